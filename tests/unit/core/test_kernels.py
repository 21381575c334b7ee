"""Sums and the like of compiled code, against NumPy in the order of the ranks."""

from __future__ import annotations

import ctypes

import ml_dtypes
import numpy as np
import pytest

from tests.helpers.depth import deep

DTYPES = {
    "i8": "i1", "i16": "i2", "i32": "i4", "i64": "i8",
    "u8": "u1", "u16": "u2", "u32": "u4", "u64": "u8",
    "f16": "f2", "bf16": ml_dtypes.bfloat16, "f32": "f4", "f64": "f8", "g": "g",
    "c64": "c8", "c128": "c16", "bool": "?",
}  # fmt: skip
UFUNCS = {
    "sum": np.add, "mean": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum,
    "and": np.logical_and, "or": np.logical_or,
}  # fmt: skip
HALVES = ("f16", "bf16")


@pytest.fixture(scope="module")
def fold(compiled):
    return ctypes.CDLL(str(compiled("kernels.c", "-shared", "-fPIC"))).fold


def rows_of(dtype, ranks, length, rng):
    """Return an array for each rank, of all values that integers have, and some that are none."""
    if dtype.kind == "b":
        return [rng.integers(0, 2, length).astype(dtype) for _ in range(ranks)]
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        bounds = info.min, info.max
        return [rng.integers(*bounds, length, dtype, endpoint=True) for _ in range(ranks)]
    rows = []
    for _ in range(ranks):
        row = rng.normal(size=length) * 10.0 ** rng.integers(-3, 3, length)
        for value in (np.nan, np.inf, -np.inf):
            row[rng.random(length) < 0.02] = value
        rows.append(row + 1j * rng.normal(size=length) if dtype.kind == "c" else row)
    with np.errstate(all="ignore"):
        return [row.astype(dtype) for row in rows]


def complex_product(a, b):
    """Multiply in four roundings; NumPy's own product has less on some processors."""
    out = np.empty_like(a)
    out.real, out.imag = a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real
    return out


def expected(name, operation, rows):
    """Fold blocks of 8 ranks, then the blocks; half types in float32."""
    ranks, dtype = len(rows), rows[0].dtype
    is_complex_product = operation == "prod" and dtype.kind == "c"
    ufunc = complex_product if is_complex_product else UFUNCS[operation]
    with np.errstate(all="ignore"):
        rows = [row.astype("f4") for row in rows] if name in HALVES else rows
        blocks = []
        for first in range(0, ranks, 8):
            total = rows[first]
            for row in rows[first + 1 : first + 8]:
                total = ufunc(total, row)
            blocks.append(total)
        total = blocks[0]
        for block in blocks[1:]:
            total = ufunc(total, block)
        if operation == "mean":
            parts = total.view(total.real.dtype)
            total = (parts / parts.dtype.type(ranks)).view(total.dtype)
        return total.astype(dtype)


@pytest.mark.parametrize("operation", UFUNCS)
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("ranks", [1, 3, *deep(2, 8), 9, *deep(17, 20)])
def test_a_fold_has_the_bits_of_numpy(fold, name, operation, ranks):
    dtype, rng = np.dtype(DTYPES[name]), np.random.default_rng(ranks)
    for length in (0, 1, 2, 7, 1023, 1024, 1025, 3000):
        rows = rows_of(dtype, ranks, length, rng)
        out = np.zeros(length, dtype)
        places = (ctypes.c_void_p * ranks)(*(row.ctypes.data for row in rows))
        target = ctypes.c_void_p(out.ctypes.data)
        is_there = fold(
            operation.encode(), name.encode(), target, places, ranks, ctypes.c_long(length)
        )
        assert bool(is_there) == has(dtype, operation)
        if not is_there:
            return
        got, want = (out, expected(name, operation, rows))
        if dtype.kind == "c":
            got, want = got.view(got.real.dtype), want.view(want.real.dtype)
        if name in HALVES:
            got, want = got.astype("f4"), want.astype("f4")
        np.testing.assert_array_equal(got, want)


def has(dtype, operation):
    """Tell whether a dtype has an operation: means of what divides, orders of what is real."""
    if operation in ("and", "or"):
        return dtype.kind == "b"
    if operation == "mean":
        return dtype.kind in "fcV" or dtype == ml_dtypes.bfloat16
    return operation in ("sum", "prod") or dtype.kind != "c"
