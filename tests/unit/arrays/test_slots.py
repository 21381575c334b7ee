"""Memory that is used again as soon as, and not before, nobody refers to it."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mpimesh.arrays import aligned_empty
from mpimesh.arrays.memory import KEPT_STEPS, ArrayPool

FLOAT = np.dtype(np.float64)


def owned(nbytes):
    return np.empty(nbytes, np.uint8)


def aligned(nbytes):
    return aligned_empty(nbytes, np.uint8)


def from_buffer(nbytes):
    return np.frombuffer(bytearray(nbytes), np.uint8)


ALLOCATORS = pytest.mark.parametrize("allocate", [owned, aligned, from_buffer])


def address(array):
    return array.__array_interface__["data"][0]


@ALLOCATORS
def test_a_slot_is_free_when_its_array_is_gone(allocate):
    pool = ArrayPool(allocate)
    first = pool.take((10, 3), FLOAT)
    where = address(first)
    assert first.shape == (10, 3)
    assert first.flags.c_contiguous
    assert first.flags.writeable
    second = pool.take((10, 3), FLOAT)
    assert not np.shares_memory(first, second)
    size = pool.nbytes
    del first
    assert address(pool.take((9, 3), FLOAT)) == where
    assert pool.nbytes == size


@ALLOCATORS
def test_views_keep_a_slot(allocate):
    pool = ArrayPool(allocate)
    array = pool.take((8, 4), FLOAT)
    where = address(array)
    views = [array[2:3], array.T, array.reshape(-1).view(np.uint8)[5:9]]
    del array
    while views:
        assert address(pool.take((8, 4), FLOAT)) != where
        views.pop()
    gc.collect()
    taken = [pool.take((8, 4), FLOAT) for _ in range(2)]
    assert where in [address(one) for one in taken]


@given(st.lists(st.tuples(st.integers(0, 300), st.booleans()), max_size=40))
def test_arrays_in_use_never_share_memory(steps):
    pool = ArrayPool(aligned)
    held = []
    for number, (rows, keep) in enumerate(steps):
        array = pool.take((rows, 2), FLOAT)
        array[...] = number
        if keep:
            held.append((number, array))
        elif held:
            held.pop(0)
    for number, array in held:
        assert np.all(array == number)
    # No more slots than arrays were ever held, with the one being filled, in each class of size.
    assert pool.nbytes <= 2 * sum(16 * rows + 128 for rows, _ in steps)


def test_what_no_step_has_used_for_a_while_is_forgotten():
    pool = ArrayPool(aligned)
    array = pool.take((4,), FLOAT)
    array[...] = 7
    del array
    often, kept = pool.take((4000,), FLOAT), pool.take((500,), FLOAT)
    kept[...] = 8
    del often
    for _ in range(KEPT_STEPS):
        pool.end_step()
        often = pool.take((4000,), FLOAT)
        assert pool.place_of(often, len) >= often.nbytes
        assert pool.nbytes > 4000 * 8 + 500 * 8
        del often
    pool.end_step()
    assert 4000 * 8 <= pool.nbytes < 4000 * 8 + 500 * 8
    # An array in use stays valid, though the pool has given it up.
    assert pool.place_of(kept, len) == -1
    others = [pool.take((500,), FLOAT) for _ in range(3)]
    for other in others:
        other[...] = 1
    assert np.all(kept == 8)
