"""Operations of MPI under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NoReturn

from mpi4py import MPI

from mpimesh.arrays.types import HostArray
from mpimesh.errors import TransportError
from mpimesh.transport.base import RecvRequest, Request
from mpimesh.transport.doorbell import Doorbell
from mpimesh.transport.waiting import poll

__all__ = ["MPIReceive", "MPIRequest", "MPIRequests", "Order", "PiecewiseReceive", "fail"]


class MPIRequest:
    """One MPI request and the buffers it works on."""

    __slots__ = ("_buffers", "_request")

    def __init__(self, request: MPI.Request, buffers: object) -> None:
        self._request = request
        self._buffers = buffers

    def test(self) -> bool:
        """Tell whether it is done."""
        try:
            return self._request.Test()
        except MPI.Exception as error:
            fail("an operation under way", error)


class MPIRequests:
    """Several requests that are one operation."""

    __slots__ = ("_requests",)

    def __init__(self, requests: list[Request]) -> None:
        self._requests = requests

    def test(self) -> bool:
        """Tell whether all are done."""
        self._requests = [request for request in self._requests if not request.test()]
        return not self._requests


class Order:
    """The order of the collectives of one MPI communicator, of which some go alone.

    Attributes:
        busy: Whether one that goes alone is under way, so that all others must queue.
    """

    __slots__ = ("_alone", "_moving", "_queue", "busy")

    def __init__(self) -> None:
        self._alone: Request | None = None
        self._moving = False
        self._queue: deque[_Queued] = deque()
        self.busy = False

    def add(self, start: Callable[[], Request], *, alone: bool = False) -> Request:
        """Return the request of `start`, which is called when its turn has come.

        Args:
            start: Starts the collective.
            alone: Whether all that comes after it is to start when it is done.
        """
        queued = _Queued(self, start, alone)
        self._queue.append(queued)
        self.busy = True
        self.advance()
        return queued

    def advance(self) -> bool:
        """Start what may start, and tell whether nothing goes alone any more."""
        if self._moving:
            return False  # a signal handler came in between, and waits for something else
        self._moving = True
        try:
            while self._alone is None or self._alone.test():
                self._alone = None
                if not self._queue:
                    self.busy = False
                    return True
                queued = self._queue[0]
                queued.begin()
                self._queue.popleft()  # now: what a signal handler raises must not lose it
                if queued.alone:
                    self._alone = queued.request
            return False
        finally:
            self._moving = False


class _Queued:
    """A request that starts in its turn."""

    __slots__ = ("_error", "_order", "_start", "alone", "request")

    def __init__(self, order: Order, start: Callable[[], Request], alone: bool) -> None:
        self._order = order
        self._start = start
        self._error: Exception | None = None
        self.alone = alone
        self.request: Request | None = None

    def begin(self) -> None:
        """Start it; an error is raised where its end is asked for."""
        try:
            self.request = self._start()
        except Exception as error:
            self._error = error

    def test(self) -> bool:
        """Tell whether it is done."""
        if self._order.busy:
            self._order.advance()
        if self._error is not None:
            raise self._error
        return self.request is not None and self.request.test()


class MPIReceive:
    """A receive, which knows afterwards how much came."""

    __slots__ = ("_bell", "_buffer", "_request", "_status")

    def __init__(self, request: MPI.Request, buffer: HostArray, bell: Doorbell | None) -> None:
        self._request = request
        self._buffer = buffer
        self._bell = bell
        self._status = MPI.Status()

    def test(self) -> bool:
        """Tell whether the message is here."""
        # A finished request is REQUEST_NULL, whose test would overwrite the status.
        if self._request == MPI.REQUEST_NULL:
            return True
        try:
            done = self._request.Test(self._status)
        except MPI.Exception as error:
            fail("receive", error)
        if done and self._bell is not None:
            self._bell.ring()  # the sender may wait for a large message to be taken
        return done

    def received_bytes(self) -> int:
        """Return the message's size."""
        return self._status.Get_count(MPI.BYTE)

    def cancel(self) -> bool:
        """Take the receive back, if no message has matched it."""
        if self._request == MPI.REQUEST_NULL:
            return False
        self._request.Cancel()
        poll(self.test)
        return self._status.Is_cancelled()


class PiecewiseReceive(MPIRequests):
    """A receive in pieces, of a message that has just the buffer's size."""

    __slots__ = ("_pieces",)

    def __init__(self, pieces: list[RecvRequest]) -> None:
        super().__init__(list(pieces))
        self._pieces = pieces

    def received_bytes(self) -> int:
        """Return the message's size."""
        return sum(piece.received_bytes() for piece in self._pieces)

    def cancel(self) -> bool:
        """Take the receive back, if no message has matched it."""
        taken_back = [piece.cancel() for piece in self._pieces]
        return all(taken_back)


def fail(name: str, error: MPI.Exception, advice: str = "") -> NoReturn:
    """Raise an error of MPI as one of the transport, with what to do where that is known."""
    raise TransportError(
        f"MPI refused or failed in {name} on rank {MPI.COMM_WORLD.rank}: "
        f"{error.Get_error_string()}{advice}"
    ) from error
