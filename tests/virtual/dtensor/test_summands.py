"""Functions of summands come to NumPy's result of what they add up to, whatever else they take."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.dtensor.linear import LINEAR
from tests.helpers.depth import deep
from tests.helpers.rule_fuzz import Case, Operand, problems

CASTS = [
    "then(x1, np.copyto(x1, x0, casting='unsafe'))",
    "np.full_like(x1, x0)",
    "x0.astype('i4')",
    "x0.astype('f2')",
    "set(x1, Ellipsis, x0)",
    "then(x1, x1.fill(1.5))",
    "np.add(x0, 1.5, dtype='i4', casting='unsafe')",
    "np.positive(x0, dtype='f4', casting='unsafe')",
    "[np.add(x0, 1.5, dtype='i4', casting='unsafe', out=x0), x0]",
    "[np.add(x0, x0, out=x1, casting='unsafe'), x1]",
    "np.where(x1 > 0, x0, x1)",
    "np.sum(x0, 0, dtype='i4')",
    "np.einsum('ij->j', x0, dtype='i4', casting='unsafe')",
    "np.matmul(x0, x0.T, dtype='f4', casting='unsafe')",
]
PRODUCTS = [
    "x0 * x2",
    "x2 * x0",
    "x0 * np.inf",
    "x0 * x2[0, 0]",
    "np.multiply.outer(x0, x2)",
    "x0 @ x2.T",
    "np.tensordot(x2, x0, 0)",
    "np.kron(x0, x2)",
    "np.einsum('ij,ij->ij', x0, x2)",
    "x0 / x2",
    "x0 + x2",
    "np.where(True, x0, x2)",
    "np.prod(x0, 0)",
]


@pytest.mark.parametrize("op", ["sum", "mean", *deep("prod"), "min", *deep("max")])
@pytest.mark.parametrize("place", [*deep("R", "S0"), "S1", "P"])
def test_summands_and_other_operands(op, place):
    """Casts that cut, products with infinities and NaN: what is not linear is not so taken."""
    cases = []
    for number, text in enumerate([*CASTS, *PRODUCTS]):
        for size in (1, 3):
            operands = (
                Operand(f"P({op})", (3, 4), "float64", number),
                Operand(
                    place.replace("P", f"P({op})" if op != "mean" else "S1"), (3, 4), "int32", 1
                ),
                Operand(place.replace("P", f"P({op})"), (3, 4), "float64", 2, "inf"),
            )
            cases.append(Case(f"a={size}", text, operands, exact=False))
    assert not problems(cases)


def test_every_linear_function_keeps_summands():
    """The table says what stays; that it is right is tried on random calls of every rule."""

    def main():
        with mm.DeviceMesh("a=2") as mesh:
            x = mm.full((2, 2), 3.0, mesh, "P")
            calls = {
                np.where: lambda: np.where(True, x, x),
                np.bincount: lambda: np.bincount(np.arange(2), x[0]),
                np.divide: lambda: x / 2,
                np.multiply: lambda: 2 * x,
                np.matmul: lambda: np.einsum("ij->j", x),
            }
            for function, rows in LINEAR.items():
                if "sum" in rows[0].ops:
                    operands = [x] * len(rows[0].operands)
                    found = calls.get(function, lambda f=function, o=operands: f(*o))()
                    assert found.layout.partial_op == "sum", function

    mm.run_virtual(2, main)


def test_summands_that_a_narrower_dtype_cannot_hold():
    """The sum is 3, and the parts are infinite in float16, or too coarse in float32."""
    calls: dict[str, Any] = {
        "astype": lambda x, kind: x.astype(kind),
        "copyto": lambda x, kind: copied(np.zeros_like(x, dtype=kind), x),
        "add": lambda x, kind: np.add(x, x, dtype=kind, casting="unsafe") / 2,
        "positive": lambda x, kind: np.positive(x, dtype=kind, casting="unsafe"),
    }

    def copied(y, x):
        np.copyto(y, x, casting="unsafe")
        return y

    def main():
        with mm.DeviceMesh("a=2") as mesh:
            part = -1e9 if mesh.rank else 1e9 + 3
            for name, call in calls.items():
                for kind in ("f2", "f4", "F"):
                    x = mm.DTensor.from_local(np.full(2, part), mesh, "P", shape=(2,))
                    assert call(x, kind).full().tolist() == [3, 3], (name, kind)

    mm.run_virtual(2, main)


def test_zeros_keep_their_sign():
    """What a rank has beside a number is neutral: -0.0, as 0.0 + -0.0 is 0.0."""
    x = np.array([-0.0, 0.0, 1.0])

    def main():
        with mm.DeviceMesh("a=3") as mesh:
            for kind in ("f2", "f8", "c16"):
                whole = (x - 0j if kind == "c16" else x).astype(kind)
                split: Any = mm.distribute(whole, mesh, "R").redistribute("P")
                chosen: Any = np.where(True, split, -0.0)
                for found in (split, chosen, split.copy()):
                    assert np.array_equal(np.signbit(found.full().real), np.signbit(whole.real))

    mm.run_virtual(3, main)
