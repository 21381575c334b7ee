"""Every rule of split arrays with random arguments, held against NumPy in one process."""

from __future__ import annotations

import pytest

from mpimesh.layout.placement import PARTIAL_OPS
from tests.helpers.depth import deep_but, is_deep
from tests.helpers.rule_cases import (
    CASES,
    KINDS,
    METHODS,
    OPERATORS,
    draw_cases,
    draw_kinds,
    operator_methods,
    public_methods,
    rule_names,
)
from tests.helpers.rule_fuzz import Case, check, problems

NOT_IN_NUMPY = {"device", "to_device"}
"""Names of the array API standard; the placement is not NumPy's to say."""


def check_all(cases: list[Case]) -> None:
    refused: list[Case] = []
    found = problems(cases, lambda case, why: refused.append(case))
    assert not found, f"{len(found)} of {len(cases)}:\n" + "\n".join(found[:20])
    # A refusal is right on all ranks, but what is refused is not tested.
    assert len(refused) < 0.05 * len(cases)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("checks", ["0", "1"])
def test_every_rule_is_as_numpy_has_it(checks, monkeypatch):
    """Values, dtypes, shapes and errors, the same on all ranks, whatever the arguments."""
    monkeypatch.setenv("MPIMESH_CHECKS", checks)
    check_all(draw_cases(int(checks), 5_000 if is_deep() else 330))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("op", deep_but(PARTIAL_OPS, "sum", "mean", "max"))
def test_every_rule_takes_summands(op):
    """It works on them one by one only if that comes to NumPy's result of the whole array."""
    check_all(draw_cases(7, 1_500 if is_deep() else 60, op=op))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", deep_but(KINDS, "M8[D]", "S3", "i4,f8", "complex64"))
def test_every_rule_takes_every_dtype(kind):
    """Dates, spans, texts, raw bytes, records, truth values, halves, complex NaN: as NumPy."""
    cases = draw_kinds(kind, 1)
    check_all(cases if is_deep() else cases[sum(map(ord, kind)) % 7 :: 7])


def test_every_rule_has_cases():
    assert rule_names() == {*CASES} - {"method", "operator"}
    assert public_methods() - NOT_IN_NUMPY == {*METHODS}
    assert operator_methods() == OPERATORS


def test_a_round_draws_from_every_rule():
    assert {case.rule for case in draw_cases(0, 330)} == {*CASES}


def test_what_is_wrong_is_found():
    """An oracle that knows another answer, another error, or ranks that differ."""
    x = [("S0", (4,), "f8", 1)]
    with pytest.raises(AssertionError, match=r"not 5"):
        check("a=2", "x0.size + (5 - 4 if isinstance(x0, np.ndarray) else 0)", x)
    with pytest.raises(AssertionError, match="NumPy raises"):
        check("a=2", "x0 if not isinstance(x0, np.ndarray) else x0[9]", x)
    with pytest.raises(AssertionError, match="ranks differ"):
        check("a=2", "isinstance(x0, np.ndarray) or [0, 1][x0.mesh.rank * 2]", x)
    check("a=3", "np.median(x0, axis=(1, 2))", [("S0", (2, 3, 4), "float64", 1, "")])
