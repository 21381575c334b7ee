"""Functions of split arrays on small blocks, which cost little beside the call itself.

Each is compared with NumPy's on a block of the same size; those that exchange something have no
such counterpart, and show what they add. The last rows are conjugate gradients, an iteration each,
three ways, by the example of that name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import mpimesh as mm
from benchmarks.measure import Effort, in_turns
from benchmarks.rows import make_rows

__all__ = ["run"]

SIDE = 8
_MOST_CALLS = 500


def run(mesh: mm.DeviceMesh, effort: Effort) -> list[dict[str, Any]]:
    """Return a row for each function. Collective."""
    with mm.DeviceMesh("y=-1") as own:
        rows = _functions(own, effort)
        return rows + _conjugate_gradients(own, effort)


def _functions(mesh: mm.DeviceMesh, effort: Effort) -> list[dict[str, Any]]:
    a = np.ones((SIDE, SIDE))
    x, y = (mm.ones((SIDE * mesh.size, SIDE), mesh, "S0") for _ in range(2))
    w = mm.ones((SIDE, SIDE), mesh, "R")
    calls: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "x + y": (lambda: a + a, lambda: x + y),
        "exp(x)": (lambda: np.exp(a), lambda: np.exp(x)),
        "x @ w": (lambda: a @ a, lambda: x @ w),
        "x.sum(1)": (lambda: a.sum(1), lambda: x.sum(1)),
        "x.T": (lambda: a.T, lambda: x.T),
        "x[:, 1:3]": (lambda: a[:, 1:3].copy(), lambda: x[:, 1:3]),
        "float((x * y).sum())": (lambda: float((a * a).sum()), lambda: float((x * y).sum())),
        "S0 to R": (a.copy, lambda: x.redistribute("R")),
        "shift by a row": (lambda: np.roll(a, 1, axis=0), lambda: mm.shift(x, 1, axis=0)),
    }
    rows = []
    count = min(_MOST_CALLS, effort.most_calls)
    for name, (numpy, split) in calls.items():
        ways = {"NumPy": numpy, "mpimesh": split}
        timings = in_turns(_native(mesh), ways, calls=count, rounds=effort.rounds)
        rows += make_rows(f"{name}, blocks of {SIDE} x {SIDE}", timings)
    return rows


def _conjugate_gradients(mesh: mm.DeviceMesh, effort: Effort) -> list[dict[str, Any]]:
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    import conjugate_gradients

    rows = []
    for points, tolerance in ((64, 1e-9), (512, 1e-2)):
        if not effort.sizes([points * points * 8]):
            continue
        steps = conjugate_gradients.split_arrays(mesh, points, tolerance)[2]
        ways = {
            name: lambda solve=solve, points=points, tolerance=tolerance: solve(
                mesh, points, tolerance
            )
            for name, solve in reversed(conjugate_gradients.WAYS.items())
        }
        timings = in_turns(_native(mesh), ways, calls=1, rounds=effort.rounds)
        found = make_rows(f"conjugate gradients, {points} x {points}, an iteration", timings)
        rows += [
            {**row, "us": row["us"] / steps, "over_us": row["over_us"] / steps} for row in found
        ]
    return rows


def _native(mesh: mm.DeviceMesh) -> Any:
    return mesh.group().communicator.native  # type: ignore[attr-defined]
