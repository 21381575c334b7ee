"""Regions exchanged in memory that the ranks of a node share: each reads what it takes.

A block that others take of and that does not lie in the arena is copied there first,
as far as they take of it: one copy more, where messages have three. So is a small one, for
its rank need then not wait until all others have read it: that takes longer than the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod

import numpy as np

from mpimesh.arrays.types import HostArray
from mpimesh.errors import MismatchError, on_all_ranks
from mpimesh.transport.base import Request
from mpimesh.transport.board import Entry
from mpimesh.transport.boxes import view, volume
from mpimesh.transport.engine import Engine
from mpimesh.transport.entering import NOT_READ
from mpimesh.transport.quick import InPlaces
from mpimesh.transport.region_work import Piece, piece_work, pieces_of
from mpimesh.transport.regions import Regions, raw_dtype
from mpimesh.transport.team import Team
from mpimesh.transport.team_work import Work, do_at_once
from mpimesh.transport.what import Operation, operation_number

__all__ = [
    "COPIED_BYTES",
    "EXCHANGE",
    "Copies",
    "Offer",
    "Reading",
    "compare",
    "described",
    "near_blocks",
    "reading_work",
]

EXCHANGE = operation_number(Operation.EXCHANGE_REGIONS, np.empty(0, np.uint8))
"""Its number: the ranks' arrays differ, and a rank may have none."""

_NOTHING = Regions()

_MOST = 0.6
"""From this part of a block on it is copied as a whole."""

_AT_A_TIME = 4
"""How many pieces are read before other operations have a turn."""

_KEPT_BYTES = 32 << 20
"""Largest copy whose memory is kept for the next, for fresh memory costs more than the copy."""

COPIED_BYTES = 1 << 20
"""Up to this size blocks are copied though they could be read where they lie."""

_SIZE_BITS = 12
_DTYPE_BITS = _SIZE_BITS + 7


class Offer:
    """A rank's block, where the others of its node can read it.

    Args:
        team: The ranks of the node.
        source: The block.
        regions: What they take of it.
        room: Gives so many bytes of the arena; None if there are none.
        copied_bytes: Up to this size a block is copied though it lies in the arena.

    Attributes:
        at: Where it begins in the arena; -1 if there is no room.
        is_read: Whether others read the block itself, and no copy of it.
    """

    __slots__ = ("_copy", "_regions", "_source", "at", "is_read")

    def __init__(
        self,
        team: Team,
        source: HostArray | None,
        regions: Regions,
        room: Callable[[int], HostArray | None],
        *,
        copied_bytes: int = 0,
    ) -> None:
        self._regions = regions
        self._source = self._copy = None
        self.at = NOT_READ
        self.is_read = False
        if source is None or not source.nbytes or not regions.gives:
            return
        self.at = team.find(source)
        self.is_read = self.at >= 0
        if self.at < 0 or source.nbytes <= copied_bytes:
            memory = room(source.nbytes)
            if memory is not None:
                self.is_read = False
                self.at = team.find(memory)
                raw = raw_dtype(source.dtype)
                self._source = source.view(raw)
                self._copy = memory.view(raw).reshape(source.shape)

    def fill(self) -> None:
        """Copy what others take, if it is not there yet. Doing it again is harmless."""
        source, copy = self._source, self._copy
        if source is None or copy is None:
            return
        gives = self._regions.gives
        if sum(volume(give.box) for give in gives) > _MOST * source.size:
            # In one run: of large blocks that is half the traffic, for the processor need not
            # read what it writes over.
            np.copyto(copy, source)
            return
        for give in gives:
            copy[give.box] = source[give.box]


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
        self._lent: list[tuple[int, HostArray]] = []  # until all are through with this number

    def room(self, nbytes: int) -> HostArray | None:
        """Return so many bytes that nobody reads, for the next operation; None for no room."""
        board = self._team.board
        over = [self._meets or board.are_through(number) for number, _ in self._lent]
        free = [memory for (_, memory), one in zip(self._lent, over, strict=True) if one]
        self._lent = [row for row, one in zip(self._lent, over, strict=True) if not one]
        fitting = [memory for memory in free if nbytes <= memory.nbytes <= _KEPT_BYTES]
        memory = min(fitting, key=len) if fitting else self._team.room(nbytes)
        if memory is None:
            return None
        self._lent.append((board.posted + 1, memory))
        return memory[:nbytes]


class _Over:
    """A request that is done."""

    def test(self) -> bool:
        """Tell so."""
        return True


def _no_work(entry: Entry) -> Sequence[Work]:
    return ()


class Reading(InPlaces):
    """An exchange of regions that all lie in shared memory, or else by messages.

    Args:
        team: The ranks, of which none has an unfinished operation.
        engine: Moves it along until it is settled.
        offer: This rank's block.
        told: What it says of its arrays.
        plan: Gives what this rank is to do, once it is known where all blocks lie.
        otherwise: Begins the exchange by messages.
    """

    __slots__ = ("_offer",)

    def __init__(
        self,
        team: Team,
        engine: Engine,
        offer: Offer,
        told: int,
        plan: Callable[[Entry], Sequence[Work]],
        otherwise: Callable[[], Request],
    ) -> None:
        super().__init__(team, engine, EXCHANGE, (offer.at, told), plan, otherwise)
        self._offer = offer

    def _move(self) -> bool:
        over = super()._move()
        if over:
            # The engine may hold this request for a while yet; not so the arrays.
            self._plan, self._otherwise, self._parts = _no_work, _Over, ()
            self._offer = Offer(self._team, None, _NOTHING, self._team.room)
        return over

    def _read(self) -> bool:
        if self._team.board.posted < self._number:
            self._offer.fill()
        return super()._read()

    def _worked(self, parts: Sequence[Work]) -> bool:
        if not self._work(parts):
            return False
        self._team.board.pass_by(self._number)
        self._team.ring()
        return True

    def _over(self) -> bool:
        """Tell whether nobody reads this rank's block any more."""
        if self._offer.is_read and not self._team.board.are_through(self._number):
            self._team.look_elsewhere()
            return False
        self._engine.steps += 1
        if self._refusal is not None:
            raise self._refusal
        return True

    def _work(self, parts: Sequence[Work]) -> bool:
        stop = min(self._done_parts + _AT_A_TIME, len(parts))
        with np.errstate(all="ignore"):
            while self._done_parts < stop:
                note = partial(setattr, self, "_done_parts", self._done_parts + 1)
                do_at_once(parts[self._done_parts], note)
        self._engine.steps += 1
        return stop == len(parts)


def described(*arrays: HostArray | None) -> int:
    """Return what a rank says of its source and target: the first's size, and their dtype.

    0 if it has neither.
    """
    for number, array in enumerate(arrays):
        if array is not None:
            code = ord(array.dtype.kind) << _SIZE_BITS | array.dtype.itemsize % (1 << _SIZE_BITS)
            return (0 if number else array.nbytes) << _DTYPE_BITS | code
    return 0


def compare(told: Sequence[int], *, on_all: bool = True) -> None:
    """See whether the ranks' arrays have one dtype.

    Args:
        told: What each rank says of its arrays.
        on_all: Whether these are all ranks.

    Raises:
        MismatchError: If not, on all of these ranks.
    """
    codes = {one % (1 << _DTYPE_BITS) for one in told if one}
    if len(codes) > 1:
        each = ", ".join(
            f"rank {rank}: {chr(one % (1 << _DTYPE_BITS) >> _SIZE_BITS)}{one % (1 << _SIZE_BITS)}"
            for rank, one in enumerate(told[:16])
            if one
        )
        error = MismatchError(
            f"an exchange of regions has one dtype on all ranks; kinds and bytes are: {each}"
        )
        raise on_all_ranks(error) if on_all else error


def reading_work(
    team: Team,
    entry: Entry,
    source: HostArray | None,
    target: HostArray | None,
    regions: Regions,
) -> list[Work]:
    """Return what to read of all ranks' blocks, which lie in shared memory.

    Raises:
        MismatchError: If the dtypes differ, on all ranks; or, on this rank alone, if a block has
            not the size that it takes of.
    """
    compare(entry.targets)
    if target is None or not target.nbytes:
        return []
    dtype, raw = target.dtype, raw_dtype(target.dtype)
    itemsize = dtype.itemsize
    pieces: list[Piece] = regions.prepared(
        ("pieces", team.rank, itemsize),
        lambda: pieces_of(regions, range(len(regions.takes)), team.rank + 1, itemsize),
    )
    blocks: dict[tuple[int, tuple[int, ...]], HostArray] = {}
    targets = target.view(raw), target

    def block(rank: int, shape: tuple[int, ...]) -> HostArray:
        found = blocks.get((rank, shape))
        if found is None:
            found = blocks[rank, shape] = _block(team, entry, source, rank, shape, target)
        return found

    work: list[Work] = []
    for op, box, parts in pieces:
        if op:
            sources = [view(block(rank, shape), there) for rank, shape, there in parts]
            work.append(piece_work(op, view(targets[1], box), sources, dtype, team.scratch))
        else:
            rank, shape, there = parts[0]
            work.append(
                (
                    partial(
                        np.copyto, view(targets[0], box), view(block(rank, shape).view(raw), there)
                    ),
                )
            )
    return work


def _block(
    team: Team,
    entry: Entry,
    source: HostArray | None,
    rank: int,
    shape: tuple[int, ...],
    target: HostArray,
) -> HostArray:
    """Return a rank's block."""
    if rank == team.rank and source is not None:
        return source
    nbytes = prod(shape) * target.itemsize
    has = entry.targets[rank] >> _DTYPE_BITS
    if has != nbytes:
        raise MismatchError(
            f"rank {team.rank} takes of a block of shape {shape} of rank {rank}, {nbytes} bytes "
            f"of dtype {target.dtype}, but that block has {has}"
        )
    return team.view(rank, entry.sources[rank], nbytes, target.dtype).reshape(shape)


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
