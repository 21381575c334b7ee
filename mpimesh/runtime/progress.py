"""The unfinished operations of one rank: its waits, what progresses meanwhile, locked inputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from typing import Protocol

import numpy as np

from mpimesh.arrays import HostArray
from mpimesh.comm import Communicator, ProgressEngine, Request
from mpimesh.core.call import Ledger

__all__ = ["InputLocks", "KeptError", "Progress", "Wait", "put_before"]


@dataclass(slots=True, eq=False, weakref_slot=True)
class Wait:
    """One wait of this rank, for those who look after waits that may never end.

    It has the arrays of its operation by `look`: who remembers it does so by a weak reference.

    Attributes:
        what: What is waited for; its `str` says so.
        communicator: Among whom.
        peers: The ranks of `communicator` that it takes; None for all.
        look: Called while the rank naps; raises to end the wait.
        blocking: Whether it is in calls that block: of MPI, of the file system.
        is_limited: Whether it ends by itself.
        number: Which of the collectives it is that are counted as `among`, where `what` does not
            tell; 0 if they are not counted.
        among: The name of the ranks whose collectives are counted.
        mesh: The mesh, called alike on all its ranks; empty if it is none.
        since_s: Its start by :func:`time.monotonic`.
    """

    what: object
    communicator: Communicator
    peers: Sequence[int] | None = None
    look: Callable[[], None] | None = None
    _: KW_ONLY
    blocking: bool = False
    is_limited: bool = False
    number: int = 0
    among: str = ""
    mesh: str = ""
    since_s: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class KeptError:
    """An error that this rank brings to a meeting of all ranks, which are to raise it there.

    Attributes:
        error: The error.
        is_shown: Whether its traceback was written, because the meeting may never be.
        since_s: When it was kept by :func:`time.monotonic`.
    """

    error: BaseException
    is_shown: bool = False
    since_s: float = field(default_factory=time.monotonic)


class Background(Protocol):
    """A thread that writes files."""

    nbytes: int
    done: bool


class Progress(ProgressEngine):
    """All unfinished multi-step operations of one rank.

    Attributes:
        kept: The error that this rank is about to tell the others; None if there is none.
        current: What the rank waits for now; None if it does not. Other threads may read it.
        on_idle: Called while a wait naps; raises to end it.
        ledgers: Those of the communicators of all its meshes, by what `id` gives for them.
        counts: What else this rank has started together with others, by name.
        background: Threads of this rank that write files, for which others may wait.
    """

    __slots__ = (
        "background",
        "counts",
        "current",
        "kept",
        "ledgers",
        "on_idle",
    )

    def __init__(self) -> None:
        super().__init__()
        self.current: Wait | None = None
        self.kept: KeptError | None = None
        self.on_idle: Callable[[Wait], None] | None = None
        self.ledgers: dict[int, Ledger] = {}
        self.counts: dict[str, int] = {}
        self.background: tuple[Background, ...] = ()

    def ledger_of(self, communicator: Communicator) -> Ledger:
        """Return the ledger of a communicator; a new one of no mesh if it is of none. Local."""
        return self.ledgers.get(id(communicator)) or Ledger(communicator)

    def wait(
        self,
        communicator: Communicator,
        request: Request | Callable[[], bool],
        *,
        what: object,
        timeout_s: float | None = None,
        peers: Sequence[int] | None = None,
        look: Callable[[], None] | None = None,
        number: int = 0,
        among: str = "",
    ) -> bool:
        """Wait for `request`, moving everything else along; False after `timeout_s`.

        Args:
            communicator: Among whom the request is under way.
            request: What is waited for, or a test of it; an error of it ends the wait.
            what: Its `str` names it in reports.
            timeout_s: Longest wait; None waits as long as it takes.
            peers: The ranks of `communicator` without which it cannot be done; None for all.
            look: Called while the rank naps; raises to end the wait.
            number: See :class:`Wait`.
            among: See :class:`Wait`; by default the ranks of `communicator`.

        Raises:
            PeerLostError: If a rank that it takes has left.
            DeadlockError: With checks on, if ranks wait for each other in a circle.
        """
        test: Callable[[], bool] = request if callable(request) else request.test

        def ready() -> bool:
            if self.pending:
                self.advance()
            return test()

        limited = timeout_s is not None
        ledger = self.ledger_of(communicator)
        wait = Wait(
            what,
            communicator,
            peers,
            look,
            is_limited=limited,
            number=number,
            among=among or ledger.name,
            mesh=ledger.mesh,
        )
        outer, self.current = self.current, wait
        watched = look is not None or self.on_idle is not None or self.recorder is not None
        idle = self._idle if watched else None
        try:
            return communicator.wait(ready, timeout_s, what=what, idle=idle)
        finally:
            self._go_back_to(outer)

    @contextmanager
    def watched(self, what: object, communicator: Communicator) -> Iterator[None]:
        """Have the watchdog look after a section with calls that block."""
        ledger = self.ledger_of(communicator)
        section = Wait(what, communicator, blocking=True, among=ledger.name, mesh=ledger.mesh)
        outer, self.current = self.current, section
        try:
            yield
        finally:
            self._go_back_to(outer)

    def keeping(self, error: BaseException | None) -> AbstractContextManager[None]:
        """Keep `error` while this rank goes to tell it to the others; None keeps nothing.

        Whatever ends that before shows it: an error raised here has it as its context, and who ends
        the job from elsewhere finds it in :attr:`kept`.
        """
        return nullcontext() if error is None else self._keeping(error)

    @contextmanager
    def _keeping(self, error: BaseException) -> Iterator[None]:
        outer, self.kept = self.kept, KeptError(error)
        try:
            yield
        except BaseException as end:
            put_before(end, error)
            raise
        finally:
            self.kept = outer

    def _go_back_to(self, outer: Wait | None) -> None:
        if outer is not None:
            outer.since_s = time.monotonic()  # something has moved
        self.current = outer
        if self.recorder is not None:
            self.recorder.wait(outer)

    def _idle(self) -> None:
        wait = self.current
        if wait is None:
            return
        if self.recorder is not None:
            self.recorder.wait(wait)
        if wait.look is not None:  # first: who is in another operation may have left, too
            wait.look()
        if self.on_idle is not None:
            self.on_idle(wait)


def put_before(end: BaseException, error: BaseException) -> None:
    """Have the traceback of `end` show `error` first, unless one came from the other already."""
    chain = _chain(end)
    if any(one is error for last in chain for one in (last, last.__cause__, last.__context__)):
        return
    if any(one is last for one in _chain(error) for last in chain):
        return  # an exception that is raised again: they would be in a circle
    last = chain[-1]
    last.__context__, last.__suppress_context__ = error, False


def _chain(error: BaseException) -> list[BaseException]:
    """Return an exception and those it came from, each once, as a traceback shows them."""
    chain: list[BaseException] = []
    before: BaseException | None = error
    while before is not None and not any(before is one for one in chain):
        chain.append(before)
        before = before.__cause__ or (None if before.__suppress_context__ else before.__context__)
    return chain


@dataclass(slots=True)
class _Locked:
    """A locked array, how many operations read it, and the first of them."""

    array: HostArray
    reader: object
    count: int = 0


class InputLocks:
    """Inputs of operations under way, made read-only so that a write to one raises.

    One array may be the input of several operations, and an array and views of it may be inputs
    together. So locks are counted, and a view stays locked as long as the array that it belongs to:
    NumPy makes no view writable before its base.
    """

    __slots__ = ("_due", "_locked")

    def __init__(self) -> None:
        self._locked: dict[int, _Locked] = {}
        self._due: list[int] = []

    def lock(self, x: HostArray, reader: object = None) -> Callable[[], None] | None:
        """Make `x` read-only until the returned function is called; None if it is so already.

        Args:
            x: The input.
            reader: The operation; its `str` names it.
        """
        locked = self._locked.get(id(x))
        if locked is None:
            if not x.flags.writeable:
                return None
            x.flags.writeable = False
            locked = self._locked[id(x)] = _Locked(x, reader)
        locked.count += 1
        return lambda: self._release(id(x))

    def holder(self, x: HostArray) -> object:
        """Return the operation for which `x` is read-only; None if it is so without one."""
        for locked in self._locked.values():
            if np.may_share_memory(locked.array, x):
                return locked.reader
        return None

    def _release(self, key: int) -> None:
        locked = self._locked[key]
        locked.count -= 1
        if locked.count == 0:
            self._due.append(key)
        # A base that is freed may free views that have waited for it.
        freed = True
        while freed:
            freed = sum(map(self._unlock, self._due)) > 0
            self._due = [key for key in self._due if key in self._locked]
        if not any(locked.count for locked in self._locked.values()):
            # What is left has a base that the program itself made read-only meanwhile.
            self._locked.clear()
            self._due.clear()

    def _unlock(self, key: int) -> bool:
        """Make an array writable that nobody reads any more; False if it is not possible yet."""
        locked = self._locked.get(key)
        if locked is None or locked.count:
            return False
        try:
            locked.array.flags.writeable = True
        except ValueError:
            return False
        del self._locked[key]
        return True
