"""The memory of gradients that are reduced together, and its reduction, planned once.

A bucket's reduction is a persistent collective on its flat memory: an all-reduce in place, or where
the ranks divide the bucket, a reduce-scatter. It is prepared with the bucket and started in every
cycle.

Of a divided bucket each rank gets the sum of one part, and gives the new values of it. The
parameters' values lie in flat memory like their gradients, in the same order, so that a part
of one is a part of the other, wherever parameters begin and end. A rank's part of the sums comes
into memory of its own, *not* into the bucket, which other ranks still read.

How much of a divided bucket a rank has follows from the stage of ZeRO (Rajbhandari et al. 2020):

====== ============================= ============================= =============================
stage  state of the optimizer        gradients                     values
====== ============================= ============================= =============================
1      its part                      all                           all
2      its part                      its part, all while they come all
3      its part                      its part, all while they come its part
====== ============================= ============================= =============================

From stage 2 on a bucket has memory only from when its last gradient is complete to when it is
reduced: gradients come into arrays of their own, and are packed then. At stage 3 on one node the
values lie in an array that its ranks have once, in memory that they give in turns: each rank
changes its own part, and reads those of the others where they are. Nothing is gathered. Over
several nodes, and on devices, a rank has its part only, and the others come layer by layer, see
:mod:`mpimesh.parallel.split_layers`; or with hybrid sharding each node has all values
once, and the new ones are gathered as at stage 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from mpimesh.arrays import Array, DType, ReduceOp, namespace
from mpimesh.arrays.memory import ArrayPool
from mpimesh.comm.requests import Condition
from mpimesh.core.call import PlanRecord
from mpimesh.errors import ModuleStateError
from mpimesh.nn import Parameter
from mpimesh.nn.parameter import ELSEWHERE, ZERO
from mpimesh.runtime import CollectiveTensor, DeviceMesh, ProcessGroup
from mpimesh.runtime.persistent import PersistentCollective
from mpimesh.runtime.traffic import Rule, all_reduced, uniform
from mpimesh.trace import Tracer

__all__ = [
    "STAGES",
    "Bucket",
    "BucketShard",
    "Reductions",
    "SharedValues",
    "flat_places",
    "inside",
    "shard_sizes",
    "share_frozen",
]

_GRAIN_BYTES = 64
_AWAY = (
    "the replicas divide its values, which are here only while its layer runs in a step of its "
    "model: call forward() of the model instead of the layer's, full_state_dict() and "
    "load_state_dict() for values, model.gathered() to have them all for a moment, or into_inner() "
    "of a DataParallel to take the layers out"
)
_ZEROS = bytes([ZERO])
STAGES = range(4)
"""How much replicas may divide; 0 is nothing."""

_MOST_PACKED = 2
"""Reductions under way of buckets that have memory for their reduction only."""


def shard_sizes(size: int, itemsize: int, ranks: int) -> tuple[int, ...]:
    """Return how many of `size` elements fall to each rank, the same on every rank.

    Parts begin on cache lines. They are equal, but the last ones may be short or empty.
    """
    grain = max(1, _GRAIN_BYTES // itemsize)
    each = -(-size // (ranks * grain)) * grain
    return tuple(min(each, max(0, size - rank * each)) for rank in range(ranks))


@dataclass(frozen=True, slots=True)
class SharedValues:
    """Values of parameters in an array that the ranks of a node have once.

    Attributes:
        parameters: The parameters, in the order of the array.
        memory: The array, flat.
        views: The values that the parameters have now; none if nothing was moved.
        part: The elements that this rank writes. Those of the ranks of a node are all.
        is_whole: Whether all ranks of the group have this array, not those of this node alone.
    """

    parameters: tuple[Parameter, ...]
    memory: Array
    views: list[Array]
    part: slice
    is_whole: bool


def share_values(
    parameters: Sequence[Parameter],
    group: ProcessGroup,
    part: slice,
    *,
    turn: int,
    label: str,
    only_whole: bool = False,
) -> SharedValues:
    """Move the values of parameters into an array that the ranks of a node have once. Collective.

    Args:
        parameters: Parameters of one dtype, which have the same values on all ranks.
        group: The ranks.
        part: The elements that this rank is to write, so that all together write all; where they
            do not have one array, one rank of each node writes all.
        turn: Which rank of a node gives the memory.
        label: Names the wait for all of them.
        only_whole: Move nothing unless all ranks of the group have the one array.
    """
    dtype = np.dtype(parameters[0].value().dtype)
    size = sum(parameter.size for parameter in parameters)
    values, sources = group._core.node_empty((size,), dtype, turn=turn)
    is_whole = len(set(sources)) == 1
    if only_whole and not is_whole:
        group._core.node_release(values)
        return SharedValues(tuple(parameters), values, [], part, is_whole)
    if not is_whole:
        part = slice(0, size if sources[group.rank or 0] == group.rank else 0)
    _copy(parameters, part, values[part])
    group.barrier(label=label)  # before it they are not all there
    return SharedValues(tuple(parameters), values, _shown(parameters, values), part, is_whole)


def share_frozen(parameters: Iterable[Parameter], group: ProcessGroup) -> list[SharedValues]:
    """Let the ranks of a node have the values of frozen parameters once: an array for each dtype.

    Collective.
    """
    kinds: dict[DType | None, list[Parameter]] = {}
    for parameter in parameters:
        if not parameter.requires_grad and type(parameter.data) is np.ndarray:
            kinds.setdefault(parameter.dtype, []).append(parameter)
    shared: list[SharedValues] = []
    for turn, frozen in enumerate(kinds.values()):
        sizes = shard_sizes(sum(one.size for one in frozen), 1, group.size)
        start = sum(sizes[: group.rank])
        part = slice(start, start + sizes[group.rank or 0])
        label = "values of frozen parameters"
        shared.append(share_values(frozen, group, part, turn=turn, label=label))
    return shared


def flat_places(parameters: Iterable[Parameter]) -> Iterator[tuple[Parameter, slice]]:
    """Yield each parameter with its elements in flat memory, where one comes after the other."""
    end = 0
    for parameter in parameters:
        begin, end = end, end + parameter.size
        yield parameter, slice(begin, end)


def inside(place: slice, part: slice) -> slice:
    """Return the elements of flat memory in `part` that are in `place`, counted from its start."""
    start, stop = (min(max(edge, place.start), place.stop) for edge in (part.start, part.stop))
    return slice(start - place.start, stop - place.start)


def _shown(parameters: Sequence[Parameter], flat: Array) -> list[Array]:
    """Let parameters have the values that lie in `flat` memory; return the views of it."""
    views: list[Array] = []
    for parameter, place in flat_places(parameters):
        parameter.data = flat[place].reshape(parameter.shape)
        views.append(parameter.data)
    return views


def _copy(parameters: Sequence[Parameter], part: slice, out: Array) -> None:
    """Write those of the values of parameters that lie in `part` of flat memory to `out`."""
    for parameter, place in flat_places(parameters):
        out[inside(part, place)] = parameter.value().reshape(-1)[inside(place, part)]


class BucketShard:
    """One rank's part of a bucket. Making it is collective over the group at stage 3.

    Args:
        parameters: The parameters of the bucket, whose values move into flat memory.
        grad_dtype: The dtype of their gradients.
        group: The ranks that divide it.
        mesh: Gives the memory.
        name: What the bucket is called.
        stage: How much of it each rank has.
        turn: Which rank of a node gives the memory of values that it has once.
        by_layer: Whether a rank may be left without the values of other nodes, or of devices.

    Attributes:
        stage: As given.
        parameters: The parameters.
        dtype: The dtype of their values.
        xp: The library of their values.
        values: The values of all parameters, flat; None if this rank has its part only.
        own: The values of this rank's part.
        is_whole: Whether all ranks have one array of values, so that none has to be sent.
        memory: The sums of this rank's part; new values go out from the same bytes: by then the
            sums are used up.
        sizes: The sizes of all parts.
        part: The slice of this rank.
        written: The elements that this rank writes, of the values that it sees: all of its own
            memory; of a node's the ranks of the node have different ones.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        grad_dtype: DType,
        group: ProcessGroup,
        mesh: DeviceMesh,
        name: str,
        *,
        stage: int,
        turn: int,
        by_layer: bool,
    ) -> None:
        self.parameters = tuple(parameters)
        first = parameters[0].value()
        self.xp, self.dtype = xp, dtype = namespace(first), np.dtype(first.dtype)
        size = sum(parameter.size for parameter in parameters)
        self.stage = stage
        self.sizes = shard_sizes(size, dtype.itemsize, group.size)
        start = sum(self.sizes[: group.rank])
        self.part = slice(start, start + self.sizes[group.rank or 0])
        mine = self.part.stop - start
        # Only what others read of this rank is in shared memory.
        self.memory = (
            mesh.shared_empty(mine, grad_dtype) if xp is np else xp.empty(mine, grad_dtype)
        )
        self.is_whole = False
        self.views: list[Array] = []
        self.values: Array | None = None
        self.written = slice(0, size)
        if stage == 3 and xp is np:
            shared = share_values(
                parameters,
                group,
                self.part,
                turn=turn,
                label=f"values of {name}",
                only_whole=by_layer,
            )
            self.views, self.is_whole = shared.views, shared.is_whole
            if self.views:
                self.values, self.written = shared.memory, shared.part
        elif not by_layer:
            self.values = xp.empty(size, dtype)
            _copy(parameters, slice(0, size), self.values)
            self.views = _shown(parameters, self.values)
        if self.values is None:
            self.written = self.part
            # Others read it, as they do the memory of sums.
            self.own = mesh.shared_empty(mine, dtype) if xp is np else xp.empty(mine, dtype)
            _copy(parameters, self.part, self.own)
            self.hide()
        else:
            self.own = self.values[self.part]
        # Values may be of a smaller dtype than gradients, never of a larger one.
        self._outgoing = self.memory.view(dtype)[:mine]
        self._gather = None
        if self.values is not None and not self.is_whole:
            self._gather = group.all_gather_init(
                self._outgoing, sizes=self.sizes, out=self.values, label=f"values of {name}"
            )

    def show(self, flat: Array) -> None:
        """Let the parameters have the values that lie in `flat` memory."""
        _shown(self.parameters, flat)

    def check_hidden(self) -> None:
        """Return if the parameters have no values here, as :meth:`hide` left them.

        Raises:
            ModuleStateError: If one was assigned values, which would be lost.
        """
        for parameter in self.parameters:
            if parameter.data is not None:
                raise ModuleStateError(
                    f"{parameter!r} has got values that would be lost, as the replicas divide "
                    "those that it had: set them by load_state_dict() of the model, or inside of "
                    "model.gathered(write=True)"
                )

    def keep(self) -> None:
        """Take this rank's part of the parameters' values, which are all here."""
        _copy(self.parameters, self.part, self.own)

    def hide(self) -> None:
        """Let the parameters have no values here, of which this rank keeps its part."""
        for parameter in self.parameters:
            parameter.put_away(_AWAY)

    def gather(self) -> CollectiveTensor | None:
        """Start to give this rank's new values to all, and to take theirs. Collective.

        None where there is nothing to send; a barrier shows that all are there.
        """
        if self._gather is None:
            return None
        self._outgoing[...] = self.own
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
        flat: The memory; None while it has none.
        parameters: Those whose gradients are views of it, in its order.
        group: The ranks over which it is reduced.
        name: What it is called in traces and labels.
        dtype: Of the gradients.
        size: How many elements they have.
        shard: This rank's part, if the ranks divide the bucket; else None.
        handle: The reduction under way; None if there is none.
        incomplete: How many of the gradients are not complete in this cycle.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        flat: Array,
        group: ProcessGroup,
        name: str,
        op: ReduceOp,
    ) -> None:
        self.parameters = tuple(parameters)
        self.flat: Array | None = flat
        self.dtype = np.dtype(flat.dtype)
        self.size = int(flat.size)
        self.group = group
        self.name = name
        self.incomplete = 0
        self.handle: CollectiveTensor | None = None
        self.shard: BucketShard | None = None
        self._op = op
        self._label = f"gradient {name}"
        self._start_s = 0.0
        self._marks = bytearray(len(self.parameters))
        self._views: list[Array] = []
        for number, (parameter, place) in enumerate(flat_places(self.parameters)):
            view = flat[place].reshape(parameter.shape)
            parameter.attach_grad(view, self._marks, number)
            self._views.append(view)
        # Another library looks after gradients of its own, too.
        self._foreign = [
            (parameter, view)
            for parameter, view in zip(self.parameters, self._views, strict=True)
            if type(parameter).zero_grad is not Parameter.zero_grad
        ]
        # Gives memory for one reduction; None while there is memory that stays.
        self._empty: Callable[[], Array] | None = None
        self._reduction: PersistentCollective | None = group.all_reduce_init(
            flat, op, out=flat, label=self._label
        )

    def divide(
        self, mesh: DeviceMesh, stage: int, pool: ArrayPool, turn: int, *, by_layer: bool
    ) -> None:
        """From now on give each rank the sums of its part only. By all ranks alike.

        Args:
            mesh: Gives memory.
            stage: How much of the bucket each rank has, 1 to 3. At 3 this is collective.
            pool: Gives the bucket's memory for a reduction, from stage 2 on.
            turn: Which rank of a node gives the memory of values that it has once.
            by_layer: Whether a rank may be left without the values of other nodes.
        """
        shard = self.shard = BucketShard(
            self.parameters,
            self.dtype,
            self.group,
            mesh,
            self.name,
            stage=stage,
            turn=turn,
            by_layer=by_layer and stage == 3 and not self._foreign,
        )
        if stage == 1:
            self._reduction = self.group.reduce_scatter_init(
                self.flat, self._op, sizes=shard.sizes, out=shard.memory, label=self._label
            )
            self.hide()
            return
        take = pool.take if shard.xp is np else shard.xp.empty
        self._empty = partial(take, (self.size,), self.dtype)
        self._views.clear()
        self.flat = self._reduction = None
        for parameter in self.parameters:
            parameter.detach_grad()

    def show(self) -> None:
        """Let the parameters' gradients be views of the memory, if it stays."""
        if self._empty is not None:
            return
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
        if self._empty is None and self._is_shown():
            for parameter, _ in self._foreign:
                parameter.zero_grad()
            self._marks[:] = _ZEROS * len(self._marks)
        else:
            for parameter in self.parameters:
                parameter.zero_grad()

    def reduce(self, tracer: Tracer) -> None:
        """Start the reduction. Collective over the group."""
        self._start_s = tracer.clock()
        if self._reduction is not None:
            self._write_zeros()
            self.handle = self._reduction.start()
        elif self.shard is not None and self._empty is not None:
            self.flat = self._empty()
            self._pack(self.flat)
            sizes, out = self.shard.sizes, self.shard.memory
            self.handle = self.group.reduce_scatter(
                self.flat, self._op, sizes=sizes, out=out, label=self._label
            )

    def received(self) -> tuple[int, int]:
        """Return the bytes and the messages that this rank receives in the reduction. Local."""
        shard = self.shard
        by: tuple[Rule, int] = (all_reduced, self.nbytes)
        if shard is not None:
            by = uniform, (shard.part.stop - shard.part.start) * int(self.dtype.itemsize)
        return self.group._core.received(PlanRecord(self.nbytes, by))

    def finish(self, tracer: Tracer) -> None:
        """Wait for the reduction, if it is under way."""
        if self.handle is None:
            return
        try:
            self.settle()
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

    def settle(self) -> None:
        """Take the sums of a reduction, which stays known as this cycle's, and let go of memory."""
        try:
            if self.handle is not None:
                self.handle.resolve()
        finally:
            if self._empty is not None:
                self.flat = None

    def _pack(self, flat: Array) -> None:
        """Move the gradients into flat memory, and let go of theirs."""
        for parameter, place in flat_places(self.parameters):
            gradient = parameter.grad
            flat[place] = 0 if gradient is None else gradient.reshape(-1)
            parameter.grad = None

    def _is_shown(self) -> bool:
        """Tell whether all gradients are views of the memory."""
        return ELSEWHERE not in self._marks and ELSEWHERE | ZERO not in self._marks

    def _write_zeros(self) -> None:
        """Write the zeros of the gradients to which nothing was added, and show them elsewhere."""
        marks = self._marks
        if self.flat is not None and marks.count(ZERO) == len(marks):
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
        return self.size * int(self.dtype.itemsize)


class Reductions:
    """The reductions of one cycle, started strictly in their order, the same on every rank.

    Args:
        buckets: What is reduced, in order, each over its group.
        tracer: Records the time of each reduction.

    Attributes:
        buckets: What is reduced, in order.
        started: How many reductions this rank has started in this cycle.
        check_abort: Called while a rank waits in the middle of a cycle; raises if it is to be left.
    """

    def __init__(self, buckets: Sequence[Bucket], tracer: Tracer) -> None:
        self.buckets = tuple(buckets)
        self.started = 0
        self.check_abort: Callable[[], None] | None = None
        self._moving = 0  # the first started bucket that is not known to be done
        self._tracer = tracer

    def start_complete(self) -> None:
        """Start what is complete, up to the first bucket that is not."""
        while self.started < len(self.buckets) and not self.buckets[self.started].incomplete:
            self._start_next()

    def start_all(self) -> None:
        """Start all that are left: every rank does, whatever became of its cycle."""
        self.check_abort = None
        while self.started < len(self.buckets):
            self._start_next()

    def move_along(self) -> None:
        """Ask the oldest reduction under way whether it is done: asking is what moves it."""
        if self._moving < self.started and self._is_done(self.buckets[self._moving]):
            self._moving += 1

    def finish(self) -> None:
        """Wait for all that are started, and be ready for the next cycle."""
        for bucket in self.buckets[: self.started]:
            bucket.finish(self._tracer)
        self.started = self._moving = 0

    def _start_next(self) -> None:
        bucket = self.buckets[self.started]
        if bucket.flat is None:  # it has memory for its reduction only
            while self.started - self._moving >= _MOST_PACKED:
                self._wait_for(self.buckets[self._moving])
                self._moving += 1
        bucket.reduce(self._tracer)
        self.started += 1

    def _is_done(self, bucket: Bucket) -> bool:
        """Tell whether a started reduction is done; then its memory is free."""
        if bucket.handle is None:
            return True
        if not bucket.handle.done():
            return False
        bucket.settle()
        return True

    def _wait_for(self, bucket: Bucket) -> None:
        """Wait for a reduction in the middle of a cycle, or raise if the cycle is to be left.

        All ranks of the group start it, at the latest at the end of their cycle. In a pipeline one
        may stand there until others have done more. They do not wait for this rank in a circle:
        what a rank does before a reduction is the same on all replicas, so the one that is furthest
        behind waits for nobody.
        """

        def is_done() -> bool:
            if self.check_abort is not None:
                self.check_abort()
            return self._is_done(bucket)

        bucket.group._core.wait_for(Condition(is_done), what=f"gradient {bucket.name}")
