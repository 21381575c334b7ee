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
def kernels(compiled):
    return ctypes.CDLL(str(compiled("kernels.c", "-shared", "-fPIC")))


@pytest.fixture(scope="module")
def fold(kernels):
    return kernels.fold


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


def folded(fold, name, operation, rows):
    """Fold by compiled code; None where it has no such operation."""
    out = np.zeros(len(rows[0]), rows[0].dtype)
    places = (ctypes.c_void_p * len(rows))(*(row.ctypes.data for row in rows))
    target, length = ctypes.c_void_p(out.ctypes.data), ctypes.c_long(len(out))
    is_there = fold(operation.encode(), name.encode(), target, places, len(rows), length)
    return out if is_there else None


@pytest.mark.parametrize("operation", UFUNCS)
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("ranks", [1, 3, *deep(2, 8), 9, *deep(17, 20)])
def test_a_fold_has_the_bits_of_numpy(fold, name, operation, ranks):
    dtype, rng = np.dtype(DTYPES[name]), np.random.default_rng(ranks)
    for length in (0, 1, 2, 7, 1023, 1024, 1025, 3000):
        rows = rows_of(dtype, ranks, length, rng)
        got = folded(fold, name, operation, rows)
        assert (got is not None) == has(dtype, operation)
        if got is None:
            return
        want = expected(name, operation, rows)
        if dtype.kind == "c":
            got, want = got.view(got.real.dtype), want.view(want.real.dtype)
        if name in HALVES:
            got, want = got.astype("f4"), want.astype("f4")
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("operation", ["sum", "mean", "prod", "min", "max"])
@pytest.mark.parametrize("name", HALVES)
def test_a_fold_of_halves_rounds_every_value_as_numpy(fold, name, operation):
    values, rng = np.arange(1 << 16, dtype="u2"), np.random.default_rng(1)
    for ranks in (1, 2, 3):
        rows = [values, *(rng.permutation(values) for _ in range(ranks - 1))]
        rows = [row.view(DTYPES[name]) for row in rows]
        got, want = folded(fold, name, operation, rows), expected(name, operation, rows)
        same = got.view("u2") == want.view("u2")
        is_zero = (got == 0) & (want == 0) & (operation in ("min", "max"))  # of either sign
        assert (same | is_zero | (np.isnan(got) & np.isnan(want))).all()


@pytest.mark.parametrize("operation", ["sum", "mean", "prod"])
@pytest.mark.parametrize("name", ["f16", "bf16", "f32", "f64", "g"])
def test_a_fold_keeps_signs_of_zeros_and_of_a_nan(fold, name, operation):
    # Of two NaN either may be kept; and a minimum of zeros may have either sign.
    dtype, rng = np.dtype(DTYPES[name]), np.random.default_rng(2)
    for ranks in (1, 2, 3, 9):
        values = rng.choice([0.0, -0.0, 1.0, -1.0], (ranks, 2000))
        values[rng.integers(ranks, size=500), np.arange(500)] = np.nan
        values *= rng.choice([1.0, -1.0], (ranks, 2000))
        rows = [row.astype(dtype) for row in values]
        got, want = folded(fold, name, operation, rows), expected(name, operation, rows)
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
        np.testing.assert_array_equal(np.signbit(got), np.signbit(want))


def has(dtype, operation):
    """Tell whether a dtype has an operation: means of what divides, orders of what is real."""
    if operation in ("and", "or"):
        return dtype.kind == "b"
    if operation == "mean":
        return dtype.kind in "fcV" or dtype == ml_dtypes.bfloat16
    return operation in ("sum", "prod") or dtype.kind != "c"


class Box(ctypes.Structure):
    """An element's bytes, and of each axis its length and its strides: NodeBox of kernels.h."""

    _fields_ = (
        ("item", ctypes.c_int64),
        ("ndim", ctypes.c_int),
        ("shape", ctypes.c_int64 * 64),
        ("stride_in", ctypes.c_int64 * 64),
        ("stride_out", ctypes.c_int64 * 64),
    )


def copy_box(kernels, out, array):
    axes = ctypes.c_int64 * 64
    box = Box(array.itemsize, out.ndim, axes(*out.shape), axes(*array.strides), axes(*out.strides))
    target, source = ctypes.c_void_p(out.ctypes.data), ctypes.c_void_p(array.ctypes.data)
    kernels.copy_box(target, source, ctypes.byref(box))


def some_view(shape, dtype, rng):
    """Return memory, and a view of this shape on it: axes in any order, steps of either sign."""
    ndim = len(shape)
    order = rng.permutation(ndim)
    steps = rng.choice([1, 1, 1, 2, 3, -1, -2], ndim) if rng.random() < 0.7 else np.ones(ndim, int)
    gaps = rng.integers(0, 3, ndim) if rng.random() < 0.5 else np.zeros(ndim, int)
    lengths = [
        shape[axis] * abs(int(step)) + int(gap)
        for axis, step, gap in zip(order, steps, gaps, strict=True)
    ]
    memory = np.frombuffer(rng.bytes(int(np.prod(lengths)) * dtype.itemsize), dtype).reshape(
        lengths
    )
    memory = memory.copy()
    view = memory
    for place, (axis, step) in enumerate(zip(order, steps, strict=True)):
        view = view[
            (slice(None),) * place + (slice(0, shape[axis] * abs(int(step)), abs(int(step))),)
        ]
        view = np.flip(view, place) if step < 0 else view
    return memory, view.transpose(np.argsort(order)) if ndim else view


@pytest.mark.parametrize("item", ["V1", "V2", "V3", "V4", "V8", "V16", "V24"])
def test_a_copied_box_is_numpys(kernels, item):
    dtype, rng = np.dtype(item), np.random.default_rng(len(item))
    for _ in range(300):
        longest = rng.choice([3, 8, 70])
        ndim = rng.integers(0, 6 if longest < 70 else 3)
        shape = tuple(
            int(length) for length in rng.integers(0 if rng.random() < 0.1 else 1, longest, ndim)
        )
        memory, out = some_view(shape, dtype, rng)
        if ndim and rng.random() < 0.1:  # one element for all along an axis
            axis = int(rng.integers(ndim))
            array = some_view((*shape[:axis], 1, *shape[axis + 1 :]), dtype, rng)[1]
            array = np.broadcast_to(array, shape)
        else:
            array = some_view(shape, dtype, rng)[1]
        copy_box(kernels, out, array)
        got, out[...] = memory.tobytes(), array
        assert got == memory.tobytes(), (shape, out.strides, array.strides)
