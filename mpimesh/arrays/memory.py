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
from mpimesh.errors import DTypeError, ShapeError

__all__ = [
    "KEPT_STEPS",
    "ArrayPool",
    "SlotPool",
    "address_of",
    "aligned_bytes",
    "aligned_empty",
    "array_shape",
    "memory_at",
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
        MemoryError: If there is not as much memory.
    """
    sizes, kind = array_shape(shape, dtype)
    nbytes = math.prod(sizes) * kind.itemsize
    try:
        aligned: HostArray = take(nbytes).view(kind).reshape(sizes)
    except OSError as error:
        raise MemoryError(
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


_SMALLEST_BYTES = 32 * 1024
"""Below this the allocator's own free lists are faster than looking for a block."""

_REFERENCES_WHEN_FREE = 2
"""To the memory's owner: the block's own, and the argument of `sys.getrefcount`.

Every array over the memory, however it was cut and viewed, refers to the owner and not to
the block: NumPy follows a view's base down to the array that has the memory.
"""


class ArrayPool:
    """Blocks of memory that become arrays and are used again when those are gone.

    A fresh NumPy array costs its page faults on first touch: at 1 MiB that is five times the price
    of the all-reduce that fills it. A block is free when no array refers to it, by its reference
    count; no one has to give anything back.

    Args:
        limit_bytes: Most memory of the pool. Larger or further requests get ordinary arrays.
    """

    def __init__(self, *, limit_bytes: int = 512 * 1024 * 1024) -> None:
        self._limit_bytes = limit_bytes
        self._held_bytes = 0
        self._blocks: dict[int, list[HostArray]] = {}
        self._lock = Lock()

    @property
    def held_bytes(self) -> int:
        """Bytes of all blocks, in use or free."""
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
            used = [block for block in blocks if not _is_free(block)]
            self._held_bytes -= size * (len(blocks) - len(used))
            blocks[:] = used
            if self._held_bytes + needed_bytes <= self._limit_bytes:
                return True
        return False


def _is_free(block: HostArray) -> bool:
    return sys.getrefcount(block.base) == _REFERENCES_WHEN_FREE


def _size_class(nbytes: int) -> int:
    """Round up to one of four sizes in each power of two: at most a fifth is unused."""
    step = 1 << max(nbytes.bit_length() - 3, 6)
    return max(-(-nbytes // step) * step, step)


# -- slots, which are used again for as long as steps take them ------------------------------------

KEPT_STEPS = 16
"""Number of steps that a slot waits to be used again."""


class _MemorySlot:
    """A block of memory and the array that owns it, to which all views of it refer."""

    __slots__ = ("at", "block", "owner", "used_in", "when_free")

    def __init__(self, block: HostArray) -> None:
        self.block = block
        self.owner = _owner(block)
        self.when_free = 0
        self.used_in = 0
        self.at: int | None = None


class SlotPool:
    """Arrays for the messages and results of a rank's steps, in memory of any kind.

    A received activation is referenced by the layers that saved it, until their backward; only the
    array's own reference count knows when that is over. So a slot is never returned: it is free
    when no array refers to its memory. There are as many slots of a size as were in use at one time
    in the last few steps, which the schedule bounds.

    Args:
        allocate: Gives memory for a number of bytes, as an array of bytes.
    """

    def __init__(self, allocate: Callable[[int], HostArray]) -> None:
        self._allocate = allocate
        self._slots: dict[int, list[_MemorySlot]] = {}
        self._starts: dict[int, _MemorySlot] = {}
        self._step = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, in use or free."""
        return sum(slot.block.nbytes for slots in self._slots.values() for slot in slots)

    def take(self, shape: Sequence[int], dtype: DType) -> HostArray:
        """Return an uninitialised C-contiguous array, in use while it or a view of it lives."""
        array = self.take_again(shape, dtype)
        if array is not None:
            return array
        size = _size_class(math.prod(shape) * dtype.itemsize)
        slot = _MemorySlot(self._allocate(size))
        # Counted, here where nothing else refers to the block: Python's own differ by version.
        slot.when_free = sys.getrefcount(slot.owner)
        self._slots.setdefault(size, []).append(slot)
        self._starts[_start(slot.block)] = slot
        return self._array(slot, shape, dtype)

    def take_again(self, shape: Sequence[int], dtype: DType) -> HostArray | None:
        """Return such an array as :meth:`take` in a slot that is free; None if none is."""
        slots = self._slots.get(_size_class(math.prod(shape) * dtype.itemsize), ())
        references = sys.getrefcount
        for slot in slots:
            if references(slot.owner) == slot.when_free:
                return self._array(slot, shape, dtype)
        return None

    def _array(self, slot: _MemorySlot, shape: Sequence[int], dtype: DType) -> HostArray:
        slot.used_in = self._step
        array: HostArray = np.ndarray(shape, dtype, slot.block)
        return array

    def place_of(self, array: HostArray, find: Callable[[HostArray], int]) -> int:
        """Return what `find` says of the slot that `array` begins; -1 if it begins none."""
        slot = self._starts.get(_start(array))
        if slot is None:
            return -1
        if slot.at is None:
            slot.at = find(slot.block)
        return slot.at

    def end_step(self) -> None:
        """Forget the slots that were not taken in the last `KEPT_STEPS` steps.

        An array in use stays valid.
        """
        self._step += 1
        oldest = self._step - KEPT_STEPS
        if all(slot.used_in >= oldest for slots in self._slots.values() for slot in slots):
            return
        recent = {
            size: [slot for slot in slots if slot.used_in >= oldest]
            for size, slots in self._slots.items()
        }
        self._slots = {size: slots for size, slots in recent.items() if slots}
        self._starts = {_start(slot.block): slot for slots in recent.values() for slot in slots}


def _start(array: HostArray) -> int:
    """Return the address of an array."""
    start: int = array.__array_interface__["data"][0]
    return start


def _owner(array: HostArray) -> HostArray:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
