"""Transforms, matrices and tables of split arrays under MPI."""

from __future__ import annotations

from typing import Any

import numpy as np

import mpimesh as mm
from tests.helpers.raises import raises

NP: Any = np


def test_transforms_of_arrays_split_along_any_axis(comm):
    x = np.random.default_rng(1).normal(size=(5, 8, 6))
    with mm.DeviceMesh("a=-1", comm) as mesh:
        for place in ("S0", "S1", "S2"):
            split = mm.distribute(x, mesh, place)
            found = NP.fft.fftn(split).full()
            np.testing.assert_allclose(found, np.fft.fftn(x), atol=1e-9)
            back = NP.fft.irfftn(NP.fft.rfftn(split), x.shape, axes=(0, 1, 2)).full()
            np.testing.assert_allclose(back, x, atol=1e-12)


def test_a_singular_matrix_on_one_rank_is_told_to_all(comm):
    with mm.DeviceMesh("a=-1", comm) as mesh:
        stack = np.broadcast_to(np.eye(3), (mesh.size, 3, 3)).copy()
        stack[-1] = 0.0
        x = mm.distribute(stack, mesh, "S0")
        with raises(np.linalg.LinAlgError, "Singular"):
            np.linalg.inv(x)
        with np.errstate(all="raise"), raises(FloatingPointError, "zero"):
            NP.divide(1.0, NP.linalg.det(x))
        assert float(x.sum()) == 3.0 * (mesh.size - 1)


def test_gradients_and_tables(comm):
    values = np.arange(12.0) ** 2
    with mm.DeviceMesh("a=-1", comm) as mesh:
        x = mm.distribute(values, mesh, "S0")
        np.testing.assert_array_equal(NP.gradient(x).full(), np.gradient(values))
        found = NP.convolve(x, [1.0, 2.0, 1.0], "same").full()
        np.testing.assert_array_equal(found, np.convolve(values, [1.0, 2.0, 1.0], "same"))
        assert NP.isin(x, [4.0, 9.0]).full().tolist() == np.isin(values, [4.0, 9.0]).tolist()
