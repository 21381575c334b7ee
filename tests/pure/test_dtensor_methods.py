"""Methods of split arrays are NumPy's functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import DTypeError, ShapeError
from tests.pure.dtensor_check import agree, numbers, placements_of, raises_alike, same, split

CALLS: list[Any] = [
    lambda x: x.reshape(4, 3),
    lambda x: x.reshape((2, -1), order="F"),
    lambda x: x.ravel(),
    lambda x: x.flatten(),
    lambda x: x.flatten("F"),
    lambda x: x.T,
    lambda x: x.mT,
    lambda x: x.transpose(),
    lambda x: x.transpose(1, 0),
    lambda x: x.transpose((0, 1)),
    lambda x: x.swapaxes(0, 1),
    lambda x: x[:, :1].squeeze(),
    lambda x: x[:, :1].squeeze(1),
    lambda x: x.cumsum(),
    lambda x: x.cumprod(0),
    lambda x: x.argsort(0, kind="stable"),
    lambda x: x.take([1, 0], axis=1),
    lambda x: x.repeat(2, 0),
    lambda x: x.compress([True, False, True], 0),
    lambda x: x.diagonal(1),
    lambda x: x.nonzero(),
    lambda x: x.astype(float),
    lambda x: x.astype("c16").real,
    lambda x: x.astype("c16").imag,
    lambda x: x.copy(),
]


@pytest.mark.parametrize("dims", ["a=1", "a=2", "a=3", "a=2,b=2"])
def test_methods(dims):
    x = numbers((3, 4))
    cases: list[Any] = [
        (f, [x], [p]) for f in CALLS for p in placements_of(2, dims.count("="))[::2]
    ]
    agree(dims, cases)


def test_in_place():
    def main():
        with mm.DeviceMesh("a=2") as mesh:
            for place in ("S0", "S1", "R", "P"):
                x = split(numbers((3, 4)), mesh, place)
                x.sort(0)
                same(x, np.sort(numbers((3, 4)), 0))
                x.fill(7)
                same(x, np.full((3, 4), 7))
                assert x.layout.text == f"a={place}"

    mm.run_virtual(2, main)


def test_facts_and_numbers():
    def main():
        with mm.DeviceMesh("a=2") as mesh:
            x = split(numbers((3, 4)), mesh, "S1")
            assert (np.ndim(x), np.shape(x), np.size(x), np.size(x, 1)) == (2, (3, 4), 12, 4)
            assert np.result_type(x, np.float32) == np.float64
            assert np.isrealobj(x)
            assert not np.iscomplexobj(x)
            assert np.can_cast(x.dtype, float)
            assert x[1, 2].item() == numbers((3, 4))[1, 2]
            assert x.tolist() == numbers((3, 4)).tolist()
            flat = x.flatten()
            flat.fill(0)
            same(x, numbers((3, 4)))

    mm.run_virtual(2, main)


def test_wrong_arguments():
    x = numbers((3, 4))
    raises_alike("a=2", DTypeError, [(lambda x: x.astype("i1", casting="safe"), x, "S0")])
    raises_alike("a=2", ShapeError, [(lambda x: x.item(), x, "S0")])
