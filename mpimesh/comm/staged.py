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

from mpimesh.arrays.namespace import Array, DType, HostArray
from mpimesh.comm.base import Communicator
from mpimesh.comm.device_strategy import Collective, DeviceStrategy
from mpimesh.comm.engine import Steps
from mpimesh.comm.requests import Request

__all__ = ["STAGE_BYTES", "Staged"]

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
            for piece in _pieces(most, self._stage_bytes // blocks // dtype.itemsize):
                loads = [block[piece] for block in what.send_blocks()]
                stores = [block[piece] for block in what.recv_blocks()]
                yield _Round(loads, stores, partial(start, piece), in_place)

        yield from self._run(rounds())

    # -- messages, as bytes ------------------------------------------------------------------

    def send(self, buffer: Array, dest: int, tag: int) -> Steps:
        """Send bytes, in pieces that the receiver cuts alike."""
        start = lambda loaded, _: self.host.isend(loaded, dest, tag)  # noqa: E731
        yield from self._run(
            _Round([buffer[p]], [], start) for p in _pieces(buffer.size, self._stage_bytes)
        )

    def recv(self, buffer: Array, source: int, tag: int) -> Steps:
        """Receive a message of bytes that has the buffer's size."""
        start = lambda _, stored: self.host.irecv(stored, source, tag)  # noqa: E731
        yield from self._run(
            _Round([], [buffer[p]], start) for p in _pieces(buffer.size, self._stage_bytes)
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


def _pieces(size: int, step: int) -> list[slice]:
    return [slice(at, at + step) for at in range(0, size, max(1, step))]


def _pinned(nbytes: int) -> HostArray:
    """Return pinned bytes: a GPU copies to and from them beside other work.

    Allocating pinned memory takes a millisecond and stops the device; CuPy has a pool of it.
    """
    memory = sys.modules["cupy"].cuda.alloc_pinned_memory(max(1, nbytes))
    return np.frombuffer(memory, np.uint8, nbytes)
