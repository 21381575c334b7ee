"""Device memory given to an MPI that can take it.

MPI moves; it never reduces: MPIs crash in reductions of device memory, or copy it to the host and
back. Sums are our own algorithms (`exchange.py`) of messages between devices and CuPy's functions.
MPI knows nothing of streams, so before it is given an array the stream has come to the event after
which the array may be read or written; the request asks for that, and starts MPI's call then.

Where messages are proven and a collective is not, that is made of messages, too. So it is with an
MPI without CUDA on a UCX with it: UCX gets the pointer of a message unread, but the rank's own part
of a collective MPI copies itself, and crashes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np

from mpimesh.arrays.types import Array, DType
from mpimesh.transport.base import MAX_USER_TAG, Communicator, Request
from mpimesh.transport.cuda_probe import cuda_aware
from mpimesh.transport.device_mover import COLLECTIVES, DeviceMover
from mpimesh.transport.engine import Engine, Steps
from mpimesh.transport.exchange import (
    Links,
    all_reduce_steps,
    block_steps,
    broadcast_steps,
    cut,
    reduce_scatter_steps,
    reduce_steps,
)

__all__ = ["MPICuda"]

_TAG = MAX_USER_TAG + 40
_REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter")
_MOVES = tuple(operation for operation in COLLECTIVES if operation not in _REDUCTIONS)

Proof = Callable[[str], tuple[bool, str]]
"""Tells of an operation whether MPI may be given device memory for it, and why."""


class MPICuda(DeviceMover):
    """Gives device pointers to MPI.

    Args:
        host: A plain MPI communicator.
        engine: As for :class:`DeviceMover`.
        chain: As for :class:`DeviceMover`.
        proof: Tells what MPI may be given.
    """

    name = "mpi_cuda"
    operations = frozenset((*COLLECTIVES, "messages"))

    def __init__(
        self,
        host: Communicator,
        engine: Engine,
        chain: Hashable,
        *,
        proof: Proof = cuda_aware,
    ) -> None:
        super().__init__(host, engine, chain)
        # Asked once: what was agreed on with the other ranks must not change under way.
        self._answers = {operation: proof(operation) for operation in (*_MOVES, "messages")}

    def cannot(self, operation: str, dtype: DType | None = None, op: str = "") -> str | None:
        """Return why it does not do `operation`: it was not proven, as a rule."""
        if self.host.kind != "mpi":
            return "these ranks are threads, not MPI's"
        proven, why = self._answers["messages"]
        if not proven and operation in _MOVES:
            proven, why = self._answers[operation]
        return None if proven else why

    def _gives(self, operation: str) -> bool:
        """Tell whether MPI is given a movement as a whole; if not, it is made of messages."""
        return self._answers[operation][0]

    # -- reductions ----------------------------------------------------------------------

    def _all_reduce(self, send: Array, recv: Array, op: str) -> Steps:
        if recv.data.ptr != send.data.ptr:
            recv[...] = send
        yield from all_reduce_steps(self._links(op, recv.dtype), recv)

    def _reduce(self, send: Array, recv: Array | None, op: str, root: int) -> Steps:
        work = recv if recv is not None and self.rank == root else self.lane.cupy.empty_like(send)
        if work.data.ptr != send.data.ptr:
            work[...] = send
        yield from reduce_steps(self._links(op, send.dtype), work, root)

    def _reduce_scatter(self, send: Array, recv: Array, counts: Sequence[int], op: str) -> Steps:
        work = send.copy()
        mine = yield from reduce_scatter_steps(self._links(op, send.dtype), work, counts)
        recv[...] = mine

    def _links(self, op: str, dtype: DType) -> Links:
        cupy = self.lane.cupy
        functions = {
            "sum": cupy.add,
            "prod": cupy.multiply,
            "min": cupy.minimum,
            "max": cupy.maximum,
        }

        def combine(first: Array, second: Array, out: Array) -> None:
            functions[op](first, second, out=out)

        return Links(
            rank=self.rank,
            size=self.size,
            isend=lambda array, dest: self.host.isend(_bytes(array), dest, _TAG),
            irecv=lambda array, source: self.host.irecv(_bytes(array), source, _TAG),
            combine=combine,
            empty=lambda size: cupy.empty(size, dtype),
            settled=self.lane.reached,
        )

    # -- movements, as bytes ---------------------------------------------------------------

    def _all_gather(self, send: Array, recv: Array, counts: Sequence[int]) -> Steps:
        if not self._gives("all_gather"):
            yield from self._pass_blocks([send] * self.size, cut(recv, counts))
            return
        yield from self._when_ready(
            lambda: self.host.all_gather(_bytes(send), _bytes(recv), _in_bytes(counts, send))
        )

    def _gather(self, send: Array, recv: Array | None, counts: Sequence[int], root: int) -> Steps:
        at_root = recv is not None and self.rank == root
        if not self._gives("gather"):
            incoming = cut(recv, counts) if at_root else []
            yield from self._pass_blocks(self._only(root, send), incoming)
            return
        out = _bytes(recv) if at_root else None
        yield from self._when_ready(
            lambda: self.host.gather(_bytes(send), out, _in_bytes(counts, send), root)
        )

    def _scatter(self, send: Array | None, recv: Array, counts: Sequence[int], root: int) -> Steps:
        at_root = send is not None and self.rank == root
        if not self._gives("scatter"):
            outgoing = cut(send, counts) if at_root else []
            yield from self._pass_blocks(outgoing, self._only(root, recv))
            return
        given = _bytes(send) if at_root else None
        yield from self._when_ready(
            lambda: self.host.scatter(given, _bytes(recv), _in_bytes(counts, recv), root)
        )

    def _all_to_all(
        self, send: Array, recv: Array, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> Steps:
        if not self._gives("all_to_all"):
            yield from self._pass_blocks(cut(send, send_counts), cut(recv, recv_counts))
            return
        yield from self._when_ready(
            lambda: self.host.all_to_all(
                _bytes(send),
                _bytes(recv),
                _in_bytes(send_counts, send),
                _in_bytes(recv_counts, recv),
            )
        )

    def _broadcast(self, buffer: Array, root: int) -> Steps:
        if self._gives("broadcast"):
            yield from self._when_ready(lambda: self.host.broadcast(_bytes(buffer), root))
            return
        yield self.lane.reached()
        yield from broadcast_steps(self._links("sum", buffer.dtype), buffer, root)

    def _pass_blocks(self, outgoing: list[Array], incoming: list[Array]) -> Steps:
        """Send block d to rank d and receive block s from rank s; no block of its own by MPI."""
        if outgoing and incoming:
            mine, place = outgoing[self.rank], incoming[self.rank]
            self.lane.copy(place.data.ptr, mine.data.ptr, mine.nbytes)
        yield self.lane.reached()
        given = [*outgoing, *incoming]
        if given:
            yield from block_steps(self._links("sum", given[0].dtype), outgoing, incoming)

    def _only(self, root: int, block: Array) -> list[Array]:
        return [block if rank == root else block[:0] for rank in range(self.size)]

    def send_steps(self, buffer: Array, dest: int, tag: int) -> Steps:
        """Return the steps of a send of device memory."""
        yield from self._when_ready(lambda: self.host.isend(_bytes(buffer), dest, tag))

    def recv_steps(self, buffer: Array, source: int, tag: int) -> Steps:
        """Return the steps of a receive into device memory."""
        yield from self._when_ready(lambda: self.host.irecv(_bytes(buffer), source, tag))

    def _when_ready(self, start: Callable[[], Request]) -> Steps:
        yield self.lane.reached()
        yield start()


def _bytes(array: Array) -> Array:
    return array.view(np.uint8)


def _in_bytes(counts: Sequence[int], array: Array) -> list[int]:
    return [count * array.dtype.itemsize for count in counts]
