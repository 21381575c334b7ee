"""Exchanges of regions among the ranks of a node, and the protocol by which they meet.

Each rank has a *cell* in its arena, which only it writes and all read: notes, and the number up to
which it is done. An exchange has a number, counted alike by all ranks of the node. Of step n a rank

- *publishes* note n: where its block lies. What it has written by then, others may read.
- *acknowledges* n: it has read and written all that it needs of step n.

Nothing else is ever waited for: `identities_of(n)` before others' memory is used, and `done_by(n)`
before a rank's own memory is given back or used again.

Notes:
    Note n stands in slot ``n % NOTES`` as a *word*, where the block begins in the rank's arena, and
    what describes it. The word is written last. It holds n (31 bits) and an *identity* (32 bits) of
    the others, so one look at it tells that the note is there and what it says. Any other
    combination gets the next number that the rank has not given yet: ranks know each other's from
    what they have read before.

Order, on which all that is shared rests
1. *A note that is seen is whole, and so is what was written before it.* The word is stored after
   all of it, and loaded before all of it. Loads and stores of x86-64 keep that order; on other
   processors MPI's own barrier, `Win.Sync`, stands in between on both sides.
2. *Acknowledgements are in order*: exchanges of one window are worked one after the other on each
   rank, so who has acknowledged n has acknowledged all before it.
3. *Nothing is overwritten too early.* Who publishes note n has seen that all ranks have
   acknowledged n - NOTES (`has_room`). So where note n belongs stands n or an older one, never a
   newer one, for a rank that has not acknowledged n.
4. *An old note is never taken for a new one*: its number differs by a multiple of `NOTES`, less
   than 2**31.
5. *Nobody waits for ever.* Take the ranks with the lowest number that is not acknowledged. They
   have room, for everybody has acknowledged all before. So each can publish; those further on have
   published that step long ago. So they go on.

A rank may be in its user's program for as long as it likes: the others go on as far as `has_room`
lets them. That may be several exchanges: a note is published when its exchange starts, if all
before it on this rank have published theirs, be they worked or not.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Sequence
from contextvars import Context
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from mpimesh.arrays.namespace import DType, HostArray
from mpimesh.caches import Cache
from mpimesh.comm.arena import Arena
from mpimesh.core.node import Door
from mpimesh.errors import ClosedError

__all__ = [
    "CELL_BYTES",
    "NOTES",
    "NOT_READ",
    "Cells",
    "Note",
    "SharedWindow",
    "quiet_calls",
]

Cells: TypeAlias = tuple["memoryview[int]", ...]
"""The cells of some ranks, in their order."""

Note: TypeAlias = tuple[int, int]
"""Place of a rank's block in its arena, -1 for none; and its descriptor."""

NOTES = 64
"""Number of steps by which a rank may be ahead of another."""

NOT_READ = 0
"""Where an array is said to lie that no other rank touches."""

_DONE = 0
_NOTES_AT = 8
"""In numbers of 8 bytes: what is done has a cache line of its own."""

_NOTE_NUMBERS = 4  # of which three are used: no note lies on two cache lines
CELL_BYTES = 8 * (_NOTES_AT + NOTES * _NOTE_NUMBERS)

_IDENTITY_BITS = 32
_IDENTITIES = (1 << _IDENTITY_BITS) - 1
_NUMBERS = (1 << 31) - 1
_UNNAMED = 1
"""Identity of a note that is not to be recognised: the rank has given all others."""

_FIRST_NAME = 2

_MOST_NAMES = 4096
_TESTS_BETWEEN_POKES = 8
_IN_ORDER = platform.machine() in ("x86_64", "AMD64")


class SharedWindow:
    """The cells of one communicator's ranks on one node.

    Args:
        rank: This rank's place.
        memories: The arenas of all members, as this process has them mapped, in their order.
        cells: Where the members' cells begin, zero at first.
        arena: This rank's own.
        poke: Lets MPI move its own operations along; called while this rank waits.
        doors: The members' doors; empty if nobody sleeps.

    Attributes:
        size: How many members there are.
        published: The number of this rank's last note.
        done_by_all: A step that all ranks are known to have acknowledged, with all before it.
        doors: The members' doors.
        closed: Whether the ranks have left: no step comes about any more.
        find: Gives where an array begins in this rank's arena; -1 for an ordinary one.
        room: Gives new memory in this rank's arena; None if none is left.
        fence: Keeps what was read and written before apart from what comes after.
        quietly: Calls functions of NumPy without its warnings; the thread that moves operations
            along has it for itself.
    """

    def __init__(
        self,
        rank: int,
        memories: Sequence[HostArray],
        cells: Sequence[int],
        arena: Arena,
        poke: Callable[[], object],
        doors: Sequence[Door] = (),
    ) -> None:
        self.rank = rank
        self.size = len(memories)
        self.published = 0
        self.closed = False
        self.doors = doors
        self.fence = _fence()
        self.quietly = quiet_calls()
        self._others_doors = [door for place, door in enumerate(doors) if place != rank]
        self._memories = memories
        self.find = arena.find
        self.room = arena.empty
        self._poke = poke
        self._tests = 0
        self.done_by_all = 0
        self._names: Cache[Note, int] = Cache(_MOST_NAMES)
        self._next_name = _FIRST_NAME
        views = [
            memory[at : at + CELL_BYTES].view(np.int64)
            for memory, at in zip(memories, cells, strict=True)
        ]
        # Through memoryviews a number is read in 40 ns, a third of what NumPy takes.
        self.cells: Cells = tuple([memoryview(view) for view in views])  # type: ignore[arg-type]
        self._mine = self.cells[rank]
        self._scratch: HostArray = np.empty(0, np.uint8)

    # -- publish ---------------------------------------------------------------------

    def has_room(self) -> bool:
        """Tell whether the next note may be published."""
        number = self.published + 1 - NOTES
        return self.done_by_all >= number or self.acknowledged_by_all(number)

    def acknowledged_by_all(self, number: int) -> bool:
        """Tell whether all ranks have acknowledged all steps up to this one.

        This one, too: it may publish a step before it has worked those before, which read its own
        note and area as they do the others'.
        """
        if self.done_by_all >= number:
            return True
        self.done_by_all = min(cell[_DONE] for cell in self.cells)
        if not _IN_ORDER:
            self.fence()
        return self.done_by_all >= number

    def publish(
        self,
        number: int,
        block_at: int,
        descriptor: int,
        doors: Sequence[Door],
    ) -> None:
        """Publish a note; a second call with the same number changes nothing.

        Args:
            number: The next one.
            block_at: Where this rank's block begins in its arena; -1 if it does not lie there.
            descriptor: Describes the block.
            doors: Of those who may wait for it.
        """
        note = (block_at, descriptor)
        identity = self._names.get(note) or self._name(note)
        at = _NOTES_AT + number % NOTES * _NOTE_NUMBERS
        mine = self._mine
        mine[at + 1] = block_at
        mine[at + 2] = descriptor
        if not _IN_ORDER:
            self.fence()
        # In this order: if a signal ends this in between, the next call does all of it again.
        mine[at] = (number & _NUMBERS) << _IDENTITY_BITS | identity
        self.published = number
        for door in doors:
            door.ring()

    def acknowledge(self, number: int) -> None:
        """Say that this rank has read and written all that it needs of the steps up to this one."""
        if not _IN_ORDER:
            self.fence()
        self._mine[_DONE] = number

    # -- look at the others ----------------------------------------------------------

    def cells_of(self, places: Iterable[int]) -> Cells:
        """Return the cells of some ranks."""
        return tuple([self.cells[place] for place in places])

    def doors_of(self, places: Sequence[int]) -> tuple[Door, ...]:
        """Return the doors of some ranks."""
        return tuple([self.doors[place] for place in places if self.doors])

    def ring(self) -> None:
        """Wake the ranks that are asleep: there is news for them."""
        for door in self._others_doors:
            door.ring()

    def identities_of(self, number: int, cells: Cells) -> tuple[int, ...] | None:
        """Return the identities of the notes of some ranks; None if some are not there yet."""
        at = _NOTES_AT + number % NOTES * _NOTE_NUMBERS
        base = (number & _NUMBERS) << _IDENTITY_BITS
        identities: tuple[int, ...] = ()
        for cell in cells:  # most have one or two: a comprehension costs more
            identity = cell[at] - base
            if not 0 < identity <= _IDENTITIES:
                return None
            identities += (identity,)
        if not _IN_ORDER:
            self.fence()
        return identities

    def are_lasting(self, identities: tuple[int, ...]) -> bool:
        """Tell whether notes with these identities always say the same."""
        return min(identities, default=_FIRST_NAME) >= _FIRST_NAME

    def notes(self, number: int, cells: Cells) -> list[Note]:
        """Return the notes of ranks that have published them, and have not been acknowledged."""
        at = _NOTES_AT + number % NOTES * _NOTE_NUMBERS
        return [(cell[at + 1], cell[at + 2]) for cell in cells]

    def done_by(self, number: int, cells: Cells) -> bool:
        """Tell whether these ranks have acknowledged all steps up to this one."""
        for cell in cells:
            if cell[_DONE] < number:
                return False
        if not _IN_ORDER:
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

    def _name(self, note: Note) -> int:
        """Return the identity of a note that is new."""
        identity = self._next_name
        if identity > _IDENTITIES:
            return _UNNAMED
        self._next_name = identity + 1
        self._names[note] = identity
        return identity

    # -- memory ----------------------------------------------------------------------

    def view(self, member: int, at: int, nbytes: int, dtype: DType) -> HostArray:
        """Return the array that begins at `at` of a rank's arena."""
        return self._memories[member][at : at + nbytes].view(dtype)

    def scratch(self, nbytes: int) -> HostArray:
        """Return memory of this rank's own for what it works out on the way."""
        if self._scratch.nbytes < nbytes:
            self._scratch = np.empty(nbytes, np.uint8)
        return self._scratch[:nbytes]


def _nothing() -> None:
    """Do nothing: this processor keeps the order by itself."""


@lru_cache(maxsize=1)
def _fence() -> Callable[[], None]:
    """Return what keeps what was written or read before apart from what comes after."""
    if _IN_ORDER:
        return _nothing
    from mpi4py import MPI  # late: importing it starts MPI

    window = MPI.Win.Create(None, comm=MPI.COMM_SELF)
    window.Lock_all()
    sync: Callable[[], None] = window.Sync
    return sync


def quiet_calls() -> Callable[..., Any]:
    """Return ``quietly(function, *arguments)``, which calls a function without NumPy's warnings.

    Reductions overflow and make NaN in silence, as MPI's do. To enter and leave `numpy.errstate`
    takes 2 us, more than a small sum takes. NumPy keeps its state in a context variable, so one
    context in which that is set once serves all later calls.

    Not for two threads at a time, and for nothing that runs Python: a signal handler that came in
    between could not use it again.
    """
    context = Context()
    context.run(np.seterr, all="ignore")
    return context.run
