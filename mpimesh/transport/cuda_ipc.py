"""Ranks of one node that read each other's device memory in place.

An operation meets twice. First every rank tells where its arrays lie, after recording an event
that its stream reaches when they are ready: whoever knows the place lets its own stream wait for
that event, on the device. Then every rank reads what it needs, records a second event, and says
so: the streams wait for all of these before anybody may write what others read. The events are
CUDA's interprocess events; a later operation records them again only after all ranks have let
their streams wait for them, because it starts after the second meeting.

All-reduce, n bytes and N ranks:

| | reads | when |
|---|---|---|
| one-shot: every rank reads and adds all | (N - 1) n | N = 2; N <= 4, 512 KiB; N <= 8, 256 KiB |
| two-shot: every rank adds its slice, then reads the others' | 2 n (N - 1) / N | above |

Ranks are added in their order by whoever adds, so the result is the same to the last bit on all.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from mpimesh.arrays.types import Array, DType
from mpimesh.transport.base import Communicator
from mpimesh.transport.cuda_handles import PLACE, Imports, describe
from mpimesh.transport.device_mover import DeviceMover
from mpimesh.transport.engine import Engine, Steps
from mpimesh.transport.ipc_events import PeerEvents

__all__ = ["CudaIpc", "one_shot"]

Read = tuple[Array, int, int]
"""Where to, from which rank, from how many bytes into its array."""


def one_shot(nbytes: int, size: int) -> bool:
    """Tell whether every rank reads the whole of all others."""
    if size <= 2:
        return True
    return (size <= 4 and nbytes < 512 << 10) or (size <= 8 and nbytes < 256 << 10)


class CudaIpc(DeviceMover):
    """Reads the memory of the other ranks of a node.

    Args:
        host: As for :class:`DeviceMover`.
        engine: As for :class:`DeviceMover`.
        chain: As for :class:`DeviceMover`.
        events: Of all ranks.
        process: What tells this process from all others of the node.
    """

    name = "cuda_ipc"

    def __init__(
        self,
        host: Communicator,
        engine: Engine,
        chain: Hashable,
        events: PeerEvents,
        *,
        process: int,
    ) -> None:
        super().__init__(host, engine, chain)
        self._events = events
        self._process = process
        self._imports = Imports(process=process)
        self._raw: dict[int, int] = {}
        self._rooms: dict[int, int] = {}

    def free(self) -> None:
        """Close what was opened, and free the memory for arrays that others cannot open."""
        self._imports.close()
        self._events.close()
        runtime = self.lane.cuda.runtime
        while self._raw:
            runtime.free(self._raw.popitem()[0])
        self._rooms.clear()

    # -- reductions ----------------------------------------------------------------------

    def _all_reduce(self, send: Array, recv: Array, op: str) -> Steps:
        if one_shot(recv.nbytes, self.size):
            whole = slice(0, recv.size)
            yield from self._reduced(send, recv, whole, op, takes=True)
        else:
            yield from self._two_shot(send, recv, op)

    def _reduce(self, send: Array, recv: Array | None, op: str, root: int) -> Steps:
        mine = self.rank == root
        out = recv if recv is not None and mine else send
        yield from self._reduced(send, out, slice(0, send.size), op, takes=mine)

    def _reduce_scatter(self, send: Array, recv: Array, counts: Sequence[int], op: str) -> Steps:
        block = _blocks(counts)[self.rank]
        yield from self._reduced(send, recv, block, op, takes=True)

    def _reduced(self, send: Array, out: Array, part: slice, op: str, *, takes: bool) -> Steps:
        """Reduce one part of all ranks' `send` into `out`, on ranks that take it."""
        places = yield from self._meet(send)
        sources = [at[0] for at in places]
        total = None
        if takes and part.stop > part.start:
            # Others may read the memory of `out` as their input: then it is written only after.
            apart = self._apart(out, sources[self.rank], send.nbytes)
            total = self._total(sources, send.dtype, part, op, out if apart else None)
        yield from self._leave()
        if total is not None and total is not out:
            out[...] = total

    def _two_shot(self, send: Array, recv: Array, op: str) -> Steps:
        parts = _blocks(_even(recv.size, self.size))
        mine = parts[self.rank]
        # Others read my slice of the result there. Nobody but me reads this slice of my input.
        shown = self._shown(recv, 1, fill=False)
        places = yield from self._meet(send, shown)
        if mine.stop > mine.start:
            sources = [at[0] for at in places]
            target = shown[mine]
            apart = self._apart(target, sources[self.rank], send.nbytes)
            total = self._total(sources, send.dtype, mine, op, target if apart else None)
            if total is not target:
                target[...] = total
        yield from self._leave()
        self._read(
            [(recv[part], rank, part.start * recv.itemsize) for rank, part in enumerate(parts)],
            [at[1] for at in places],
        )
        yield from self._leave()

    def _total(
        self, addresses: list[int], dtype: DType, part: slice, op: str, out: Array | None
    ) -> Array:
        """Combine one part of all ranks' arrays, in the order of ranks; in `out` if there is one.

        Returns:
            The combination, in new memory without `out`; a single rank's own part as it lies.
        """
        cupy = self.lane.cupy
        function = {
            "sum": cupy.add,
            "prod": cupy.multiply,
            "min": cupy.minimum,
            "max": cupy.maximum,
        }[op]
        first, *others = [self._seen(address, part, dtype) for address in addresses]
        if not others:
            return first
        total = cupy.empty_like(first) if out is None else out
        function(first, others[0], out=total)
        for other in others[1:]:
            function(total, other, out=total)
        return total

    @staticmethod
    def _apart(out: Array, address: int, nbytes: int) -> bool:
        """Tell whether `out` shares no byte with the `nbytes` at `address`."""
        start: int = out.data.ptr
        return start + out.nbytes <= address or start >= address + nbytes

    # -- movements -----------------------------------------------------------------------

    def _all_gather(self, send: Array, recv: Array, counts: Sequence[int]) -> Steps:
        parts = [recv[block] for block in _blocks(counts)]
        reads = [(part, rank, 0) for rank, part in enumerate(parts)]
        yield from self._move(send, lambda: reads)

    def _gather(self, send: Array, recv: Array | None, counts: Sequence[int], root: int) -> Steps:
        reads: list[Read] = []
        if recv is not None and self.rank == root:
            reads = [(recv[block], rank, 0) for rank, block in enumerate(_blocks(counts))]
        yield from self._move(send, lambda: reads)

    def _scatter(self, send: Array | None, recv: Array, counts: Sequence[int], root: int) -> Steps:
        given = recv[:0] if send is None or self.rank != root else send
        start = _blocks(counts)[self.rank].start * recv.itemsize
        yield from self._move(given, lambda: [(recv, root, start)])

    def _all_to_all(
        self, send: Array, recv: Array, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> Steps:
        # Where my block begins in the array of each other rank, only that rank knows.
        mine = np.array([block.start for block in _blocks(send_counts)], np.int64)
        starts = np.empty(self.size, np.int64)
        ones = [1] * self.size
        yield self.host.all_to_all(mine, starts, ones, ones)
        parts = [recv[block] for block in _blocks(recv_counts)]
        reads = [(part, rank, int(starts[rank]) * recv.itemsize) for rank, part in enumerate(parts)]
        yield from self._move(send, lambda: reads)

    def _broadcast(self, buffer: Array, root: int) -> Steps:
        given = buffer if self.rank == root else buffer[:0]
        reads = [] if self.rank == root else [(buffer, root, 0)]
        yield from self._move(given, lambda: reads)

    def _move(self, send: Array, reads: Callable[[], list[Read]]) -> Steps:
        places = yield from self._meet(send)
        self._read(reads(), [at[0] for at in places])
        yield from self._leave()

    def _read(self, reads: list[Read], addresses: list[int]) -> None:
        for target, rank, offset in reads:
            source = addresses[rank] + offset
            if target.nbytes and target.data.ptr != source:
                self.lane.copy(target.data.ptr, source, target.nbytes)

    # -- meetings ------------------------------------------------------------------------

    def _meet(self, *arrays: Array) -> Steps:
        """Show `arrays` to all ranks; the steps' value is where this rank sees those of each."""
        shown = [self._shown(array, slot) for slot, array in enumerate(arrays)]
        mine = np.array([self._place(array) for array in shown], PLACE)
        everyone = np.empty(self.size * mine.nbytes, np.uint8)
        self._events.record("ready", self.lane)
        yield self.host.all_gather(mine.view(np.uint8), everyone, [mine.nbytes] * self.size)
        self._events.wait("ready", self.lane)
        places = everyone.view(PLACE).reshape(self.size, len(arrays))
        return [
            [array.data.ptr for array in shown]
            if rank == self.rank
            else [self._imports.open(place) for place in row]
            for rank, row in enumerate(places)
        ]

    def _leave(self) -> Steps:
        """Tell all ranks that this one has read; from here on everybody may write."""
        self._events.record("read", self.lane)
        yield self.host.barrier()
        self._events.wait("read", self.lane)
        if self._imports.crowded:
            yield self.lane.reached()
            self._imports.trim()

    def _place(self, array: Array) -> Any:
        return describe(array, process=self._process, own=array.data.ptr in self._raw)

    def _shown(self, array: Array, slot: int, *, fill: bool = True) -> Array:
        """Return `array`, or a copy of it in this rank's own memory, which others can open."""
        if self._place(array)["nbytes"] >= 0:
            return array
        copy = self._view(self._room(array.nbytes, slot), array.size, array.dtype)
        if fill:
            copy[...] = array
        return copy

    def _room(self, nbytes: int, slot: int) -> int:
        """Return memory outside of any pool; there is one for each array of an operation."""
        ptr = self._rooms.get(slot)
        if ptr is None or self._raw[ptr] < nbytes:
            # What is outgrown stays until the end: others may have it open.
            ptr = int(self.lane.cuda.runtime.malloc(1 << (nbytes - 1).bit_length()))
            self._raw[ptr] = 1 << (nbytes - 1).bit_length()
            self._rooms[slot] = ptr
        return ptr

    def _seen(self, address: int, part: slice, dtype: DType) -> Array:
        itemsize = np.dtype(dtype).itemsize
        return self._view(address + part.start * itemsize, part.stop - part.start, dtype)

    def _view(self, address: int, size: int, dtype: DType) -> Array:
        nbytes = size * np.dtype(dtype).itemsize
        cuda = self.lane.cuda
        memory = cuda.UnownedMemory(address, nbytes, self, self.lane.device.id)
        return self.lane.cupy.ndarray((size,), dtype, cuda.MemoryPointer(memory, 0))

    # -- whether it works ------------------------------------------------------------------

    @classmethod
    def find(
        cls,
        host: Communicator,
        engine: Engine,
        chain: Hashable,
        *,
        process: int | None = None,
    ) -> Steps:
        """Collective: make it if all ranks can; the steps' value is (mover or None, reason)."""
        from mpimesh.transport.ipc_trial import try_out

        return (yield from try_out(cls, host, engine, chain, process))


def _blocks(counts: Sequence[int]) -> list[slice]:
    ends = list(accumulate(counts))
    return [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]


def _even(size: int, parts: int) -> list[int]:
    return [size // parts + (part < size % parts) for part in range(parts)]
