"""Offers of blocks in shared memory: where others read a block, or a copy that is made for them.

A block that others take of and that does not lie in the arena is copied there first, as far as
they take of it: one copy more, where messages have three. So may be a small one that lies there,
for its rank need then not wait until all others have read it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from mpimesh.arrays.types import HostArray
from mpimesh.comm.regions import raw_dtype
from mpimesh.comm.shared_window import NOT_READ, Cells, SharedWindow
from mpimesh.layout.boxes import Box, view, volume, whole
from mpimesh.layout.regions import Regions

__all__ = ["NO_OFFER", "Copies", "CopyRule", "Fill", "Offer", "copied_boxes"]

_WHOLE_FROM = 0.6
"""From this part of a block on it is copied as a whole."""

_REUSED_BYTES = 32 << 20
"""Largest copy whose memory is used for the next, for fresh memory costs more than the copy."""

_SMALL_PART = 8
_LARGEST = 16 << 20
"""No more than an eighth of a block up to this size counts as its edges."""

_MOST_COMPARED = 64
"""Of more boxes, those that lie in another are copied twice."""

_MOST_FREE = 2
_MOST_FILLS = 16

Fill: TypeAlias = Sequence[tuple[HostArray, HostArray]]
"""Copies: the source of each, and before it its target."""


@dataclass(frozen=True, slots=True)
class CopyRule:
    """Which blocks are copied though others could read them where they lie.

    Attributes:
        block_bytes: Those up to this size.
        part_bytes: Larger ones of which no more than this, and a small part, is taken: the edges
            of a block, for a halo. The copy takes as much address space as the block.
    """

    block_bytes: int
    part_bytes: int

    @staticmethod
    def for_ranks(ranks: int) -> CopyRule:
        """Return the rule for so many ranks on this node.

        To wait until all readers are through is worth a copy where ranks share cores. Where each
        has its own, they read at the same time, and only the smallest blocks are copied.
        """
        # Not the cores that this process may use: a rank that is bound has but one.
        crowded = ranks > (os.cpu_count() or 1)
        return CopyRule(1 << 20 if crowded else 64 << 10, 128 << 10)

    def copies(self, nbytes: int, given_bytes: int) -> bool:
        """Tell whether a block is copied, of which the others take so much."""
        return nbytes <= self.block_bytes or (
            given_bytes <= self.part_bytes and _SMALL_PART * given_bytes <= nbytes <= _LARGEST
        )


class Offer:
    """A rank's block, where the others of its node can read it.

    Attributes:
        at: Where it begins in the arena; -1 if there is no room.
        is_read: Whether others read the block itself, and no copy of it.
        copies: What is to be copied, and before it where to.
    """

    __slots__ = ("at", "copies", "is_read")

    def __init__(self, at: int, *, is_read: bool = False, fill: Fill = ()) -> None:
        self.at = at
        self.is_read = is_read
        self.copies = fill

    def fill(self) -> None:
        """Copy what others take, if it is not there yet. Doing it again is harmless."""
        for to, what in self.copies:
            to[...] = what


NO_OFFER = Offer(NOT_READ)
"""The offer of a rank from which nobody takes anything."""


class _Buffer:
    """Memory for a copy.

    Attributes:
        memory: The bytes.
        nbytes: How many they are.
        at: Where they begin in the arena.
        number: The number of the last operation that used it.
        readers: The cells of those who read it then.
    """

    __slots__ = ("at", "memory", "nbytes", "number", "readers")

    def __init__(self, memory: HostArray, at: int) -> None:
        self.memory = memory
        self.nbytes = memory.nbytes
        self.at = at
        self.number = 0
        self.readers: Cells = ()


class Copies:
    """Memory of the arena for copies of blocks, which others may read for a while.

    Args:
        window: The ranks.
        meets: Whether all ranks end each operation together: then nobody reads the last copy.
    """

    __slots__ = ("_buffers", "_meets", "_window")

    def __init__(self, window: SharedWindow, *, meets: bool = False) -> None:
        self._window = window
        self._meets = meets
        self._buffers: list[_Buffer] = []

    def offer(
        self,
        source: HostArray | None,
        boxes: Sequence[Box],
        readers: Cells = (),
        *,
        at: int | None = None,
        copied: bool = False,
        fills: dict[tuple[int, int], Fill] | None = None,
    ) -> Offer:
        """Offer a block for the next operation.

        Args:
            source: The block.
            boxes: What is to be copied of it where others do not read the block itself; nothing if
                none takes of it.
            readers: The cells of those who take of it, if operations do not end together.
            at: Where it begins in the arena, if that is known; -1 for an ordinary array.
            copied: Whether it is copied though it lies in the arena.
            fills: A cache of the copies that are made of a block that lies in the arena.
        """
        if source is None or not boxes or not source.nbytes:
            return NO_OFFER
        if at is None:
            at = self._window.find(source)
        if at >= 0 and not copied:
            return Offer(at, is_read=True)
        buffer = self._buffer(source.nbytes, readers)
        if buffer is None:
            return Offer(at, is_read=at >= 0)
        if at < 0 or fills is None:
            return Offer(buffer.at, fill=_fill(buffer.memory[: source.nbytes], source, boxes))
        fill = fills.get((at, buffer.at))
        if fill is None:
            # Through the window's views, which keep neither the block nor the copy alive.
            window, nbytes = self._window, source.nbytes
            block = window.view(window.rank, at, nbytes, source.dtype).reshape(source.shape)
            memory = window.view(window.rank, buffer.at, nbytes, buffer.memory.dtype)
            fill = _fill(memory, block, boxes)
            if len(fills) >= _MOST_FILLS:
                fills.clear()
            fills[at, buffer.at] = fill
        return Offer(buffer.at, fill=fill)

    def again(
        self,
        source: HostArray,
        nbytes: int,
        boxes: Sequence[Box],
        readers: Cells,
        at: int,
        offers: dict[int, Offer],
    ) -> Offer:
        """Offer a copy of a block that is copied again and again, from the same place.

        Args:
            source: The block.
            nbytes: Its size.
            boxes: What is to be copied of it.
            readers: The cells of those who take of it.
            at: Where it begins in the arena; -1 for an ordinary array.
            offers: Keeps the offers, by where the copies lie.
        """
        buffers = self._buffers
        if buffers and len(buffers) <= _MOST_FREE:
            # As in _buffer, without the cost of its calls.
            oldest = buffers[0]
            offer = offers.get(oldest.at)
            if (
                offer is not None
                and nbytes <= oldest.nbytes <= _REUSED_BYTES
                and self._window.done_by(oldest.number, oldest.readers)
            ):
                oldest.number = self._window.published + 1
                oldest.readers = readers
                buffers.append(buffers.pop(0))
                return offer
        buffer = self._buffer(nbytes, readers)
        if buffer is None:
            return Offer(at, is_read=at >= 0)
        offer = offers.get(buffer.at)
        if offer is None:
            # Through the window's view, which does not keep the memory of the copy.
            window = self._window
            memory = window.view(window.rank, buffer.at, nbytes, buffer.memory.dtype)
            if len(offers) >= _MOST_FILLS:
                offers.clear()
            offer = offers[buffer.at] = Offer(buffer.at, fill=_fill(memory, source, boxes))
        return offer

    @property
    def memories(self) -> list[HostArray]:
        """The copies that others may still read."""
        return [buffer.memory for buffer in self._buffers if not self._is_over(buffer)]

    def _is_over(self, buffer: _Buffer) -> bool:
        return self._meets or self._window.done_by(buffer.number, buffer.readers)

    def _buffer(self, nbytes: int, readers: Cells) -> _Buffer | None:
        """Return so many bytes that nobody reads, for the next operation; None for no room."""
        buffers = self._buffers
        buffer: _Buffer | None = None
        if buffers and len(buffers) <= _MOST_FREE:
            # Most exchanges are like the last one, and need as much.
            oldest = buffers[0]
            if _fits(nbytes, oldest) and self._is_over(oldest):
                buffer = buffers.pop(0)
        if buffer is None:
            free = [other for other in buffers if self._is_over(other)]
            self._buffers = buffers = [other for other in buffers if other not in free]
            fitting = [other for other in free if _fits(nbytes, other)]
            if fitting:
                buffer = min(fitting, key=lambda other: other.nbytes)
            else:
                memory = self._window.room(nbytes)
                if memory is None:
                    return None
                buffer = _Buffer(memory, self._window.find(memory))
        buffer.number = self._window.published + 1
        buffer.readers = readers
        buffers.append(buffer)
        return buffer


def _fits(nbytes: int, buffer: _Buffer) -> bool:
    return nbytes <= buffer.nbytes <= _REUSED_BYTES


def _fill(memory: HostArray, source: HostArray, boxes: Sequence[Box]) -> Fill:
    raw = raw_dtype(source.dtype)
    copy, block = memory.view(raw).reshape(source.shape), source.view(raw)
    return [(view(copy, box), view(block, box)) for box in boxes]


def _is_in(box: Box, other: Box) -> bool:
    return all(first <= a and b <= last for (a, b), (first, last) in zip(box, other, strict=True))


def copied_boxes(regions: Regions, shape: tuple[int, ...]) -> tuple[Box, ...]:
    """Return what to copy of a block of which others take: that, or all in one run.

    Of large blocks a run is half the traffic, for the processor need not read what it writes over.
    """
    boxes = tuple(dict.fromkeys([give.box for give in regions.gives]))
    if len(boxes) <= _MOST_COMPARED:
        # The corners of a block lie in its edges.
        boxes = tuple(
            [box for box in boxes if not any(box != one and _is_in(box, one) for one in boxes)]
        )
    if sum(map(volume, boxes)) > _WHOLE_FROM * prod(shape):
        return (whole(shape),)
    return boxes
