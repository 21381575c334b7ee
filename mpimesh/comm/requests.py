"""Requests of what is under way between ranks, and messages between ranks of one process."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate
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


# -- messages between ranks of one process -------------------------------------------------------

_Key = tuple[int, int, int]
"""Sender, receiver, tag."""


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

    def take(self, message: _Sent, key: _Key) -> None:
        """Copy `message` into the buffer; the mailbox's lock is held."""
        size, nbytes = message.data.size, message.data.nbytes
        if nbytes > self.buffer.nbytes:
            source, dest, tag = key
            self.error = TransportError(
                f"rank {dest} receives {self.buffer.nbytes} bytes from rank {source} with tag "
                f"{tag}, but {nbytes} bytes were sent"
            )
        elif self.buffer.dtype == message.data.dtype:
            self.buffer[:size] = message.data
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
    """Sends and receives of ranks of one process: other virtual ranks, or an MPI rank and itself.

    Those with the same key, which is sender, receiver and tag, meet in the order in which each was
    started.

    Args:
        lock: Held whenever something changes here.
        note_change: Called then.
    """

    def __init__(
        self, lock: AbstractContextManager[object], note_change: Callable[[], None]
    ) -> None:
        self._lock = lock
        self._note_change = note_change
        self._sent: defaultdict[_Key, deque[_Sent]] = defaultdict(deque)
        self._posted: defaultdict[_Key, deque[_PostedReceive]] = defaultdict(deque)

    def send(self, key: _Key, buffer: HostArray, *, copy: bool) -> Condition:
        """Send `buffer`; if no receive waits for it, a copy of it if `copy`.

        The request is done when the buffer may be written again.
        """
        message = _Sent(buffer)
        with self._lock:
            posted = self._posted[key]
            if posted:
                posted.popleft().take(message, key)
            elif copy:
                self._sent[key].append(_Sent(buffer.copy()))
                message.taken = True
            else:
                self._sent[key].append(message)
            self._note_change()
        return Condition(lambda: message.taken)

    def receive(self, key: _Key, buffer: HostArray) -> Receive:
        """Receive the next message into `buffer`."""
        receive = _PostedReceive(buffer)
        with self._lock:
            sent = self._sent[key]
            if sent:
                receive.take(sent.popleft(), key)
                self._note_change()
            else:
                self._posted[key].append(receive)

        def cancel() -> bool:
            with self._lock:
                posted = self._posted[key]
                if receive not in posted:
                    return False
                posted.remove(receive)
                return True

        return Receive(receive.is_here, lambda: receive.nbytes, cancel)

    def find(self, keys: Iterable[_Key]) -> tuple[_Key, int] | None:
        """Return the first of `keys` for which a message waits, and its bytes."""
        with self._lock:
            for key in keys:
                sent = self._sent.get(key)
                if sent:
                    return key, sent[0].data.nbytes
        return None
