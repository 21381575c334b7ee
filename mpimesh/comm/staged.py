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

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from mpimesh.arrays.types import Array, DType, HostArray
from mpimesh.comm.base import Communicator
from mpimesh.comm.device_strategy import BlockMove, DeviceStrategy, block_slices
from mpimesh.comm.engine import Steps
from mpimesh.comm.requests import Request

__all__ = ["STAGE_BYTES", "PinnedPool", "Staged"]

STAGE_BYTES = 4 << 20
"""Largest buffer of one round: large enough for the bus, small enough to overlap."""

_BYTE = np.dtype(np.uint8)
_SMALLEST_BYTES = 4096


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


class Staged(DeviceStrategy):
    """Moves everything through pinned host memory.

    Args:
        host: Moves the host memory.
        stage_bytes: Size of one of the two buffers.
    """

    name = "staged"

    def __init__(self, host: Communicator, *, stage_bytes: int = STAGE_BYTES) -> None:
        super().__init__(host)
        self._stage_bytes = stage_bytes
        self._pool = PinnedPool()

    def cannot(self, operation: str, dtype: DType | None = None, op: str = "") -> str | None:
        """Return None: it does all."""
        return None

    # -- reductions --------------------------------------------------------------------------

    def reduce(self, send: Array, recv: Array | None, op: str, root: int | None) -> Steps:
        """Reduce over all ranks into `recv` on `root`; on each if None."""

        def rounds() -> Iterator[_Round]:
            for piece in self._pieces(send):
                part = send[piece]
                # To all ranks it goes in place.
                at = 0 if root is None else _aligned(part.nbytes)

                def move(buffer: HostArray, part: Array = part, at: int = at) -> Request:
                    data = _typed(buffer, 0, part)
                    if root is None:
                        return self.host.all_reduce(None, data, op)
                    out = None if recv is None else _typed(buffer, at, part)
                    return self.host.reduce(data, out, op, root)

                stores = [] if recv is None else [(recv[piece], at)]
                yield _Round(at + part.nbytes, move, [(part, 0)], stores)

        yield from self._run(rounds())

    def reduce_scatter(self, send: Array, recv: Array, counts: Sequence[int], op: str) -> Steps:
        """Reduce `send`; rank r gets block r, ``counts[r]`` elements long."""
        share = self._share(send.dtype.itemsize)
        starts = [block.start for block in block_slices(counts)]

        def rounds() -> Iterator[_Round]:
            for number in range(_ceil_div(max(counts), share)):
                at, sizes = number * share, _piece_sizes(counts, share, number)
                parts = [slice(s + at, s + at + n) for s, n in zip(starts, sizes, strict=True)]
                loads, end = _in_a_row([send[part] for part in parts])
                out = recv[at : at + share]
                start = _aligned(end)

                def move(
                    buffer: HostArray,
                    sizes: list[int] = sizes,
                    out: Array = out,
                    start: int = start,
                ) -> Request:
                    summands = _host_view(buffer, np.dtype(send.dtype), 0, sum(sizes))
                    return self.host.reduce_scatter(summands, _typed(buffer, start, out), sizes, op)

                yield _Round(start + out.nbytes, move, loads, [(out, start)])

        yield from self._run(rounds())

    # -- movements, as bytes -----------------------------------------------------------------

    def move_blocks(self, move: BlockMove) -> Steps:
        """Move blocks of bytes: a piece of every block in each round."""
        share = self._share(1)
        count = _ceil_div(max([*move.send_counts, *move.recv_counts]), share)
        if move.operation == "all_to_all":
            # A rank knows the sizes of its own blocks only: how many rounds there are is agreed on.
            most = np.array([count], np.int64)
            yield self.host.all_reduce(None, most, "max")
            count = int(most[0])

        def rounds() -> Iterator[_Round]:
            for number in range(count):
                piece = slice(number * share, (number + 1) * share)
                loads, send_end = _in_a_row([block[piece] for block in move.send_blocks()])
                at = _aligned(send_end)
                stores, end = _in_a_row([block[piece] for block in move.recv_blocks()], at)

                def start(
                    buffer: HostArray,
                    number: int = number,
                    send_end: int = send_end,
                    at: int = at,
                    end: int = end,
                ) -> Request:
                    return move.start(
                        self.host,
                        None if move.send is None else _host_view(buffer, _BYTE, 0, send_end),
                        None if move.recv is None else _host_view(buffer, _BYTE, at, end - at),
                        _piece_sizes(move.send_counts, share, number),
                        _piece_sizes(move.recv_counts, share, number),
                    )

                yield _Round(end, start, loads, stores)

        yield from self._run(rounds())

    def broadcast(self, buffer: Array, root: int) -> Steps:
        """Copy the bytes of `root` into those of every rank."""
        yield from self._in_pieces(
            buffer, lambda part: self.host.broadcast(part, root), comes=self.rank != root
        )

    def send(self, buffer: Array, dest: int, tag: int) -> Steps:
        """Send bytes, in pieces that the receiver cuts alike."""
        yield from self._in_pieces(
            buffer, lambda part: self.host.isend(part, dest, tag), comes=False
        )

    def recv(self, buffer: Array, source: int, tag: int) -> Steps:
        """Receive a message of bytes that has the buffer's size."""
        yield from self._in_pieces(
            buffer, lambda part: self.host.irecv(part, source, tag), comes=True
        )

    def _in_pieces(
        self, data: Array, move: Callable[[HostArray], Request], *, comes: bool
    ) -> Steps:
        """Move all bytes, piece by piece: out of the array, or into it if they `come`."""

        def rounds() -> Iterator[_Round]:
            for piece in self._pieces(data):
                part = data[piece]

                def move_part(stage: HostArray, size: int = part.size) -> Request:
                    return move(stage[:size])

                whole = [(part, 0)]
                yield _Round(part.size, move_part, [] if comes else whole, whole if comes else [])

        yield from self._run(rounds())

    # -- the two buffers ---------------------------------------------------------------------

    def _run(self, rounds: Iterator[_Round]) -> Steps:
        """Load, move and store round after round, each load beside the move of the one before."""
        buffers: list[HostArray] = []
        before: tuple[_Round, HostArray, Request] | None = None
        try:
            for number, current in enumerate(rounds):
                place = number % 2
                if place == len(buffers):
                    buffers.append(self._pool.take(current.nbytes))
                elif buffers[place].size < current.nbytes:
                    self._pool.give(buffers[place], self.stream.mark())
                    buffers[place] = self._pool.take(current.nbytes)
                buffer = buffers[place]
                for array, at in current.loads:
                    self.stream.copy(buffer.ctypes.data + at, array.data.ptr, array.nbytes)
                loaded = self.stream.reached()
                if before is not None:
                    yield from self._move(*before)
                before = (current, buffer, loaded)
            if before is not None:
                yield from self._move(*before)
        finally:
            end = self.stream.mark()
            for buffer in buffers:
                self._pool.give(buffer, end)

    def _move(self, current: _Round, buffer: HostArray, loaded: Request) -> Steps:
        yield loaded
        yield current.move(buffer)
        for array, at in current.stores:
            self.stream.copy(array.data.ptr, buffer.ctypes.data + at, array.nbytes)

    def _share(self, itemsize: int) -> int:
        """Return how many elements of every rank's block fit into one round."""
        return max(1, self._stage_bytes // (self.size + 1) // itemsize)

    def _pieces(self, data: Array) -> Iterator[slice]:
        step = max(1, self._stage_bytes // data.dtype.itemsize)
        return (slice(at, min(at + step, data.size)) for at in range(0, data.size, step))


def _piece_sizes(counts: Sequence[int], share: int, number: int) -> list[int]:
    """Return of every block the size of its piece `number`."""
    return [max(0, min(count - number * share, share)) for count in counts]


def _in_a_row(arrays: list[Array], at: int = 0) -> tuple[list[tuple[Array, int]], int]:
    """Give each array its place in a buffer, one after the other; return where they end, too."""
    ends = list(accumulate((array.nbytes for array in arrays), initial=at))
    return list(zip(arrays, ends[:-1], strict=True)), ends[-1]


def _typed(buffer: HostArray, at: int, like: Array) -> HostArray:
    return _host_view(buffer, np.dtype(like.dtype), at, like.size)


def _host_view(buffer: HostArray, dtype: DType, at: int, size: int) -> HostArray:
    if size == 0:
        # NumPy's empty views point to the beginning of the buffer, and MPI refuses the same place
        # for input and result.
        return np.empty(0, dtype)
    return buffer[at : at + size * dtype.itemsize].view(dtype)


def _aligned(nbytes: int) -> int:
    return _ceil_div(nbytes, 64) * 64


def _ceil_div(size: int, step: int) -> int:
    return -(-size // step)


class PinnedPool:
    """Pinned buffers of powers of two: a GPU copies to and from them beside other work.

    Allocating pinned memory takes a millisecond and stops the device, so it stays allocated. A
    buffer that is given back may still be read by a copy under way; it is given out again when the
    event is done that was recorded after that copy.

    Args:
        limit_bytes: Most memory that stays while it is not in use.
    """

    def __init__(self, *, limit_bytes: int = 256 << 20) -> None:
        self._limit_bytes = limit_bytes
        self._free: list[tuple[HostArray, Any]] = []

    def take(self, nbytes: int) -> HostArray:
        """Return bytes that no copy uses any more; at least `nbytes` of them."""
        size = max(_SMALLEST_BYTES, 1 << (nbytes - 1).bit_length()) if nbytes else _SMALLEST_BYTES
        for place, (buffer, event) in enumerate(self._free):
            if buffer.size == size and event.done:
                del self._free[place]
                return buffer
        memory = sys.modules["cupy"].cuda.alloc_pinned_memory(size)
        return np.frombuffer(memory, np.uint8, size)

    def give(self, buffer: HostArray, event: Any) -> None:
        """Take `buffer` back; copies that use it come before `event`."""
        if buffer.size + sum(other.size for other, _ in self._free) <= self._limit_bytes:
            self._free.append((buffer, event))
        elif not event.done:
            # Over the limit, but a copy may still use it: it goes when another comes after it.
            self._free = [(other, e) for other, e in self._free if not e.done]
            self._free.append((buffer, event))
