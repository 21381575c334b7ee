"""Split arrays for tests: in every layout, with real summands, and compared with whole ones."""

from __future__ import annotations

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.layout import Partial
from tests.helpers import warned


def values(shape, dtype="f8", seed=0):
    """Small whole numbers, for which every order of summation gives the same."""
    rng = np.random.default_rng(seed)
    found = rng.integers(-4, 5, shape)
    if np.dtype(dtype).kind == "c":
        found = found + 1j * rng.integers(-4, 5, shape)
    if np.dtype(dtype).kind == "b":
        found = found > 0
    return np.asarray(found, dtype)


def distribute(array, mesh, placement):
    """Split a whole array. Without a type, as NumPy's functions name none but NumPy's arrays."""
    return mm.distribute(array, mesh, placement)


def zeros(shape, mesh, placement, dtype=float):
    """Return zeros, without a type."""
    return mm.zeros(shape, mesh, placement, dtype=dtype)


def placements(array, dims=1):
    """The placements of an array on a mesh of one dim; of two, some."""
    shards = [f"S{axis}" for axis in range(array.ndim)]
    partial = ["P"] if array.dtype.kind in "iufc" else []
    one = ["R", *shards, *partial]
    if dims == 1:
        return one
    return [f"{a}, {b}" for a in one for b in one]


def split(mesh, array, placement):
    """Split a whole array; along `Partial` dims every rank holds something."""
    x = mm.distribute(array, mesh, placement)
    dims = [d for d, spec in enumerate(x.placement) if isinstance(spec, Partial)]
    if dims:
        coords = x.layout.mesh.coords_of(mesh.rank)
        for dim in dims:  # what one adds the last one takes away
            number, size = coords[dim], x.layout.mesh.dims[dim].size
            rest = size * (size - 1) // 2 if number == size - 1 else 0
            x.local[...] += np.asarray(number - rest).astype(array.dtype)
    return x


def same(got, want, what="", rtol=1e-12):
    """Compare a result with NumPy's: kind, shape, dtype, values. Every rank does."""
    if isinstance(want, tuple | list):
        assert len(got) == len(want), what
        for one, other in zip(got, want, strict=True):
            same(one, other, what, rtol)
        return
    whole = got.full() if isinstance(got, mm.DTensor) else np.asarray(got)
    want = np.asarray(want)
    assert whole.shape == want.shape, (what, whole.shape, want.shape)
    assert whole.dtype == want.dtype, (what, whole.dtype, want.dtype)
    if want.dtype.kind in "fc":
        rtol = max(rtol, 4 * np.finfo(want.dtype).eps)
        np.testing.assert_allclose(whole, want, rtol=rtol, atol=rtol, err_msg=str(what))
    else:
        np.testing.assert_array_equal(whole, want, err_msg=str(what))


def quiet(function, *args, **kwargs):
    """Call without NumPy's warnings, which come in other numbers from blocks."""
    with warned.ignored, np.errstate(all="ignore"):
        return function(*args, **kwargs)


def on_every_layout(ranks, check, arrays, dims="x", pick=None):
    """Call ``check(mesh, tensors, what)`` on virtual ranks, for all layouts of all arrays."""

    def main():
        with mm.DeviceMesh(dims if "=" in dims else f"{dims}={ranks}") as mesh:
            rows = [placements(array, mesh.ndim) for array in arrays]
            for number, row in enumerate(np.ndindex(*map(len, rows))):
                if pick is not None and number % pick:
                    continue
                chosen = [rows[i][j] for i, j in enumerate(row)]
                tensors = [split(mesh, a, p) for a, p in zip(arrays, chosen, strict=True)]
                check(mesh, tensors, f"{ranks} ranks, {chosen}")

    mm.run_virtual(ranks, main)


def agrees(function, *arrays, ranks=2):
    """Check that a function gives what NumPy's gives: value, dtype, or kind of error."""
    try:
        want, error = quiet(function, *arrays), None
    except Exception as found:
        want, error = None, found

    def check(mesh, tensors, what):
        if error is None:
            same(quiet(function, *tensors), want, what)
            return
        kinds = [one for one in type(error).__mro__ if one.__module__ == "builtins"]
        with pytest.raises(kinds[0]):
            quiet(function, *tensors)

    on_every_layout(ranks, check, list(arrays))
