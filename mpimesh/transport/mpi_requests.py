"""Operations of MPI under way."""

from __future__ import annotations

from typing import NoReturn

from mpi4py import MPI

from mpimesh.arrays.types import HostArray
from mpimesh.errors import TransportError
from mpimesh.transport.base import RecvRequest, Request
from mpimesh.transport.doorbell import Doorbell
from mpimesh.transport.waiting import poll

__all__ = ["MPIReceive", "MPIRequest", "MPIRequests", "PiecewiseReceive", "fail"]


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


def fail(name: str, error: MPI.Exception) -> NoReturn:
    """Raise an error of MPI as one of the transport."""
    raise TransportError(
        f"MPI refused or failed in {name} on rank {MPI.COMM_WORLD.rank}: {error.Get_error_string()}"
    ) from error
