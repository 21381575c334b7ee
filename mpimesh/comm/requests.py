"""Requests of what is under way between ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol

from mpimesh.arrays import ArrayPool
from mpimesh.arrays.namespace import Array, HostArray

__all__ = [
    "MAX_USER_TAG",
    "WHOLE_MESSAGE_BYTES",
    "Condition",
    "Messages",
    "Receive",
    "RecvRequest",
    "Request",
    "all_done",
    "block_slices",
    "chunk_slices",
    "cut",
]

MAX_USER_TAG = 16383
"""Message tags above this one, up to MPI's guaranteed 32767, are mpimesh's own."""

WHOLE_MESSAGE_BYTES = 4096
"""Messages up to this size arrive in one piece, so a receive may offer more room than they need."""


class Request(Protocol):
    """One started operation."""

    def test(self) -> bool:
        """Move the operation along and tell whether it is done. True stays True.

        Raises:
            TransportError: If the operation failed.
        """
        ...


class RecvRequest(Request, Protocol):
    """A started receive."""

    def received_bytes(self) -> int:
        """Return the message's size, once :meth:`test` is True."""
        ...

    def cancel(self) -> bool:
        """Take the receive back; False if a message had already matched it."""
        ...


class Messages(Protocol):
    """Ranks that send each other messages: what algorithms by messages need of a communicator."""

    rank: int
    size: int
    packed: ArrayPool | None

    def isend(self, buffer: HostArray, dest: int, tag: int) -> Request:
        """Send `buffer`."""
        ...

    def irecv(self, buffer: HostArray, source: int, tag: int) -> RecvRequest:
        """Receive into `buffer`."""
        ...


class Condition:
    """The request that is done when a function says so, which each test asks again.

    Args:
        test: Moves along what there is to be moved, and tells whether it is done; True stays True.
        buffers: What is to live as long as the request: others read it or write into it.
    """

    __slots__ = ("_buffers", "test")

    def __init__(self, test: Callable[[], bool], buffers: object = None) -> None:
        self.test = test
        self._buffers = buffers


class Receive(Condition):
    """The request of a receive, by its functions.

    Args:
        test: As for any condition.
        received_bytes: Gives the message's size, once it is here.
        cancel: Takes the receive back; False if a message had already matched it.
        buffers: As for any condition.
    """

    __slots__ = ("cancel", "received_bytes")

    def __init__(
        self,
        test: Callable[[], bool],
        received_bytes: Callable[[], int],
        cancel: Callable[[], bool],
        buffers: object = None,
    ) -> None:
        self.test = test
        self.received_bytes = received_bytes
        self.cancel = cancel
        self._buffers = buffers


def all_done(*requests: Request) -> Condition:
    """Return several requests as one, which moves all of them along at each test."""
    left = list(requests)

    def test() -> bool:
        left[:] = [request for request in left if not request.test()]
        return not left

    return Condition(test)


def block_slices(counts: Sequence[int]) -> list[slice]:
    """Return the places of blocks of so many elements that lie one after the other."""
    return [slice(end - count, end) for count, end in zip(counts, accumulate(counts), strict=True)]


def cut(array: Array, counts: Sequence[int]) -> list[Array]:
    """Return the blocks of a flat array that lie one after the other."""
    return [array[block] for block in block_slices(counts)]


def chunk_slices(size: int, step: int, start: int = 0) -> list[slice]:
    """Return the places of chunks of `step` elements, up to `size`; the last may be shorter."""
    return [slice(at, min(at + step, size)) for at in range(start, size, max(1, step))]
