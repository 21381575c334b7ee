"""Elements of split arrays moved around by real MPI, on any number of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

import mpimesh as mm
from tests.helpers.dtensor_check import numbers, same, split

CALLS: list[Any] = [
    np.transpose,
    lambda x: np.reshape(x, (-1,)),
    lambda x: np.reshape(x, (4, 6)),
    lambda x: np.concatenate([x, x], 1),
    lambda x: np.stack([x, x]),
    lambda x: np.flip(x),
    lambda x: np.roll(x, 3),
    lambda x: np.pad(x, 2, mode="wrap"),
    lambda x: np.repeat(x, 2, 0),
    lambda x: x[::-2, 1:],
    lambda x: x[2],
    lambda x: x[[5, 0, 0]],
    lambda x: x[[5, 0, 2], [1, 3, 3]],
    lambda x: np.nonzero(x),
    lambda x: np.cumsum(x, 0),
    lambda x: np.cumsum(x),
    lambda x: np.diff(x, axis=0),
    lambda x: np.sort(x, 0),
    lambda x: np.argsort(x, None, kind="stable"),
    lambda x: np.unique(x, return_inverse=True),
]


def test_functions(comm):
    x = numbers((6, 4))
    with mm.DeviceMesh("a=-1", comm) as mesh:
        for place in ("R", "P", "S0", "S1"):
            for number, function in enumerate(CALLS):
                y = split(x, mesh, place)
                same(function(y), function(x), f"call {number} of {place}")
            y = split(x, mesh, place)
            same(y[split(x > 0, mesh, "S1")], x[x > 0], place)


def test_writes(comm):
    with mm.DeviceMesh("a=-1", comm) as mesh:
        for place in ("R", "P", "S0", "S1"):
            x = numbers((6, 4))
            y = split(x, mesh, place)
            y[1:5] = split(x, mesh, "S1")[::-1][:4]
            y[[0, 5], [3, 0]] = [70, 80]
            y[split(x > 5, mesh, "S0")] = 9
            expected = x.copy()
            expected[1:5] = x[::-1][:4]
            expected[[0, 5], [3, 0]] = [70, 80]
            expected[x > 5] = 9
            same(y, expected, place)


def test_rows_are_sorted_over_all_ranks(comm):
    x = np.random.default_rng(3).integers(0, 500, 2000)
    with mm.DeviceMesh("a=-1", comm) as mesh:
        y = split(x, mesh, "S0")
        found: Any = np.sort(y)
        assert found.layout == y.layout
        same(found, np.sort(x))
        same(np.argsort(y, kind="stable"), np.argsort(x, kind="stable"))
