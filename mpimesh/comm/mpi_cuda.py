"""Device memory given to an MPI that can take it.

MPI moves; it never reduces: MPIs crash in reductions of device memory, or copy it to the host and
back. Sums are our own algorithms, of messages between devices and CuPy's functions. MPI knows
nothing of streams, so before it is given an array the stream has come to the event after which the
array may be read or written; the request asks for that, and starts MPI's call then.

Where messages are proven and a collective is not, that is made of messages, too. So it is with an
MPI without CUDA on a UCX with it: UCX gets the pointer of a message unread, but the rank's own part
of a collective MPI copies itself, and crashes.

The algorithms work for arrays of any library: :class:`Peers` says how to send, receive, combine and
allocate. Every value is combined in one order by one rank, or by pairs of ranks that combine the
same two values, so the result is the same to the last bit on all ranks.

| | messages of one rank, each way | bytes of one rank, each way |
|---|---|---|
| doubling, for small arrays | log2(ranks) | log2(ranks) * n |
| ring, for large ones | 2 * (ranks - 1) | 2 * n * (ranks - 1) / ranks |
| blocks, from each to each | ranks - 1 | the blocks |
| binomial tree, a broadcast | at most log2(ranks) | n in, and n to each rank below |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mpimesh.arrays.types import Array, DType
from mpimesh.comm.base import Communicator
from mpimesh.comm.cuda_probe import PROCESS_PROBE, ProbeResult
from mpimesh.comm.device_strategy import BlockMove, DeviceStrategy, agree, cut
from mpimesh.comm.engine import Steps
from mpimesh.comm.requests import MAX_USER_TAG, Request, all_done
from mpimesh.layout.cuts import even_sizes

__all__ = ["MPICuda", "Peers", "reduce_scatter_steps", "reduce_steps"]

_TAG = MAX_USER_TAG + 40
_MOVES = ("all_gather", "gather", "scatter", "all_to_all", "broadcast")

_SMALL_BYTES = 64 << 10
"""Up to here doubling is faster than the ring, which has more messages."""


class MPICuda(DeviceStrategy):
    """Gives device pointers to MPI.

    Args:
        host: A plain MPI communicator.
        proof: Tells of an operation whether MPI may be given device memory for it.
    """

    name = "mpi_cuda"

    def __init__(
        self, host: Communicator, *, proof: Callable[[str], ProbeResult] = PROCESS_PROBE.result
    ) -> None:
        super().__init__(host)
        # Asked once: what was agreed on with the other ranks must not change under way.
        self._results = {operation: proof(operation) for operation in (*_MOVES, "messages")}
        self.reason = self._results["messages"].reason

    @classmethod
    def find(cls, host: Communicator) -> Steps:
        """Collective: make it if messages are proven on all ranks; else the value says why not."""
        yield from PROCESS_PROBE.steps(host)
        strategy = cls(host)
        problem = strategy.cannot("messages") or ""
        why_not = yield from agree(host, problem, "has no proof of it")
        return (None, why_not) if why_not else (strategy, "")

    def cannot(self, operation: str, dtype: DType | None = None, op: str = "") -> str | None:
        """Return why it does not do `operation`: it was not proven, as a rule."""
        if self.host.kind != "mpi":
            return "these ranks are threads, not MPI's"
        result = self._results["messages"]
        if not result.usable and operation in _MOVES:
            result = self._results[operation]
        return None if result.usable else result.reason

    # -- reductions ----------------------------------------------------------------------

    def reduce(self, send: Array, recv: Array | None, op: str, root: int | None) -> Steps:
        """Reduce over all ranks into `recv` on `root`; on each if None."""
        work = self.cupy.empty_like(send) if recv is None else recv
        self.stream.copy_array(work, send)
        yield from reduce_steps(self._peers(send.dtype, op), work, root)

    def reduce_scatter(self, send: Array, recv: Array, counts: Sequence[int], op: str) -> Steps:
        """Reduce `send`; rank r gets block r, ``counts[r]`` elements long."""
        peers = self._peers(send.dtype, op)
        recv[...] = yield from reduce_scatter_steps(peers, send.copy(), counts)

    def _peers(self, dtype: DType, op: str = "sum") -> Peers:
        function, empty, host = self.ufunc(op), self.cupy.empty, self.host
        return Peers(
            rank=self.rank,
            size=self.size,
            isend=lambda x, dest: host.isend(x.view(np.uint8), dest, _TAG),
            irecv=lambda x, source: host.irecv(x.view(np.uint8), source, _TAG),
            combine=lambda first, second, out: function(first, second, out=out),
            empty=lambda size: empty(size, dtype),
            settled=self.stream.reached,
        )

    # -- movements, as bytes ---------------------------------------------------------------

    def move(self, move: BlockMove) -> Steps:
        """Move blocks of bytes: by MPI as a whole where that is proven, else by messages."""
        if self._results[move.operation].usable:
            yield self.stream.reached()
            arguments = move.send, move.recv, move.send_counts, move.recv_counts
            yield move.start(self.host, *arguments)
            return
        outgoing, incoming = move.outgoing(), move.incoming()
        self.copy_own_block(outgoing, incoming)  # not by MPI
        yield self.stream.reached()
        peers = self._peers(np.dtype(np.uint8))
        if move.operation == "broadcast":
            yield from _broadcast_steps(peers, move.buffer, move.root)
        else:
            yield from _block_steps(peers, outgoing, incoming)


# -- algorithms of messages ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Peers:
    """The primitives of the algorithms.

    Attributes:
        rank: This rank.
        size: Number of ranks.
        isend: Starts to send an array to a rank.
        irecv: Starts to receive from a rank into an array.
        combine: Puts the combination of two arrays into the third, which may be one of them.
        empty: Returns a new array of so many elements.
        settled: Returns the request that is done when all that was combined or allocated so far
            may be sent or received into.
        small_bytes: Up to which size arrays go by doubling.
    """

    rank: int
    size: int
    isend: Callable[[Array, int], Request]
    irecv: Callable[[Array, int], Request]
    combine: Callable[[Array, Array, Array], object]
    empty: Callable[[int], Array]
    settled: Callable[[], Request]
    small_bytes: int = _SMALL_BYTES


def reduce_steps(peers: Peers, data: Array, root: int | None = None) -> Steps:
    """Reduce `data` over all ranks into that of `root`, or of each if None.

    On other ranks than a root it holds nothing after.
    """
    if peers.size == 1 or data.size == 0:
        return
    if data.nbytes <= peers.small_bytes:
        yield from _doubling(peers, data)
        return
    counts = even_sizes(data.size, peers.size)
    yield from reduce_scatter_steps(peers, data, counts)
    blocks = cut(data, counts)
    if root is None:
        yield from _ring_gather(peers, blocks)
    elif peers.rank == root:
        yield all_done(*(peers.irecv(blocks[r], r) for r in range(peers.size) if r != root))
    else:
        yield peers.isend(blocks[peers.rank], root)


def reduce_scatter_steps(peers: Peers, data: Array, counts: Sequence[int]) -> Steps:
    """Reduce `data`; the steps' value is this rank's block of it, the rest holds nothing after."""
    rank, size = peers.rank, peers.size
    blocks = cut(data, counts)
    if size == 1:
        return blocks[0]
    after, before = (rank + 1) % size, (rank - 1) % size
    buffer = peers.empty(max(counts))
    yield peers.settled()
    # A block starts its way at the rank after its owner's, and each rank on it adds its own part.
    for step in range(size - 1):
        outgoing, incoming = blocks[(rank - 1 - step) % size], blocks[(rank - 2 - step) % size]
        arriving = buffer[: incoming.size]
        yield all_done(peers.irecv(arriving, before), peers.isend(outgoing, after))
        peers.combine(arriving, incoming, incoming)
        yield peers.settled()
    return blocks[rank]


def _block_steps(peers: Peers, outgoing: Sequence[Array], incoming: Sequence[Array]) -> Steps:
    """Send block d to rank d and receive block s from rank s, but for this rank's own.

    Args:
        peers: What sends and receives.
        outgoing: A block for each rank, of which empty ones stay here; none at all sends nothing.
        incoming: The same for what comes.
    """
    # Step k talks to the rank k places on, so that no rank is everybody's first.
    order = [(peers.rank + step) % peers.size for step in range(1, peers.size)]
    receives = [peers.irecv(incoming[p], p) for p in order if incoming and incoming[p].size]
    sends = [peers.isend(outgoing[p], p) for p in order if outgoing and outgoing[p].size]
    yield all_done(*receives, *sends)


def _broadcast_steps(peers: Peers, data: Array, root: int) -> Steps:
    """Give every rank the root's `data`, which each rank passes on to those below it in a tree."""
    place = (peers.rank - root) % peers.size
    # The lowest bit that is set leads to the rank above; all lower ones to those below.
    reach = place & -place or 1 << (peers.size - 1).bit_length()
    if not data.size:
        return
    if place:
        yield peers.irecv(data, (place - reach + root) % peers.size)
    steps = [1 << bit for bit in reversed(range(reach.bit_length() - 1))]
    below = [place + step for step in steps if place + step < peers.size]
    yield all_done(*[peers.isend(data, (child + root) % peers.size) for child in below])


def _ring_gather(peers: Peers, blocks: list[Array]) -> Steps:
    rank, size = peers.rank, peers.size
    after, before = (rank + 1) % size, (rank - 1) % size
    for step in range(size - 1):
        outgoing, incoming = blocks[(rank - step) % size], blocks[(rank - 1 - step) % size]
        yield all_done(peers.irecv(incoming, before), peers.isend(outgoing, after))


def _doubling(peers: Peers, data: Array) -> Steps:
    """Combine with a partner at distance 1, 2, 4, ...; ranks over a power of two go before."""
    rank, size = peers.rank, peers.size
    core = 1 << (size.bit_length() - 1)
    buffer = peers.empty(data.size)
    yield peers.settled()
    if rank >= core:
        yield peers.isend(data, rank - core)
        yield peers.irecv(data, rank - core)
        return
    extra = rank + core if rank + core < size else None
    if extra is not None:
        yield peers.irecv(buffer, extra)
        peers.combine(data, buffer, data)
        yield peers.settled()
    distance = 1
    while distance < core:
        partner = rank ^ distance
        yield all_done(peers.irecv(buffer, partner), peers.isend(data, partner))
        # The lower rank's part first on both sides, for functions to which the order matters.
        first, second = (data, buffer) if rank < partner else (buffer, data)
        peers.combine(first, second, data)
        yield peers.settled()
        distance *= 2
    if extra is not None:
        yield peers.isend(data, extra)
