"""Memory of arrays: aligned, in huge pages where it is large, and pooled for results.

Rows of ordinary 4 KiB pages cost a large reduction a quarter of its speed in address translation
(measured: 16 MiB, 5.8 against 4.5 ms). NumPy asks for huge pages only where its allocator happens
to map fresh memory, so this module asks itself.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Callable, Sequence
from ctypes import addressof, c_char
from operator import index
from threading import Lock
from typing import Any, SupportsIndex

import numpy as np

from mpimesh.arguments import MOST, shown
from mpimesh.arrays.dtypes import as_dtype, refuse_objects
from mpimesh.arrays.namespace import DType, HostArray
from mpimesh.errors import DTypeError, OutOfMemoryError, ShapeError

__all__ = [
    "KEPT_STEPS",
    "POOLED_FROM_BYTES",
    "ArrayPool",
    "address_of",
    "aligned_bytes",
    "aligned_empty",
    "array_shape",
    "memory_at",
    "zero_pages",
]


_CACHE_LINE_BYTES = 64
_HUGE_PAGE_BYTES = 2 << 20
_HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)


def address_of(x: HostArray) -> int | None:
    """Return where an array begins; None if it is read-only, empty, or not in one piece."""
    buffer: Any = x
    try:
        return addressof(c_char.from_buffer(buffer))
    except (BufferError, TypeError, ValueError):
        return None


def memory_at(address: int, nbytes: int, dtype: DType) -> HostArray:
    """Return an array over memory that it does not keep alive."""
    whole: Any = (c_char * nbytes).from_address(address)
    memory: HostArray = np.frombuffer(whole, dtype)
    return memory


def aligned_bytes(nbytes: int) -> HostArray:
    """Return uninitialised bytes that start on a cache line, or on a huge page if they fill one.

    The memory lives as long as an array refers to it.
    """
    if nbytes < _HUGE_PAGE_BYTES or _HUGE_PAGES is None:
        return _from(np.empty(nbytes + _CACHE_LINE_BYTES, np.uint8), nbytes, _CACHE_LINE_BYTES)
    mapping = mmap.mmap(-1, nbytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(_HUGE_PAGES)
    return _from(np.frombuffer(mapping, np.uint8), nbytes, _HUGE_PAGE_BYTES)


def zero_pages(rows: int, nbytes: int) -> list[HostArray]:
    """Return rows of zero bytes, of which only those pages cost memory that are written."""
    block = mmap.mmap(-1, rows * nbytes)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        block.madvise(mmap.MADV_NOHUGEPAGE)
    return [*np.frombuffer(block, np.uint8).reshape(rows, nbytes)]


def _from(raw: HostArray, nbytes: int, alignment_bytes: int) -> HostArray:
    start = -raw.ctypes.data % alignment_bytes
    return raw[start : start + nbytes]


def aligned_empty(
    shape: Sequence[SupportsIndex] | SupportsIndex,
    dtype: Any,
    take: Callable[[int], HostArray] = aligned_bytes,
) -> HostArray:
    """Return an uninitialised C-contiguous array that starts on a cache line.

    Args:
        shape: Its shape.
        dtype: Its dtype.
        take: Gives so many bytes, which start on a cache line.

    Raises:
        ShapeError: If a size is negative or no whole number.
        DTypeError: If `dtype` holds Python objects.
        OutOfMemoryError: If there is not as much memory.
    """
    sizes, kind = array_shape(shape, dtype)
    nbytes = math.prod(sizes) * kind.itemsize
    try:
        aligned: HostArray = take(nbytes).view(kind).reshape(sizes)
    except (MemoryError, OSError) as error:
        raise OutOfMemoryError(
            f"an array of shape {sizes} and dtype {kind} needs {nbytes / 2**30:.1f} GiB, which "
            f"this machine does not give: {error}"
        ) from None
    return aligned


def array_shape(
    shape: Sequence[SupportsIndex] | SupportsIndex, dtype: Any
) -> tuple[tuple[int, ...], DType]:
    """Return shape and dtype of an array that can be exchanged.

    Raises:
        ShapeError: If a size is negative or no whole number.
        DTypeError: If `dtype` holds Python objects.
    """
    try:
        # First what is most frequent: to ask for a protocol takes ten times as long.
        if type(shape) is tuple or isinstance(shape, Sequence):
            sizes = tuple(map(index, shape))
        else:
            sizes = (
                (index(shape),) if isinstance(shape, SupportsIndex) else tuple(map(index, shape))
            )
    except TypeError:
        raise ShapeError(
            f"a shape is a whole number or a row of whole numbers, got {shown(shape)}"
        ) from None
    if sizes and min(sizes) < 0:
        raise ShapeError(f"sizes of an array must not be negative, got {sizes}")
    kind = as_dtype(dtype)
    refuse_objects(kind)
    if not kind.itemsize:
        raise DTypeError(f"elements of dtype {kind} have no bytes; give their length, as in 'S8'")
    if math.prod(filter(None, sizes)) * kind.itemsize > MOST:
        raise ShapeError(
            f"an array of shape {shown(sizes)} and dtype {kind} has more bytes than an address "
            "can count"
        )
    return sizes, kind


KEPT_STEPS = 16
"""Number of steps that a block waits to be used again."""

POOLED_FROM_BYTES = 32 * 1024
"""Below this the allocator's own free lists are faster than looking for a block."""


class _PooledBlock:
    """A block of memory and the array that owns it, to which all views of it refer."""

    __slots__ = ("at", "memory", "owner", "used_in", "when_free")

    def __init__(self, memory: HostArray) -> None:
        self.memory = memory
        self.owner = _owner(memory)
        self.when_free = 0
        self.used_in = 0
        self.at: int | None = None


class ArrayPool:
    """Blocks of memory that become arrays, and are used again when those are gone.

    A fresh NumPy array costs its page faults on first touch: at 1 MiB that is five times the price
    of the all-reduce that fills it. In shared memory, ranks that have mapped a block need not map
    another one.

    A received activation is referenced by the layers that saved it, until their backward; only the
    array's own reference count knows when that is over. So a block is never returned: it is free
    when no array refers to its memory. Every array over it, however it was cut and viewed, refers
    to the owner and not to the block: NumPy follows a view's base down to the array that has the
    memory.

    Args:
        allocate: Gives memory for a number of bytes, as an array of bytes.
        least_bytes: Smaller arrays are ordinary ones.
        limit_bytes: Most memory of the pool. Larger or further requests get ordinary arrays.
    """

    def __init__(
        self,
        allocate: Callable[[int], HostArray] = aligned_bytes,
        *,
        least_bytes: int = 0,
        limit_bytes: int = sys.maxsize,
    ) -> None:
        self._allocate = allocate
        self._least_bytes = least_bytes
        self._limit_bytes = limit_bytes
        self._blocks: dict[int, list[_PooledBlock]] = {}
        self._starts: dict[int, _PooledBlock] = {}
        self._step = 0
        self._lock = Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks, in use or free."""
        return sum(size * len(blocks) for size, blocks in self._blocks.items())

    def take(self, shape: Sequence[int], dtype: DType) -> HostArray:
        """Return an uninitialised C-contiguous array, in use while it or a view of it lives."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < self._least_bytes:
            return np.empty(shape, dtype)
        array = self.take_again(shape, dtype)
        if array is not None:
            return array
        size = _size_class(nbytes)
        with self._lock:
            if self.nbytes + size > self._limit_bytes:
                self._keep(lambda block: sys.getrefcount(block.owner) != block.when_free)
                if self.nbytes + size > self._limit_bytes:
                    return aligned_empty(shape, dtype)
            block = _PooledBlock(self._allocate(size))
            # Counted, here where nothing else refers to it: Python's own differ by version.
            block.when_free = sys.getrefcount(block.owner)
            self._blocks.setdefault(size, []).append(block)
            self._starts[_start(block.memory)] = block
            return self._array(block, shape, dtype)

    def take_again(self, shape: Sequence[int], dtype: DType) -> HostArray | None:
        """Return such an array as :meth:`take` in a block that is free; None if none is."""
        references = sys.getrefcount
        with self._lock:
            for block in self._blocks.get(_size_class(math.prod(shape) * dtype.itemsize), ()):
                if references(block.owner) == block.when_free:
                    return self._array(block, shape, dtype)
        return None

    def _array(self, block: _PooledBlock, shape: Sequence[int], dtype: DType) -> HostArray:
        block.used_in = self._step
        array: HostArray = np.ndarray(shape, dtype, block.memory)
        return array

    def place_of(self, array: HostArray, find: Callable[[HostArray], int]) -> int:
        """Return what `find` says of the block that `array` begins; -1 if it begins none."""
        block = self._starts.get(_start(array))
        if block is None:
            return -1
        if block.at is None:
            block.at = find(block.memory)
        return block.at

    def end_step(self) -> None:
        """Forget the blocks that were not taken in the last `KEPT_STEPS` steps.

        An array in use stays valid.
        """
        self._step += 1
        oldest = self._step - KEPT_STEPS
        with self._lock:
            if any(b.used_in < oldest for blocks in self._blocks.values() for b in blocks):
                self._keep(lambda block: block.used_in >= oldest)

    def _keep(self, wanted: Callable[[_PooledBlock], bool]) -> None:
        """Forget the other blocks."""
        kept = {size: [*filter(wanted, blocks)] for size, blocks in self._blocks.items()}
        self._blocks = {size: blocks for size, blocks in kept.items() if blocks}
        self._starts = {_start(b.memory): b for blocks in kept.values() for b in blocks}


def _size_class(nbytes: int) -> int:
    """Round up to one of four sizes in each power of two: at most a fifth is unused."""
    step = 1 << max(nbytes.bit_length() - 3, 6)
    return max(-(-nbytes // step) * step, step)


def _start(array: HostArray) -> int:
    """Return the address of an array."""
    start: int = array.__array_interface__["data"][0]
    return start


def _owner(array: HostArray) -> HostArray:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
