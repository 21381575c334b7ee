"""Blocks of random arrays, whose values follow from the number of each element."""

from __future__ import annotations

import math
import tracemalloc
from itertools import pairwise, product
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mpimesh.arrays import random_numbers
from mpimesh.arrays.random_bits import WordStream, key_of
from mpimesh.arrays.random_numbers import block_pieces, permutation
from mpimesh.errors import ArrayValueError
from tests.helpers.array_makers import KEY, RANDOM, random_block, slices, whole
from tests.helpers.depth import examples
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


@pytest.mark.parametrize("name", RANDOM)
@settings(max_examples=examples(40))
@given(partition=partitions(), most=st.sampled_from([1, 2, 5, 16, 1 << 14]))
def test_the_blocks_of_any_partition_are_slices_of_the_whole(name, partition, most):
    make = RANDOM[name]
    shape, parts = partition
    expected = whole(make, shape)
    assert expected.shape == shape
    with mock.patch.object(random_numbers, "_PIECE", most):
        for box in parts:
            assert_same_bits(make(shape, box), expected[slices(box)].copy())


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
    found, end = [], 0
    with mock.patch.object(random_numbers, "_PIECE", most):
        offsets, places = block_pieces(shape, box)
    for place, base in places:
        assert place.start == end
        end = place.stop
        assert 0 < end - place.start <= most
        found += [base + int(offset) for offset in offsets[: end - place.start]]
    assert found == expected.reshape(-1).tolist()


def test_numbers_past_32_bits_are_right():
    shape = (2**31, 2**30, 3)
    box = ((2**31 - 2, 2**31), (2**30 - 1, 2**30), (1, 3))
    expected = [
        (2**31 - 2 + i) * 2**30 * 3 + (2**30 - 1) * 3 + 1 + j for i in (0, 1) for j in (0, 1)
    ]
    words = WordStream.of(KEY).words(np.array(expected, np.uint64)).reshape(2, 1, 2)
    assert_same_bits(random_block(KEY, shape, box), (words >> np.uint64(11)) * 2.0**-53)
    assert random_block(KEY, (2**40, 0, 2**40), ((0, 2**40), (0, 0), (0, 1))).size == 0


@pytest.mark.parametrize("name", ["random", "normal", "refused", "uniform float16"])
def test_temporary_memory_does_not_grow_with_the_block(name):
    tracemalloc.start()
    try:
        block = whole(RANDOM[name], (1 << 20,))
        peak = tracemalloc.get_traced_memory()[1] - block.nbytes
    finally:
        tracemalloc.stop()
    assert peak < 2 << 20, f"{block.nbytes} bytes took {peak} more"


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
