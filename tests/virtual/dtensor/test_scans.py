"""Scans along split axes: NumPy's values, whatever the ranks, near the limits of the dtype, too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import mpimesh as mm
from tests.helpers.depth import examples
from tests.helpers.dtensor_check import layouts, split

KINDS = ["f2", "f4", "f8", "g", "c8", "c16"]
SCANS: dict[str, Any] = {
    "cumsum": np.cumsum,
    "cumprod": np.cumprod,
    "nancumsum": np.nancumsum,
    "nancumprod": np.nancumprod,
    "cumulative_sum": lambda x, axis: np.cumulative_sum(x, axis=axis, include_initial=True),
    "cumulative_prod": lambda x, axis: np.cumulative_prod(x, axis=axis),
    "maximum": np.maximum.accumulate,
    "logaddexp": np.logaddexp.accumulate,
    "subtract": np.subtract.accumulate,
}


def _elements(rng, kind, shape, flavour):
    """Numbers whose sums or products leave the range of the dtype, come back, or stay inside."""
    limits = np.finfo(kind)
    if flavour == "large":
        made = rng.normal(size=shape) * limits.max / 4
        made = np.where(rng.random(shape) < 0.3, -made, made)
    elif flavour == "both":
        made = np.exp(rng.normal(size=shape) * np.log(limits.max) / 3)
        made *= rng.choice([1, -1], shape)
    else:
        made = 1 + rng.normal(size=shape) / 8
    if np.dtype(kind).kind == "c":
        made = made * np.exp(1j * rng.choice([0, 0.5, 2], shape))
    made = made.astype(kind)
    spots = rng.random(shape)
    for value in (np.nan, np.inf, -np.inf, 0, -0.0):
        share = 0.05 if flavour == "special" else 0.003
        made[spots < share] = value
        spots = rng.random(shape)
    return made


def _check(name, x, placement, mesh):
    """Compare with NumPy: where it is finite, infinite or NaN, and by the bound of its sums."""
    expected = SCANS[name](x, 0)
    found = SCANS[name](split(x, mesh, placement), 0).full()
    note = f"{name} of {x.dtype} as {placement} on {mesh.size}: {x.tolist()}"
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), note
    for part in (np.real, np.imag):
        ours, theirs = part(found), part(expected)
        wild = ~np.isfinite(theirs)
        assert np.array_equal(np.isfinite(ours), ~wild), note
        # Of a complex product that overflows NumPy's vector code, which fuses, may have NaN where
        # its scalar code, which does not, has an infinity; which of them it takes hangs on the row.
        if x.dtype.kind != "c":
            assert np.array_equal(ours[wild], theirs[wild], equal_nan=True), note
    finite = np.isfinite(expected)
    n, eps = max(1, len(x)), np.finfo(expected.dtype).eps
    if name in ("maximum", "subtract", "logaddexp"):
        bound = np.zeros(expected.shape)
    elif "sum" in name:
        values = np.abs(np.nan_to_num(x, posinf=0, neginf=0)).astype("g")
        bound = n * eps * np.cumsum(values, 0).max(0, initial=0)
    else:
        bound = 4 * n * eps * np.abs(expected).astype("g")
    with np.errstate(all="ignore"):
        off = np.abs(found.astype("G") - expected.astype("G"))
    assert (off <= bound)[finite].all(), note


@settings(max_examples=examples(60))
@given(st.data())
def test_scans_have_numpys_values(data):
    """On 1 to 6 ranks, with empty blocks."""
    size = data.draw(st.integers(1, 6))
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    cases = []
    for _ in range(12):
        name = data.draw(st.sampled_from([*SCANS]))
        kinds = KINDS[:4] if name == "logaddexp" else KINDS
        shape = (data.draw(st.integers(0, 40)), *data.draw(st.sampled_from([(), (3,)])))
        flavour = data.draw(st.sampled_from(["large", "both", "near", "near", "special"]))
        with np.errstate(all="ignore"):
            x = _elements(rng, data.draw(st.sampled_from(kinds)), shape, flavour)
        cases.append((name, x, data.draw(layouts(shape[:1], size, partial=False))))

    def main():
        with mm.DeviceMesh(f"a={size}") as mesh, np.errstate(all="ignore"):
            for case in cases:
                _check(*case, mesh)

    mm.run_virtual(size, main)


@pytest.mark.parametrize(
    ("name", "x"),
    [
        ("cumsum", np.array([-6e4, 0, 6e4, 6e4], "f2")),
        ("cumsum", np.array([6e4, 6e4, -6e4, -6e4], "f2")),
        ("cumprod", np.array([0, 1, 1e200, 1e200])),
        ("cumprod", np.array([1e-200, 1e-200, 1e200, 1e200])),
        ("cumprod", np.array([1e150, 1e-200, 1e-115, 1e200, 1, 1])),
        ("cumprod", np.array([3e37, 1, 100, 0.01], "f4")),
        ("cumprod", np.array([complex(np.inf, 0), 1j, 1j, 1, 2])),
        ("cumprod", np.array([1e200, 1e100, 1e-200, 1e-150])),
        ("cumsum", np.ones(3000, "f2")),
        ("maximum", np.array([complex(np.nan, 1), 1, complex(2, np.nan), 3])),
    ],
)
@pytest.mark.parametrize("dims", ["a=1", "a=2", "a=3", "a=2,b=2"])
def test_blocks_go_on_from_those_before(name, x, dims):
    """What a block comes to alone says nothing of it where sums or products leave the range."""

    def main():
        with mm.DeviceMesh(dims) as mesh, np.errstate(all="ignore"):
            placement = ", ".join(["S0"] * len(mesh.shape))
            found = SCANS[name](mm.distribute(x, mesh, placement), 0).full()
            for part in (np.real, np.imag):
                np.testing.assert_array_equal(part(found), part(SCANS[name](x, 0)))

    mm.run_virtual(int(np.prod([int(dim[2:]) for dim in dims.split(",")])), main)


def test_spans_and_dates_that_are_none_stay_so():
    spans = np.array([1, 2, "NaT", 4, 5], "m8[s]")
    dates = np.array(["2026-01-03", "2025-01-01", "2027-05-05", "NaT", "2020-01-01"], "M8[D]")

    def main():
        with mm.DeviceMesh("a=3") as mesh:
            for name, x in (("cumsum", spans), ("maximum", dates)):
                found = SCANS[name](mm.distribute(x, mesh, "S0"), 0).full()
                np.testing.assert_array_equal(found, SCANS[name](x, 0))

    mm.run_virtual(3, main)


def test_a_value_refused_on_one_rank_is_refused_on_all():
    def main():
        with mm.DeviceMesh("a=3") as mesh:
            with pytest.raises(ValueError, match="negative"):
                np.power.accumulate(mm.distribute(np.array([2, 3, 1, 1, -1, 2]), mesh, "S0"))
            assert np.sum(mm.ones(6, mesh, "S0")).item() == 6

    mm.run_virtual(3, main)
