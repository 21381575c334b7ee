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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from mpimesh.arrays.types import Array, DType, HostArray
from mpimesh.comm.base import Communicator
from mpimesh.comm.device_strategy import BlockMove, DeviceStrategy, cut
from mpimesh.comm.engine import Steps
from mpimesh.comm.requests import Request

__all__ = ["STAGE_BYTES", "PinnedPool", "Staged"]

STAGE_BYTES = 4 << 20
"""Largest buffer of one round: large enough for the bus, small enough to overlap."""

_SMALLEST_BYTES = 4096
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
        self._pool = PinnedPool()

    @classmethod
    def find(cls, host: Communicator) -> Steps:
        """Make it; the steps' value is (strategy, reason)."""
        yield from ()
        return cls(host), ""

    def cannot(self, operation: str, dtype: DType | None = None, op: str = "") -> str | None:
        """Return None: it does all."""
        return None

    # -- reductions --------------------------------------------------------------------------

    def reduce(self, send: Array, recv: Array | None, op: str, root: int | None) -> Steps:
        """Reduce over all ranks into `recv` on `root`; on each if None."""
        dtype = send.dtype

        def start(loaded: HostArray, stored: HostArray) -> Request:
            data = loaded.view(dtype)
            if root is None:
                return self.host.all_reduce(None, data, op)
            return self.host.reduce(data, None if recv is None else stored.view(dtype), op, root)

        def rounds() -> Iterator[_Round]:
            for piece in self._pieces(send):
                stores = [] if recv is None else [recv[piece]]
                yield _Round([send[piece]], stores, start, in_place=root is None)

        yield from self._run(rounds())

    def reduce_scatter(self, send: Array, recv: Array, counts: Sequence[int], op: str) -> Steps:
        """Reduce `send`; rank r gets block r, ``counts[r]`` elements long."""
        dtype, blocks = send.dtype, cut(send, counts)

        def start(sizes: list[int], loaded: HostArray, stored: HostArray) -> Request:
            return self.host.reduce_scatter(loaded.view(dtype), stored.view(dtype), sizes, op)

        def rounds() -> Iterator[_Round]:
            for piece in _pieces_of(max(counts), self._share(dtype.itemsize)):
                parts = [block[piece] for block in blocks]
                yield _Round(parts, [recv[piece]], partial(start, [part.size for part in parts]))

        yield from self._run(rounds())

    # -- movements, as bytes -----------------------------------------------------------------

    def move(self, move: BlockMove) -> Steps:
        """Move blocks of bytes: a piece of every block in each round."""
        # The array of a broadcast has a buffer for itself.
        share = self._stage_bytes if move.operation == "broadcast" else self._share(1)
        most = max([*move.send_counts, *move.recv_counts])
        if move.operation == "all_to_all":
            # A rank knows the sizes of its own blocks only: how many rounds there are is agreed on.
            sizes = np.array([most], np.int64)
            yield self.host.all_reduce(None, sizes, "max")
            most = int(sizes[0])

        def start(piece: slice, loaded: HostArray, stored: HostArray) -> Request:
            send = None if move.send is None else loaded
            recv = None if move.recv is None else stored
            send_counts = _sizes_in(piece, move.send_counts)
            return move.start(
                self.host, send, recv, send_counts, _sizes_in(piece, move.recv_counts)
            )

        def rounds() -> Iterator[_Round]:
            for piece in _pieces_of(most, share):
                loads = [block[piece] for block in move.send_blocks()]
                stores = [block[piece] for block in move.recv_blocks()]
                yield _Round(loads, stores, partial(start, piece))

        yield from self._run(rounds())

    def send(self, buffer: Array, dest: int, tag: int) -> Steps:
        """Send bytes, in pieces that the receiver cuts alike."""
        start = lambda loaded, _: self.host.isend(loaded, dest, tag)  # noqa: E731
        yield from self._run(_Round([buffer[p]], [], start) for p in self._pieces(buffer))

    def recv(self, buffer: Array, source: int, tag: int) -> Steps:
        """Receive a message of bytes that has the buffer's size."""
        start = lambda _, stored: self.host.irecv(stored, source, tag)  # noqa: E731
        yield from self._run(_Round([], [buffer[p]], start) for p in self._pieces(buffer))

    # -- the two buffers ---------------------------------------------------------------------

    def _run(self, rounds: Iterable[_Round]) -> Steps:
        """Load, move and store round after round, each load beside the move of the one before."""
        buffers: list[HostArray] = []
        before: tuple[_Round, HostArray, Request] | None = None
        try:
            for number, current in enumerate(rounds):
                buffer = self._buffer(buffers, number % 2, current.places()[1].stop)
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
        end = self.stream.mark()
        for buffer in buffers:
            self._pool.give(buffer, end)

    def _buffer(self, buffers: list[HostArray], place: int, nbytes: int) -> HostArray:
        """Return one of the two buffers, with room for so many bytes."""
        if place == len(buffers):
            buffers.append(self._pool.take(nbytes))
        elif buffers[place].size < nbytes:
            self._pool.give(buffers[place], self.stream.mark())
            buffers[place] = self._pool.take(nbytes)
        return buffers[place]

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

    def _share(self, itemsize: int) -> int:
        """Return how many elements of every rank's block fit into one round."""
        return max(1, self._stage_bytes // (self.size + 1) // itemsize)

    def _pieces(self, data: Array) -> list[slice]:
        return _pieces_of(data.size, max(1, self._stage_bytes // data.dtype.itemsize))


def _pieces_of(size: int, step: int) -> list[slice]:
    return [slice(at, at + step) for at in range(0, size, step)]


def _sizes_in(piece: slice, counts: Sequence[int]) -> list[int]:
    """Return how much of every block is in its piece."""
    return [max(0, min(piece.stop, count) - piece.start) for count in counts]


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
