"""Meshes whose ranks stand in another order, or that leave ranks out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import LayoutError
from tests.helpers.dtensor_check import numbers

CALLS: list[Any] = [
    np.transpose,
    np.ravel,
    lambda x: np.reshape(x, (3, 4, 2)),
    lambda x: np.expand_dims(x, 1),
    lambda x: np.squeeze(x[:, :1]),
    lambda x: np.broadcast_to(x[:1], (3, 4)),
    lambda x: np.concatenate([x, x], 1),
    lambda x: np.flip(x),
    lambda x: np.pad(x, 2),
    lambda x: np.tril(x),
    lambda x: np.diag(x[0]),
    lambda x: np.diagonal(x),
    lambda x: x[::-2, 1:],
    lambda x: x[2, 3],
    lambda x: x[[5, 0, 2], [1, 3, 3]],
    lambda x: x.astype("c16").real,
    lambda x: np.cumsum(x, 0),
    lambda x: np.diff(x, axis=0),
    lambda x: np.sort(x, 0),
    lambda x: np.sort(x[:, :1], 0),
    lambda x: np.argsort(x, None, kind="stable"),
    lambda x: np.take_along_axis(x, np.argsort(x, 0, kind="stable"), 0),
    lambda x: np.searchsorted(np.arange(-9, 9, 2), x),
]
FOUND: list[Any] = [np.nonzero, np.unique, np.argwhere]


@pytest.mark.parametrize("dims", [[("a", 4)], [("a", 2), ("b", 2)]])
def test_ranks_in_another_order(dims):
    x = numbers((6, 4))
    places = ["S0", "S1"] if len(dims) == 1 else ["S0, S1", "S1, P", "S0, S0"]

    def main():
        with mm.DeviceMesh(mm.Mesh(dims, [3, 0, 4, 1])) as mesh:
            for place in places:
                for number, function in enumerate(CALLS):
                    y = mm.distribute(x, mesh, place)
                    found, expected = function(y), function(x)
                    assert found.shape == expected.shape, (number, place)
                    assert found.dtype == expected.dtype, (number, place)
                    whole = found.full()
                    assert (whole is None) == (mesh.rank == 2)
                    if whole is not None:
                        np.testing.assert_array_equal(whole, expected, f"{number} {place}")
                for function in FOUND:
                    y = mm.distribute(x, mesh, "R" + ", R" * (len(dims) - 1))
                    if not y.is_member:
                        with pytest.raises(LayoutError):
                            function(y)
                y = mm.distribute(x, mesh, place)
                y[1:3] = 7
                y[[0, 5], [3, 0]] = [70, 80]
                y[:, 1] = y[:, 2]
                z = x.copy()
                z[1:3] = 7
                z[[0, 5], [3, 0]] = [70, 80]
                z[:, 1] = z[:, 2]
                whole = y.full()
                if whole is not None:
                    np.testing.assert_array_equal(whole, z, place)

    mm.run_virtual(5, main)
