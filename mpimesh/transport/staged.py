"""Device memory moved through pinned host memory: the way that works everywhere.

An operation goes in rounds, each of which fits into one pinned buffer. The device fills the buffer
of the next round while the host communicator moves the one before, and takes results back while
the one after is moved:

    device   load 0 | load 1 | store 0, load 2 | store 1, load 3 | ...
    host             | move 0 | move 1          | move 2          | ...

All copies are on one stream, so a round's load starts when the stores of the round before last,
which used the same buffer, are done. The host communicator sees ordinary host arrays: what it can
do (shared memory inside a node, several nodes, any size), this can do.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from mpimesh.arrays.types import Array, DType, HostArray
from mpimesh.transport.base import Communicator, Request
from mpimesh.transport.device_mover import COLLECTIVES, DeviceMover
from mpimesh.transport.engine import Engine, Steps
from mpimesh.transport.pinned import PinnedPool

__all__ = ["STAGE_BYTES", "Staged"]

_BYTE = np.dtype(np.uint8)

STAGE_BYTES = 4 << 20
"""Largest buffer of one round: large enough for the bus, small enough to overlap."""


@dataclass(slots=True)
class _Round:
    """One buffer full.

    Attributes:
        loads: What the device copies into the buffer: (array, offset in bytes).
        move: Starts the host operation on the buffer.
        stores: What the device copies out of it afterwards.
    """

    nbytes: int
    move: Callable[[HostArray], Request]
    loads: list[tuple[Array, int]] = field(default_factory=list)
    stores: list[tuple[Array, int]] = field(default_factory=list)


class Staged(DeviceMover):
    """Moves everything through pinned host memory.

    Args:
        host: Moves the host memory.
        engine: As for :class:`DeviceMover`.
        chain: As for :class:`DeviceMover`.
        stage_bytes: Size of one of the two buffers.
    """

    name = "staged"
    operations = frozenset((*COLLECTIVES, "messages"))

    def __init__(
        self,
        host: Communicator,
        engine: Engine,
        chain: Hashable,
        *,
        stage_bytes: int = STAGE_BYTES,
    ) -> None:
        super().__init__(host, engine, chain)
        self._stage_bytes = stage_bytes
        self._pool = PinnedPool()

    # -- reductions --------------------------------------------------------------------------

    def _all_reduce(self, send: Array, recv: Array, op: str) -> Steps:
        def rounds() -> Iterator[_Round]:
            for piece in self._pieces(send.size, send.dtype.itemsize):
                part, out = send[piece], recv[piece]

                def move(buffer: HostArray, part: Array = part) -> Request:
                    return self.host.all_reduce(None, _typed(buffer, part), op)

                yield _Round(part.nbytes, move, [(part, 0)], [(out, 0)])

        yield from self._run(rounds())

    def _reduce(self, send: Array, recv: Array | None, op: str, root: int) -> Steps:
        def rounds() -> Iterator[_Round]:
            for piece in self._pieces(send.size, send.dtype.itemsize):
                part = send[piece]
                nbytes = part.nbytes
                at = _aligned(nbytes)

                def move(buffer: HostArray, part: Array = part, at: int = at) -> Request:
                    out = _typed(buffer[at:], part) if self.rank == root else None
                    return self.host.reduce(_typed(buffer, part), out, op, root)

                stores = [(recv[piece], at)] if recv is not None and self.rank == root else []
                yield _Round(at + nbytes, move, [(part, 0)], stores)

        yield from self._run(rounds())

    def _reduce_scatter(self, send: Array, recv: Array, counts: Sequence[int], op: str) -> Steps:
        dtype = np.dtype(send.dtype)

        def rounds() -> Iterator[_Round]:
            for parts in self._block_pieces(counts, dtype.itemsize):
                sizes = [part.stop - part.start for part in parts]
                loads, at = _in_a_row([send[part] for part in parts])
                mine = sizes[self.rank]
                own = _starts(counts)[self.rank]
                place = parts[self.rank]
                out = recv[place.start - own : place.stop - own]
                start = _aligned(at)

                def move(
                    buffer: HostArray,
                    sizes: list[int] = sizes,
                    start: int = start,
                    mine: int = mine,
                ) -> Request:
                    given = _cut(buffer, dtype, 0, sum(sizes))
                    return self.host.reduce_scatter(
                        given, _cut(buffer, dtype, start, mine), sizes, op
                    )

                yield _Round(start + out.nbytes, move, loads, [(out, start)])

        yield from self._run(rounds())

    # -- movements, as bytes -----------------------------------------------------------------

    def _all_gather(self, send: Array, recv: Array, counts: Sequence[int]) -> Steps:
        yield from self._gathering(send, recv, counts, None)

    def _gather(self, send: Array, recv: Array | None, counts: Sequence[int], root: int) -> Steps:
        yield from self._gathering(send, recv if self.rank == root else None, counts, root)

    def _gathering(
        self, send: Array, recv: Array | None, counts: Sequence[int], root: int | None
    ) -> Steps:
        itemsize = send.dtype.itemsize
        given, out = _bytes(send), None if recv is None else _bytes(recv)
        counts = [count * itemsize for count in counts]
        own = _starts(counts)[self.rank]

        def rounds() -> Iterator[_Round]:
            for parts in self._block_pieces(counts, 1):
                sizes = [part.stop - part.start for part in parts]
                piece = parts[self.rank]
                at = _aligned(sizes[self.rank])
                stores: list[tuple[Array, int]] = []
                total = 0
                if out is not None:
                    stores, total = _in_a_row([out[part] for part in parts], at)

                def move(buffer: HostArray, sizes: list[int] = sizes, at: int = at) -> Request:
                    mine = _cut(buffer, _BYTE, 0, sizes[self.rank])
                    if root is None:
                        whole = _cut(buffer, _BYTE, at, sum(sizes))
                        return self.host.all_gather(mine, whole, sizes)
                    out = _cut(buffer, _BYTE, at, sum(sizes)) if self.rank == root else None
                    return self.host.gather(mine, out, sizes, root)

                loads = [(given[piece.start - own : piece.stop - own], 0)]
                yield _Round(max(at, total), move, loads, stores)

        yield from self._run(rounds())

    def _scatter(self, send: Array | None, recv: Array, counts: Sequence[int], root: int) -> Steps:
        itemsize = recv.dtype.itemsize
        given = _bytes(send) if send is not None and self.rank == root else None
        out = _bytes(recv)
        counts = [count * itemsize for count in counts]
        own = _starts(counts)[self.rank]

        def rounds() -> Iterator[_Round]:
            for parts in self._block_pieces(counts, 1):
                sizes = [part.stop - part.start for part in parts]
                piece = parts[self.rank]
                at = _aligned(sizes[self.rank])
                loads: list[tuple[Array, int]] = []
                total = 0
                if given is not None:
                    loads, total = _in_a_row([given[part] for part in parts], at)

                def move(buffer: HostArray, sizes: list[int] = sizes, at: int = at) -> Request:
                    whole = _cut(buffer, _BYTE, at, sum(sizes)) if given is not None else None
                    mine = _cut(buffer, _BYTE, 0, sizes[self.rank])
                    return self.host.scatter(whole, mine, sizes, root)

                stores = [(out[piece.start - own : piece.stop - own], 0)]
                yield _Round(max(at, total), move, loads, stores)

        yield from self._run(rounds())

    def _all_to_all(
        self, send: Array, recv: Array, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> Steps:
        itemsize = send.dtype.itemsize
        given, out = _bytes(send), _bytes(recv)
        outgoing = [count * itemsize for count in send_counts]
        incoming = [count * itemsize for count in recv_counts]
        share = self._share(1)
        # A rank knows the sizes of its own blocks only: how many rounds there are is agreed on.
        most = np.array([-(-max([0, *outgoing, *incoming]) // share)], np.int64)
        yield self.host.all_reduce(None, most, "max")

        def rounds() -> Iterator[_Round]:
            for number in range(int(most[0])):
                sends = _nth_pieces(outgoing, share, number)
                receives = _nth_pieces(incoming, share, number)
                there = [part.stop - part.start for part in sends]
                back = [part.stop - part.start for part in receives]
                loads, middle = _in_a_row([given[part] for part in sends])
                stores, end = _in_a_row([out[part] for part in receives], middle)

                def move(
                    buffer: HostArray,
                    there: list[int] = there,
                    back: list[int] = back,
                    middle: int = middle,
                    end: int = end,
                ) -> Request:
                    mine = _cut(buffer, _BYTE, 0, middle)
                    theirs = _cut(buffer, _BYTE, middle, end - middle)
                    return self.host.all_to_all(mine, theirs, there, back)

                yield _Round(end, move, loads, stores)

        yield from self._run(rounds())

    def _broadcast(self, buffer: Array, root: int) -> Steps:
        yield from self._in_pieces(
            buffer, lambda part: self.host.broadcast(part, root), comes=self.rank != root
        )

    def send_steps(self, buffer: Array, dest: int, tag: int) -> Steps:
        """Return the steps of a send, in pieces that the receiver cuts alike."""
        yield from self._in_pieces(
            buffer, lambda part: self.host.isend(part, dest, tag), comes=False
        )

    def recv_steps(self, buffer: Array, source: int, tag: int) -> Steps:
        """Return the steps of a receive of a message that has the buffer's size."""
        yield from self._in_pieces(
            buffer, lambda part: self.host.irecv(part, source, tag), comes=True
        )

    def _in_pieces(
        self, buffer: Array, move: Callable[[HostArray], Request], *, comes: bool
    ) -> Steps:
        """Move a whole buffer, piece by piece: out of it, or into it if it `comes`."""
        data = _bytes(buffer)

        def rounds() -> Iterator[_Round]:
            for piece in self._pieces(data.size, 1):
                part = data[piece]

                def move_part(stage: HostArray, size: int = part.size) -> Request:
                    return move(stage[:size])

                whole = [(part, 0)]
                if comes:
                    yield _Round(part.size, move_part, stores=whole)
                else:
                    yield _Round(part.size, move_part, loads=whole)

        yield from self._run(rounds())

    # -- the two buffers ---------------------------------------------------------------------

    def _run(self, rounds: Iterator[_Round]) -> Steps:
        """Load, move and store round after round, each load beside the move of the one before."""
        buffers: list[HostArray] = []
        before: tuple[_Round, HostArray, Request] | None = None
        try:
            for number, one in enumerate(rounds):
                place = number % 2
                if place == len(buffers):
                    buffers.append(self._pool.take(one.nbytes))
                elif buffers[place].size < one.nbytes:
                    self._pool.give(buffers[place], self.lane.mark())
                    buffers[place] = self._pool.take(one.nbytes)
                buffer = buffers[place]
                for array, at in one.loads:
                    self.lane.copy(buffer.ctypes.data + at, array.data.ptr, array.nbytes)
                loaded = self.lane.reached()
                if before is not None:
                    yield from self._move(*before)
                before = (one, buffer, loaded)
            if before is not None:
                yield from self._move(*before)
        finally:
            end = self.lane.mark()
            for buffer in buffers:
                self._pool.give(buffer, end)

    def _move(self, one: _Round, buffer: HostArray, loaded: Request) -> Steps:
        yield loaded
        yield one.move(buffer)
        for array, at in one.stores:
            self.lane.copy(array.data.ptr, buffer.ctypes.data + at, array.nbytes)

    def _share(self, itemsize: int) -> int:
        """Return how many elements of every rank's block fit into one round."""
        return max(1, self._stage_bytes // (self.size + 1) // itemsize)

    def _pieces(self, size: int, itemsize: int) -> Iterator[slice]:
        step = max(1, self._stage_bytes // itemsize)
        return (slice(at, min(at + step, size)) for at in range(0, size, step))

    def _block_pieces(self, counts: Sequence[int], itemsize: int) -> Iterator[list[slice]]:
        share = self._share(itemsize)
        for number in range(-(-max([0, *counts]) // share)):
            yield _nth_pieces(counts, share, number)


def _nth_pieces(counts: Sequence[int], share: int, number: int) -> list[slice]:
    """Return of every block its piece `number`, as places in the row of all blocks."""
    at = number * share
    return [
        slice(start + min(at, count), start + min(at + share, count))
        for start, count in zip(_starts(counts), counts, strict=True)
    ]


def _starts(counts: Sequence[int]) -> list[int]:
    return [0, *accumulate(counts)][: len(counts)]


def _in_a_row(arrays: list[Array], at: int = 0) -> tuple[list[tuple[Array, int]], int]:
    """Give each array its place in a buffer, one after the other; return where they end, too."""
    ends = list(accumulate((array.nbytes for array in arrays), initial=at))
    return list(zip(arrays, ends[:-1], strict=True)), ends[-1]


def _bytes(array: Array) -> Array:
    return array.view(np.uint8)


def _typed(buffer: HostArray, like: Array) -> HostArray:
    return _cut(buffer, np.dtype(like.dtype), 0, like.size)


def _cut(buffer: HostArray, dtype: DType, at: int, size: int) -> HostArray:
    if size == 0:
        # NumPy's empty views point to the beginning of the buffer, and MPI refuses the same place
        # for input and result.
        return np.empty(0, dtype)
    return buffer[at : at + size * dtype.itemsize].view(dtype)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 64) * 64
