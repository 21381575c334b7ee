"""Memory for results, used again once nobody holds the last result any more.

A fresh NumPy array costs its page faults on first touch: at 1 MiB that is five
times the price of the all-reduce that fills it. So results are cut from blocks
that the pool keeps. A block is free when no array refers to it, which its
reference count tells; nobody has to give anything back.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from threading import Lock

import numpy as np

from mpimesh.arrays.memory import aligned_bytes
from mpimesh.arrays.types import DType, HostArray

__all__ = ["ArrayPool"]

_SMALLEST_BYTES = 32 * 1024
"""Below this the allocator's own free lists are faster than looking for a block."""

_REFERENCES_WHEN_FREE = 2
"""To the memory's owner: the block's own, and the argument of `sys.getrefcount`.

Every array over the memory, however it was cut and viewed, refers to the owner and not to
the block: NumPy follows a view's base down to the array that has the memory.
"""


class ArrayPool:
    """Blocks of memory that become arrays and are used again when those are gone.

    Args:
        limit_bytes: Most memory kept in the pool. Larger or further requests get
            ordinary arrays, so the limit bounds what is kept, not what can be had.
    """

    def __init__(self, *, limit_bytes: int = 512 * 1024 * 1024) -> None:
        self._limit_bytes = limit_bytes
        self._held_bytes = 0
        self._blocks: dict[int, list[HostArray]] = {}
        self._lock = Lock()

    @property
    def held_bytes(self) -> int:
        """Bytes of all blocks kept, in use or free."""
        return self._held_bytes

    def empty(self, shape: Sequence[int], dtype: DType) -> HostArray:
        """Return an uninitialised C-contiguous array, from a free block if there is one."""
        nbytes = math.prod(shape) * dtype.itemsize
        part = self._part(nbytes) if nbytes >= _SMALLEST_BYTES else None
        return np.empty(shape, dtype) if part is None else part.view(dtype).reshape(shape)

    def clear(self) -> None:
        """Forget all blocks; arrays in use stay valid."""
        with self._lock:
            self._blocks.clear()
            self._held_bytes = 0

    def _part(self, nbytes: int) -> HostArray | None:
        """Return the first bytes of a free block; None if the pool is full."""
        size = _size_class(nbytes)
        with self._lock:
            blocks = self._blocks.setdefault(size, [])
            for block in blocks:
                if _is_free(block):
                    return block[:nbytes]
            if self._held_bytes + size > self._limit_bytes and not self._drop_free(size):
                return None
            block = aligned_bytes(size)
            blocks.append(block)
            self._held_bytes += size
            return block[:nbytes]

    def _drop_free(self, needed_bytes: int) -> bool:
        """Let go of free blocks of other sizes until `needed_bytes` fit."""
        for size, blocks in self._blocks.items():
            kept = [block for block in blocks if not _is_free(block)]
            self._held_bytes -= size * (len(blocks) - len(kept))
            blocks[:] = kept
            if self._held_bytes + needed_bytes <= self._limit_bytes:
                return True
        return False


def _is_free(block: HostArray) -> bool:
    return sys.getrefcount(block.base) == _REFERENCES_WHEN_FREE


def _size_class(nbytes: int) -> int:
    """Round up to one of four sizes per power of two, so that at most a fifth is unused."""
    step = 1 << max(nbytes.bit_length() - 3, 0)
    return -(-nbytes // step) * step
