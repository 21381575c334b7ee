"""Memory that the ranks of a node share, and the protocol by which they use it.

Each rank has a *cell* in its arena, which only it writes and all read: notes, the number up to
which it is done, and a stage. An operation, or a step of one, has a number, counted alike by all
ranks of the node. Of step n a rank

- *publishes* note n: which operation it is in, and where its arrays lie. What it has written by
  then, others may read.
- *acknowledges* n: it has read and written all that it needs of step n.

Nothing else is ever waited for: `published_by(n)` before others' memory is used, and
`done_by(n)` before a rank's own memory is given back or used again.

Notes:
    Note n stands in slot ``n % NOTES`` as four numbers: a *word*, the operation, where the input
    begins in the rank's arena, and where the result does. The word is written last. It holds n
    (31 bits) and an *identity* (32 bits) of the other three, so one look at it tells that the note
    is there and what it says. A note without places has the operation's own digest for an identity,
    alike on all ranks: who is in the same step expects the very word that it has published itself.
    Any other combination gets the next number that the rank has not given yet: ranks know each
    other's from what they have read before.

Areas
    Beside the notes a rank writes data into areas: `SLOTS` small slots, and two halves of the stage
    for inputs and two for results. Steps that use one take turns, alike on all ranks: the slot that
    has not been used for longest, or the other half.

Order, on which all that is shared rests
1. *A note that is seen is whole, and so is what was written before it.* The word is stored after
   all of it, and loaded before all of it. Loads and stores of x86-64 keep that order; on other
   processors MPI's own barrier, `Win.Sync`, stands in between on both sides.
2. *Acknowledgements are in order*: operations of one window are worked one after the other on each
   rank, so who has acknowledged n has acknowledged all before it.
3. *Nothing is overwritten too early.* Who publishes note n has seen that all ranks have
   acknowledged n - NOTES, and who writes to an area, that they have the step that used it last
   (`has_room`, `Ring.is_free`). Whoever may read it for that is through by then.
   So where note n belongs stands n or an older one, never a newer one, for a rank that has not
   acknowledged n.
4. *An old note is never taken for a new one*: its number differs by a multiple of `NOTES`, less
   than 2**31.
5. *Steps in lockstep need no look at the room.* A rank that acknowledges n - 1 before it publishes
   n, and waits for all notes n, knows that all have acknowledged n - 1, and so whatever used the
   half of the stage that comes next.
6. *Nobody waits for ever.* Take the ranks with the lowest number that is not acknowledged. They
   have room, for everybody has acknowledged all before. So each can publish; those further on have
   published that step long ago. So they go on.

A rank may be in its user's program for as long as it likes: the others go on as far as `has_room`
lets them. That may be several operations: a note is published when its operation starts, if all
before it on this rank have published theirs, be they worked or not.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Generator, Iterable, Sequence
from contextvars import Context
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, TypeAlias

import numpy as np

from mpimesh.arrays.namespace import DType, HostArray
from mpimesh.comm.arena import Arena
from mpimesh.comm.engine import Doorbell
from mpimesh.comm.requests import Condition, Request
from mpimesh.comm.signatures import mismatch
from mpimesh.errors import ClosedError

__all__ = [
    "CELL_BYTES",
    "NOTES",
    "NOT_READ",
    "SLOTS",
    "STAGE_BYTES",
    "Cells",
    "Note",
    "Ring",
    "SharedWindow",
    "WindowEntry",
    "areas_bytes",
    "enter",
    "quiet_calls",
]

Cells: TypeAlias = tuple["memoryview[int]", ...]
"""The cells of some ranks, in their order."""

Note: TypeAlias = tuple[int, int, int]
"""The operation, and where its input and its result begin, or what else they stand for."""

NOTES = 64
"""Number of steps by which a rank may be ahead of another."""

SLOTS = 16
"""Number of small slots, of `slot_bytes` each."""

STAGE_BYTES = 256 * 1024
"""Most bytes of an ordinary array that are staged at a time: input and result stay in cache."""

NOT_READ = 0
"""Where an array is said to lie that no other rank touches."""

_HALVES = 2
_LEAST_SLOT_BYTES = 4096
_DONE = 0
_NOTES_AT = 8
"""In numbers of 8 bytes: what is done has a cache line of its own."""

_NOTE_NUMBERS = 4
CELL_BYTES = 8 * (_NOTES_AT + NOTES * _NOTE_NUMBERS)
"""Size of a cell, without its areas."""

_IDENTITY_BITS = 32
_IDENTITIES = (1 << _IDENTITY_BITS) - 1
_NUMBERS = (1 << 31) - 1
_DECLINED = 1
_UNNAMED = 2
"""Identity of a note that is not to be recognised: the rank has given all others."""

_FIRST_NAME = 3
_DIGEST = 1 << 31
"""Bit of the identities that are digests of an operation without places."""

_MOST_NAMES = 4096
_TESTS_BETWEEN_POKES = 8
_MOST_KEPT = 64
_IN_ORDER = platform.machine() in ("x86_64", "AMD64")


def slot_bytes(members: int) -> int:
    """Return the size of a small slot, which also holds two numbers for each of so many ranks."""
    return max(_LEAST_SLOT_BYTES, 16 * members)


def areas_bytes(stage_bytes: int, members: int) -> int:
    """Return the size of all areas: the halves of inputs and results, and the slots."""
    return 2 * _HALVES * stage_bytes + SLOTS * slot_bytes(members)


@dataclass(frozen=True, slots=True)
class WindowEntry:
    """The notes of all ranks of the node for one step.

    Attributes:
        what: Which operation each is in; -1 for one that has declined.
        sources: Where their inputs begin in their arenas; -1 for an ordinary array.
        targets: Where their results begin.
        counts: What each sends to each, and what each receives from each; empty if not asked for.
    """

    what: list[int]
    sources: list[int]
    targets: list[int]
    counts: list[list[int]] = field(default_factory=list)


class SharedWindow:
    """The cells of one communicator's ranks on one node.

    Args:
        rank: This rank's place.
        memories: The arenas of all members, as this process has them mapped, in their order.
        cells: Where the members' cells begin, zero at first.
        stages: Where their areas begin.
        arena: This rank's own.
        poke: Lets MPI move its own operations along; called while this rank waits.
        stage_bytes: Most bytes of an ordinary array that are staged at a time.
        bells: The members' bells, if they have any.

    Attributes:
        size: How many members there are.
        published: The number of this rank's last note.
        done_by_all: A step that all ranks are known to have acknowledged, with all before it.
        bells: The members' bells.
        slots: The small areas.
        stage: The halves for inputs.
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
        stages: Sequence[int],
        arena: Arena,
        poke: Callable[[], object],
        stage_bytes: int = STAGE_BYTES,
        bells: Sequence[Doorbell | None] = (),
    ) -> None:
        self.rank = rank
        self.size = len(memories)
        self.stage_bytes = stage_bytes
        self.published = 0
        self.closed = False
        self.bells = bells
        self.fence = _fence()
        self.quietly = quiet_calls()
        self._others_bells = [bell for place, bell in enumerate(bells) if bell and place != rank]
        self._memories = memories
        self.find = arena.find
        self.room = arena.empty
        self._poke = poke
        self._tests = 0
        self.done_by_all = 0
        self._names: dict[Note, int] = {}
        self._next_name = _FIRST_NAME
        views = [
            memory[at : at + CELL_BYTES].view(np.int64)
            for memory, at in zip(memories, cells, strict=True)
        ]
        # Through memoryviews a number is read in 40 ns, a third of what NumPy takes.
        self.cells: Cells = tuple([memoryview(view) for view in views])  # type: ignore[arg-type]
        self.others: Cells = tuple([c for place, c in enumerate(self.cells) if place != rank])
        self._mine = self.cells[rank]
        self._scratch: HostArray = np.empty(0, np.uint8)
        ends = [at + 2 * _HALVES * stage_bytes for at in stages]
        self.stage = Ring(memories, stages, _HALVES, stage_bytes)
        results = [at + _HALVES * stage_bytes for at in stages]
        self._results = Ring(memories, results, _HALVES, stage_bytes)
        self.slots = Ring(memories, ends, SLOTS, slot_bytes(self.size))

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
        what: int,
        source: int = 0,
        target: int = 0,
        bells: Sequence[Doorbell] | None = None,
    ) -> None:
        """Publish a note; a second call with the same number changes nothing.

        Args:
            number: The next one.
            what: The operation.
            source: Where the input begins in this rank's arena.
            target: The same for its result, if others are to use it.
            bells: Of those who may wait for it; None for all.
        """
        note = (what, source, target)
        identity = self._names.get(note) or self._name(note)
        at = _NOTES_AT + number % NOTES * _NOTE_NUMBERS
        mine = self._mine
        mine[at + 1] = what
        mine[at + 2] = source
        mine[at + 3] = target
        if not _IN_ORDER:
            self.fence()
        # In this order: if a signal ends this in between, the next call does all of it again.
        mine[at] = (number & _NUMBERS) << _IDENTITY_BITS | identity
        self.published = number
        for bell in self._others_bells if bells is None else bells:
            if bell.asleep[0]:
                bell.ring()

    def decline(self) -> None:
        """Publish that this rank has an ordinary array, and will not look at the others' notes."""
        number = self.published + 1
        at = _NOTES_AT + number % NOTES * _NOTE_NUMBERS
        self._mine[at] = (number & _NUMBERS) << _IDENTITY_BITS | _DECLINED
        self._mine[_DONE] = number
        self.published = number
        for bell in self._others_bells:
            bell.ring()

    def acknowledge(self, number: int) -> None:
        """Say that this rank has read and written all that it needs of the steps up to this one."""
        if not _IN_ORDER:
            self.fence()
        self._mine[_DONE] = number

    def meet(self, what: int = 0, source: int = 0, target: int = 0) -> Request:
        """Publish the next step of an operation in lockstep, and acknowledge the one before.

        The request is done when all have published it.
        """
        number = self.published + 1
        self.acknowledge(number - 1)
        self.stage.take(number)
        self.publish(number, what, source, target)
        return Condition(partial(self._all_published, number))

    def _all_published(self, number: int) -> bool:
        if self.published_by(number, self.others):
            return True
        self.look_elsewhere()
        return False

    # -- look at the others ----------------------------------------------------------

    def cells_of(self, places: Iterable[int]) -> Cells:
        """Return the cells of some ranks."""
        return tuple([self.cells[place] for place in places])

    def bells_of(self, places: Sequence[int]) -> tuple[Doorbell, ...]:
        """Return the bells of some ranks, as far as they have any."""
        found = [self.bells[place] for place in places if self.bells]
        return tuple([bell for bell in found if bell is not None])

    def ring(self) -> None:
        """Wake the ranks that are asleep: there is news for them."""
        for bell in self._others_bells:
            if bell.asleep[0]:
                bell.ring()

    def published_by(self, number: int, cells: Cells) -> bool:
        """Tell whether these ranks have published this step."""
        at, wanted = _NOTES_AT + number % NOTES * _NOTE_NUMBERS, number & _NUMBERS
        for cell in cells:
            if cell[at] >> _IDENTITY_BITS != wanted:
                return False
        if not _IN_ORDER:
            self.fence()
        return True

    def agreed(self, number: int) -> bool | None:
        """Tell whether all have published the note without places that this rank has.

        None if one has published none yet; False if one has published another.
        """
        at = _NOTES_AT + number % NOTES * _NOTE_NUMBERS
        word = self._mine[at]
        for cell in self.others:
            theirs = cell[at]
            if theirs != word:
                return None if (theirs ^ word) >> _IDENTITY_BITS else False
        if not _IN_ORDER:
            self.fence()
        return True

    def identities(
        self, number: int, likely: tuple[int, ...] | None = None
    ) -> tuple[int, ...] | None:
        """Return the identities of all notes of a step; None if some are not there yet.

        Empty as soon as one is known to have declined. `likely` are those of an earlier step with
        the same arrays, which are compared first, at a third of the cost.
        """
        at = _NOTES_AT + number % NOTES * _NOTE_NUMBERS
        base = (number & _NUMBERS) << _IDENTITY_BITS
        identities = likely
        if likely is None or not self._are(at, base, likely):
            found = [cell[at] - base for cell in self.cells]
            if _DECLINED in found:
                return ()
            if not all(0 < identity <= _IDENTITIES for identity in found):
                return None
            identities = tuple(found)
        if not _IN_ORDER:
            self.fence()
        return identities

    def _are(self, at: int, base: int, identities: tuple[int, ...]) -> bool:
        """Tell whether the notes at a place have these identities."""
        for cell, identity in zip(self.cells, identities, strict=True):
            if cell[at] - base != identity:
                return False
        return True

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
        """Return the notes of ranks that have published them. The operation is -1 where declined.

        For a rank that has not acknowledged the step.
        """
        at = _NOTES_AT + number % NOTES * _NOTE_NUMBERS
        return [
            (
                -1 if cell[at] & _IDENTITIES == _DECLINED else cell[at + 1],
                cell[at + 2],
                cell[at + 3],
            )
            for cell in cells
        ]

    def entry(self, number: int, *, with_counts: bool = False) -> WindowEntry:
        """Return all ranks' notes of a step that all have published."""
        notes = self.notes(number, self.cells)
        what, sources, targets = map(list, zip(*notes, strict=True))
        counts = [slot.tolist() for slot in self.counts()] if with_counts else []
        return WindowEntry(what, sources, targets, counts)

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
        what, source, target = note
        if not source and not target:
            # Alike in all processes: numbers have the same hash everywhere.
            identity = hash((what, 0x9E3779B9)) & (_DIGEST - 1) | _DIGEST
        else:
            identity = self._next_name
            if identity >= _DIGEST:
                return _UNNAMED
            self._next_name = identity + 1
        if len(self._names) >= _MOST_NAMES:
            self._names.clear()
        self._names[note] = identity
        return identity

    # -- memory ----------------------------------------------------------------------

    def inputs(self, dtype: DType, size: int = -1, *, coming: int = 0) -> list[HostArray]:
        """Return what all ranks stage for a step: chunks of their arrays.

        Args:
            dtype: The chunks' dtype.
            size: Their elements; all that there is room for if -1.
            coming: 0 for the last step that used the stage, 1 for the next.
        """
        stage = self.stage
        return stage.views(dtype, size)[(stage.state[0] + coming) % _HALVES]

    def results(self, dtype: DType, *, coming: int = 0) -> list[HostArray]:
        """Return what all ranks stage for a step: their parts of a result."""
        return self._results.views(dtype, -1)[(self.stage.state[0] + coming) % _HALVES]

    def counts(self, *, coming: int = 0) -> list[HostArray]:
        """Return all ranks' slots as numbers: what each sends to each, and receives from each."""
        slots = self.slots
        return slots.views(_INT64, 2 * self.size)[(slots.state[0] + coming) % SLOTS]

    def views(self, places: Sequence[int], nbytes: int, dtype: DType) -> list[HostArray]:
        """Return the arrays of all ranks that begin at `places` of their arenas."""
        return [self.view(member, at, nbytes, dtype) for member, at in enumerate(places)]

    def view(self, member: int, at: int, nbytes: int, dtype: DType) -> HostArray:
        """Return the array that begins at `at` of a rank's arena."""
        return self._memories[member][at : at + nbytes].view(dtype)

    def scratch(self, nbytes: int) -> HostArray:
        """Return memory of this rank's own for what it works out on the way."""
        if self._scratch.nbytes < nbytes:
            self._scratch = np.empty(nbytes, np.uint8)
        return self._scratch[:nbytes]


class Ring:
    """Areas of one size in every rank's memory, which steps use in turns, alike on all ranks.

    Args:
        memories: The arenas of all ranks.
        starts: Where the areas begin in each.
        count: Number of areas.
        nbytes: Size of each.

    Attributes:
        nbytes: Size of each area.
        state: The turns so far, and the step of the last one; both change at once.
        used: The step that used each area last.
    """

    __slots__ = ("_areas", "_views", "nbytes", "state", "used")

    def __init__(
        self, memories: Sequence[HostArray], starts: Sequence[int], count: int, nbytes: int
    ) -> None:
        self.nbytes = nbytes
        self.state = (0, 0)
        self.used = [0] * count
        self._areas = [
            [
                memory[at + area * nbytes : at + (area + 1) * nbytes]
                for memory, at in zip(memories, starts, strict=True)
            ]
            for area in range(count)
        ]
        self._views: dict[tuple[int, int], list[list[HostArray]]] = {}

    def is_free(self, window: SharedWindow) -> bool:
        """Tell whether the next area may be written."""
        return window.acknowledged_by_all(self.used[(self.state[0] + 1) % len(self.used)])

    def take(self, number: int) -> None:
        """Count the next area as used by a step; a second call changes nothing."""
        turn, last = self.state
        if last < number:
            turn += 1
            self.used[turn % len(self.used)] = number
            self.state = (turn, number)

    def views(self, dtype: DType, size: int) -> list[list[HostArray]]:
        """Return each area of each rank, as arrays of so many elements; as many as fit if -1."""
        key = (dtype.num, size)
        views = self._views.get(key)
        if views is None:
            if len(self._views) >= _MOST_KEPT:
                self._views.clear()
            end = self.nbytes if size < 0 else size * dtype.itemsize
            views = [[memory[:end].view(dtype) for memory in row] for row in self._areas]
            self._views[key] = views
        return views


_INT64: DType = np.dtype(np.int64)


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


def enter(
    window: SharedWindow,
    what: int,
    source_at: int = -1,
    target_at: int = NOT_READ,
    *,
    counts: Sequence[int] | None = None,
    on_all: bool = True,
) -> Generator[Request, None, WindowEntry]:
    """Publish the first of several steps, and find out where all arrays lie.

    Args:
        window: The ranks of this node.
        what: The operation's number.
        source_at: Where in this rank's arena its input lies; -1 if it is an ordinary array.
        target_at: The same for its result, if other ranks are to read or write it.
        counts: What it sends to each rank, and what it receives from each.
        on_all: Whether these are all ranks, so that a mismatch is known to all.

    Raises:
        MismatchError: If the ranks are in different operations.
    """

    def has_room() -> bool:
        if window.has_room() and (counts is None or window.slots.is_free(window)):
            return True
        window.look_elsewhere()
        return False

    yield Condition(has_room)
    number = window.published + 1
    if counts is not None:
        window.counts(coming=1)[window.rank][...] = counts
        window.slots.take(number)
    yield window.meet(what, source_at, target_at)
    entry = window.entry(number, with_counts=counts is not None)
    if entry.what.count(what) != window.size:
        window.acknowledge(number)
        raise mismatch(entry.what, on_all=on_all)
    return entry
