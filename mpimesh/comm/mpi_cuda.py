"""Device memory given to an MPI that can take it.

MPI moves; it never reduces: MPIs crash in reductions of device memory, or copy it to the host and
back. Sums are our own algorithms, of messages between devices and CuPy's functions. MPI knows
nothing of streams, so before it is given an array the stream has come to the event after which the
array may be read or written; the request asks for that, and starts MPI's call then.

Where messages are proven and a collective is not, that is made of messages, too. So it is with an
MPI without CUDA on a UCX with it: UCX gets the pointer of a message unread, but the rank's own part
of a collective MPI copies itself, and crashes.

The algorithms are those of `reductions.py`, with their table of steps: doubling for small arrays,
the ring for large ones, a tree for small broadcasts, and blocks from each rank to each.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpimesh.arrays.namespace import Array, DType
from mpimesh.comm.base import Communicator
from mpimesh.comm.cuda_probe import PROCESS_PROBE, ProbeResult
from mpimesh.comm.device_strategy import Collective, DeviceStrategy, agree
from mpimesh.comm.engine import Steps
from mpimesh.comm.reductions import (
    RING,
    Peers,
    all_reduce_by_messages,
    broadcast_by_messages,
    doubling,
    reduce_by_messages,
    reduce_scatter_by_messages,
)
from mpimesh.comm.requests import Request, all_done

__all__ = ["MPICuda"]

_MOVES = ("all_gather", "gather", "scatter", "all_to_all", "broadcast")

_SMALL_BYTES = 64 << 10
"""Up to here doubling is faster than the ring, which has more messages."""
_SMALL_ARITY = 2


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

    def steps(self, what: Collective) -> Steps:
        """Do a collective: by MPI as a whole where that is proven, else by messages."""
        send, recv, peers = what.send, what.recv, _DevicePeers(self)
        yield from peers.settled()
        small = what.data.nbytes <= _SMALL_BYTES or what.data.size < self.size
        if not what.op and self._results[what.name].usable:
            yield what.start(self.host, send, recv)
        elif what.name == "broadcast":
            yield from broadcast_by_messages(
                peers, _SMALL_ARITY if small else RING, what.data, what.root
            )
        elif what.name == "reduce_scatter":
            yield from reduce_scatter_by_messages(peers, send, recv, what.send_counts, what.op)
        elif not what.op:
            outgoing, incoming = self.keep_own_block(what)  # not by MPI
            yield from peers.settled()
            receives = [peers.irecv(block, rank) for rank, block in incoming]
            sends = [peers.isend(block, rank) for rank, block in outgoing]
            yield all_done(*receives, *sends)
        elif small:
            total = peers.empty(send) if recv is None else recv
            self.stream.copy_array(total, send)
            yield from doubling(peers, total, what.op)
        elif what.name == "all_reduce":
            yield from all_reduce_by_messages(
                peers, RING, None if recv is send else send, recv, what.op
            )
        else:
            yield from reduce_by_messages(peers, RING, send, recv, what.op, what.root)


class _DevicePeers(Peers):
    """Ranks that send each other device memory, combined on the stream of a strategy."""

    def __init__(self, strategy: DeviceStrategy) -> None:
        super().__init__(strategy.host)
        self._strategy = strategy

    def isend(self, data: Array, dest: int) -> Request:
        """Start to send an array, as bytes."""
        return super().isend(data.view(np.uint8), dest)

    def irecv(self, data: Array, source: int) -> Request:
        """Start to receive into an array, as bytes."""
        return super().irecv(data.view(np.uint8), source)

    def combine(self, op: str, first: Array, second: Array, out: Array) -> None:
        """Put the combination of two arrays into the third, on the stream."""
        self._strategy.ufunc(op)(first, second, out=out)

    def empty(self, like: Array) -> Array:
        """Return a new array on the device."""
        return self._strategy.cupy.empty_like(like)

    def settled(self) -> Steps:
        """Wait until the stream has come to what it was given."""
        yield self._strategy.stream.reached()
