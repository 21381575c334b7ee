"""What a function meets in the block of one rank alone: all ranks raise, and alike.

Else that rank would leave, and the others wait for it in their next collective.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from tests.helpers.depth import is_deep
from tests.helpers.dtensor_check import on
from tests.helpers.rule_cases import draw_cases
from tests.helpers.rule_fuzz import problems, with_rare_values

LAST_ZERO = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 0.0])
LAST_LARGE = np.array([1.0, 1.0, 1.0, 1e308, 1e308, 1e308])
LAST_NEGATIVE = np.array([2, 2, 2, 2, 2, -1])
NANS = np.where(np.arange(6)[:, None, None] == 5, np.nan, np.ones((6, 2, 2)))
SINGULAR = np.where(np.arange(6)[:, None, None] == 5, 0.0, np.eye(2))
TEXTS = np.array(["1", "2", "3", "4", "5", "six"])


def reciprocal(value: float) -> float:
    return 1 / float(value)


REFUSED: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "power": (LAST_NEGATIVE, lambda x: np.power(x, x)),
    "power, out": (LAST_NEGATIVE, lambda x: np.power(x, x, out=np.zeros_like(x, dtype=float))),
    "power, dtype": (
        LAST_NEGATIVE / 1,
        lambda x: np.power(x, x, dtype=int, casting="unsafe"),
    ),
    "power.outer": (LAST_NEGATIVE, lambda x: np.power.outer(x, x)),
    "power.reduce": (
        np.stack([np.full(6, 2), LAST_NEGATIVE]).T,
        lambda x: np.power.reduce(x, axis=1),
    ),
    "texts": (TEXTS, lambda x: x.astype(float)),
    "texts into numbers": (
        TEXTS,
        lambda x: np.copyto(np.zeros_like(x, dtype=int), x, casting="unsafe"),
    ),
    "texts, set": (TEXTS, lambda x: np.zeros_like(x, dtype=int).__setitem__(..., x)),
    "texts, joined": (
        TEXTS,
        lambda x: np.concatenate([x, x], dtype=float, casting="unsafe"),
    ),
    "inv": (SINGULAR, np.linalg.inv),
    "norm": (NANS, lambda x: np.linalg.norm(x, 2, axis=(1, 2))),
    "nuclear norm": (NANS, lambda x: np.linalg.norm(x, "nuc", axis=(1, 2))),
    "eigvals": (NANS, np.linalg.eigvals),
    "a function of Python": (
        LAST_ZERO,
        lambda x: np.frompyfunc(reciprocal, 1, 1)(x, out=np.zeros_like(x), casting="unsafe"),
    ),
    "piecewise": (
        LAST_ZERO,
        lambda x: np.piecewise(x, [x > -1], [lambda row: [reciprocal(one) for one in row]]),
    ),
    "choose": (np.array([0, 1, 0, 1, 0, 7]), lambda x: np.choose(x, [x, x])),
    "unravel_index": (np.array([0, 1, 0, 1, 0, 70]), lambda x: np.unravel_index(x, (2, 3))),
    "geomspace": (LAST_ZERO, lambda x: np.geomspace(x, 5.0, 3)),
    "bincount": (LAST_NEGATIVE, np.bincount),
    "take_along_axis": (np.arange(6) * 2, lambda x: np.take_along_axis(x, x, 0)),
}
"""Values of which the last rank has what NumPy refuses, and what refuses it."""

FLOATS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "divide": (LAST_ZERO, lambda x: 1.0 / x),
    "divide, in place": (LAST_ZERO, lambda x: x.__ifloordiv__(x)),
    "log": (LAST_ZERO, lambda x: np.log(x, where=x > -1, out=np.zeros_like(x))),
    "sum": (LAST_LARGE, np.sum),
    "prod": (LAST_LARGE, np.prod),
    "cumsum": (LAST_LARGE, np.cumsum),
    "cumprod": (LAST_LARGE, np.cumprod),
    "cumsum over ranks": (LAST_LARGE[[3, 0, 1, 2, 0, 4]], np.cumsum),
    "diff": (LAST_LARGE * [1, 1, 1, 1, -1, 1], np.diff),
    "gradient": (LAST_LARGE * [1, 1, 1, 1, 1, -1], np.gradient),
    "astype": (LAST_LARGE, lambda x: x.astype(np.float32)),
    "matmul": (LAST_LARGE, lambda x: np.outer(x, [5.0]) @ np.array([[5.0]])),
    "fft": (LAST_LARGE[:, None] * np.ones(3), lambda x: np.fft.fft(x, axis=1)),
    "fft of a split axis": (LAST_LARGE, np.fft.fft),
    "var": (LAST_LARGE, np.var),
    "norm": (LAST_LARGE, np.linalg.norm),
    "polyval": (LAST_LARGE, lambda x: np.polyval([1.0, 0.0, 0.0], x)),
    "einsum": (LAST_LARGE, lambda x: np.einsum("i,j->ij", x, x)),
    "trapezoid": (LAST_LARGE, np.trapezoid),
    "cov": (np.stack([LAST_LARGE, LAST_LARGE[::-1]]).T, lambda x: np.cov(x, rowvar=False)),
}
"""Values of which one rank has what makes NumPy's errors of floats, and what meets them."""


def outcome(call: Callable[[Any], Any], x: Any) -> Exception | None:
    try:
        call(x)
    except Exception as error:
        return error
    return None


def outcomes_on(mesh: mm.DeviceMesh, calls: Any) -> dict[str, Any]:
    """Return what each rank's call raised. The barrier meets ranks that go another way."""
    found = {}
    for name, (values, call) in calls.items():
        error = outcome(call, mm.distribute(values, mesh, "S0"))
        mesh.group().barrier()
        found[name] = (type(error), str(error))
    return found


@pytest.mark.parametrize("checks", ["0", "1"])
def test_what_one_rank_refuses_all_do(checks, monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", checks)
    first, *others = on("a=3", outcomes_on, REFUSED)
    assert others == [first, first]
    for name, (values, call) in REFUSED.items():
        expected = outcome(call, values.copy())
        assert expected is not None, name
        families = (ZeroDivisionError, IndexError, np.linalg.LinAlgError, TypeError, ValueError)
        family = next(one for one in families if isinstance(expected, one))
        assert issubclass(first[name][0], (family, TypeError)), (name, first[name], expected)


@pytest.mark.parametrize("how", ["raise", "call", "warn"])
def test_what_floats_raise_on_one_rank_they_raise_on_all(how):
    """By NumPy's errstate, a function of the caller's, or warnings that are errors."""

    def refuse(kind, flag):
        raise LookupError(kind)

    def main(mesh):
        with np.errstate(all=how, under="ignore", call=refuse):
            assert (mm.ones(6, mesh, "S0") + 1.0).shape == (6,)
            return outcomes_on(mesh, FLOATS)

    with warnings.catch_warnings():
        if how == "warn":
            warnings.simplefilter("error")
        first, *others = on("a=3", main)
    assert others == [first, first]
    wanted = {"raise": FloatingPointError, "call": LookupError, "warn": RuntimeWarning}[how]
    assert {name: kind for name, (kind, _) in first.items() if kind is not wanted} == {}


def test_what_floats_meet_goes_to_the_callers_own_function_and_log():
    class Log:
        def __init__(self):
            self.rows: list[Any] = []

        def __call__(self, kind, flag):
            self.rows.append(kind)

        def write(self, text):
            self.rows.append(text)

    def main(mesh):
        log, x = Log(), mm.distribute(np.array([1.0, 1e308]), mesh, "S0")
        with np.errstate(divide="log", over="call", call=log):
            x * 10.0
            x / 0.0
        return log.rows

    zero, large = on("a=2", main)
    assert [len(zero), len(large)] == [1, 2]
    assert large[0] == "overflow"
    assert all(row[-1].startswith("Warning: divide by zero encountered") for row in (zero, large))


def test_an_operator_of_floats_starts_nothing():
    """Only what may be refused costs an exchange, and only if ranks have other values."""

    def main(mesh):
        x, whole = mm.ones(6, mesh, "S0"), mm.ones(6, mesh, "R")
        started = mesh.group()._core.started
        x + x, np.exp(x), x.sum(), x @ x, np.where(x > 0, x, 1.0), x[1:3], x.astype("f4")
        x.astype(int) ** 2, whole.astype(int) ** whole.astype(int), np.linalg.inv(np.diag(whole))
        return mesh.group()._core.started - started

    assert on("a=2", main) == [0, 0]


def test_rules_with_a_rare_value_end_alike_on_all_ranks():
    cases = draw_cases(5, 3_000 if is_deep() else 150)
    found = problems([with_rare_values(case) for case in cases])
    assert not found, f"{len(found)} of {len(cases)}:\n" + "\n".join(found[:20])
