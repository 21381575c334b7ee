"""The memory of gradients that are reduced together, and its reduction, planned once.

A bucket's reduction is a persistent collective on its flat memory: an all-reduce in place, or where
the ranks divide the bucket, a reduce-scatter. It is prepared with the bucket and started in every
cycle.

Of a divided bucket each rank gets the sum of one part, and gives the new values of it. The
parameters' values lie in flat memory like their gradients, in the same order, so that a part
of one is a part of the other, wherever parameters begin and end. A rank's part of the sums comes
into memory of its own, *not* into the bucket, which other ranks still read. The new values go out
from the same memory: by then the sums are used up.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpimesh.arrays import Array, ReduceOp, namespace
from mpimesh.nn import Parameter
from mpimesh.nn.parameter import ELSEWHERE, ZERO
from mpimesh.runtime import CollectiveTensor, DeviceMesh, ProcessGroup
from mpimesh.trace import Tracer

__all__ = ["Bucket", "Reductions", "Shard", "shard_sizes"]

_GRAIN_BYTES = 64
_ZEROS = bytes([ZERO])


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
        name: What the bucket is called.

    Attributes:
        values: The values of all parameters, flat.
        memory: The sums of this rank's part; the new values go out from the same bytes.
        sizes: The sizes of all parts.
        part: Where this rank's lies.
    """

    __slots__ = ("_gather", "_outgoing", "memory", "part", "sizes", "values", "views")

    def __init__(
        self,
        parameters: Sequence[Parameter],
        flat: Array,
        group: ProcessGroup,
        mesh: DeviceMesh,
        name: str,
    ) -> None:
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
        self._gather = group.all_gather_init(
            self._outgoing, sizes=self.sizes, out=self.values, label=f"values of {name}"
        )

    def gather(self) -> CollectiveTensor:
        """Start to give this rank's new values to all, and to take theirs. Collective."""
        self._outgoing[...] = self.values[self.part]
        return self._gather.start()


class Bucket:
    """Flat gradient memory of some parameters, reduced as one.

    Args:
        parameters: Those whose gradients are to be views of the memory, in its order.
        flat: The memory.
        group: The ranks over which it is reduced.
        name: What it is called in traces and labels, alike on all of them.
        op: Sum or mean.

    Attributes:
        flat: The memory.
        parameters: Those whose gradients are views of it, in its order.
        group: The ranks over which it is reduced.
        name: What it is called in traces and labels.
        shard: This rank's part, if the ranks divide the bucket; else None.
        handle: The reduction under way; None if there is none.
        incomplete: How many of the gradients are not complete in this cycle.
    """

    __slots__ = (
        "_foreign",
        "_label",
        "_marks",
        "_op",
        "_reduction",
        "_start_s",
        "_views",
        "flat",
        "group",
        "handle",
        "incomplete",
        "name",
        "parameters",
        "shard",
    )

    def __init__(
        self,
        parameters: Sequence[Parameter],
        flat: Array,
        group: ProcessGroup,
        name: str,
        op: ReduceOp,
    ) -> None:
        self.parameters = tuple(parameters)
        self.flat = flat
        self.group = group
        self.name = name
        self.incomplete = 0
        self.handle: CollectiveTensor | None = None
        self.shard: Shard | None = None
        self._op = op
        self._label = f"gradient {name}"
        self._start_s = 0.0
        self._marks = bytearray(len(self.parameters))
        self._views: list[Array] = []
        start = 0
        for place, parameter in enumerate(self.parameters):
            end = start + parameter.size
            view = flat[start:end].reshape(parameter.shape)
            parameter.attach_grad(view, self._marks, place)
            self._views.append(view)
            start = end
        # Another library looks after gradients of its own, too.
        self._foreign = [
            (parameter, view)
            for parameter, view in zip(self.parameters, self._views, strict=True)
            if type(parameter).zero_grad is not Parameter.zero_grad
        ]
        self._reduction = group.all_reduce_init(flat, op, out=flat, label=self._label)

    def divide(self, mesh: DeviceMesh) -> None:
        """From now on give each rank the sums of its part only. Local, by all ranks alike."""
        shard = self.shard = Shard(self.parameters, self.flat, self.group, mesh, self.name)
        self._reduction = self.group.reduce_scatter_init(
            self.flat, self._op, sizes=shard.sizes, out=shard.memory, label=self._label
        )
        self.hide()

    def show(self) -> None:
        """Let the parameters' gradients be views of the memory."""
        for parameter, view in self._foreign:
            parameter.grad = view
        if not self._is_shown():
            for parameter, view in zip(self.parameters, self._views, strict=True):
                parameter.grad = view
            self._marks[:] = bytes(len(self._marks))

    def hide(self) -> None:
        """Let the parameters have no gradient: what is in the memory is no sum."""
        for parameter in self.parameters:
            parameter.grad = None

    def clear(self) -> None:
        """Let the gradients be 0; those that are not shown are forgotten."""
        if self._is_shown():
            for parameter, _ in self._foreign:
                parameter.zero_grad()
            self._marks[:] = _ZEROS * len(self._marks)
        else:
            for parameter in self.parameters:
                parameter.zero_grad()

    def reduce(self, tracer: Tracer) -> None:
        """Start the reduction. Collective over the group."""
        self._start_s = tracer.clock()
        self._write_zeros()
        self.handle = self._reduction.start()

    def finish(self, tracer: Tracer) -> None:
        """Wait for the reduction, if it is under way."""
        if self.handle is None:
            return
        try:
            self.handle.resolve()
        finally:
            self.handle = None
        if tracer.enabled:
            kind = "all_reduce" if self.shard is None else "reduce_scatter"
            tracer.record(
                f"{kind} {self.name}",
                "collective",
                start_s=self._start_s,
                duration_s=tracer.clock() - self._start_s,
                nbytes=self.nbytes,
            )

    def _is_shown(self) -> bool:
        """Tell whether all gradients are views of the memory."""
        return ELSEWHERE not in self._marks and ELSEWHERE | ZERO not in self._marks

    def _write_zeros(self) -> None:
        """Write the zeros of the gradients to which nothing was added, and show them elsewhere."""
        marks = self._marks
        if marks.count(ZERO) == len(marks):
            self.flat[...] = 0
            marks[:] = bytes(len(marks))
        elif ZERO in marks or ELSEWHERE | ZERO in marks:
            for parameter in self.parameters:
                parameter.write_zeros()
        for parameter, _ in self._foreign:
            parameter.grad  # noqa: B018 - looking at it ties the other library's to it again

    @property
    def nbytes(self) -> int:
        """Bytes of the memory."""
        return int(self.flat.nbytes)


class Reductions:
    """The reductions of one cycle, started strictly in their order, the same on every rank.

    Args:
        buckets: What is reduced, in order, each over its group.
        tracer: Records the time of each reduction.

    Attributes:
        buckets: What is reduced, in order.
        started: How many reductions this rank has started in this cycle.
    """

    def __init__(self, buckets: Sequence[Bucket], tracer: Tracer) -> None:
        self.buckets = tuple(buckets)
        self.started = 0
        self._moving = 0  # the first started bucket that is not known to be done
        self._tracer = tracer

    def start_complete(self) -> None:
        """Start what is complete, up to the first bucket that is not."""
        while self.started < len(self.buckets) and not self.buckets[self.started].incomplete:
            self._start_next()

    def start_all(self) -> None:
        """Start all that are left."""
        while self.started < len(self.buckets):
            self._start_next()

    def move_along(self) -> None:
        """Ask the oldest reduction under way whether it is done: asking is what moves it."""
        if self._moving < self.started:
            handle = self.buckets[self._moving].handle
            if handle is None or handle.done():
                self._moving += 1

    def finish(self) -> None:
        """Wait for all that are started, and be ready for the next cycle."""
        for bucket in self.buckets[: self.started]:
            bucket.finish(self._tracer)
        self.started = self._moving = 0

    def _start_next(self) -> None:
        self.buckets[self.started].reduce(self._tracer)
        self.started += 1
