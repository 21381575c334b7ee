"""Ranks of one node that work in each other's memory, and how they keep in step.

Each rank has a *cell* in its arena that only it writes and all read: a counter,
what it says about the operation at hand, and its board (`board.py`). To **meet**, a
rank writes what it has to say, raises its counter, and waits until no counter is
behind its own.

Order, on which all that is shared rests
1. What a rank wrote before meeting s is there for all after it.
2. What is said for meeting s stands in half ``s % 2`` of the cell, and data
   staged for it in half ``s % 2`` of the stage. Others read both after meeting
   s and before they come to meeting s+1. The rank writes that half again for
   meeting s+2, that is after meeting s+1, when all have read it. So what is
   staged never needs a second meeting to be given free.

The counters are plain memory. Stores and loads of x86-64 keep the order that
this needs; on other processors MPI's own memory barrier, `Win.Sync`, stands
between the data and the counter on both sides.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from mpi4py import MPI

from mpimesh.arrays.quiet import quiet_calls
from mpimesh.arrays.types import DType, HostArray
from mpimesh.errors import ClosedError
from mpimesh.transport.arena import Arena
from mpimesh.transport.board import BOARD_NUMBERS, Board, Entry
from mpimesh.transport.doorbell import Doorbell
from mpimesh.transport.lending import Lending

__all__ = ["STAGE_BYTES", "Entry", "Meeting", "Team", "cell_bytes", "whole_stage_bytes"]

STAGE_BYTES = 256 * 1024
"""Most bytes of an ordinary array that are staged at a time: input and result stay in cache."""

_HALVES = 2
_SAID_AT = 8
"""Where a cell's halves begin, in numbers: the counter has a cache line of its own."""

_LINE = 8
_TESTS_BETWEEN_POKES = 8
_MOST_KEPT = 64


def cell_bytes(members: int) -> int:
    """Return the size of a cell of a team of so many."""
    return 8 * (_board_at(members) + BOARD_NUMBERS)


def whole_stage_bytes(stage_bytes: int) -> int:
    """Return the size of all halves of a stage: inputs and results."""
    return 2 * _HALVES * stage_bytes


def _board_at(members: int) -> int:
    return _SAID_AT + _HALVES * _half_numbers(members)


def _half_numbers(members: int) -> int:
    return -(-(_COUNTS + 2 * members) // _LINE) * _LINE


_WHAT, _SOURCE, _TARGET, _COUNTS = range(4)
"""The places in one half of a cell; counts for each member follow."""


class Team:
    """One communicator's ranks on one node, or all of them.

    Args:
        rank: This rank's place.
        memories: The arenas of all members, as this process has them mapped, in their order.
        cells: Where the members' cells begin.
        stages: Where their stages begin.
        arena: This rank's own.
        poke: Lets MPI move its own operations along; called while this rank waits.
        stage_bytes: Most bytes of an ordinary array that are staged at a time.
        bells: The members' bells, if they have any.

    Attributes:
        size: How many members there are.
        met: How many meetings this rank has come to.
        bells: The members' bells.
        board: What each tells the others without meeting them.
        closed: Whether the ranks have left.
        fence: Keeps what was read and written before apart from what comes after.
        quietly: Calls functions of NumPy without its warnings; the thread that moves operations
            along has it for itself.
    """

    def __init__(
        self,
        rank: int,
        memories: Sequence[HostArray],
        cells: Sequence[int],
        stages: Sequence[int],
        arena: Arena,
        poke: Callable[[], object],
        stage_bytes: int = STAGE_BYTES,
        bells: Sequence[Doorbell | None] = (),
    ) -> None:
        self.rank = rank
        self.size = len(memories)
        self.stage_bytes = stage_bytes
        self.met = 0
        self.closed = False
        self.bells = bells
        self._others_bells = [bell for place, bell in enumerate(bells) if bell and place != rank]
        self._memories = memories
        self._arena = arena
        self._poke = poke
        self._tests = 0
        numbers = _half_numbers(self.size)
        self._half_at = [_SAID_AT + half * numbers for half in range(_HALVES)]
        nbytes = cell_bytes(self.size)
        views = [
            memory[at : at + nbytes].view(np.int64)
            for memory, at in zip(memories, cells, strict=True)
        ]
        # Through memoryviews a number is read in 40 ns, a third of what NumPy takes.
        self._cells = [memoryview(view) for view in views]  # type: ignore[arg-type]
        self._mine = self._cells[rank]
        self._others = [cell for place, cell in enumerate(self._cells) if place != rank]
        self.fence = _fence()
        self.quietly = quiet_calls()
        board_at = _board_at(self.size)
        self.board = Board(rank, [cell[board_at:] for cell in self._cells], self.fence)
        self._scratch: HostArray = np.empty(0, np.uint8)
        self._staged: dict[tuple[int, int, int], list[HostArray]] = {}
        self._halves = [
            [
                memory[at + half * stage_bytes : at + (half + 1) * stage_bytes]
                for memory, at in zip(memories, stages, strict=True)
            ]
            for half in range(2 * _HALVES)
        ]

    # -- meeting ---------------------------------------------------------------------

    def say(
        self, what: int, source: int, target: int = 0, counts: Sequence[int] | None = None
    ) -> None:
        """Write what the others are to know after the next meeting.

        Args:
            what: A number for the operation, which must be the same on all ranks.
            source: Where in the arena the array is that others may read; -1 if it is not there.
            target: The same for the array that others may write.
            counts: What it sends to each member, and what it receives from each.
        """
        at = self._half(self.met + 1)
        mine = self._mine
        mine[at + _WHAT] = what
        mine[at + _SOURCE] = source
        mine[at + _TARGET] = target
        if counts is not None:
            self.say_counts(counts)

    def say_counts(self, counts: Sequence[int]) -> None:
        """Write only what this rank sends to each, and what it receives from each."""
        at = self._half(self.met + 1) + _COUNTS
        for place, count in enumerate(counts, at):
            self._mine[place] = count

    def meet(self) -> Meeting:
        """Come to the next meeting; the request is done when all have come."""
        number = self.met + 1
        self.come(number)
        return Meeting(self, number)

    def come(self, number: int) -> None:
        """Come to meeting `number`, the next one. A second call does nothing more."""
        self.fence()
        # In this order: if a signal ends this in between, the next call does both.
        self._mine[0] = number
        self.met = number
        self.ring()

    def ring(self) -> None:
        """Wake the members that are asleep: there is news for them."""
        for bell in self._others_bells:
            bell.ring()

    def bells_of(self, places: Sequence[int]) -> tuple[Doorbell, ...]:
        """Return the bells of some members, as far as they have any."""
        found = [self.bells[place] for place in places if self.bells]
        return tuple([bell for bell in found if bell is not None])

    def have_come(self, number: int) -> bool:
        """Tell whether all have come to a meeting.

        Raises:
            ClosedError: If the communicator was freed meanwhile.
        """
        for cell in self._others:
            if cell[0] < number:
                self.look_elsewhere()
                return False
        self.fence()
        return True

    def look_elsewhere(self) -> None:
        """Let MPI move; to be called when a look at the others was in vain.

        Raises:
            ClosedError: If the communicator was freed meanwhile.
        """
        if self.closed:
            raise ClosedError("an operation in shared memory was given up when its mesh ended")
        self._tests += 1
        if self._tests % _TESTS_BETWEEN_POKES == 0:
            self._poke()

    def close(self) -> None:
        """Let no meeting come about any more."""
        self.closed = True

    def say_what(self, what: int) -> None:
        """Write only which operation this rank is in."""
        self._mine[self._half(self.met + 1)] = what

    def agree_on(self, what: int) -> list[int] | None:
        """Return None if all said `what` for the last meeting, else what they said."""
        at = self._half(self.met)
        said = [cell[at] for cell in self._cells]
        return said if said.count(what) != self.size else None

    def counts_said(self) -> list[list[int]]:
        """Return the counts that the members have said for the next meeting.

        They have if each has posted a note after it.
        """
        start = self._half(self.met + 1) + _COUNTS
        return [cell[start : start + 2 * self.size].tolist() for cell in self._cells]

    def heard(self, *, with_counts: bool = False) -> Entry:
        """Return what the members have said for the last meeting."""
        at = self._half(self.met)
        cells = self._cells
        start = at + _COUNTS
        counts = [cell[start : start + 2 * self.size].tolist() for cell in cells if with_counts]
        return Entry(
            [cell[at + _WHAT] for cell in cells],
            [cell[at + _SOURCE] for cell in cells],
            [cell[at + _TARGET] for cell in cells],
            counts,
        )

    def _half(self, meeting: int) -> int:
        return self._half_at[meeting % _HALVES]

    # -- memory ----------------------------------------------------------------------

    def views(self, places: Sequence[int], nbytes: int, dtype: DType) -> list[HostArray]:
        """Return the arrays of all members that begin at `places` of their arenas."""
        return [
            memory[at : at + nbytes].view(dtype)
            for memory, at in zip(self._memories, places, strict=True)
        ]

    def view(self, member: int, at: int, nbytes: int, dtype: DType) -> HostArray:
        """Return the array that begins at `at` of a member's arena."""
        return self._memories[member][at : at + nbytes].view(dtype)

    def lending(self, ranks: Sequence[int]) -> Lending:
        """Return what lends arrays between the members, which have the numbers `ranks`."""
        memories = dict(zip(ranks, self._memories, strict=True))
        return Lending(self._arena, memories, self.fence)

    def find(self, array: HostArray) -> int:
        """Return where an array begins in this rank's arena; -1 for an ordinary one."""
        return self._arena.find(array)

    def room(self, nbytes: int) -> HostArray | None:
        """Return new memory in this rank's arena; None if none is left."""
        return self._arena.empty(nbytes)

    def scratch(self, nbytes: int) -> HostArray:
        """Return memory of this rank's own for what it works out on the way."""
        if self._scratch.nbytes < nbytes:
            self._scratch = np.empty(nbytes, np.uint8)
        return self._scratch[:nbytes]

    def inputs(self, dtype: DType, size: int = -1, *, coming: int = 0) -> list[HostArray]:
        """Return what all members stage for a meeting: chunks of their arrays.

        Args:
            dtype: The chunks' dtype.
            size: Their elements; all that there is room for if -1.
            coming: 0 for the last meeting that this rank came to, 1 for the next.
        """
        return self._stages((self.met + coming) % _HALVES, dtype, size)

    def results(self, dtype: DType, *, coming: int = 0) -> list[HostArray]:
        """Return what all members stage for a meeting: their parts of a result."""
        return self._stages(_HALVES + (self.met + coming) % _HALVES, dtype, -1)

    def _stages(self, half: int, dtype: DType, size: int) -> list[HostArray]:
        key = (half, dtype.num, size)
        found = self._staged.get(key)
        if found is None:
            if len(self._staged) >= _MOST_KEPT:
                self._staged.clear()
            end = self.stage_bytes if size < 0 else size * dtype.itemsize
            found = [stage[:end].view(dtype) for stage in self._halves[half]]
            self._staged[key] = found
        return found


class Meeting:
    """The request that is done when all members have come to one meeting."""

    __slots__ = ("_number", "_team")

    def __init__(self, team: Team, number: int) -> None:
        self._team = team
        self._number = number

    def test(self) -> bool:
        """Tell whether all have come."""
        return self._team.have_come(self._number)


def _nothing() -> None:
    """Do nothing: this processor keeps the order by itself."""


@lru_cache(maxsize=1)
def _fence() -> Callable[[], None]:
    """Return what keeps what was written or read before apart from what comes after."""
    if platform.machine() in ("x86_64", "AMD64"):
        return _nothing
    window: MPI.Win = MPI.Win.Create(None, comm=MPI.COMM_SELF)
    window.Lock_all()
    return window.Sync
