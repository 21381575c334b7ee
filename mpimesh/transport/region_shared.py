"""Regions exchanged in memory that the ranks of a node share: each reads what it takes.

A rank has to do only with those of which it takes something, its *owners*, and those that take
of it, its *readers*. Exchange number s goes so on a rank, and the others need not have come:

1. If there is room for note s, it copies its block, if that is to be copied, and posts the note,
   which says where the block or its copy lies.
2. When all owners have posted their notes s, it reads what it takes.
3. It says that it is through with s.
4. If the readers read its block and no copy, it waits until all of them are through with s.

Nothing is read torn. A reader looks at a block only when it has seen note s of its owner, which
was written after the copy was made, and after all that the owner's program has written into the
block. The owner's program may write it again after step 4, when all its readers are through, which
they say after they have read. The memory of a copy is used again when those who were its readers
are through with the exchange that it was made for.

No note is overwritten too early: note s + SLOTS waits until *all* ranks of the node are through
with s, for all say so, whether they have read anything or not (`board.py`). So a rank is at most
SLOTS operations ahead of any other.

Nobody waits for ever. Take the lowest number s at which any rank is, and only ranks at s. There is
room for their notes: every rank is through with all numbers below s, so with s - SLOTS. So
all of them post, which takes nothing else; the ranks that are further on have posted s long ago,
and it still stands there, for ranks at s are not through with it. So all of them read, and say
that they are through, and step 4 ends for them. So the lowest number grows. Where other
operations come between, they wait for all ranks and change nothing in this.

A rank without memory for a copy says so in its note, and sends its parts as messages to its
readers, who receive them when they see the note: nobody else need know. Messages of a pair go in
the order of the exchanges.

A rank in another operation is found by those who take of it; it may have found them before.

A block that others take of and that does not lie in the arena is copied there first, as far as
they take of it: one copy more, where messages have three. So may be a small one that lies there,
for its rank need then not wait until all others have read it.

What is the same again in each exchange of a kind is worked out once, in a `SharedPlan`: arrays come
and go, but the places where they lie come back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from math import prod
from typing import TypeAlias

import numpy as np

from mpimesh.arrays.types import DType, HostArray
from mpimesh.errors import MismatchError, MpimeshError
from mpimesh.layout.boxes import Box, view, volume, whole
from mpimesh.layout.regions import Regions
from mpimesh.transport.base import Communicator, Request
from mpimesh.transport.board import Boards, Entry, Note
from mpimesh.transport.engine import Engine
from mpimesh.transport.entering import NOT_READ
from mpimesh.transport.quick import Quick, mismatch
from mpimesh.transport.region_messages import Blocks, MessageExchange
from mpimesh.transport.regions import (
    Piece,
    check_dtypes,
    described_bytes,
    descriptor,
    piece_work,
    pieces_of,
    raw_dtype,
)
from mpimesh.transport.team import Team
from mpimesh.transport.team_work import Work, do_at_once
from mpimesh.transport.what import EXCHANGE

__all__ = [
    "Copies",
    "CopyRule",
    "SharedExchange",
    "SharedPlan",
    "blocks_of_node",
    "copied_boxes",
]

_AT_A_TIME = 4
"""Pieces that are read before other operations have a turn."""

_MOST_WORK = 64
"""Works that are cached for one kind of exchange: addresses come again and again."""

_MOST_PIECES = 64
"""Of larger exchanges, working the pieces out costs nothing beside reading them."""

_AT_ONCE_BYTES = 256 * 1024
"""Size up to which all is read at once."""

_WHOLE_FROM = 0.6
"""From this part of a block on it is copied as a whole."""

_REUSED_BYTES = 32 << 20
"""Largest copy whose memory is used for the next, for fresh memory costs more than the copy."""

_SMALL_PART = 8
_LARGEST = 16 << 20
"""No more than an eighth of a block up to this size counts as its edges."""

_MOST_FREE = 2
_MOST_FILLS = 16


# -- the exchange ----------------------------------------------------------------------


class SharedExchange(Quick):
    """An exchange of regions, of which a rank waits for its owners and readers only.

    Args:
        team: The ranks, of which this one has no unfinished operation.
        engine: Moves it along until it is settled.
        messages: Takes the parts of blocks for which there is no memory.
        plan: What this rank takes and gives.
        offer: This rank's block.
        arrays: Its source and its target.
        places: Where these begin in its arena; -1 for an ordinary array, or none.
        max_bytes: Most memory for packed messages at a time; 0 for no limit.
    """

    __slots__ = (
        "_arrays",
        "_done_parts",
        "_max_bytes",
        "_messages",
        "_number",
        "_offer",
        "_parts",
        "_places",
        "_plan",
        "_refusal",
        "_rest",
        "_through",
    )

    def __init__(
        self,
        team: Team,
        engine: Engine,
        messages: Communicator,
        plan: SharedPlan,
        offer: Offer,
        arrays: tuple[HostArray | None, HostArray | None],
        places: tuple[int, int],
        max_bytes: int,
    ) -> None:
        super().__init__(team, engine, EXCHANGE)
        self._messages = messages
        self._plan = plan
        self._offer = offer
        self._arrays = arrays
        self._places = places
        self._max_bytes = max_bytes
        self._number = team.board.posted + 1
        self._parts: Sequence[Work] | None = None
        self._done_parts = 0
        self._rest: Sequence[Request] = ()
        self._through = False
        self._refusal: MpimeshError | None = None

    def _move(self) -> bool:
        team, board, plan, number = self._team, self._team.board, self._plan, self._number
        if self._parts is None:
            if board.posted < number:
                self._offer.fill()
                board.post(number, EXCHANGE, self._offer.at, plan.descriptor)
                for bell in plan.reader_bells:
                    bell.ring()
            if not board.have_posted(number, plan.owner_boards):
                team.look_elsewhere()
                return False
            self._engine.steps += 1
            self._parts = self._work_of(board.notes(number, plan.owner_boards))
        if self._done_parts < len(self._parts) and not self._do_some(self._parts):
            return False
        if self._rest and not all(request.test() for request in self._rest):
            return False
        if not self._through:
            board.pass_by(number)
            for bell in plan.owner_bells:
                bell.ring()
            self._through = True
        if self._offer.is_read and not board.are_through(number, plan.reader_boards):
            team.look_elsewhere()
            return False
        self._engine.steps += 1
        # The engine may hold this request for a while yet; not so the arrays.
        self._offer, self._arrays, self._parts, self._rest = NO_OFFER, (None, None), (), ()
        if self._refusal is not None:
            raise self._refusal
        return True

    def _work_of(self, notes: Sequence[Note]) -> Sequence[Work]:
        """Return what to read, now that the owners have posted; prepare what comes by messages."""
        plan, (source, target) = self._plan, self._arrays
        operations = [note[0] for note in notes]
        if operations.count(EXCHANGE) != len(operations):
            ranks = [self._team.rank, *plan.owners]
            self._refusal = mismatch([EXCHANGE, *operations], ranks=ranks, on_all=False)
            self._offer = NO_OFFER  # nor may the readers ever come
            return ()
        try:
            if self._offer.at < 0 or -1 in [note[1] for note in notes]:
                plan.check(notes)
                self._rest = self._by_messages(notes, source, target)
                return ()
            return plan.work(notes, source, self._places[0], target, self._places[1])
        except MpimeshError as error:
            # The others may yet read this rank's block: it is raised when they are through.
            self._refusal = error
            return ()

    def _by_messages(
        self, notes: Sequence[Note], source: HostArray | None, target: HostArray | None
    ) -> Sequence[Request]:
        """Return what sends this rank's parts, if it must, and what takes those of others."""
        regions = self._plan.regions
        gives = regions.gives if self._offer.at < 0 else ()
        blocks = self._plan.blocks(notes, source, target)
        messages, most = self._messages, self._max_bytes
        own = {} if source is None else {self._team.rank: blocks[self._team.rank]}
        return (
            MessageExchange(messages, source, None, Regions((), gives), own, most),
            MessageExchange(messages, source, target, Regions(regions.takes, ()), blocks, most),
        )

    def _do_some(self, parts: Sequence[Work]) -> bool:
        """Do some of this rank's parts, from the first that is not done; tell whether all are."""
        stop = min(self._done_parts + _AT_A_TIME, len(parts))
        while self._done_parts < stop:
            note = partial(setattr, self, "_done_parts", self._done_parts + 1)
            do_at_once(self._team.quietly, parts[self._done_parts], note)
        self._engine.steps += 1
        return stop == len(parts)


# -- the plan --------------------------------------------------------------------------


class SharedPlan:
    """The constant part of an exchange of some regions between arrays of one kind.

    Args:
        team: The ranks.
        regions: What this rank takes and gives.
        source: An array of the kind of this rank's block; no reference to it stays.
        target: One of the kind of what it takes into.

    Attributes:
        regions: What this rank takes and gives.
        descriptor: The size and the dtype of its arrays, for the others.
        owners: The ranks that this one reads of.
        owner_boards: Their boards.
        owner_bells: Their bells.
        reader_boards: The boards of the ranks that read of this one.
        reader_bells: Their bells.
    """

    __slots__ = (
        "_at_once",
        "_boxes",
        "_fills",
        "_given_bytes",
        "_groups",
        "_nbytes",
        "_team",
        "_whole_work",
        "_work",
        "descriptor",
        "owner_bells",
        "owner_boards",
        "owners",
        "reader_bells",
        "reader_boards",
        "regions",
    )

    def __init__(
        self, team: Team, regions: Regions, source: HostArray | None, target: HostArray | None
    ) -> None:
        self._team = team
        self.regions = regions
        self.descriptor = descriptor(source, target)
        taken = {part.rank for take in regions.takes for part in take.parts if volume(part.box)}
        given = {give.rank for give in regions.gives if volume(give.box)}
        self.owners = sorted(taken - {team.rank})
        readers = sorted(given - {team.rank})
        self.owner_boards = team.board.of(self.owners)
        self.owner_bells = team.bells_of(self.owners)
        self.reader_boards = team.board.of(readers)
        self.reader_bells = team.bells_of(readers)
        self._boxes = copied_boxes(regions, source.shape) if readers and source is not None else ()
        self._nbytes = self._given_bytes = 0
        if source is not None:
            self._nbytes = source.nbytes
            self._given_bytes = source.itemsize * sum(map(volume, self._boxes))
        self._fills: dict[tuple[int, int], Fill] = {}
        # Pieces of the same ranks in a row: their work depends on where these ranks' blocks lie.
        self._groups: list[tuple[tuple[int, ...], list[Piece]]] = []
        if target is not None and target.nbytes:
            itemsize = target.dtype.itemsize
            pieces = pieces_of(regions, range(len(regions.takes)), team.rank + 1, itemsize)
            self._groups = [(ranks, list(row)) for ranks, row in groupby(pieces, _ranks_of)]
        self._at_once = target is not None and target.nbytes <= _AT_ONCE_BYTES
        # By all addresses, and by those that a group depends on; of few pieces only.
        self._whole_work: dict[tuple[object, ...], list[Work]] = {}
        self._work: dict[tuple[object, ...], list[Work]] | None = None
        if sum(len(row) for _, row in self._groups) <= _MOST_PIECES:
            self._work = {}

    def offer(self, copies: Copies, source: HostArray | None, at: int, rule: CopyRule) -> Offer:
        """Offer this rank's block, which begins at `at` of its arena, to its readers."""
        return copies.offer(
            source,
            self._boxes,
            self.reader_boards,
            at=at,
            copied=rule.copies(self._nbytes, self._given_bytes),
            fills=self._fills,
        )

    def check(self, notes: Sequence[Note]) -> None:
        """See whether the owners' arrays have the dtype of this rank's.

        Raises:
            MismatchError: If not.
        """
        descriptors = {owner: note[2] for owner, note in zip(self.owners, notes, strict=True)}
        check_dtypes({self._team.rank: self.descriptor, **descriptors})

    def work(
        self,
        notes: Sequence[Note],
        source: HostArray | None,
        source_at: int,
        target: HostArray | None,
        target_at: int,
    ) -> list[Work]:
        """Return what to read, once the owners have said where their blocks lie.

        Raises:
            MismatchError: On this rank alone, if a block has another dtype, or not the size that it
                takes of.
        """
        key = (source_at, target_at, *notes)
        work = self._whole_work.get(key)
        if work is None:
            self.check(notes)
            work = self._all_work(notes, source, source_at, target, target_at)
            if self._at_once and work:
                work = [tuple(chain.from_iterable(work))]
            if target_at >= 0 and (source_at >= 0 or source is None) and self._work is not None:
                if len(self._whole_work) >= _MOST_WORK:
                    self._whole_work.clear()
                self._whole_work[key] = work
        return work

    def _all_work(
        self,
        notes: Sequence[Note],
        source: HostArray | None,
        source_at: int,
        target: HostArray | None,
        target_at: int,
    ) -> list[Work]:
        """Return all pieces of work, of which those that came before are not made again."""
        if target is None:
            return []
        team = self._team
        places = {owner: note[1:] for owner, note in zip(self.owners, notes, strict=True)}
        places[team.rank] = (source_at, 0)
        work: list[Work] = []
        cache = self._work if target_at >= 0 else None
        for number, (ranks, pieces) in enumerate(self._groups):
            if cache is None or (source_at < 0 and team.rank in ranks):
                work += self._work_of(pieces, places, source, target)
                continue
            key = (number, target_at, *[places[rank] for rank in ranks])
            group = cache.get(key)
            if group is None:
                # Only of memory in the arena: nothing in the cache refers to the arrays themselves.
                own_target = self._in_arena(target, target_at)
                own_source = source
                if source is not None and team.rank in ranks:
                    own_source = self._in_arena(source, source_at)
                group = self._work_of(pieces, places, own_source, own_target)
                if len(cache) >= _MOST_WORK:
                    cache.clear()
                cache[key] = group
            work += group
        return work

    def _in_arena(self, array: HostArray, at: int) -> HostArray:
        """Return an array of this rank's arena as one that does not keep it alive."""
        return _array_at(self._team, self._team.rank, at, array.dtype, array.shape)

    def _work_of(
        self,
        pieces: Sequence[Piece],
        places: Mapping[int, tuple[int, int]],
        source: HostArray | None,
        target: HostArray,
    ) -> list[Work]:
        """Return the work of some pieces, by where the blocks begin and what they are."""
        team = self._team
        dtype, raw = target.dtype, raw_dtype(target.dtype)
        raw_target = target.view(raw)
        blocks: dict[tuple[int, tuple[int, ...]], HostArray] = {}

        def block(rank: int, shape: tuple[int, ...]) -> HostArray:
            if (rank, shape) not in blocks:
                own = source if rank == team.rank else None
                blocks[rank, shape] = (
                    self._block(rank, *places[rank], dtype, shape) if own is None else own
                )
            return blocks[rank, shape]

        work: list[Work] = []
        for op, box, parts in pieces:
            if op:
                sources = [view(block(rank, shape), there) for rank, shape, there in parts]
                work.append(piece_work(op, view(target, box), sources, dtype, team.scratch))
            else:
                rank, shape, there = parts[0]
                copied = view(block(rank, shape).view(raw), there)
                work.append(piece_work(op, view(raw_target, box), [copied], raw, team.scratch))
        return work

    def blocks(
        self, notes: Sequence[Note], source: HostArray | None, target: HostArray | None
    ) -> Blocks:
        """Return what gives the blocks that this rank reads where they lie, though not all do."""
        dtype = np.dtype(np.uint8) if target is None else target.dtype
        blocks: dict[int, Callable[[tuple[int, ...]], HostArray]] = {}
        for owner, (_, at, owner_descriptor) in zip(self.owners, notes, strict=True):
            if at >= 0:
                blocks[owner] = partial(self._block, owner, at, owner_descriptor, dtype)
        if source is not None:
            blocks[self._team.rank] = lambda shape: source
        return blocks

    def _block(
        self, rank: int, at: int, its_descriptor: int, dtype: DType, shape: tuple[int, ...]
    ) -> HostArray:
        """Return the block of another rank, where it lies.

        Raises:
            MismatchError: If it has another size than this rank takes it for.
        """
        nbytes, its_nbytes = prod(shape) * dtype.itemsize, described_bytes(its_descriptor)
        if its_nbytes != nbytes:
            raise MismatchError(
                f"rank {self._team.rank} takes of a block of shape {shape} of rank {rank}, "
                f"{nbytes} bytes of dtype {dtype}, but that block has {its_nbytes}"
            )
        return _array_at(self._team, rank, at, dtype, shape)


def _ranks_of(piece: Piece) -> tuple[int, ...]:
    return tuple([rank for rank, _, _ in piece[2]])


def _array_at(team: Team, member: int, at: int, dtype: DType, shape: tuple[int, ...]) -> HostArray:
    """Return an array that begins at `at` in the arena of a member, as a view of its memory."""
    return team.view(member, at, prod(shape) * dtype.itemsize, dtype).reshape(shape)


def blocks_of_node(
    team: Team,
    entry: Entry,
    ranks: Sequence[int],
    source: HostArray | None,
    target: HostArray | None,
) -> Blocks:
    """Return what gives the blocks of the ranks on this node: of all, or of this one alone.

    Args:
        team: The ranks of this node.
        entry: Where their blocks lie.
        ranks: Their numbers.
        source: This rank's block.
        target: Where it takes to.
    """
    blocks: dict[int, Callable[[tuple[int, ...]], HostArray]] = {}
    if min(entry.sources) >= 0:
        dtype = np.dtype(np.uint8) if target is None else target.dtype
        for member, rank in enumerate(ranks):
            blocks[rank] = partial(_array_at, team, member, entry.sources[member], dtype)
    if source is not None:
        blocks[ranks[team.rank]] = lambda shape: source
    return blocks


# -- offers of blocks ------------------------------------------------------------------


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


NO_OFFER = Offer(NOT_READ)
"""The offer of a rank from which nobody takes anything."""


class _Buffer:
    """Memory for a copy.

    Attributes:
        memory: The bytes.
        at: Where they begin in the arena.
        number: The number of the last operation that used it.
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

    __slots__ = ("_buffers", "_meets", "_team")

    def __init__(self, team: Team, *, meets: bool = False) -> None:
        self._team = team
        self._meets = meets
        self._buffers: list[_Buffer] = []

    def offer(
        self,
        source: HostArray | None,
        boxes: Sequence[Box],
        readers: Boards = (),
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
            readers: The boards of those who take of it, if operations do not end with a meeting.
            at: Where it begins in the arena, if that is known; -1 for an ordinary array.
            copied: Whether it is copied though it lies in the arena.
            fills: A cache of the copies that are made of a block that lies in the arena.
        """
        if source is None or not boxes or not source.nbytes:
            return NO_OFFER
        if at is None:
            at = self._team.find(source)
        if at >= 0 and not copied:
            return Offer(at, is_read=True)
        buffer = self._buffer(source.nbytes, readers)
        if buffer is None:
            return Offer(at, is_read=at >= 0)
        if at < 0 or fills is None:
            return Offer(buffer.at, fill=_fill(buffer.memory[: source.nbytes], source, boxes))
        fill = fills.get((at, buffer.at))
        if fill is None:
            # Through the team's views, which keep neither the block nor the copy alive.
            team, nbytes = self._team, source.nbytes
            block = team.view(team.rank, at, nbytes, source.dtype).reshape(source.shape)
            memory = team.view(team.rank, buffer.at, nbytes, buffer.memory.dtype)
            fill = _fill(memory, block, boxes)
            if len(fills) >= _MOST_FILLS:
                fills.clear()
            fills[at, buffer.at] = fill
        return Offer(buffer.at, fill=fill)

    @property
    def memories(self) -> list[HostArray]:
        """The copies that others may still read."""
        return [buffer.memory for buffer in self._buffers if not self._is_over(buffer)]

    def _is_over(self, buffer: _Buffer) -> bool:
        return self._meets or self._team.board.are_through(buffer.number, buffer.readers)

    def _buffer(self, nbytes: int, readers: Boards) -> _Buffer | None:
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
                buffer = min(fitting, key=lambda other: other.memory.nbytes)
            else:
                memory = self._team.room(nbytes)
                if memory is None:
                    return None
                buffer = _Buffer(memory, self._team.find(memory))
        buffer.number = self._team.board.posted + 1
        buffer.readers = readers
        buffers.append(buffer)
        return buffer


def _fits(nbytes: int, buffer: _Buffer) -> bool:
    return nbytes <= buffer.memory.nbytes <= _REUSED_BYTES


def _fill(memory: HostArray, source: HostArray, boxes: Sequence[Box]) -> Fill:
    raw = raw_dtype(source.dtype)
    copy, block = memory.view(raw).reshape(source.shape), source.view(raw)
    return [(view(copy, box), view(block, box)) for box in boxes]


def copied_boxes(regions: Regions, shape: tuple[int, ...]) -> tuple[Box, ...]:
    """Return what to copy of a block of which others take: that, or all in one run.

    Of large blocks a run is half the traffic, for the processor need not read what it writes over.
    """
    boxes = tuple([give.box for give in regions.gives])
    if sum(map(volume, boxes)) > _WHOLE_FROM * prod(shape):
        return (whole(shape),)
    return boxes
