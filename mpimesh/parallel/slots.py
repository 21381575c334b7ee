"""Memory for messages, used again once nothing refers to it any more.

A received activation is referenced by the layers that saved it, until their backward;
only the array's own reference count knows when that is over. So a slot is
never returned: it is free when no array refers to its memory.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence

import numpy as np

from mpimesh.arrays import DType, HostArray

__all__ = ["KEPT_STEPS", "SlotPool"]

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

    def calibrate(self) -> None:
        """Count the references while there are no others than the slot's own.

        They are counted, not known: how many are Python's differs by version.
        """
        self.when_free = sys.getrefcount(self.owner)


class SlotPool:
    """Arrays for the messages of one rank.

    There are as many slots of a size as were in use at one time in the last few steps, which the
    schedule bounds.

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
        slot.calibrate()  # here, where nothing else refers to the new block
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

    def holds(self, array: HostArray) -> bool:
        """Tell whether `array` begins a slot."""
        return _start(array) in self._starts

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


def _size_class(nbytes: int) -> int:
    """Round up to one of four sizes in each power of two: uneven microbatches share slots."""
    step = 1 << max(nbytes.bit_length() - 3, 6)
    return max(-(-nbytes // step) * step, step)
