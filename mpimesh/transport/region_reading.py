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
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from math import prod

import numpy as np

from mpimesh.arrays.types import HostArray
from mpimesh.errors import MismatchError, MpimeshError
from mpimesh.transport.base import Communicator, Request
from mpimesh.transport.board import Note
from mpimesh.transport.boxes import view, volume
from mpimesh.transport.engine import Engine
from mpimesh.transport.quick import Quick, mismatch
from mpimesh.transport.region_moves import Blocks, RegionMoves
from mpimesh.transport.region_work import Piece, piece_work, pieces_of
from mpimesh.transport.regions import Regions, raw_dtype
from mpimesh.transport.team import Team
from mpimesh.transport.team_regions import (
    NOTHING,
    Copies,
    Fill,
    Offer,
    compare,
    copied_boxes,
    described,
    size_told,
)
from mpimesh.transport.team_work import Work, do_at_once
from mpimesh.transport.what import EXCHANGE

__all__ = ["COPIED_BYTES", "Reading", "Ready"]

_AT_A_TIME = 4
"""How many pieces are read before other operations have a turn."""

COPIED_BYTES = 1 << 20
"""Up to this size blocks are copied though they could be read where they lie."""

_MOST_WORK = 64
"""So many pieces of work are kept for one kind of exchange: addresses come again and again."""

_MOST_PIECES = 64
"""Of larger exchanges, working the pieces out costs nothing beside reading them."""


class Ready:
    """What is the same each time that some regions are exchanged between arrays of one kind.

    Args:
        team: The ranks.
        regions: What this rank takes and gives.
        source: An array of the kind of this rank's block; nothing of it is kept.
        target: One of the kind of what it takes into.

    Attributes:
        regions: As given.
        told: What this rank says of its arrays.
        owners: The ranks that this one reads of.
        owner_boards: Their boards.
        owner_bells: Their bells.
        reader_boards: The boards of the ranks that read of this one.
        reader_bells: Their bells.
    """

    __slots__ = (
        "_boxes",
        "_fills",
        "_groups",
        "_team",
        "_work",
        "owner_bells",
        "owner_boards",
        "owners",
        "reader_bells",
        "reader_boards",
        "regions",
        "told",
    )

    def __init__(
        self, team: Team, regions: Regions, source: HostArray | None, target: HostArray | None
    ) -> None:
        self._team = team
        self.regions = regions
        self.told = described(source, target)
        taken = {part.rank for take in regions.takes for part in take.parts if volume(part.box)}
        given = {give.rank for give in regions.gives if volume(give.box)}
        self.owners = sorted(taken - {team.rank})
        readers = sorted(given - {team.rank})
        self.owner_boards = team.board.of(self.owners)
        self.owner_bells = team.bells_of(self.owners)
        self.reader_boards = team.board.of(readers)
        self.reader_bells = team.bells_of(readers)
        self._boxes = copied_boxes(regions, source.shape) if readers and source is not None else ()
        self._fills: dict[tuple[int, int], Fill] = {}
        # Pieces of the same ranks in a row: their work depends on where these ranks' blocks lie.
        self._groups: list[tuple[tuple[int, ...], list[Piece]]] = []
        if target is not None and target.nbytes:
            itemsize = target.dtype.itemsize
            pieces = pieces_of(regions, range(len(regions.takes)), team.rank + 1, itemsize)
            self._groups = [(ranks, list(row)) for ranks, row in groupby(pieces, _ranks_of)]
        self._work: dict[tuple[int, ...], list[Work]] | None = None
        if sum(len(row) for _, row in self._groups) <= _MOST_PIECES:
            self._work = {}

    def offer(self, copies: Copies, source: HostArray | None, at: int) -> Offer:
        """Offer this rank's block, which begins at `at` of its arena, to its readers."""
        return copies.offer(
            source,
            self._boxes,
            self.reader_boards,
            at=at,
            copied_bytes=COPIED_BYTES,
            kept=self._fills,
        )

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
            MismatchError: On this rank alone, if a block has not the size that it takes of.
        """
        if target is None:
            return []
        team = self._team
        places = {owner: note[1] for owner, note in zip(self.owners, notes, strict=True)}
        told = {owner: note[2] for owner, note in zip(self.owners, notes, strict=True)}
        places[team.rank], told[team.rank] = source_at, 0
        work: list[Work] = []
        kept = self._work if target_at >= 0 else None
        for number, (ranks, pieces) in enumerate(self._groups):
            if kept is None or (source_at < 0 and team.rank in ranks):
                work += self._of(pieces, told, places, source, target)
                continue
            key = (number, target_at, *[places[rank] for rank in ranks])
            key += tuple([told[rank] for rank in ranks])
            found = kept.get(key)
            if found is None:
                # Only of memory in the arena: nothing that is kept refers to the arrays themselves.
                mine = self._reached(target, target_at)
                own = source
                if source is not None and team.rank in ranks:
                    own = self._reached(source, source_at)
                found = self._of(pieces, told, places, own, mine)
                if len(kept) >= _MOST_WORK:
                    kept.clear()
                kept[key] = found
            work += found
        return work

    def _reached(self, array: HostArray, at: int) -> HostArray:
        """Return an array of this rank's arena as one that does not keep it alive."""
        team = self._team
        return team.view(team.rank, at, array.nbytes, array.dtype).reshape(array.shape)

    def _of(
        self,
        pieces: Sequence[Piece],
        told: dict[int, int],
        places: dict[int, int],
        source: HostArray | None,
        target: HostArray,
    ) -> list[Work]:
        team = self._team
        dtype, raw = target.dtype, raw_dtype(target.dtype)
        raw_target = target.view(raw)
        blocks: dict[tuple[int, tuple[int, ...]], HostArray] = {}

        def block(rank: int, shape: tuple[int, ...]) -> HostArray:
            found = blocks.get((rank, shape))
            if found is None:
                if rank == team.rank and source is not None:
                    found = source
                else:
                    nbytes = self._expected(rank, shape, told[rank], target)
                    found = team.view(rank, places[rank], nbytes, dtype).reshape(shape)
                blocks[rank, shape] = found
            return found

        work: list[Work] = []
        for op, box, parts in pieces:
            if op:
                sources = [view(block(rank, shape), there) for rank, shape, there in parts]
                work.append(piece_work(op, view(target, box), sources, dtype, team.scratch))
            else:
                rank, shape, there = parts[0]
                what = view(block(rank, shape).view(raw), there)
                work.append((partial(np.copyto, view(raw_target, box), what),))
        return work

    def _expected(self, rank: int, shape: tuple[int, ...], told: int, target: HostArray) -> int:
        """Return how many bytes the block of a rank is taken to have.

        Raises:
            MismatchError: If it has another size.
        """
        nbytes = prod(shape) * target.itemsize
        if size_told(told) != nbytes:
            raise MismatchError(
                f"rank {self._team.rank} takes of a block of shape {shape} of rank {rank}, "
                f"{nbytes} bytes of dtype {target.dtype}, but that block has {size_told(told)}"
            )
        return nbytes

    def near(
        self, notes: Sequence[Note], source: HostArray | None, target: HostArray | None
    ) -> Blocks:
        """Return what gives the blocks that this rank reads where they lie, though not all do."""
        like: HostArray = np.empty(0, np.uint8) if target is None else target
        blocks: dict[int, Callable[[tuple[int, ...]], HostArray]] = {}
        for owner, (_, at, told) in zip(self.owners, notes, strict=True):
            if at >= 0:
                blocks[owner] = partial(self._near, owner, at, told, like)
        if source is not None:
            blocks[self._team.rank] = lambda shape: source
        return blocks

    def _near(
        self, owner: int, at: int, told: int, like: HostArray, shape: tuple[int, ...]
    ) -> HostArray:
        nbytes = self._expected(owner, shape, told, like)
        return self._team.view(owner, at, nbytes, like.dtype).reshape(shape)


def _ranks_of(piece: Piece) -> tuple[int, ...]:
    return tuple([rank for rank, _, _ in piece[2]])


class Reading(Quick):
    """An exchange of regions, of which a rank waits for its owners and readers only.

    Args:
        team: The ranks, of which this one has no unfinished operation.
        engine: Moves it along until it is settled.
        messages: Takes the parts of blocks for which there is no memory.
        ready: What this rank takes and gives.
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
        "_ready",
        "_refusal",
        "_rest",
        "_through",
    )

    def __init__(
        self,
        team: Team,
        engine: Engine,
        messages: Communicator,
        ready: Ready,
        offer: Offer,
        arrays: tuple[HostArray | None, HostArray | None],
        places: tuple[int, int],
        max_bytes: int,
    ) -> None:
        super().__init__(team, engine, EXCHANGE)
        self._messages = messages
        self._ready = ready
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
        team, board, ready, number = self._team, self._team.board, self._ready, self._number
        if self._parts is None:
            if board.posted < number:
                self._offer.fill()
                board.post(number, EXCHANGE, self._offer.at, ready.told)
                for bell in ready.reader_bells:
                    bell.ring()
            if not board.have_posted(number, ready.owner_boards):
                team.look_elsewhere()
                return False
            self._engine.steps += 1
            self._parts = self._found(board.notes(number, ready.owner_boards))
        if self._done_parts < len(self._parts) and not self._work(self._parts):
            return False
        if self._rest and not all(one.test() for one in self._rest):
            return False
        if not self._through:
            board.pass_by(number)
            for bell in ready.owner_bells:
                bell.ring()
            self._through = True
        if self._offer.is_read and not board.are_through(number, ready.reader_boards):
            team.look_elsewhere()
            return False
        self._engine.steps += 1
        # The engine may hold this request for a while yet; not so the arrays.
        self._offer, self._arrays, self._parts, self._rest = NOTHING, (None, None), (), ()
        if self._refusal is not None:
            raise self._refusal
        return True

    def _found(self, notes: Sequence[Note]) -> Sequence[Work]:
        """Return what to read, now that the owners have posted; prepare what comes by messages."""
        ready, (source, target) = self._ready, self._arrays
        what = [note[0] for note in notes]
        if what.count(EXCHANGE) != len(what):
            ranks = [self._team.rank, *ready.owners]
            self._refusal = mismatch([EXCHANGE, *what], ranks=ranks, on_all=False)
            self._offer = NOTHING  # nor may the readers ever come
            return ()
        try:
            told = {rank: note[2] for rank, note in zip(ready.owners, notes, strict=True)}
            compare({self._team.rank: ready.told, **told})
            if self._offer.at < 0 or any(note[1] < 0 for note in notes):
                self._rest = self._by_messages(notes, source, target)
                return ()
            return ready.work(notes, source, self._places[0], target, self._places[1])
        except MpimeshError as error:
            # The others may yet read this rank's block: it is raised when they are through.
            self._refusal = error
            return ()

    def _by_messages(
        self, notes: Sequence[Note], source: HostArray | None, target: HostArray | None
    ) -> Sequence[Request]:
        """Return what sends this rank's parts, if it must, and what takes those of others."""
        regions = self._ready.regions
        gives = regions.gives if self._offer.at < 0 else ()
        blocks = self._ready.near(notes, source, target)
        messages, most = self._messages, self._max_bytes
        own = {} if source is None else {self._team.rank: blocks[self._team.rank]}
        return (
            RegionMoves(messages, source, None, Regions((), gives), own, most),
            RegionMoves(messages, source, target, Regions(regions.takes, ()), blocks, most),
        )

    def _work(self, parts: Sequence[Work]) -> bool:
        """Do some of this rank's parts, from the first that is not done; tell whether all are."""
        stop = min(self._done_parts + _AT_A_TIME, len(parts))
        with np.errstate(all="ignore"):  # overflow and NaN pass silently, as in MPI
            while self._done_parts < stop:
                note = partial(setattr, self, "_done_parts", self._done_parts + 1)
                do_at_once(parts[self._done_parts], note)
        self._engine.steps += 1
        return stop == len(parts)
