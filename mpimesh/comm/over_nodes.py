"""All-reduce over several nodes: inside a node in shared memory, between nodes by MPI.

The ranks with one number on their nodes are a *rail*, and there are as many as the smallest node
has ranks. Each of the first ranks of a node sums one part of the array over its node, then over its
rail, and hands it to the others of its node. So what crosses the network does so once for each
other node, side by side on the rails, while the ranks of a node already sum what comes next.

Sums run over the ranks of a node in their order, and over the nodes as MPI's reduction of so many
ranks and elements does: the same in every run, and on all ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from mpimesh.arrays.namespace import HostArray
from mpimesh.comm.engine import Steps
from mpimesh.comm.mpi import MPICommunicator
from mpimesh.comm.requests import Request, chunk_slices
from mpimesh.core.node import Window

__all__ = ["OverNodes"]

_ROUND_BYTES = 1 << 20
"""Of what a rank sends on its rail at a time."""

_ROUNDS_AHEAD = 2
"""Rounds that are on their way between the nodes while the ranks go on with the next."""


class OverNodes:
    """The way of one communicator's all-reduces over its nodes.

    Args:
        window: The ranks of this node.
        nodes: The ranks of each node, in order.
        comm: All ranks.
        limit: Most elements in one call of MPI; 0 for what this MPI can do.

    Attributes:
        rail: The ranks with this one's number on their nodes; None if a node has none.
    """

    def __init__(
        self, window: Window, nodes: Sequence[Sequence[int]], comm: MPI.Intracomm, limit: int
    ) -> None:
        self._window = window
        self._rails = min(map(len, nodes))
        self._small = bool(limit)
        node = next(number for number, ranks in enumerate(nodes) if comm.rank in ranks)
        on_rail = window.rank < self._rails
        part: Any = comm.Split(window.rank if on_rail else MPI.UNDEFINED, node)
        self.rail = MPICommunicator(part, limit=limit) if on_rail else None

    def all_reduce(self, send: HostArray | None, recv: HostArray, op: str) -> Steps:
        """Reduce over all ranks into `recv` on each, in steps."""
        source = recv if send is None else send
        round_bytes = _ROUND_BYTES if not self._small else recv.itemsize * 16
        size = max(1, round_bytes // recv.itemsize) * self._rails
        on_rails: deque[tuple[slice, HostArray, Request | None]] = deque()
        for chunk in chunk_slices(recv.size, size):
            counts = self._counts(chunk.stop - chunk.start)
            begin = chunk.start + sum(counts[: self._window.rank])
            own = recv[begin : begin + counts[self._window.rank]]
            yield self._window.reduce_scatter(source[chunk], own, counts, op).start()
            summed = self.rail.all_reduce(None, own, op) if self.rail and own.size else None
            on_rails.append((chunk, own, summed))
            if len(on_rails) > _ROUNDS_AHEAD:
                yield from self._hand_out(recv, *on_rails.popleft())
        while on_rails:
            yield from self._hand_out(recv, *on_rails.popleft())

    def _hand_out(
        self, recv: HostArray, chunk: slice, own: HostArray, summed: Request | None
    ) -> Steps:
        if summed is not None:
            yield summed
        counts = self._counts(chunk.stop - chunk.start)
        yield self._window.all_gather(own, recv[chunk], counts).start()

    def _counts(self, size: int) -> list[int]:
        """Return how many elements of a chunk each rank of the node sums: none if on no rail."""
        each, more = divmod(size, self._rails)
        counts = [each + (place < more) for place in range(self._rails)]
        return counts + [0] * (self._window.size - self._rails)
