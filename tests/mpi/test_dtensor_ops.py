"""Computing on split arrays between the ranks of MPI, however many there are."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import ShapeError
from tests.contract.split_arrays import placements, quiet, same, split, values


@pytest.fixture
def mesh(comm):
    with mm.DeviceMesh("x=-1", comm) as made:
        yield made


def pairs(mesh, a, b):
    for one, other in product(placements(a), placements(b)):
        yield split(mesh, a, one), split(mesh, b, other), f"{mesh.size} ranks, {one}, {other}"


def test_element_by_element(mesh):
    a, b = values((7, 5)), values((5,), seed=1)
    for x, y, what in pairs(mesh, a, b):
        same(x + y * 2, a + b * 2, what)
        same(np.where(x > y, x, y), np.maximum(a, b), what)
        x += y
        same(x, a + b, what)
        assert not np.array_equal(x, a)


def test_reductions(mesh):
    a, b = values((7, 5), "i4"), values((7, 1), "bool", 1)
    for x, y, what in pairs(mesh, a, b):
        for axis in (None, 0, 1):
            same(np.sum(x, axis, where=y), a.sum(axis, where=b), what)
            same(np.max(x, axis), a.max(axis), what)
            same(quiet(np.std, x, axis), a.std(axis), what)
            same(np.argmin(x, axis), a.argmin(axis), what)
        assert float(np.mean(x)) == pytest.approx(a.mean())
        assert bool(np.any(x == a.max()))


def test_products(mesh):
    a, b = values((7, 5)), values((5, 6), seed=1)
    for x, y, what in pairs(mesh, a, b):
        same(x @ y, a @ b, what)
        same(np.einsum("ij,jk->k", x, y), (a @ b).sum(0), what)


def test_large_products(mesh):
    """Blocks lie in shared memory, and are read where they lie."""
    a = values((256, 192))
    for one, other in product(placements(a), placements(a)):
        x, y = split(mesh, a, one), split(mesh, a.T.copy(), other)
        same(x @ y, a @ a.T, (one, other))


def test_errors_are_alike_on_all_ranks_and_nothing_hangs(mesh):
    x = split(mesh, values((7, 5)), "S0")
    for _ in range(2):
        with pytest.raises(ShapeError):
            x @ x
        with pytest.raises(ShapeError):
            x + np.ones(3)
        with pytest.raises(ShapeError):
            bool(x)
    same(np.sum(x), values((7, 5)).sum())
