"""Memory for messages, used again once nobody refers to it any more.

A received activation is kept by the layers that saved it, until their backward;
only the array's own reference count knows when that is over. So nobody gives a slot
back: it is free when no array refers to its memory.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence

import numpy as np

from mpimesh.arrays import DType, HostArray

__all__ = ["SlotPool"]


class _Slot:
    """A block of memory and the array that owns it, to which all views of it refer."""

    __slots__ = ("block", "owner", "when_free")

    def __init__(self, block: HostArray) -> None:
        self.block = block
        self.owner = _owner(block)
        self.when_free = 0

    def calibrate(self) -> None:
        """Count the references while there are no others than the slot's own.

        They are counted, not known: how many are Python's differs by version.
        """
        self.when_free = self.references()

    def references(self) -> int:
        """Return the number of references to the memory."""
        return sys.getrefcount(self.owner)


class SlotPool:
    """Arrays for the messages of one rank.

    There are as many slots of a size as were ever in use at one time, which the
    schedule bounds; they stay until :meth:`clear`.

    Args:
        allocate: Gives memory for a number of bytes, as an array of bytes.
    """

    def __init__(self, allocate: Callable[[int], HostArray]) -> None:
        self._allocate = allocate
        self._slots: dict[int, list[_Slot]] = {}
        self._starts: set[int] = set()

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, in use or free."""
        return sum(slot.block.nbytes for slots in self._slots.values() for slot in slots)

    def take(self, shape: Sequence[int], dtype: DType) -> HostArray:
        """Return an uninitialised C-contiguous array, in use while it or a view of it lives."""
        nbytes = math.prod(shape) * dtype.itemsize
        size = _size_class(nbytes)
        slots = self._slots.setdefault(size, [])
        slot = next((slot for slot in slots if slot.references() == slot.when_free), None)
        if slot is None:
            slot = _Slot(self._allocate(size))
            slot.calibrate()  # here, where nobody holds the new block any more
            slots.append(slot)
            self._starts.add(slot.block.__array_interface__["data"][0])
        return slot.block[:nbytes].view(dtype).reshape(shape)

    def holds(self, array: HostArray) -> bool:
        """Tell whether `array` begins a slot."""
        return array.__array_interface__["data"][0] in self._starts

    def clear(self) -> None:
        """Forget all slots; arrays in use stay valid."""
        self._slots.clear()
        self._starts.clear()


def _owner(array: HostArray) -> HostArray:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _size_class(nbytes: int) -> int:
    """Round up to one of four sizes in each power of two: uneven microbatches share slots."""
    step = 1 << max(nbytes.bit_length() - 3, 6)
    return max(-(-nbytes // step) * step, step)
