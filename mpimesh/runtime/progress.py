"""The waits of one rank: what it waits for, and what moves along meanwhile."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from mpimesh.runtime.call import Call
from mpimesh.runtime.flight import Recorder
from mpimesh.transport import Communicator, Engine, Request

__all__ = ["Progress", "Wait"]


class Wait:
    """One wait of this rank, for those who look after waits that may never end.

    Attributes:
        what: What is waited for; its `str` says so.
        communicator: Among whom.
        peers: The ranks of `communicator` that it takes; None for all.
        look: Called while the rank naps; raises to end the wait.
        since_s: Its start by :func:`time.monotonic`.
        blocking: Whether it is in calls that block: of MPI, of the file system.
        is_limited: Whether it ends by itself.
        number: Which of the collectives it is that are counted as `among`, where `what` does not
            tell; 0 if they are not counted.
        among: The ranks whose collectives are counted; the communicator's if empty.
    """

    __slots__ = (
        "among",
        "blocking",
        "communicator",
        "is_limited",
        "look",
        "number",
        "peers",
        "since_s",
        "what",
    )

    def __init__(
        self,
        what: object,
        communicator: Communicator,
        peers: Sequence[int] | None = None,
        look: Callable[[], None] | None = None,
        *,
        blocking: bool = False,
        is_limited: bool = False,
        number: int = 0,
        among: str = "",
    ) -> None:
        self.what = what
        self.communicator = communicator
        self.peers = peers
        self.look = look
        self.blocking = blocking
        self.is_limited = is_limited
        self.number = number
        self.among = among
        self.since_s = time.monotonic()


class Progress(Engine):
    """All unfinished multi-step operations of one rank.

    Attributes:
        current: What the rank waits for now; None if it does not. Other threads may read it.
        calls: What the rank started last, the latest last.
        recorder: Writes all that it starts into the flight record; None if there is none.
        on_idle: Called while a wait naps; raises to end it.
        communicators: Those of all its meshes by name, with the numbers of their ranks in the job.
        counts: What else this rank has started together with others, by name.
    """

    __slots__ = ("calls", "communicators", "counts", "current", "on_idle", "recorder")

    def __init__(self) -> None:
        super().__init__()
        self.current: Wait | None = None
        self.calls: deque[Call] = deque(maxlen=8)
        self.recorder: Recorder | None = None
        self.on_idle: Callable[[Wait], None] | None = None
        self.communicators: dict[str, tuple[Communicator, tuple[int, ...]]] = {}
        self.counts: dict[str, int] = {}

    def wait(
        self,
        communicator: Communicator,
        request: Request,
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
            request: What is waited for; an error of it ends the wait.
            what: Its `str` names it in reports.
            timeout_s: Longest wait; None waits as long as it takes.
            peers: The ranks of `communicator` without which it cannot be done; None for all.
            look: Called while the rank naps; raises to end the wait.
            number: See :class:`Wait`.
            among: See :class:`Wait`.

        Raises:
            PeerLostError: If a rank that it takes has left.
            DeadlockError: With checks on, if ranks wait for each other in a circle.
        """
        return self.wait_until(
            communicator,
            request.test,
            what=what,
            timeout_s=timeout_s,
            peers=peers,
            number=number,
            among=among,
            look=look,
        )

    def wait_until(
        self,
        communicator: Communicator,
        test: Callable[[], bool],
        *,
        what: object,
        timeout_s: float | None = None,
        peers: Sequence[int] | None = None,
        look: Callable[[], None] | None = None,
        number: int = 0,
        among: str = "",
    ) -> bool:
        """Wait as :meth:`wait` does, for `test` to be true."""

        def ready() -> bool:
            if self._pending:
                self.advance()
            return test()

        limited = timeout_s is not None
        wait = Wait(what, communicator, peers, look, is_limited=limited, number=number, among=among)
        outer, self.current = self.current, wait
        watched = look is not None or self.on_idle is not None or self.recorder is not None
        idle = self._look if watched else None
        try:
            return communicator.wait(ready, timeout_s, what=what, idle=idle)
        finally:
            self._go_back_to(outer)

    @contextmanager
    def watched(self, what: object, communicator: Communicator) -> Iterator[None]:
        """Have the watchdog look after a section with calls that block."""
        outer, self.current = self.current, Wait(what, communicator, blocking=True)
        try:
            yield
        finally:
            self._go_back_to(outer)

    def _go_back_to(self, outer: Wait | None) -> None:
        if outer is not None:
            outer.since_s = time.monotonic()  # something has moved
        self.current = outer
        if self.recorder is not None:
            self.recorder.wait(outer)

    def _look(self) -> None:
        wait = self.current
        if wait is None:
            return
        if self.recorder is not None:
            self.recorder.wait(wait)
        if wait.look is not None:  # first: who is in another operation may have left, too
            wait.look()
        if self.on_idle is not None:
            self.on_idle(wait)
