"""Requests of what is under way between ranks, and messages of a rank to itself."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from threading import Lock
from typing import Protocol

from mpimesh.arrays import ArrayPool
from mpimesh.arrays.namespace import Array, HostArray
from mpimesh.errors import TransportError

__all__ = [
    "MAX_USER_TAG",
    "WHOLE_MESSAGE_BYTES",
    "Condition",
    "Mailbox",
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


# -- messages of a rank to itself ----------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Sent:
    """A message.

    Attributes:
        data: Its elements.
        taken: Whether the receive has it, or a copy was made: the sender's buffer is its own again.
    """

    data: HostArray
    taken: bool = False


@dataclass(slots=True, eq=False)
class _PostedReceive:
    """A receive.

    Attributes:
        buffer: Where the message comes.
        nbytes: Its size; -1 until it is here.
        error: Why it cannot be received.
    """

    buffer: HostArray
    nbytes: int = -1
    error: TransportError | None = None

    def take(self, message: _Sent, rank: int, tag: int) -> None:
        """Copy `message` into the buffer; the mailbox's lock is held."""
        nbytes = message.data.nbytes
        if nbytes > self.buffer.nbytes:
            self.error = TransportError(
                f"rank {rank} receives {self.buffer.nbytes} bytes from rank {rank} with tag "
                f"{tag}, but {nbytes} bytes were sent"
            )
        else:
            self.buffer.view("u1")[:nbytes] = message.data.view("u1")
        self.nbytes = nbytes
        message.taken = True

    def is_here(self) -> bool:
        """Tell whether the message is here."""
        if self.error is not None:
            raise self.error
        return self.nbytes >= 0


class Mailbox:
    """Messages of a rank to itself; those of one tag meet their receives in order.

    Args:
        rank: The rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lock = Lock()
        self._sent: defaultdict[int, deque[_Sent]] = defaultdict(deque)
        self._posted: defaultdict[int, deque[_PostedReceive]] = defaultdict(deque)

    def send(self, buffer: HostArray, tag: int, *, copy: bool) -> Condition:
        """Send `buffer`; if no receive waits for it, a copy of it if `copy`.

        The request is done when the buffer may be written again.
        """
        message = _Sent(buffer)
        with self._lock:
            posted = self._posted[tag]
            if posted:
                posted.popleft().take(message, self._rank, tag)
            elif copy:
                self._sent[tag].append(_Sent(buffer.copy()))
                message.taken = True
            else:
                self._sent[tag].append(message)
        return Condition(lambda: message.taken)

    def receive(self, buffer: HostArray, tag: int) -> Receive:
        """Receive the next message into `buffer`."""
        receive = _PostedReceive(buffer)
        with self._lock:
            sent = self._sent[tag]
            if sent:
                receive.take(sent.popleft(), self._rank, tag)
            else:
                self._posted[tag].append(receive)

        def cancel() -> bool:
            with self._lock:
                posted = self._posted[tag]
                if receive not in posted:
                    return False
                posted.remove(receive)
                return True

        return Receive(receive.is_here, lambda: receive.nbytes, cancel)

    def find(self, tag: int) -> tuple[int, int] | None:
        """Return the rank and the bytes of a message that waits to be received; None for none."""
        with self._lock:
            sent = self._sent.get(tag)
            return (self._rank, sent[0].data.nbytes) if sent else None
