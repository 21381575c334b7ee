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

from collections.abc import Sequence
from functools import partial

from mpimesh.arrays.types import HostArray
from mpimesh.errors import MpimeshError
from mpimesh.transport.base import Communicator, Request
from mpimesh.transport.board import Note
from mpimesh.transport.engine import Engine
from mpimesh.transport.quick import Quick, mismatch
from mpimesh.transport.region_moves import RegionMoves
from mpimesh.transport.region_ready import Ready
from mpimesh.transport.regions import Regions
from mpimesh.transport.team import Team
from mpimesh.transport.team_regions import NOTHING, Offer
from mpimesh.transport.team_work import Work, do_at_once
from mpimesh.transport.what import EXCHANGE

__all__ = ["Reading"]

_AT_A_TIME = 4
"""Pieces that are read before other operations have a turn."""


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
            if self._offer.at < 0 or -1 in [note[1] for note in notes]:
                ready.compare(notes)
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
        while self._done_parts < stop:
            note = partial(setattr, self, "_done_parts", self._done_parts + 1)
            do_at_once(self._team.quietly, parts[self._done_parts], note)
        self._engine.steps += 1
        return stop == len(parts)
