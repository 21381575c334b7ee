"""The contract of those who move device memory.

A :class:`DeviceMover` has the collectives and messages of a
:class:`~mpimesh.transport.base.Communicator`, for flat, C-contiguous CuPy arrays. Starting never
waits, and a request is done when its result is visible to the stream that was current at the
start: work given to that stream from then on sees it. All movers of a communicator share a chain,
so their operations happen in the order of their calls.

A mover is written as steps: each `_operation` method is a generator that runs with the mover's own
stream current (see `device_work.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence

from mpimesh.arrays.types import Array, DType
from mpimesh.errors import TransportError
from mpimesh.transport.base import Communicator, Request
from mpimesh.transport.device_work import Lane, in_lane
from mpimesh.transport.engine import Engine, Steps

__all__ = ["COLLECTIVES", "DeviceMover"]

COLLECTIVES = (
    *("all_reduce", "reduce", "reduce_scatter", "all_gather", "gather", "scatter"),
    *("all_to_all", "broadcast"),
)
"""All that ranks do together with device memory."""


class DeviceMover(ABC):
    """One way to move device memory between the ranks of a communicator.

    Args:
        host: Moves host memory between the same ranks, for what the mover itself has to say. Its
            collectives are the movers' own.
        engine: Moves operations along.
        chain: On which all operations of the communicator's movers queue.

    Attributes:
        name: What the way is called in routes.
        operations: The collectives it knows, and ``"messages"``.
    """

    name: str
    operations: frozenset[str] = frozenset(COLLECTIVES)

    def __init__(self, host: Communicator, engine: Engine, chain: Hashable) -> None:
        self.host = host
        self.rank = host.rank
        self.size = host.size
        self.lane = Lane(host)
        self._engine = engine
        self._chain = chain

    def cannot(self, operation: str, dtype: DType | None = None, op: str = "") -> str | None:
        """Return why it does not do `operation`, for a person; None if it does. Local.

        The answer is the same on all ranks.

        Args:
            operation: One of :data:`COLLECTIVES`, or ``"messages"``.
            dtype: Of the arrays; None to ask about none in particular.
            op: The reduction.
        """
        if operation not in self.operations:
            return f"{self.name} has no {operation}"
        return None

    # -- the contract ------------------------------------------------------------------

    def all_reduce(self, send: Array | None, recv: Array, op: str) -> Request:
        """Reduce over all ranks into `recv` on each; ``send=None`` means `recv` is the input."""
        return self.start(lambda: self._all_reduce(recv if send is None else send, recv, op))

    def reduce(self, send: Array, recv: Array | None, op: str, root: int) -> Request:
        """Reduce over all ranks into `recv` on `root`."""
        return self.start(lambda: self._reduce(send, recv, op, root))

    def reduce_scatter(self, send: Array, recv: Array, counts: Sequence[int], op: str) -> Request:
        """Reduce `send`; rank r gets block r, ``counts[r]`` elements long."""
        return self.start(lambda: self._reduce_scatter(send, recv, counts, op))

    def all_gather(self, send: Array, recv: Array, counts: Sequence[int]) -> Request:
        """Lay the ranks' `send` one after the other in `recv`; rank r sends ``counts[r]``."""
        return self.start(lambda: self._all_gather(send, recv, counts))

    def gather(self, send: Array, recv: Array | None, counts: Sequence[int], root: int) -> Request:
        """As :meth:`all_gather`, but only `root` receives."""
        return self.start(lambda: self._gather(send, recv, counts, root))

    def scatter(self, send: Array | None, recv: Array, counts: Sequence[int], root: int) -> Request:
        """Rank r gets block r of root's `send`."""
        return self.start(lambda: self._scatter(send, recv, counts, root))

    def all_to_all(
        self, send: Array, recv: Array, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> Request:
        """Block d of `send` goes to rank d; block s of `recv` comes from rank s."""
        return self.start(lambda: self._all_to_all(send, recv, send_counts, recv_counts))

    def broadcast(self, buffer: Array, root: int) -> Request:
        """Copy `buffer` of `root` into `buffer` of every rank."""
        return self.start(lambda: self._broadcast(buffer, root))

    def isend(self, buffer: Array, dest: int, tag: int) -> Request:
        """Send `buffer` to a rank whose mover of the same kind receives it."""
        return self.start(lambda: self.send_steps(buffer, dest, tag), chain=object())

    def irecv(self, buffer: Array, source: int, tag: int) -> Request:
        """Receive into `buffer`, which has the message's size."""
        return self.start(lambda: self.recv_steps(buffer, source, tag), chain=object())

    def start(self, make: Callable[[], Steps], chain: Hashable = None) -> Request:
        """Start the steps of `make` after the operations before it."""
        return self._engine.stage(self._chain if chain is None else chain, in_lane(self.lane, make))

    def free(self) -> None:  # noqa: B027 - most hold nothing that does not go by itself
        """Give back what the mover holds. Local; a second call does nothing."""

    # -- what each of them does ----------------------------------------------------------

    @abstractmethod
    def _all_reduce(self, send: Array, recv: Array, op: str) -> Steps: ...

    @abstractmethod
    def _reduce(self, send: Array, recv: Array | None, op: str, root: int) -> Steps: ...

    @abstractmethod
    def _reduce_scatter(
        self, send: Array, recv: Array, counts: Sequence[int], op: str
    ) -> Steps: ...

    @abstractmethod
    def _all_gather(self, send: Array, recv: Array, counts: Sequence[int]) -> Steps: ...

    @abstractmethod
    def _gather(
        self, send: Array, recv: Array | None, counts: Sequence[int], root: int
    ) -> Steps: ...

    @abstractmethod
    def _scatter(
        self, send: Array | None, recv: Array, counts: Sequence[int], root: int
    ) -> Steps: ...

    @abstractmethod
    def _all_to_all(
        self, send: Array, recv: Array, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> Steps: ...

    @abstractmethod
    def _broadcast(self, buffer: Array, root: int) -> Steps: ...

    def send_steps(self, buffer: Array, dest: int, tag: int) -> Steps:
        """Return the steps of a send, to be run in this mover's lane."""
        raise TransportError(self.cannot("messages") or f"{self.name} has no messages")

    def recv_steps(self, buffer: Array, source: int, tag: int) -> Steps:
        """Return the steps of a receive, to be run in this mover's lane."""
        raise TransportError(self.cannot("messages") or f"{self.name} has no messages")
