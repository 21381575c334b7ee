"""Arrays without axes, without elements, and with one: NumPy's answers hold for them, too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.pure.dtensor_check import agree, numbers, placements_of


def written(key, value):
    def function(x):
        y = x.copy()
        y[key] = value
        return y

    return function


OF_ANY: list[Any] = [
    np.ravel,
    lambda x: x[...],
    lambda x: x[None],
    np.atleast_3d,
    np.flip,
    lambda x: x.flatten(),
    lambda x: np.repeat(x, 3),
    lambda x: np.tile(x, (2, 2)),
    lambda x: np.sort(x, None),
    np.cumsum,
    np.unique,
    written(..., 5),
]
OF_AXES: list[Any] = [
    np.argwhere,
    lambda x: x[:0],
    lambda x: x[::-1],
    lambda x: x[[]],
    lambda x: np.sort(x, 0),
    lambda x: np.sort(x, -1),
    lambda x: np.argsort(x, 0, kind="stable"),
    lambda x: np.take_along_axis(x, np.argsort(x, 0, kind="stable"), 0),
    lambda x: np.cumsum(x, 0),
    lambda x: np.diff(x, axis=0),
    lambda x: np.pad(x, 1),
    lambda x: np.stack([x, x], 1),
    lambda x: np.concatenate([x, x], None),
    np.diagonal,
    lambda x: np.roll(x, 1),
    lambda x: np.array_split(x, 3),
    np.rot90,
    written(slice(0), 5),
    written([], 3),
]


@pytest.mark.parametrize("dims", ["a=1", "a=3"])
def test_small_arrays(dims):
    cases = []
    for shape in [(), (0, 3), (4, 0), (1, 1)]:
        x = numbers(shape)
        for place in placements_of(x.ndim):
            cases += [(f, [x], [place]) for f in (OF_ANY + OF_AXES if shape else OF_ANY)]
    agree(dims, cases)
