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
from typing import NamedTuple

import numpy as np

from mpimesh.arrays.namespace import HostArray
from mpimesh.comm.regions import Call, copying, raw_dtype
from mpimesh.comm.shared_window import NOT_READ, Cells, SharedWindow
from mpimesh.layout.boxes import Box, Regions, view, volume, whole

__all__ = ["NO_OFFER", "Block", "Copies", "CopyRule", "Offer", "copied_boxes"]

_WHOLE_FROM = 0.6
"""From this part of a block on it is copied as a whole."""

_REUSED_BYTES = 32 << 20
"""Largest copy whose memory is used for the next, for fresh memory costs more than the copy."""

_SMALL_PART = 8
_LARGEST = 16 << 20
"""No more than an eighth of a block up to this size counts as its edges."""

_MOST_COMPARED = 64
"""Of more boxes, those that lie in another are copied twice."""

_MOST_OFFERS = 16
_NOTHING: HostArray = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True)
class CopyRule:
    """Rule for blocks that are copied though others could read them where they lie.

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


class Offer(NamedTuple):
    """A rank's block, as the others of its node can read it.

    Attributes:
        at: Where it begins in the arena; -1 if there is no room.
        is_read: Whether others read the block itself, and no copy of it.
        fill: What copies all that others take. Doing it again is harmless.
    """

    at: int
    is_read: bool = False
    fill: tuple[Call, ...] = ()


NO_OFFER = Offer(NOT_READ)
"""The offer of a rank from which nobody takes anything."""


class Block:
    """A rank's block at one place, as it is offered again and again.

    Args:
        source: The block; None if there is none.
        at: Where it begins in the arena; -1 for an ordinary array.
        boxes: What is to be copied of it where others do not read the block itself; nothing if
            none takes of it.
        readers: The cells of those who take of it.
        copied: Whether it is copied though it lies in the arena.

    Attributes:
        nbytes: Its size.
        offer: The offer that is always the same; None if a copy is made each time.
        offers: Those of copies, by where the copies lie.
    """

    __slots__ = ("at", "boxes", "nbytes", "offer", "offers", "readers", "source")

    def __init__(
        self,
        source: HostArray | None,
        at: int,
        boxes: Sequence[Box],
        readers: Cells,
        *,
        copied: bool,
    ) -> None:
        if source is None or not boxes:
            source = _NOTHING
        self.source = source
        self.at = at
        self.boxes = boxes
        self.readers = readers
        self.nbytes = source.nbytes
        self.offer: Offer | None = None
        self.offers: dict[int, Offer] = {}
        if not self.nbytes:
            self.offer = NO_OFFER
        elif at >= 0 and not copied:
            self.offer = Offer(at, is_read=True)

    def copy(self, memory: HostArray, at: int) -> Offer:
        """Return the offer of a copy in `memory`, which begins at `at` of the arena."""
        source, raw = self.source, raw_dtype(self.source.dtype)
        target, block = memory.view(raw).reshape(source.shape), source.view(raw)
        fill = [copying(view(block, box), view(target, box)) for box in self.boxes]
        offer = Offer(at, fill=tuple(fill))
        if len(self.offers) >= _MOST_OFFERS:
            self.offers.clear()
        self.offers[at] = offer
        return offer


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
    """

    __slots__ = ("_buffers", "_window")

    def __init__(self, window: SharedWindow) -> None:
        self._window = window
        self._buffers: list[_Buffer] = []

    def offer(self, block: Block) -> Offer:
        """Offer a block for the next operation."""
        if block.offer is not None:
            return block.offer
        window, buffers, nbytes = self._window, self._buffers, block.nbytes
        for buffer in buffers:  # the one that has not been used for longest first
            if nbytes <= buffer.nbytes <= _REUSED_BYTES and window.done_by(
                buffer.number, buffer.readers
            ):
                buffers.remove(buffer)
                if len(buffers) > 1:
                    self._drop()
                break
        else:
            self._drop()
            memory = window.room(nbytes)
            if memory is None:
                return Offer(block.at, is_read=block.at >= 0)
            buffer = _Buffer(memory, window.find(memory))
        buffer.number = window.published + 1
        buffer.readers = block.readers
        buffers.append(buffer)
        at = buffer.at
        # Through the window's view, which does not keep the memory of the copy.
        return block.offers.get(at) or block.copy(
            window.view(window.rank, at, nbytes, buffer.memory.dtype), at
        )

    @property
    def memories(self) -> list[HostArray]:
        """The copies that others may still read."""
        return [buffer.memory for buffer in self._buffers if not self._is_over(buffer)]

    def _is_over(self, buffer: _Buffer) -> bool:
        return self._window.done_by(buffer.number, buffer.readers)

    def _drop(self) -> None:
        """Give back what nobody reads any more."""
        self._buffers[:] = [buffer for buffer in self._buffers if not self._is_over(buffer)]


def _is_part(box: Box, other: Box) -> bool:
    """Tell whether a box lies in another one."""
    edges = zip(box, other, strict=True)
    return box != other and all(first <= a and b <= last for (a, b), (first, last) in edges)


def copied_boxes(regions: Regions, shape: tuple[int, ...]) -> tuple[Box, ...]:
    """Return what to copy of a block of which others take: that, or all in one run.

    Of large blocks a run is half the traffic, for the processor need not read what it writes over.
    """
    boxes = tuple(dict.fromkeys([give.box for give in regions.gives]))
    if len(boxes) <= _MOST_COMPARED:
        # The corners of a block lie in its edges.
        boxes = tuple([box for box in boxes if not any(_is_part(box, other) for other in boxes)])
    if sum(map(volume, boxes)) > _WHOLE_FROM * prod(shape):
        return (whole(shape),)
    return boxes
