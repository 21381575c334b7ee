"""The contract between the runtime and whoever moves the bytes.

A :class:`Communicator` is a set of ranks that can exchange memory. It knows
nothing of shapes, layouts, means or half types: the runtime hands it flat,
C-contiguous, native-endian NumPy arrays and gets back a :class:`Request`. The
same contract is met by MPI (`mpi.py`) and by threads (`virtual.py`), and one
file of tests runs on both. A program may bring a class of its own: it sets `rank`
and `size`, defines the abstract methods, and goes to ``DeviceMesh(dims, comm)``.
What both do inside a node is in :class:`NodeCommunicator`.

Rules that every implementation keeps
1. Starting never waits for another rank. Collectives on one communicator start
   in the same order on all its ranks.
2. Buffers of a started operation belong to it until it is done.
3. Nothing waits except :meth:`Communicator.wait`, and that naps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from mpimesh.arrays import ArrayPool
from mpimesh.arrays.namespace import HostArray
from mpimesh.comm.algorithms import Algorithms
from mpimesh.comm.engine import ProgressEngine, Steps
from mpimesh.comm.reductions import by_messages
from mpimesh.comm.region_messages import exchange_by_messages
from mpimesh.comm.regions import (
    check_contiguous,
    check_regions,
    kind_of,
    moves_in_memory,
    near_and_far,
)
from mpimesh.comm.requests import RecvRequest, Request
from mpimesh.core.mail import Mail
from mpimesh.core.node import Window
from mpimesh.errors import TransportError
from mpimesh.layout.boxes import Regions

if TYPE_CHECKING:
    from mpimesh.comm.lending import Lending

__all__ = ["Communicator", "NodeCommunicator"]


class Communicator(ABC):
    """Ranks from 0 to ``size - 1``, which exchange memory.

    `counts` are elements of each rank's block, in rank order, the same on every
    rank, and blocks lie one after the other. `op` is one of ``"sum"``, ``"prod"``,
    ``"min"``, ``"max"``.
    """

    rank: int
    size: int
    kind: str = "own"
    """``"mpi"``, ``"virtual"``, or for one of the user's own any other word."""
    node: Window | None = None
    """The ranks of this node, which compare what they start on it; None if there are no others."""
    node_ranks: Sequence[int] = ()
    """Their ranks."""
    engine: ProgressEngine | None = None
    """Moves along what takes several steps, in every wait of the rank; set by who waits."""
    window: Window | None = None
    """The ranks, if all of them share memory: their collectives go by it."""
    node_mail: Mail | None = None
    """Messages to and from the ranks that share memory with this one; None if there are none."""
    lending: Lending | None = None
    """Lends arrays to ranks that can read this rank's memory; None if there are none."""
    packed: ArrayPool | None = None
    """Memory for packed regions, kept for the next exchange; made on first use."""
    nodes: tuple[int, ...] = ()
    """The node of each rank, as a number; empty if all share one, or it is not known."""
    device: Any = None
    """Moves device memory between the same ranks; made by `device_communicator` on first use."""
    device_stream: Any = None
    """The stream of those strategies for device memory that work one after the other."""

    @property
    def native(self) -> Any:
        """The mpi4py communicator, for calls of your own; None where the ranks are not MPI's."""
        return None

    def algorithms(self) -> Algorithms:
        """Return the table by which it moves host memory. Local."""
        return Algorithms.only(self.kind, "the only way that it has")

    def force(self, way: str) -> str:
        """Move host memory by `way` alone from now on; return why not, empty if it can be.

        Local, but to be done alike on all ranks, before the first operation.
        """
        return "" if way == self.kind else f"these ranks have only {self.kind!r}, not {way!r}"

    def offer_once(self, nbytes: int, turn: int = 0) -> tuple[int, int, HostArray | None]:
        """Offer memory for an array that the ranks of a node have once. Local.

        It is kept as long as this communicator, or up to :meth:`release_once`.

        Args:
            nbytes: Its size.
            turn: Which of the node's ranks is to give it, counted on round and round.

        Returns:
            The rank that gives it; if that is this one, where the memory begins, -1 if it has none,
            and the memory.
        """
        return self.rank, -1, None

    def take_once(self, source: int, place: int, nbytes: int) -> HostArray:
        """Return the memory that another rank of the node has offered. Local.

        Args:
            source: That rank.
            place: Where it begins there.
            nbytes: Its size.
        """
        raise NotImplementedError

    def release_once(self, memory: HostArray) -> None:  # noqa: B027 - most keep none
        """Keep memory no more that this rank has offered, now that no other one reads it. Local."""

    def averages(self, nbytes: int) -> bool:
        """Tell whether its reductions of such an array know ``"mean"``, too. Local.

        The same answer on all ranks.
        """
        return False

    def prepare(
        self, name: str, arguments: tuple[Any, ...], algorithm: str | None = None
    ) -> Callable[[], Request | Steps]:
        """Return what starts the collective `name` with these arguments, as often as wanted. Local.

        Each start is after the last one has ended; the arrays are the same. It gives a request, or
        its steps, to be staged in the order of this communicator's collectives.

        Args:
            name: The collective's method.
            arguments: Those of the method.
            algorithm: How, which these ranks have; None for what the table says.
        """
        begin: Callable[..., Request | Steps] = getattr(self, name)
        if algorithm is not None:
            begin = by_messages(self, name, algorithm) or begin
        return partial(begin, *arguments)

    def has_algorithm(self, name: str, algorithm: str) -> bool:
        """Tell whether collective `name` of host memory can go by `algorithm`. Local.

        The same answer on all ranks.
        """
        return algorithm == self.kind or by_messages(self, name, algorithm) is not None

    # -- collectives: all ranks of the communicator, same order everywhere -----

    @abstractmethod
    def all_reduce(self, send: HostArray | None, recv: HostArray, op: str) -> Request:
        """Reduce over all ranks into `recv` on each; ``send=None`` means `recv` is the input."""

    @abstractmethod
    def reduce(self, send: HostArray, recv: HostArray | None, op: str, root: int) -> Request:
        """Reduce over all ranks into `recv` on `root`."""

    @abstractmethod
    def reduce_scatter(
        self, send: HostArray, recv: HostArray, counts: Sequence[int], op: str
    ) -> Request:
        """Reduce `send`; rank r gets block r, ``counts[r]`` elements long."""

    @abstractmethod
    def all_gather(self, send: HostArray, recv: HostArray, counts: Sequence[int]) -> Request:
        """Lay the ranks' `send` one after the other in `recv`; rank r sends ``counts[r]``."""

    @abstractmethod
    def gather(
        self, send: HostArray, recv: HostArray | None, counts: Sequence[int], root: int
    ) -> Request:
        """As :meth:`all_gather`, but only `root` receives."""

    @abstractmethod
    def scatter(
        self, send: HostArray | None, recv: HostArray, counts: Sequence[int], root: int
    ) -> Request:
        """Rank r gets block r of root's `send`."""

    @abstractmethod
    def all_to_all(
        self,
        send: HostArray,
        recv: HostArray,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
    ) -> Request:
        """Block d of `send` goes to rank d; block s of `recv` comes from rank s."""

    @abstractmethod
    def broadcast(self, buffer: HostArray, root: int) -> Request:
        """Copy `buffer` of `root` into `buffer` of every rank."""

    def exchange_regions(
        self,
        source: HostArray | None,
        target: HostArray | None,
        regions: Regions,
        max_bytes: int = 0,
    ) -> Request | Steps:
        """Copy or reduce boxes of the ranks' blocks into boxes of each rank's target.

        A rank that takes and gives nothing takes part, too. Once it is done here, no other rank
        reads `source` any more. Reductions keep the order of the parts, so they have the same bits
        in every run.

        Args:
            source: This rank's block, C-contiguous; None if nobody takes of it. Nobody may write
                to it until the operation is done.
            target: Where it takes to, C-contiguous; None if it takes nothing. Of the same dtype on
                all ranks. It may be `source` itself, or share its memory, if nobody takes of what
                is taken into.
            regions: What it takes, and what the others take of it.
            max_bytes: Most memory that packed messages take at a time on this rank, one element
                for each message at least; 0 for as much as there is. The same on all ranks.

        Returns:
            A request, or its steps, to be staged in the order of this communicator's exchanges.

        Raises:
            RankError: If a rank is named that there is not.
            ShapeError: If a box does not lie in its array.
            DTypeError: If the dtypes differ, or do not fit a reduction. These are raised at once,
                on this rank alone.
        """
        check_regions(regions, self.rank, self.size, source, target)
        return exchange_by_messages(self, source, target, regions, max_bytes=max_bytes)

    @abstractmethod
    def barrier(self) -> Request:
        """Done once every rank has started it."""

    # -- messages ---------------------------------------------------------------

    @abstractmethod
    def isend(self, buffer: HostArray, dest: int, tag: int) -> Request:
        """Send `buffer`. Messages of one (source, dest, tag) arrive in order."""

    @abstractmethod
    def irecv(self, buffer: HostArray, source: int, tag: int) -> RecvRequest:
        """Receive into `buffer`, which has the message's size, or room for any up to 4 KiB."""

    @abstractmethod
    def probe(self, tag: int) -> tuple[int, int] | None:
        """Return (source, bytes) of a message with `tag` that waits to be received, or None."""

    # -- life -------------------------------------------------------------------

    @abstractmethod
    def wait(
        self,
        ready: Callable[[], bool],
        timeout_s: float | None = None,
        *,
        what: object = "",
        idle: Callable[[], None] | None = None,
    ) -> bool:
        """Call `ready` until it is True, with naps; False once `timeout_s` has passed.

        Args:
            ready: Tells whether the wait is over; it moves started operations along.
            timeout_s: None waits as long as it takes.
            what: Whose `str` says in error messages what is waited for.
            idle: Called before each nap, to look for news that end the wait by raising.
        """

    def stir(self) -> None:  # noqa: B027 - most see all that moves
        """Let a wait of this rank look again soon: something moves that this transport cannot see.

        A request calls it whose :meth:`~Request.test` asks a device and not this communicator.
        """

    def free_device(self, *, unended: bool = False) -> None:
        """Give back what moves device memory; a part of :meth:`free`.

        Args:
            unended: Whether something may be under way that no rank waits for: its memory stays.
        """
        device, self.device = self.device, None
        if device is not None:
            device.free(unended=unended)

    def belong_to(self, owner: str) -> None:  # noqa: B027 - only MPI runs out of them
        """Note whose it, and what is split from it, is, for messages of errors. Local."""

    @abstractmethod
    def split(self, color: int | None, key: int) -> Communicator | None:
        """Collective: ranks with one `color` form a communicator, ordered by (key, rank).

        A rank with ``color=None`` gets None.
        """

    def idup(self) -> Steps:
        """Collective: make a communicator of the same ranks without waiting; the steps' value.

        Device memory is moved by operations of several steps, whose host messages and collectives
        come at other moments on each rank. They must not meet the collectives that the ranks start
        meanwhile on the communicator itself, so they have one of their own. The first step starts
        the duplication, so ranks take that one in the order of their collectives.

        Raises:
            TransportError: If this communicator has no duplicates.
        """
        raise TransportError(f"device memory cannot be moved by a {self.kind} communicator")

    @abstractmethod
    def free(self) -> None:
        """Collective: give the communicator's resources back. A second call does nothing."""

    def abandon(self) -> None:  # noqa: B027 - most keep what they have
        """Collective: free it but for what an operation may use that no rank waits for any more."""

    @abstractmethod
    def abort(self, code: int) -> None:
        """End all ranks of the job at once with exit code `code`."""


class NodeCommunicator(Communicator):
    """Ranks whose collectives go by their window, where they have one, and else by `prepare`."""

    def averages(self, nbytes: int) -> bool:
        """Tell whether its reductions know ``"mean"``: those of a window do."""
        return self.window is not None

    def has_algorithm(self, name: str, algorithm: str) -> bool:
        """Tell whether collective `name` can go by `algorithm`. Local."""
        if algorithm == "node":
            return self.window is not None
        return super().has_algorithm(name, algorithm)

    def prepare(
        self, name: str, arguments: tuple[Any, ...], algorithm: str | None = None
    ) -> Callable[[], Request | Steps]:
        """Return what starts a collective of these arrays, as often as wanted."""
        window = self.window
        if name == "exchange_regions":
            source, target, regions, *_ = arguments
            kinds = kind_of(source), kind_of(target)
            if window is None or not moves_in_memory(*kinds):
                return partial(Communicator.exchange_regions, self, *arguments)
            check_contiguous(self.rank, source, target)
            plan = near_and_far(regions, self.rank, self.size, range(self.size), *kinds)
            return window.exchange(source, target, plan.boxes)  # without memory for messages
        if window is None or algorithm not in (None, "node"):
            return super().prepare(name, arguments, algorithm)
        bound: Callable[[], Request] = getattr(window, name)(*arguments)
        return bound

    def exchange_regions(
        self,
        source: HostArray | None,
        target: HostArray | None,
        regions: Regions,
        max_bytes: int = 0,
    ) -> Any:
        """Copy or reduce boxes of the ranks' blocks into boxes of each rank's target."""
        return self.prepare("exchange_regions", (source, target, regions, max_bytes))()

    def all_reduce(self, send: HostArray | None, recv: HostArray, op: str) -> Any:
        """Reduce over all ranks into `recv` on each; ``send=None`` means `recv` is the input."""
        return self.prepare("all_reduce", (send, recv, op))()

    def reduce(self, send: HostArray, recv: HostArray | None, op: str, root: int) -> Any:
        """Reduce over all ranks into `recv` on `root`."""
        return self.prepare("reduce", (send, recv, op, root))()

    def reduce_scatter(
        self, send: HostArray, recv: HostArray, counts: Sequence[int], op: str
    ) -> Any:
        """Reduce `send`; rank r gets block r."""
        return self.prepare("reduce_scatter", (send, recv, counts, op))()

    def all_gather(self, send: HostArray, recv: HostArray, counts: Sequence[int]) -> Any:
        """Lay the ranks' `send` one after the other in `recv`."""
        return self.prepare("all_gather", (send, recv, counts))()

    def gather(
        self, send: HostArray, recv: HostArray | None, counts: Sequence[int], root: int
    ) -> Any:
        """Lay the ranks' `send` one after the other in `recv` of `root`."""
        return self.prepare("gather", (send, recv, counts, root))()

    def scatter(
        self, send: HostArray | None, recv: HostArray, counts: Sequence[int], root: int
    ) -> Any:
        """Rank r gets block r of root's `send`."""
        return self.prepare("scatter", (send, recv, counts, root))()

    def all_to_all(
        self,
        send: HostArray,
        recv: HostArray,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
    ) -> Any:
        """Block d of `send` goes to rank d; block s of `recv` comes from rank s."""
        return self.prepare("all_to_all", (send, recv, send_counts, recv_counts))()

    def broadcast(self, buffer: HostArray, root: int) -> Any:
        """Copy `buffer` of `root` into `buffer` of every rank."""
        return self.prepare("broadcast", (buffer, root))()

    def barrier(self) -> Any:
        """Done once every rank has started it."""
        return self.prepare("barrier", ())()
