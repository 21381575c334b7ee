"""A bucket divided among its ranks: each gets the sum of one part, and gives the new values of it.

The parameters' values lie in flat memory like their gradients, in the same order, so that a part
of one is a part of the other, wherever parameters begin and end. A rank's part of the sums comes
into memory of its own, *not* into the bucket, which other ranks still read. The new values go out
from the same memory: by then the sums are used up.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpimesh.arrays import Array, ReduceOp, namespace
from mpimesh.nn import Parameter
from mpimesh.runtime import CollectiveTensor, DeviceMesh, ProcessGroup

__all__ = ["Shard", "shard_sizes"]

_GRAIN_BYTES = 64


def shard_sizes(size: int, itemsize: int, ranks: int) -> tuple[int, ...]:
    """Return how many of `size` elements fall to each rank, the same on every rank.

    Parts begin on cache lines. They are equal, but the last ones may be short or empty.
    """
    grain = max(1, _GRAIN_BYTES // itemsize)
    each = -(-size // (ranks * grain)) * grain
    return tuple(min(each, max(0, size - rank * each)) for rank in range(ranks))


class Shard:
    """One rank's part of a bucket. Making it is local, to be done by all ranks of the group.

    Args:
        parameters: The parameters of the bucket, whose values move into flat memory.
        flat: The bucket.
        group: The ranks that divide it.
        mesh: Gives the memory.

    Attributes:
        values: The values of all parameters, flat.
        memory: The sums of this rank's part; the new values go out from the same bytes.
        sizes: The sizes of all parts.
        part: Where this rank's lies.
    """

    __slots__ = ("_group", "_outgoing", "memory", "part", "sizes", "values", "views")

    def __init__(
        self, parameters: Sequence[Parameter], flat: Array, group: ProcessGroup, mesh: DeviceMesh
    ) -> None:
        self._group = group
        dtype = np.dtype(parameters[0].value().dtype)
        self.sizes = shard_sizes(flat.size, dtype.itemsize, group.size)
        start = sum(self.sizes[: group.rank])
        self.part = slice(start, start + self.sizes[group.rank or 0])
        xp = namespace(flat)
        # What others read of this rank, and only that, lies where they can.
        mine = self.part.stop - start
        self.memory = (
            mesh.shared_empty(mine, flat.dtype) if xp is np else xp.empty(mine, flat.dtype)
        )
        # Values may be of a smaller dtype than gradients, never of a larger one.
        self._outgoing = self.memory.view(dtype)[:mine]
        self.values = xp.empty(flat.size, dtype)
        self.views: list[Array] = []
        end = 0
        for parameter in parameters:
            begin, end = end, end + parameter.size
            view = self.values[begin:end].reshape(parameter.shape)
            view[...] = parameter.value()
            parameter.data = view
            self.views.append(view)

    def reduce(self, flat: Array, op: ReduceOp, label: str) -> CollectiveTensor:
        """Start the sums of this rank's part into `memory`. Collective over the group."""
        return self._group.reduce_scatter(flat, op, sizes=self.sizes, out=self.memory, label=label)

    def gather(self, label: str) -> CollectiveTensor:
        """Start to give this rank's new values to all, and to take theirs. Collective."""
        self._outgoing[...] = self.values[self.part]
        return self._group.all_gather(
            self._outgoing, sizes=self.sizes, out=self.values, label=label
        )
