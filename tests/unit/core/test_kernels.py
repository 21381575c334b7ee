"""Sums and the like, and copies of boxes, of compiled code: against NumPy."""

from __future__ import annotations

import ctypes
from itertools import pairwise
from math import prod

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


def expected(name, operation, rows, block=8):
    """Fold blocks of 8 ranks, then the blocks; half types in float32."""
    ranks, dtype = len(rows), rows[0].dtype
    is_complex_product = operation == "prod" and dtype.kind == "c"
    ufunc = complex_product if is_complex_product else UFUNCS[operation]
    with np.errstate(all="ignore"):
        rows = [row.astype("f4") for row in rows] if name in HALVES else rows
        blocks = []
        for first in range(0, ranks, block):
            total = rows[first]
            for row in rows[first + 1 : first + block]:
                total = ufunc(total, row)
            blocks.append(total)
        total = blocks[0]
        for block in blocks[1:]:
            total = ufunc(total, block)
        if operation == "mean":
            parts = total.view(total.real.dtype)
            total = (parts / parts.dtype.type(ranks)).view(total.dtype)
        return total.astype(dtype)


def folded(fold, name, operation, rows, *, in_order=False):
    """Fold by compiled code, in blocks or one by one; None where it has no such operation."""
    out = np.zeros(len(rows[0]), rows[0].dtype)
    places = (ctypes.c_void_p * len(rows))(*(row.ctypes.data for row in rows))
    target, length = ctypes.c_void_p(out.ctypes.data), ctypes.c_long(len(out))
    ranks = -len(rows) if in_order else len(rows)
    is_there = fold(operation.encode(), name.encode(), target, places, ranks, length)
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
        same(name, got, expected(name, operation, rows))


@pytest.mark.parametrize("operation", UFUNCS)
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("ranks", [2, 11, *deep(1, 8, 20)])
def test_a_fold_of_parts_goes_one_by_one(fold, name, operation, ranks):
    dtype, rng = np.dtype(DTYPES[name]), np.random.default_rng(ranks)
    if not has(dtype, operation):
        return
    for length in (0, 1, 1025, 3000):
        rows = rows_of(dtype, ranks, length, rng)
        got = folded(fold, name, operation, rows, in_order=True)
        same(name, got, expected(name, operation, rows, block=ranks))


def same(name, got, want):
    if got.dtype.kind == "c":
        got, want = got.view(got.real.dtype), want.view(want.real.dtype)
    if name in HALVES:
        got, want = got.astype("f4"), want.astype("f4")
    np.testing.assert_array_equal(got, want)


def test_the_sum_in_order_is_not_that_of_blocks(fold):
    # 2049 is no half: only in float32, rounded once, is this 2058; and 2^24 + 1 is no float.
    ones = [np.ones(1, "f2")] * 10
    got = folded(fold, "f16", "sum", [np.full(1, 2048, "f2"), *ones], in_order=True)
    assert got == np.float16(2058)
    rows = [np.full(1, 2**24, "f4"), *[np.ones(1, "f4")] * 10]
    assert folded(fold, "f32", "sum", rows, in_order=True) == 2**24
    assert folded(fold, "f32", "sum", rows) == 2**24 + 4


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
    """NodeBox of boxes.h."""

    _fields_ = (
        ("at", ctypes.c_uint64),
        ("run", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("dims", ctypes.POINTER(ctypes.c_uint64)),
        ("n", ctypes.c_uint32),
        ("base", ctypes.c_uint32),
    )


class SomeBox:
    """A box of a C-contiguous array: for boxes.h, and for NumPy the places of its bytes."""

    def __init__(self, lengths, item, rng, *, whole=True):
        shape = [int(n + extra) for n, extra in zip(lengths, some_gaps(lengths, rng), strict=True)]
        begins = [
            int(rng.integers(0, size - n + 1)) for n, size in zip(lengths, shape, strict=True)
        ]
        cut = tuple(slice(begin, begin + n) for begin, n in zip(begins, lengths, strict=True))
        self.nbytes = prod(shape) * item
        self.places = np.arange(self.nbytes).reshape(*shape, item)[cut].ravel()
        strides = [item * prod(shape[axis + 1 :]) for axis in range(len(shape))]
        at = sum(begin * stride for begin, stride in zip(begins, strides, strict=True))
        run, axes = item, list(zip(lengths, strides, strict=True))
        # All that lies together is one run; or the last of the axes are not in it.
        axes = [axis for axis in axes if axis[0] > 1] if whole else axes
        while axes and axes[-1][1] == run and (whole or rng.random() < 0.7):
            run *= axes.pop()[0]
        values = [int(n) for n, _ in axes] + [int(stride) for _, stride in axes]
        self.dims = (ctypes.c_uint64 * max(1, len(values)))(*values)
        self.box = Box(at, run, len(self.places), self.dims, len(axes), 0)


def some_gaps(lengths, rng):
    """Return how much longer the array's axes are, of a few of them."""
    gaps = np.zeros(len(lengths), int)
    wider = rng.integers(0, len(lengths), int(rng.integers(0, 4)))
    gaps[wider] = rng.integers(0, 3, len(wider))
    return gaps


def some_lengths(elements, axes, rng):
    """Return the lengths of axes of which this is the product."""
    lengths = [1] * axes
    for factor in factors(elements):
        lengths[rng.integers(axes)] *= factor
    return lengths


def factors(n):
    found = []
    while n > 1:
        found.append(next(k for k in range(2, n + 1) if n % k == 0))
        n //= found[-1]
    return found


def pointer(array):
    return ctypes.c_void_p(array.ctypes.data)


def size(n):
    return ctypes.c_uint64(int(n))


ITEMS = [1, 2, 3, 4, 8, 16, 24]
ELEMENTS = [1, 2, 3, 7, 8, 12, 30, 64, 72, 210, 512, 1000]


def some_box(elements, item, rng, **options):
    axes = int(rng.choice([1, 2, 3, 5, 8, 24]))
    return SomeBox(some_lengths(elements, axes, rng), item, rng, **options)


@pytest.mark.parametrize("item", ITEMS)
def test_a_box_is_copied_into_another_one(kernels, item):
    rng = np.random.default_rng(item)
    for _ in range(300):
        elements = int(rng.choice(ELEMENTS))
        to, source = (some_box(elements, item, rng, whole=rng.random() < 0.5) for _ in range(2))
        block = np.frombuffer(rng.bytes(source.nbytes), "u1")
        out = np.frombuffer(rng.bytes(to.nbytes), "u1").copy()
        want, total = out.copy(), elements * item
        to_at = from_at = 0
        nbytes = total
        if rng.random() < 0.6:  # from any byte on
            to_at, from_at = rng.integers(0, total + 1, 2)
            nbytes = rng.integers(0, total - max(to_at, from_at) + 1)
        taken = block[source.places[from_at : from_at + nbytes]]
        want[to.places[to_at : to_at + nbytes]] = taken
        boxes = ctypes.byref(to.box), ctypes.byref(source.box)
        kernels.copy_box(
            pointer(out),
            boxes[0],
            size(to_at),
            pointer(block),
            boxes[1],
            size(from_at),
            size(nbytes),
        )
        np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize("item", ITEMS)
def test_bytes_of_a_box_are_found_where_they_lie_together(kernels, item):
    rng, found = np.random.default_rng(item), 0
    kernels.find_box.restype = ctypes.c_long
    for _ in range(300):
        elements = int(rng.choice(ELEMENTS))
        one = some_box(elements, item, rng)
        begin = int(rng.integers(0, elements * item))
        longest = elements * item - begin
        nbytes = int(rng.integers(1, (longest if rng.random() < 0.5 else min(longest, 40)) + 1))
        places = one.places[begin : begin + nbytes]
        want = places[0] if places[-1] - places[0] == nbytes - 1 else -1
        block = np.empty(one.nbytes, "u1")
        got = kernels.find_box(pointer(block), ctypes.byref(one.box), size(begin), size(nbytes))
        assert got == want
        found += got >= 0
    assert 0 < found < 300


@pytest.mark.parametrize("item", ITEMS)
def test_any_bytes_of_what_is_given_are_packed(kernels, item):
    rng = np.random.default_rng(item)
    for _ in range(60):
        ranks, lengths = int(rng.integers(1, 12)), some_lengths(int(rng.choice(ELEMENTS)), 3, rng)
        counts = rng.integers(0, 4, ranks) * (rng.random(ranks) < 0.7)
        # Boxes of one block: of its bytes each has a place of its own, so they may overlap.
        some = [SomeBox(lengths, item, rng, whole=rng.random() < 0.5) for _ in range(sum(counts))]
        block = np.frombuffer(rng.bytes(max([0, *(one.nbytes for one in some)])), "u1")
        give_at = np.array([0, *np.cumsum(counts)], "u8")
        given = [block[one.places] for one in some]
        head = (8 * (ranks + 1) + 15) // 16 * 16
        ends = np.array([head, *(head + np.cumsum([len(one) for one in given]))])
        table = np.zeros(head // 8, "u8")
        table[: ranks + 1] = ends[give_at.astype(int)]
        packed = np.concatenate([table.view("u1"), *given])
        boxes = (Box * max(1, len(some)))(*(one.box for one in some))
        cuts = np.sort(rng.integers(0, len(packed) + 1, int(rng.integers(0, 5))))
        for lo, hi in pairwise([0, *cuts, len(packed)]):
            piece = np.full(hi - lo + 2, 0x77, "u1")
            kernels.pack_boxes(
                ranks, boxes, pointer(give_at), pointer(table), pointer(block),
                ctypes.c_void_p(piece.ctypes.data + 1), size(lo), size(hi),
            )  # fmt: skip
            np.testing.assert_array_equal(piece[1:-1], packed[lo:hi])
            assert piece[0] == piece[-1] == 0x77
