"""The waits of one rank: what it waits for, and what moves along meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from mpimesh.transport import Communicator, Engine, Request

__all__ = ["Progress", "Wait"]


class Wait:
    """One wait of this rank, for those who look after waits that may never end.

    Attributes:
        what: What is waited for; its `str` says so.
        communicator: Among whom.
        peers: The ranks of `communicator` that it takes; None for all.
        since_s: Its start by :func:`time.monotonic`.
    """

    __slots__ = ("communicator", "peers", "since_s", "what")

    def __init__(self, what: object, communicator: Communicator, peers: Sequence[int] | None):
        self.what = what
        self.communicator = communicator
        self.peers = peers
        self.since_s = time.monotonic()


class Progress(Engine):
    """All unfinished multi-step operations of one rank.

    Attributes:
        current: What the rank waits for now; None if it does not. Other threads may read it.
        last: What the rank started last.
        news: Called while a wait naps; raises to end it.
    """

    __slots__ = ("current", "last", "news")

    def __init__(self) -> None:
        super().__init__()
        self.current: Wait | None = None
        self.last: object = None
        self.news: Callable[[Wait], None] | None = None

    def wait(
        self,
        communicator: Communicator,
        request: Request,
        *,
        what: object,
        timeout_s: float | None = None,
        peers: Sequence[int] | None = None,
    ) -> bool:
        """Wait for `request`, moving everything else along; False after `timeout_s`.

        Args:
            communicator: Among whom the request is under way.
            request: What is waited for; an error of it ends the wait.
            what: Its `str` names it in reports.
            timeout_s: Longest wait; None waits as long as it takes.
            peers: The ranks of `communicator` without which it cannot be done; None for all.

        Raises:
            PeerLostError: If a rank that it takes has left.
        """
        return self.wait_until(
            communicator, request.test, what=what, timeout_s=timeout_s, peers=peers
        )

    def wait_until(
        self,
        communicator: Communicator,
        test: Callable[[], bool],
        *,
        what: object,
        timeout_s: float | None = None,
        peers: Sequence[int] | None = None,
    ) -> bool:
        """Wait as :meth:`wait` does, for `test` to be true."""

        def ready() -> bool:
            if self._pending:
                self.advance()
            return test()

        outer, self.current = self.current, Wait(what, communicator, peers)
        idle = None if self.news is None else self._look
        try:
            return communicator.wait(ready, timeout_s, what=what, idle=idle)
        finally:
            self.current = outer

    def _look(self) -> None:
        if self.news is not None and self.current is not None:
            self.news(self.current)
