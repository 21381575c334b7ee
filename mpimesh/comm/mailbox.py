"""Messages between ranks of one process: to other virtual ranks, and of an MPI rank to itself."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from mpimesh.arrays.types import HostArray
from mpimesh.comm.base import Condition, Request
from mpimesh.errors import TransportError

__all__ = ["Key", "Mailbox", "Receive", "Sent"]

Key = tuple[int, int, int]
"""Sender, receiver, tag."""


@dataclass(slots=True)
class Sent:
    """A message."""

    data: HostArray
    taken: bool = False
    """The receive has it, or a copy was made: the sender's buffer is its own again."""


class Receive:
    """The request of a receiver: posted, until :meth:`take` gives it its message."""

    __slots__ = ("_bytes", "_key", "_mailbox", "buffer", "error")

    def __init__(self, mailbox: Mailbox, key: Key, buffer: HostArray) -> None:
        self.buffer = buffer
        self.error: TransportError | None = None
        self._mailbox = mailbox
        self._key = key
        self._bytes = -1

    def take(self, message: Sent) -> None:
        """Copy `message` into the buffer; the mailbox's lock is held."""
        size = message.data.size
        if message.data.nbytes > self.buffer.nbytes:
            source, dest, tag = self._key
            self.error = TransportError(
                f"rank {dest} receives {self.buffer.nbytes} bytes from rank {source} with tag "
                f"{tag}, but {message.data.nbytes} bytes were sent"
            )
        elif self.buffer.dtype == message.data.dtype:
            self.buffer[:size] = message.data
        else:
            self.buffer.view("u1")[: message.data.nbytes] = message.data.view("u1")
        self._bytes = message.data.nbytes
        message.taken = True

    def test(self) -> bool:
        """Tell whether the message is here."""
        if self.error is not None:
            raise self.error
        return self._bytes >= 0

    def received_bytes(self) -> int:
        """Return the message's size."""
        return self._bytes

    def cancel(self) -> bool:
        """Take the receive back, if no message has met it."""
        return self._mailbox.withdraw(self._key, self)


class Mailbox:
    """Where sends and receives with the same key meet, in the order in which each was started.

    Args:
        lock: Held whenever something changes here.
        note_change: Called then.
    """

    def __init__(
        self, lock: AbstractContextManager[object], note_change: Callable[[], None]
    ) -> None:
        self._lock = lock
        self._note_change = note_change
        self._sent: defaultdict[Key, deque[Sent]] = defaultdict(deque)
        self._posted: defaultdict[Key, deque[Receive]] = defaultdict(deque)

    def send(self, key: Key, buffer: HostArray, *, copy: bool) -> Request:
        """Send `buffer`; if nobody waits for it, a copy of it if `copy`.

        The request is done when the buffer may be written again.
        """
        message = Sent(buffer)
        with self._lock:
            posted = self._posted[key]
            if posted:
                posted.popleft().take(message)
            elif copy:
                self._sent[key].append(Sent(buffer.copy()))
                message.taken = True
            else:
                self._sent[key].append(message)
            self._note_change()
        return Condition(lambda: message.taken)

    def receive(self, key: Key, buffer: HostArray) -> Receive:
        """Receive the next message into `buffer`."""
        receive = Receive(self, key, buffer)
        with self._lock:
            sent = self._sent[key]
            if sent:
                receive.take(sent.popleft())
                self._note_change()
            else:
                self._posted[key].append(receive)
        return receive

    def find(self, keys: Iterable[Key]) -> tuple[Key, int] | None:
        """Return the first of `keys` for which a message waits, and its bytes."""
        with self._lock:
            for key in keys:
                sent = self._sent.get(key)
                if sent:
                    return key, sent[0].data.nbytes
        return None

    def withdraw(self, key: Key, receive: Receive) -> bool:
        """Take a receive back; False if a message has met it."""
        with self._lock:
            posted = self._posted[key]
            if receive not in posted:
                return False
            posted.remove(receive)
            return True
