from __future__ import annotations

import gc

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mpimesh.arrays import ArrayPool, aligned_bytes

BYTE = np.dtype(np.uint8)


def overlap(a, b):
    return np.may_share_memory(a, b)


@pytest.mark.parametrize("nbytes", [0, 1, 63, 4096, 2 << 20, (2 << 20) + 1, 5 << 20])
def test_memory_is_aligned_and_can_be_written(nbytes):
    memory = aligned_bytes(nbytes)
    assert memory.shape == (nbytes,)
    assert nbytes == 0 or memory.ctypes.data % 64 == 0
    memory[...] = 7
    assert (memory == 7).all()


@pytest.mark.parametrize("nbytes", [40_000, 3 << 20])
def test_a_block_comes_back_when_its_last_view_goes(nbytes):
    pool = ArrayPool()
    first = pool.take((nbytes,), BYTE)
    address = first.ctypes.data
    view = first[10:20].view(np.int8)
    del first
    second = pool.take((nbytes,), BYTE)
    assert second.ctypes.data != address
    assert not overlap(view, second)
    del view
    assert pool.take((nbytes,), BYTE).ctypes.data == address


def test_small_arrays_are_ordinary():
    pool = ArrayPool(least_bytes=1000)
    assert pool.take((8, 8), np.dtype(float)).shape == (8, 8)
    assert pool.nbytes == 0


def test_the_limit_bounds_what_is_kept_not_what_can_be_had():
    pool = ArrayPool(limit_bytes=100_000)
    arrays = [pool.take((40_000,), BYTE) for _ in range(5)]
    assert pool.nbytes <= 100_000
    assert not any(overlap(a, b) for k, a in enumerate(arrays) for b in arrays[:k])
    del arrays
    gc.collect()
    # Free blocks of one size make room for another.
    large = pool.take((90_000,), BYTE)
    assert 90_000 <= pool.nbytes <= 100_000
    large[...] = 1


@given(st.lists(st.tuples(st.integers(0, 200_000), st.integers(0, 9)), max_size=40))
def test_arrays_in_use_never_overlap(steps):
    pool = ArrayPool(limit_bytes=400_000)
    alive: list[np.ndarray] = []
    for stamp, (nbytes, drop) in enumerate(steps):
        array = pool.take((nbytes,), BYTE)
        assert array.flags.c_contiguous
        array[...] = stamp
        alive.append(array[nbytes // 3 :] if drop % 2 else array)
        assert not any(overlap(a, b) for k, a in enumerate(alive) for b in alive[:k])
        if drop < len(alive):
            del alive[drop]
        del array
