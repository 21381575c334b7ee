"""Offers of a rank's block to the others of its node, and what they say of theirs.

A block that others take of and that does not lie in the arena is copied there first,
as far as they take of it: one copy more, where messages have three. So may be a small one that
lies there, for its rank need then not wait until all others have read it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TypeAlias

import numpy as np

from mpimesh.arrays.types import HostArray
from mpimesh.errors import MismatchError
from mpimesh.transport.board import Boards, Entry
from mpimesh.transport.boxes import Box, view, volume
from mpimesh.transport.entering import NOT_READ
from mpimesh.transport.regions import Regions, raw_dtype
from mpimesh.transport.team import Team

__all__ = [
    "NOTHING",
    "Copies",
    "CopyRule",
    "Fill",
    "Offer",
    "compare",
    "copied_boxes",
    "described",
    "near_blocks",
    "size_told",
]

_MOST = 0.6
"""From this part of a block on it is copied as a whole."""

_KEPT_BYTES = 32 << 20
"""Largest copy whose memory is kept for the next, for fresh memory costs more than the copy."""

_SMALL_PART = 8
_LARGEST = 16 << 20
"""No more than an eighth of a block up to this size counts as its edges."""

_MOST_FREE = 2
_MOST_FILLS = 16

_SIZE_BITS = 12
_DTYPE_BITS = _SIZE_BITS + 7

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
    """

    __slots__ = ("_fill", "at", "is_read")

    def __init__(self, at: int, *, is_read: bool = False, fill: Fill = ()) -> None:
        self.at = at
        self.is_read = is_read
        self._fill = fill

    def fill(self) -> None:
        """Copy what others take, if it is not there yet. Doing it again is harmless."""
        for to, what in self._fill:
            np.copyto(to, what)


NOTHING = Offer(NOT_READ)
"""The offer of a rank from which nobody takes anything."""


class _Room:
    """Memory for a copy.

    Attributes:
        memory: The bytes.
        at: Where they begin in the arena.
        number: The number of the last operation that lent it.
        readers: The boards of those who read it then.
    """

    __slots__ = ("at", "memory", "number", "readers")

    def __init__(self, memory: HostArray, at: int) -> None:
        self.memory = memory
        self.at = at
        self.number = 0
        self.readers: Boards = ()


class Copies:
    """Memory of the arena for copies of blocks, which others may read for a while.

    Args:
        team: The ranks.
        meets: Whether each operation ends with a meeting: then nobody reads the copy of the last.
    """

    __slots__ = ("_lent", "_meets", "_team")

    def __init__(self, team: Team, *, meets: bool = False) -> None:
        self._team = team
        self._meets = meets
        self._lent: list[_Room] = []

    def offer(
        self,
        source: HostArray | None,
        boxes: Sequence[Box],
        readers: Boards = (),
        *,
        at: int | None = None,
        copied: bool = False,
        kept: dict[tuple[int, int], Fill] | None = None,
    ) -> Offer:
        """Offer a block for the next operation.

        Args:
            source: The block.
            boxes: What is to be copied of it where others do not read the block itself; nothing if
                none takes of it.
            readers: The boards of those who take of it, if operations do not end with a meeting.
            at: Where it begins in the arena, if that is known; -1 for an ordinary array.
            copied: Whether it is copied though it lies in the arena.
            kept: Where to keep what is copied of a block that lies in the arena.
        """
        if source is None or not boxes or not source.nbytes:
            return NOTHING
        if at is None:
            at = self._team.find(source)
        if at >= 0 and not copied:
            return Offer(at, is_read=True)
        room = self._room(source.nbytes, readers)
        if room is None:
            return Offer(at, is_read=at >= 0)
        if at < 0 or kept is None:
            return Offer(room.at, fill=_fill(room.memory[: source.nbytes], source, boxes))
        fill = kept.get((at, room.at))
        if fill is None:
            # Through the team's views, which keep neither the block nor the copy alive.
            team, nbytes = self._team, source.nbytes
            block = team.view(team.rank, at, nbytes, source.dtype).reshape(source.shape)
            memory = team.view(team.rank, room.at, nbytes, room.memory.dtype)
            fill = _fill(memory, block, boxes)
            if len(kept) >= _MOST_FILLS:
                kept.clear()
            kept[at, room.at] = fill
        return Offer(room.at, fill=fill)

    @property
    def memories(self) -> list[HostArray]:
        """The copies that others may still read."""
        return [room.memory for room in self._lent if not self._is_over(room)]

    def _is_over(self, room: _Room) -> bool:
        return self._meets or self._team.board.are_through(room.number, room.readers)

    def _room(self, nbytes: int, readers: Boards) -> _Room | None:
        """Return so many bytes that nobody reads, for the next operation; None for no room."""
        lent = self._lent
        found: _Room | None = None
        if lent and len(lent) <= _MOST_FREE:
            # Most exchanges are like the last one, and need as much.
            oldest = lent[0]
            if _fits(nbytes, oldest) and self._is_over(oldest):
                found = lent.pop(0)
        if found is None:
            free = [room for room in lent if self._is_over(room)]
            self._lent = lent = [room for room in lent if room not in free]
            fitting = [room for room in free if _fits(nbytes, room)]
            if fitting:
                found = min(fitting, key=lambda room: room.memory.nbytes)
            else:
                memory = self._team.room(nbytes)
                if memory is None:
                    return None
                found = _Room(memory, self._team.find(memory))
        found.number = self._team.board.posted + 1
        found.readers = readers
        lent.append(found)
        return found


def _fits(nbytes: int, room: _Room) -> bool:
    return nbytes <= room.memory.nbytes <= _KEPT_BYTES


def _fill(memory: HostArray, source: HostArray, boxes: Sequence[Box]) -> Fill:
    raw = raw_dtype(source.dtype)
    copy, block = memory.view(raw).reshape(source.shape), source.view(raw)
    return [(view(copy, box), view(block, box)) for box in boxes]


def copied_boxes(regions: Regions, shape: tuple[int, ...]) -> tuple[Box, ...]:
    """Return what to copy of a block of which others take: that, or all in one run.

    Of large blocks a run is half the traffic, for the processor need not read what it writes over.
    """
    boxes = tuple([give.box for give in regions.gives])
    if sum(map(volume, boxes)) > _MOST * prod(shape):
        return (tuple([slice(0, size) for size in shape]),)
    return boxes


def described(*arrays: HostArray | None) -> int:
    """Return what a rank says of its source and target: the first's size, and their dtype.

    0 if it has neither.
    """
    for number, array in enumerate(arrays):
        if array is not None:
            code = ord(array.dtype.kind) << _SIZE_BITS | array.dtype.itemsize % (1 << _SIZE_BITS)
            return (0 if number else array.nbytes) << _DTYPE_BITS | code
    return 0


def size_told(told: int) -> int:
    """Return how many bytes a rank's source has, by what it says of it."""
    return told >> _DTYPE_BITS


def compare(told: Mapping[int, int]) -> None:
    """See whether the arrays of ranks have one dtype, by what they say of them.

    Raises:
        MismatchError: If not.
    """
    codes = {one % (1 << _DTYPE_BITS) for one in told.values() if one}
    if len(codes) > 1:
        each = ", ".join(
            f"rank {rank}: {chr(one % (1 << _DTYPE_BITS) >> _SIZE_BITS)}{one % (1 << _SIZE_BITS)}"
            for rank, one in sorted(told.items())[:16]
            if one
        )
        raise MismatchError(
            f"an exchange of regions has one dtype on all ranks; kinds and bytes are: {each}"
        )


def near_blocks(
    team: Team,
    entry: Entry,
    here: Sequence[int],
    source: HostArray | None,
    target: HostArray | None,
) -> dict[int, Callable[[tuple[int, ...]], HostArray]]:
    """Return what gives the blocks of the ranks on this node: of all, or of this one alone.

    Args:
        team: The ranks of this node.
        entry: Where their blocks lie.
        here: Their numbers.
        source: This rank's block.
        target: Where it takes to.
    """
    blocks: dict[int, Callable[[tuple[int, ...]], HostArray]] = {}
    if min(entry.sources) >= 0:
        like = np.empty(0, np.uint8) if target is None else target
        for member, rank in enumerate(here):
            blocks[rank] = partial(_reached, team, entry, member, like)
    if source is not None:
        blocks[here[team.rank]] = lambda shape: source
    return blocks


def _reached(
    team: Team, entry: Entry, member: int, like: HostArray, shape: tuple[int, ...]
) -> HostArray:
    nbytes = prod(shape) * like.itemsize
    return team.view(member, entry.sources[member], nbytes, like.dtype).reshape(shape)
