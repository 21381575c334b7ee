"""Arrays as rows of blocks against NumPy's split and concatenate."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mpimesh.errors import ShapeError
from mpimesh.runtime.operands import Blocks, check_sizes, normal_axis
from tests.helpers.raises import raises


@st.composite
def arrays_in_blocks(draw):
    shape = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    axis = draw(st.integers(0, len(shape) - 1))
    sizes = draw(st.lists(st.integers(0, 3), min_size=1, max_size=5))
    shape[axis] = sum(sizes)
    x = np.arange(np.prod(shape)).reshape(shape)
    if draw(st.booleans()):
        x = np.asfortranarray(x)
    return x, axis, sizes


@given(arrays_in_blocks())
def test_pack_lays_the_blocks_one_after_the_other(case):
    x, axis, sizes = case
    blocks = Blocks(x.shape, axis, sizes)
    packed = blocks.pack(x)
    parts = np.split(x, np.cumsum(sizes)[:-1], axis)
    assert packed.tolist() == np.concatenate([part.ravel() for part in parts]).tolist()
    assert [part.size for part in parts] == blocks.counts
    assert [part.shape for part in parts] == [blocks.block_shape(r) for r in range(len(sizes))]


@given(arrays_in_blocks())
def test_unpack_undoes_pack(case):
    x, axis, sizes = case
    blocks = Blocks(x.shape, axis, sizes)
    whole = np.full_like(x, -1)
    blocks.unpack(blocks.pack(x), whole)
    assert np.array_equal(whole, x)


@given(arrays_in_blocks())
def test_blocks_that_lie_in_order_are_not_copied(case):
    x, axis, sizes = case
    blocks = Blocks(x.shape, axis, sizes)
    if blocks.in_order and x.flags.c_contiguous and x.size:
        assert np.shares_memory(blocks.pack(x), x)


def test_equal_blocks_and_those_of_one_rank():
    assert Blocks.of_whole((2, 6), 1, 3, None).sizes == (2, 2, 2)
    assert Blocks.of_mine((4, 2), 0, 1, 3, None).shape == (12, 2)
    assert Blocks.of_mine((4, 2), 0, 1, 3, [1, 4, 0]).shape == (5, 2)
    with raises(ShapeError, [1, 4, 0], "rank 0", "axis 0", (4, 2)):
        Blocks.of_mine((4, 2), 0, 0, 3, [1, 4, 0])


@pytest.mark.parametrize("sizes", [np.array([1, 2], "u1"), (1, 2), range(1, 3), iter([1, 2])])
def test_sizes_become_plain_numbers(sizes):
    plain = check_sizes(sizes, 2)
    assert plain == [1, 2]
    assert all(type(size) is int for size in plain)


@pytest.mark.parametrize("sizes", [[1], [1, 2, 3], [1, -1], [1.0, 2], "ab", 2, [None, 1]])
def test_sizes_that_are_none(sizes):
    with raises(ShapeError, "sizes", "2 ranks", repr(sizes)):
        check_sizes(sizes, 2)


def test_axes():
    two: Any = np.int8(2)
    assert [normal_axis(int(axis), 3) for axis in (-3, -1, 0)] + [normal_axis(two, 3)] == [
        0,
        2,
        0,
        2,
    ]
    for axis in (3, -4):
        with raises(ShapeError, "here", axis, 3):
            normal_axis(axis, 3, what="here")
    wrong: Any
    for wrong in (1.0, "x", None):
        with raises(ShapeError, "axis", repr(wrong)):
            normal_axis(wrong, 3)
