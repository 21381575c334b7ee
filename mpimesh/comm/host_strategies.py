"""Device memory moved by the host communicator: given to MPI as it is, or by way of pinned memory.

``mpi_cuda``, where an MPI can take device memory. MPI moves; it never reduces: MPIs crash in
reductions of device memory, or copy it to the host and back. Sums are our own algorithms, of
messages between devices and CuPy's functions. MPI knows nothing of streams, so before it is given
an array the stream has come to the event after which the array may be read or written; the request
asks for that, and starts MPI's call then.

Where messages are proven and a collective is not, that is made of messages, too. So it is with an
MPI without CUDA on a UCX with it: UCX gets the pointer of a message unread, but the rank's own part
of a collective MPI copies itself, and crashes. The algorithms are those of `reductions.py`:
doubling for small arrays, the ring for large ones, a tree for small broadcasts, and blocks from
each rank to each.

MPI is given memory of the kind that it was tried with: what lies elsewhere, such as in CuPy's
asynchronous pool or managed memory, goes through a copy on the device. That is for each rank alone
to see, so ranks may hold their arrays in different kinds of memory.

``staged`` works everywhere. An operation goes in rounds, each of which fits into one pinned buffer.
The device fills the buffer of the next round while the host communicator moves the one before, and
takes results back while the one after is moved:

    device   load 0 | load 1 | store 0, load 2 | store 1, load 3 | ...
    host             | move 0 | move 1          | move 2          | ...

All copies are on one stream, so a round's load starts when the stores of the round before last,
which used the same buffer, are done. The host communicator sees ordinary host arrays: what it can
do (shared memory inside a node, several nodes, any size), this can do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from mpimesh.arrays.namespace import Array, DType, HostArray
from mpimesh.comm.base import Communicator
from mpimesh.comm.cuda_probe import PROCESS_PROBE, ProbeResult
from mpimesh.comm.device_strategy import (
    Collective,
    DeviceStrategy,
    agree,
    is_plain,
    plain_copy,
    plain_empty,
)
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
from mpimesh.comm.requests import Request, all_done, chunk_slices

__all__ = ["STAGE_BYTES", "MPICuda", "Staged"]

# -- through pinned host memory ------------------------------------------------------------------

STAGE_BYTES = 4 << 20
"""Largest buffer of one round: large enough for the bus, small enough to overlap."""

_abandoned: list[HostArray] = []
"""Buffers of operations that failed: the host communicator may still write into them."""
_ALIGNED_BYTES = 64
_NOTHING: HostArray = np.empty(0, np.uint8)


@dataclass(slots=True)
class _Round:
    """One buffer full.

    Attributes:
        loads: What the device copies into the buffer, one after the other.
        stores: What the device copies out of it afterwards, from behind the loads.
        start: Starts the host operation, given the bytes of the loads and those of the stores.
        in_place: Whether the stores lie where the loads do.
    """

    loads: Sequence[Array]
    stores: Sequence[Array]
    start: Callable[[HostArray, HostArray], Request]
    in_place: bool = False

    def places(self) -> tuple[slice, slice]:
        """Return where in the buffer the loads and the stores lie."""
        loads, stores = (sum(x.nbytes for x in arrays) for arrays in (self.loads, self.stores))
        at = 0 if self.in_place else -(-loads // _ALIGNED_BYTES) * _ALIGNED_BYTES
        return slice(0, loads), slice(at, at + stores)


class Staged(DeviceStrategy):
    """Moves everything through pinned host memory.

    Args:
        host: Moves the host memory.
        stage_bytes: Size of one of the two buffers.
    """

    name = "staged"
    reason = "works everywhere"

    def __init__(self, host: Communicator, *, stage_bytes: int = STAGE_BYTES) -> None:
        super().__init__(host)
        self._stage_bytes = stage_bytes
        self._copied: list[tuple[Any, ...]] = []
        """Buffers that copies may still read, each pair behind the event that comes after these."""

    @classmethod
    def find(cls, host: Communicator) -> Steps:
        """Make it; the steps' value is (strategy, reason)."""
        yield from ()
        return cls(host), ""

    def cannot(self, operation: str, dtype: DType | None = None, op: str = "") -> str | None:
        """Return None: it does all."""
        return None

    def steps(self, what: Collective) -> Steps:
        """Do a collective piece by piece: a piece of every block in each round."""
        # A buffer has a piece of the block of each rank and of one more, or of the one whole array.
        blocks = 1 if what.name in ("all_reduce", "reduce", "broadcast") else self.size + 1
        most = max(*what.send_counts, *what.recv_counts)
        if what.name == "all_to_all":
            # A rank knows the sizes of its own blocks only: how many rounds there are is agreed on.
            sizes = np.array([most], np.int64)
            yield self.host.all_reduce(None, sizes, "max")
            most = int(sizes[0])
        dtype, in_place = what.data.dtype, what.name == "all_reduce"

        def start(piece: slice, loaded: HostArray, stored: HostArray) -> Request:
            send = None if what.send is None or in_place else loaded.view(dtype)
            recv = None if what.recv is None else stored.view(dtype)
            return what.start(self.host, send, recv, piece)

        def rounds() -> Iterator[_Round]:
            for piece in chunk_slices(most, self._stage_bytes // blocks // dtype.itemsize):
                loads = [block[piece] for block in what.send_blocks()]
                stores = [block[piece] for block in what.recv_blocks()]
                yield _Round(loads, stores, partial(start, piece), in_place)

        yield from self._run(rounds())

    # -- messages, as bytes ------------------------------------------------------------------

    def send(self, buffer: Array, dest: int, tag: int) -> Steps:
        """Send bytes, in pieces that the receiver cuts alike."""
        start = lambda loaded, _: self.host.isend(loaded, dest, tag)  # noqa: E731
        yield from self._run(
            _Round([buffer[p]], [], start) for p in chunk_slices(buffer.size, self._stage_bytes)
        )

    def recv(self, buffer: Array, source: int, tag: int) -> Steps:
        """Receive a message of bytes that has the buffer's size."""
        start = lambda _, stored: self.host.irecv(stored, source, tag)  # noqa: E731
        yield from self._run(
            _Round([], [buffer[p]], start) for p in chunk_slices(buffer.size, self._stage_bytes)
        )

    # -- the two buffers ---------------------------------------------------------------------

    def _run(self, rounds: Iterable[_Round]) -> Steps:
        """Load, move and store round after round, each load beside the move of the one before."""
        buffers: list[HostArray] = []
        before: tuple[_Round, HostArray, Request] | None = None
        try:
            for number, current in enumerate(rounds):
                if number < 2:  # no round is larger than those before it
                    buffers.append(_pinned(current.places()[1].stop))
                buffer = buffers[number % 2]
                self._copy(current.loads, buffer.ctypes.data, load=True)
                loaded = self.stream.reached()
                if before is not None:
                    yield from self._move(*before)
                before = (current, buffer, loaded)
            if before is not None:
                yield from self._move(*before)
        except BaseException:
            _abandoned.extend(buffers)
            raise
        self._copied = [(event, *used) for event, *used in self._copied if not event.done]
        self._copied.append((self.stream.mark(), *buffers))

    def _move(self, current: _Round, buffer: HostArray, loaded: Request) -> Steps:
        yield loaded
        # NumPy's empty views point to the beginning of the buffer, and MPI refuses the same place
        # for input and result.
        views = [buffer[p] if p.stop > p.start else _NOTHING for p in current.places()]
        yield current.start(*views)
        at = current.places()[1].start
        self._copy(current.stores, buffer.ctypes.data + at, load=False)

    def _copy(self, arrays: Sequence[Array], address: int, *, load: bool) -> None:
        """Copy arrays to a buffer, one after the other, or from there."""
        for array in arrays:
            target, source = (address, array.data.ptr) if load else (array.data.ptr, address)
            self.stream.copy(target, source, array.nbytes)
            address += array.nbytes


def _pinned(nbytes: int) -> HostArray:
    """Return pinned bytes: a GPU copies to and from them beside other work.

    Allocating pinned memory takes a millisecond and stops the device; CuPy has a pool of it.
    """
    memory = sys.modules["cupy"].cuda.alloc_pinned_memory(max(1, nbytes))
    return np.frombuffer(memory, np.uint8, nbytes)


# -- given to MPI --------------------------------------------------------------------------------

_MOVES = ("all_gather", "gather", "scatter", "all_to_all", "broadcast")

_SMALL_BYTES = 64 << 10
"""Up to here doubling is faster than the ring, which has more messages."""
_SMALL_ARITY = 2


class MPICuda(DeviceStrategy):
    """Gives device pointers to MPI.

    Args:
        host: A plain MPI communicator.
        results: For which operations MPI may be given device memory; the same on all ranks.
    """

    name = "mpi_cuda"

    def __init__(self, host: Communicator, results: Mapping[str, ProbeResult]) -> None:
        super().__init__(host)
        self._results = results
        self.reason = self._results["messages"].reason

    @classmethod
    def find(cls, host: Communicator) -> Steps:
        """Collective: make it if messages are proven on all ranks; else the value says why not."""
        strategy = cls(host, (yield from PROCESS_PROBE.steps(host)))
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
        """Do a collective in memory that MPI was tried with."""
        send = None if what.send is None else plain_copy(what.send, self.stream)
        recv = send if what.recv is what.send else what.recv
        if recv is not None and not is_plain(recv):
            recv = plain_empty(recv)
        yield from self._plain_steps(replace(what, send=send, recv=recv))
        if recv is not None and recv is not what.recv:
            self.stream.copy_array(what.recv, recv)

    def _plain_steps(self, what: Collective) -> Steps:
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
        """Return a new array on the device, which MPI may be given."""
        return plain_empty(like)

    def settled(self) -> Steps:
        """Wait until the stream has come to what it was given."""
        yield self._strategy.stream.reached()
