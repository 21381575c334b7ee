"""Blocks of arrays whose values follow from the number of each element."""

from __future__ import annotations

import math
import sys
import tracemalloc
from itertools import pairwise, product
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mpimesh.arrays import indexed
from mpimesh.arrays.indexed import (
    BlockPieces,
    arange_block,
    box_shape,
    eye_block,
    flat_indices,
    full_block,
    linspace_block,
)
from mpimesh.arrays.random_bits import WordStream, key_of
from mpimesh.arrays.random_numbers import permutation, random_block
from mpimesh.errors import ArrayValueError, DTypeError, ShapeError
from tests.helpers.array_makers import ANY_SHAPE, KEY, RANDOM, slices, whole
from tests.helpers.depth import examples
from tests.helpers.fake_cupy import FakeArray, FakeCupy
from tests.helpers.raises import raises

SHAPES = st.lists(st.integers(0, 7), max_size=4).map(tuple)


@st.composite
def partitions(draw):
    """A shape, and where each of its axes is cut."""
    shape = draw(SHAPES)
    cuts = [
        [0, *sorted(draw(st.lists(st.integers(0, extent), max_size=3))), extent] for extent in shape
    ]
    return shape, [tuple(box) for box in product(*(list(pairwise(axis)) for axis in cuts))]


@st.composite
def blocks(draw, shapes=SHAPES):
    """A shape and a box in it."""
    shape = draw(shapes)
    ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return shape, tuple((start, stop) for start, stop in ends)


def assert_same_bits(found, expected):
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert found.flags.c_contiguous
    assert found.tobytes() == expected.tobytes()


# -- any block is that slice of the whole ------------------------------------------------


@pytest.mark.parametrize("name", ANY_SHAPE)
@settings(max_examples=examples(40))
@given(partition=partitions(), most=st.sampled_from([1, 2, 5, 16, 1 << 14]))
def test_the_blocks_of_any_partition_are_slices_of_the_whole(name, partition, most):
    make = ANY_SHAPE[name]
    shape, parts = partition
    expected = whole(make, shape)
    assert expected.shape == shape
    with mock.patch.object(indexed, "_HOST_PIECE", most):
        for box in parts:
            found = make(shape, box)
            assert_same_bits(found, expected[slices(box)].copy())
            out = np.full_like(found, 1)
            assert make(shape, box, out=out) is out
            assert_same_bits(out, found)


@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.parametrize(
    "box", [((0, 70), (0, 900)), ((3, 70), (1, 2)), ((9, 10), (5, 900)), ((0, 70), (100, 700))]
)
def test_blocks_of_several_pieces_are_slices_of_the_whole(name, box):
    expected = whole(RANDOM[name], (70, 900))
    assert_same_bits(RANDOM[name]((70, 900), box), expected[slices(box)].copy())


@settings(max_examples=examples(150))
@given(block=blocks(), most=st.integers(1, 40))
def test_pieces_have_the_numbers_of_their_elements_in_order(block, most):
    shape, box = block
    expected = np.arange(math.prod(shape)).reshape(shape)[slices(box)]
    np.testing.assert_array_equal(flat_indices(shape, box), expected)
    found, end = [], 0
    pieces = BlockPieces.of(shape, box, most=most)
    for place, base in pieces:
        assert place.start == end
        end = place.stop
        assert 0 < end - place.start <= most
        found += [base + int(offset) for offset in pieces.offsets[: end - place.start]]
    assert found == expected.reshape(-1).tolist()


def test_numbers_past_32_bits_are_right():
    shape = (2**31, 2**30, 3)
    box = ((2**31 - 2, 2**31), (2**30 - 1, 2**30), (1, 3))
    expected = [
        (2**31 - 2 + i) * 2**30 * 3 + (2**30 - 1) * 3 + 1 + j for i in (0, 1) for j in (0, 1)
    ]
    numbers = flat_indices(shape, box, np.uint64)
    assert numbers.reshape(-1).tolist() == expected
    words = WordStream.of(KEY).words(np, numbers)
    assert_same_bits(random_block(KEY, shape, box), (words >> np.uint64(11)) * 2.0**-53)


def test_axes_may_be_given_as_numbers_of_numpy():
    number: Any = np.int64
    shape = (number(2**40), number(2**20))
    box = ((number(2**39), number(2**39 + 1)), (number(0), number(2)))
    plain = random_block(KEY, (2**40, 2**20), ((2**39, 2**39 + 1), (0, 2)))
    key: Any = np.uint64(KEY)
    assert_same_bits(random_block(key, shape, box), plain)


@pytest.mark.parametrize("name", ["random", "normal", "refused", "uniform float16"])
def test_temporary_memory_does_not_grow_with_the_block(name):
    block = whole(RANDOM[name], (1 << 20,))
    tracemalloc.start()
    try:
        whole(RANDOM[name], (1 << 20,), out=block)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 << 20, f"{block.nbytes} bytes took {peak} more"


# -- ranges and diagonals ----------------------------------------------------------------

NUMBERS = ["float16", "float32", "float64", "longdouble", "int8", "uint8", "int64", "uint64"]
DTYPES = st.sampled_from([np.dtype(t) for t in [*NUMBERS, ">f8", ">i4", ml_dtypes.bfloat16]])


@settings(max_examples=examples(400))
@given(
    dtype=DTYPES,
    start=st.floats(-100, 100),
    step=st.floats(-10, 10).filter(lambda x: abs(x) > 1e-3),
    block=blocks(st.tuples(st.integers(0, 90))),
)
def test_a_range_is_that_of_numpy(dtype, start, step, block):
    (n,), ((low, high),) = block
    if dtype.kind in "iu":
        start, step = abs(int(start)), 1
    expected = np.arange(start, start + step * (n - 0.5) if n else start, step, dtype=dtype)
    if expected.size == n:  # the length that NumPy finds is rounded, too
        found = arange_block(start, step, (n,), ((low, high),), dtype)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, expected[low:high])
        np.testing.assert_array_equal(np.signbit(found), np.signbit(expected[low:high]))


@pytest.mark.parametrize(
    ("start", "step", "dtype"),
    [
        (2**62, 3, np.int64),
        (2**63, 2**40, np.uint64),
        (-5, -7, np.int64),
        (0.1, 0.1, np.float32),
        (-0.0, 1.0, np.float64),
        (1e16, 1.5, np.float64),
    ],
)
def test_long_ranges_are_those_of_numpy(start, step, dtype):
    n = 150_000
    stop = start + step * n if isinstance(start, int) else start + step * (n - 0.5)
    expected = np.arange(start, stop, step, dtype=dtype)
    assert expected.size == n
    for box in ((0, n), (1, n), (70_000, 140_000), (n - 1, n), (5, 5)):
        assert_same_bits(arange_block(start, step, (n,), (box,), dtype), expected[slice(*box)])


@settings(max_examples=examples(400))
@given(
    dtype=DTYPES,
    start=st.floats(-100, 100),
    stop=st.one_of(st.floats(-100, 100), st.just(5e-324)),
    endpoint=st.booleans(),
    block=blocks(st.tuples(st.integers(0, 90))),
)
def test_a_spread_is_that_of_numpy(dtype, start, stop, endpoint, block):
    (n,), ((low, high),) = block
    if dtype.kind == "u":
        start, stop = abs(start), abs(stop)
    start = 0.0 if stop == 5e-324 else start
    expected = np.linspace(start, stop, n, endpoint=endpoint, dtype=dtype)[low:high]
    found = linspace_block(start, stop, (n,), ((low, high),), dtype, endpoint=endpoint)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(expected))


def test_a_long_spread_is_that_of_numpy():
    expected = np.linspace(-1, 3, 200_001)
    for box in ((0, 200_001), (65_535, 131_073), (100, 200_001)):
        assert_same_bits(linspace_block(-1, 3, (200_001,), (box,)), expected[slice(*box)])


@settings(max_examples=examples(200))
@given(block=blocks(st.tuples(st.integers(0, 9), st.integers(0, 9))), k=st.integers(-10, 10))
def test_a_diagonal_is_that_of_numpy(block, k):
    shape, box = block
    expected = np.eye(shape[0], shape[1], k=k, dtype=np.int8)[slices(box)].copy()
    assert_same_bits(eye_block(shape, box, np.int8, k=k), expected)


# -- what is refused ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("box", "values"),
    [
        (((0, 3),), (1,)),
        (((0, 3), (2, 1)), ("axis 1", (2, 1))),
        (((0, 3), (-1, 1)), ("axis 1", (-1, 1))),
        (((0, 5), (0, 1)), ("axis 0", (0, 5))),
    ],
)
def test_a_box_outside_its_array_is_refused(box, values):
    with raises(ShapeError, "box", (4, 6), *values):
        box_shape((4, 6), box)
    with raises(ShapeError, "box", (4, 6), *values):
        random_block(KEY, (4, 6), box)


def test_arrays_whose_elements_have_no_numbers_are_refused():
    box_shape((2**62, 1), ((0, 1), (0, 1)))
    with raises(ShapeError, (2**62, 2)):
        box_shape((2**62, 2), ((0, 1), (0, 1)))
    assert random_block(KEY, (2**40, 0, 2**40), ((0, 2**40), (0, 0), (0, 1))).size == 0


@pytest.mark.parametrize(
    ("out", "error", "values"),
    [
        (np.empty((2, 3)), ShapeError, ((3, 2), (2, 3))),
        (np.empty((3, 2), order="F"), ShapeError, ((3, 2), "C-contiguous")),
        (np.empty((6, 2))[::2], ShapeError, ((3, 2), "C-contiguous")),
        (np.empty((3, 2), np.float32), DTypeError, ("float64", "float32")),
    ],
)
def test_an_out_that_does_not_fit_is_refused(out, error, values):
    with raises(error, "out", *values):
        random_block(KEY, (4, 6), ((1, 4), (0, 2)), out=out)


@pytest.mark.parametrize(
    ("call", "values"),
    [
        (lambda: arange_block(0, 1, (2, 3), ((0, 2), (0, 3)), int), ("range", (2, 3))),
        (lambda: linspace_block(0, 1, (), ()), ("range", ())),
        (lambda: eye_block((3,), ((0, 3),)), ("diagonal", (3,))),
    ],
)
def test_axes_of_another_number_are_refused(call, values):
    with raises(ShapeError, *values):
        call()


@pytest.mark.parametrize("dtype", [bool, complex, "M8[s]", object])
def test_ranges_of_what_is_no_real_number_are_refused(dtype):
    with raises(DTypeError, "range", np.dtype(dtype)):
        arange_block(0, 1, (3,), ((0, 3),), dtype)
    with raises(DTypeError, "range", np.dtype(dtype)):
        linspace_block(0, 1, (3,), ((0, 3),), dtype)


def test_numbers_that_a_dtype_cannot_hold_are_refused():
    with raises(ArrayValueError, "int8", 127):
        arange_block(127, 1, (2,), ((0, 2),), np.int8)
    assert arange_block(127, 1, (1,), ((0, 1),), np.int8).tolist() == [127]
    with raises(ArrayValueError, "int8", 300):
        full_block(300, (2,), ((0, 2),), np.int8)
    with raises(ArrayValueError, "int8", [1, 2]):
        full_block([1, 2], (2,), ((0, 2),), np.int8)
    with raises(DTypeError, "int32", "int64"):
        flat_indices((3,), ((0, 3),), np.int32)


@pytest.mark.parametrize("number", [-1, -(2**70), 1.0, np.float64(2), "1", None])
def test_a_seed_that_is_no_whole_number_is_refused(number):
    """A negative one had no last digit: its key was never done."""
    with raises(ArrayValueError, "seeds", repr(number)):
        key_of(0, number)


@pytest.mark.parametrize("key", [-1, 2**64, 0.5])
def test_a_key_that_is_no_word_is_refused(key):
    for call in (lambda: random_block(key, (2,), ((0, 2),)), lambda: permutation(key, 3)):
        with raises(ArrayValueError, key):
            call()


# -- on a device -------------------------------------------------------------------------


@pytest.fixture
def cupy(monkeypatch):
    fake = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    return fake


@pytest.mark.parametrize("name", ANY_SHAPE)
def test_a_device_makes_the_same_bits(name, cupy):
    box = ((2, 19), (30, 99))
    expected = ANY_SHAPE[name]((20, 100), box)
    found = ANY_SHAPE[name]((20, 100), box, xp=cupy)
    assert isinstance(found, FakeArray)
    assert_same_bits(cupy.asnumpy(found), expected)
    out = cupy.empty(expected.shape, expected.dtype)
    assert ANY_SHAPE[name]((20, 100), box, out=out) is out
    assert_same_bits(cupy.asnumpy(out), expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda xp: arange_block(0.5, 0.1, (99,), ((0, 70),), np.float32, xp=xp),
        lambda xp: arange_block(3, -2, (99,), ((0, 70),), np.int16, xp=xp),
        lambda xp: linspace_block(0.5, 9, (99,), ((20, 99),), np.int32, xp=xp),
        lambda xp: eye_block((9, 7), ((1, 8), (2, 7)), k=-1, xp=xp),
        lambda xp: permutation(KEY, 50, xp=xp),
    ],
)
def test_a_device_makes_the_same_ranges(make, cupy):
    found = make(cupy)
    assert isinstance(found, FakeArray)
    assert_same_bits(cupy.asnumpy(found), make(np))
