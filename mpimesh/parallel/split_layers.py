"""Layers whose parameters lie on several ranks: split over a group, or divided among replicas.

A model with split layers is trained by :class:`~mpimesh.DataParallel` or
:class:`~mpimesh.PipelineParallel` like any other: the ranks along the group's dim of the mesh do
the same actions in the same order, each on its part of the layers. What differs stands here: some
gradients are summed over ranks of the group, too, once a step, parameters are counted once in
norms, and states are put together and cut.

At stage 3 of ZeRO a rank has its part of each bucket's values. Where not all ranks see one memory,
as over several nodes, the values of a layer are gathered before it runs, and let go when the next
one runs; meanwhile those of the next one come. So a rank has its part, and the buckets of two
layers. It is the same forward and backward. All replicas run the same layers in the same order,
which needs the same number of microbatches: a replica that has fewer rows runs some of none. So
their gathers meet.

Such layers wait for other ranks in the middle of a forward or backward. If one of them fails there,
it never comes to the collective that the others are in, and a started collective cannot be taken
back. So a step watches: while a layer waits, it looks for the signal of a failed rank, and what was
started is noted. After a failure the ranks compare their notes, and those that are behind do what
they have missed, with zeros; then nothing of the step is left on the group, and the next one works.
All ranks run the same layers in the same order, so a rank is never further ahead than the few
collectives that it has not resolved.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from mpimesh.arrays import Array, HostArray, namespace, to_numpy
from mpimesh.arrays.memory import ArrayPool, aligned_bytes
from mpimesh.arrays.namespace import is_cupy
from mpimesh.comm.requests import Condition
from mpimesh.errors import ModuleError, ModuleStateError, MpimeshError
from mpimesh.layout.boxes import extent, view, volume
from mpimesh.nn import CrossEntropy, Parameter, Sequential
from mpimesh.nn.containers import is_plain
from mpimesh.nn.parameter import check_shape
from mpimesh.nn.protocol import FeaturePart
from mpimesh.nn.split import watch
from mpimesh.nn.tensor_parallel import split_groups
from mpimesh.parallel.bucket import Bucket, BucketShard
from mpimesh.parallel.replicas import (
    Line,
    agree_values,
    digest,
    group_named,
    groups_of_lines,
    lines_along,
    lines_of_holders,
)
from mpimesh.parallel.stage import PipelineStage, check_alike
from mpimesh.runtime import CollectiveTensor, DeviceMesh, ProcessGroup
from mpimesh.runtime.agreement import agree
from mpimesh.runtime.call import Call

__all__ = [
    "LayerValues",
    "TensorModel",
    "local_part",
    "sum_shared_gradients",
    "tensor_groups",
    "who_holds",
    "whole_array",
]

_MOST = 16  # more collectives than a split layer ever has under way at once
_OUTSIDE = (
    "the replicas divide its values, and gather them in the steps of its model only: call "
    "forward() of the model instead of the layer's, or take the layers out by into_inner()"
)


# -- a watch over the ranks of a step --------------------------------------------------------------


class _Call(NamedTuple):
    """A started collective, so that a rank that missed it can take part."""

    name: str
    shape: Sequence[int]
    dtype: str
    on_device: bool
    options: dict[str, Any]

    def start(self, group: ProcessGroup, x: Array, **out: Array) -> CollectiveTensor:
        handle: CollectiveTensor = getattr(group, self.name)(x, **self.options, **out)
        return handle

    def start_missed(self, group: ProcessGroup) -> CollectiveTensor:
        """Take part in what another rank of the group has started, with zeros."""
        shape = list(self.shape)
        if self.name == "all_gather":
            shape[self.options["axis"]] = self.options["sizes"][group.rank or 0]
        xp = sys.modules["cupy"] if self.on_device else np
        return self.start(group, xp.zeros(shape, self.dtype))


class _Watch:
    """A step's record of the collectives of its layers on this rank, which it starts.

    Args:
        group: The ranks that share the layers, for their collectives in this step.
        check_abort: Raises if the step is to be left.
        most: Most collectives that are under way at once.
    """

    def __init__(
        self, group: ProcessGroup, check_abort: Callable[[], None], *, most: int = _MOST
    ) -> None:
        self.group = group
        self._check_abort = check_abort
        self._count = 0
        self._recent: deque[_Call] = deque(maxlen=most)
        self._open: dict[int, CollectiveTensor] = {}

    def start(self, name: str, x: Array, *, out: Array | None = None, **options: Any) -> _Watched:
        """Start a collective, as :meth:`mpimesh.nn.split.SplitRanks.start` does. Collective."""
        call = _Call(name, tuple(x.shape), str(x.dtype), is_cupy(x), options)
        handle = call.start(self.group, x, **({} if out is None else {"out": out}))
        self._count += 1
        self._recent.append(call)
        self._open[id(handle)] = handle
        return _Watched(handle, self)

    def resolve(self, handle: CollectiveTensor) -> Array:
        """Wait for `handle` and return its result, or leave the step.

        Raises:
            Exception: What ends the step, if another rank has failed in it.
        """

        def is_done() -> bool:
            if handle.done():
                return True
            self._check_abort()
            return False

        if not handle.done():
            self.group._core.wait_for(Condition(is_done), what=handle)
        value = handle.resolve()
        self._open.pop(id(handle), None)
        return value

    def notes(self) -> list[Any]:
        """Return what other ranks are to know after a failure: how many, and the last of them."""
        return [self._count, [list(call) for call in self._recent]]

    def finish(self, everyone: Sequence[list[Any]]) -> None:
        """Do what this rank has missed, and wait for all that is under way. Collective.

        Args:
            everyone: The `notes` of all ranks of the group.
        """
        most, calls = max(everyone, key=lambda notes: notes[0])
        missed = [] if most == self._count else calls[self._count - most :]
        handles = list(self._open.values())
        handles += [_Call(*call).start_missed(self.group) for call in missed]
        for handle in handles:
            try:
                handle.resolve()
            except MpimeshError:
                continue  # the ranks were at odds, which the step tells
        self._open.clear()


class _Watched:
    """The result of a collective of a layer that may be under way."""

    __slots__ = ("_handle", "_value", "_watch")

    def __init__(self, handle: CollectiveTensor, watch: _Watch) -> None:
        self._handle: CollectiveTensor | None = handle
        self._value: Array = None
        self._watch = watch

    def resolve(self) -> Array:
        """Wait for the result and return it; see :meth:`_Watch.resolve`."""
        if self._handle is not None:
            self._value = self._watch.resolve(self._handle)
            self._handle = None
        return self._value


class _Watching:
    """An owner of layers that wait for other ranks within a step."""

    _watch: _Watch | None = None

    def settle(self) -> None:
        """Wait for what is under way and was not needed in the end. Collective."""

    def notes(self) -> list[Any]:
        """Return what the other ranks are to know after a failure. Local."""
        return [] if self._watch is None else self._watch.notes()

    def finish(self, notes: Mapping[int, list[Any]]) -> None:
        """Leave nothing of a failed step on the group. Collective over it.

        Args:
            notes: The `notes` of all ranks, by their numbers in the mesh.
        """
        if self._watch is not None:
            self._watch.finish([notes[rank] for rank in self._watch.group.ranks])


# -- layers split over a group ---------------------------------------------------------------------


def tensor_groups(*layers: object) -> list[ProcessGroup]:
    """Return the groups of a mesh over which `layers`, and those under them, are split. Local."""
    return [group for group in split_groups(*layers) if isinstance(group, ProcessGroup)]


def sum_shared_gradients(parameters: Iterable[Parameter], group: ProcessGroup) -> None:
    """Sum the gradients of which several ranks of a group have parts: norms', biases', and such.

    Collective over `group`. Training by :class:`~mpimesh.DataParallel` or
    :class:`~mpimesh.PipelineParallel` does this once a step; a loop of one's own calls it
    after backward, once, on all parameters of the model.

    Args:
        parameters: Those of the model, in the same order on every rank.
        group: The ranks over which its layers are split.

    Cost:
        One all-reduce for each dtype, if anything is shared.
    """
    pieces: dict[Any, list[tuple[Array, int]]] = {}
    sizes: dict[Any, int] = {}
    for one in parameters:
        if not one.requires_grad or not one.is_shared:
            continue
        if one.grad is None:
            one.grad = namespace(one.value()).zeros_like(one.data)
        # What other ranks hold has its place, too, and gets zeros from here.
        for box in one.blocks:
            start = sizes.get(one.dtype, 0)
            sizes[one.dtype] = start + volume(box)
            if box == one.box:
                pieces.setdefault(one.dtype, []).append((one.grad, start))
    for dtype, size in sizes.items():
        mine = pieces[dtype]
        flat = namespace(mine[0][0]).zeros(size, dtype)
        for grad, start in mine:
            flat[start : start + grad.size] = grad.reshape(-1)
        summed = group.all_reduce(flat, out=flat, label="shared gradients").resolve()
        for grad, start in mine:
            grad[...] = summed[start : start + grad.size].reshape(grad.shape)


class TensorModel(_Watching):
    """The layers of a model that are split over a group of ranks, as one of these sees them.

    Args:
        stages: All stages of the model.

    Attributes:
        group: The ranks; None if no layer is split.

    Raises:
        ModuleError: If layers are split over different groups, or one needs features of which this
            rank has a part.
    """

    def __init__(self, stages: Sequence[PipelineStage]) -> None:
        groups = tensor_groups(*stages)
        if len(groups) > 1:
            names = sorted(group.name for group in groups)
            raise ModuleError(f"the layers of one model are split over one group, got {names}")
        self.group: ProcessGroup | None = groups[0] if groups else None
        self._apart = self.group
        self._shared: dict[tuple[int, ...], ProcessGroup] = {}
        part: FeaturePart | None = None
        for stage in stages:
            part = stage.set_part(part)
        self._output = part

    @property
    def is_split(self) -> bool:
        """Whether layers are split over several ranks."""
        return self.group is not None and self.group.size > 1

    def make_groups(
        self,
        mesh: DeviceMesh,
        scope: ProcessGroup,
        data: ProcessGroup,
        parameters: Sequence[Parameter],
        tied: Iterable[Parameter],
    ) -> None:
        """Make the groups that the model needs beside those of the mesh. Collective over the mesh.

        The layers' collectives have an order of their own: after a failure some are under way when
        all ranks meet, and where the layers are split over all ranks of `scope`, what they meet in
        would never begin. And there is a group for each set of ranks that have the same part of
        a parameter, with their replicas.

        Args:
            mesh: The mesh.
            scope: The ranks that step together.
            data: The replicas of this rank's stages.
            parameters: Those of the whole model, alike on all ranks.
            tied: Of these, what several stages hold.

        Raises:
            ModuleError: If a parameter is tied and shared.
        """
        group = self.group
        if group is None or not self.is_split:
            return
        if group.communicator is scope.communicator:
            name = f"layers of {group.name}"
            self._apart = group_named(mesh, name, list(group.ranks), apart=True)
        shared = [one for one in parameters if one.is_shared]
        both = {id(one) for one in tied} & {id(one) for one in shared}
        if both:
            names = sorted({one.name for one in shared if id(one) in both})
            raise ModuleError(
                f"parameters {names} stand in several stages, and several ranks of group "
                f"{group.name!r} have the same part of them: their gradients cannot be summed both "
                "ways; give each stage a parameter of its own"
            )
        if shared:
            sets = dict.fromkeys(
                ranks for one in shared for ranks in one.blocks.values() if len(ranks) > 1
            )
            lines = lines_of_holders(scope, group, data, sets, what="shared parameters")
            self._shared = groups_of_lines(mesh, lines, kind="shared by")

    def group_of(self, parameter: Parameter) -> ProcessGroup | None:
        """Return all ranks that have this rank's part of a parameter; None if it is the only one.

        Their replicas are in it, too.
        """
        return self._shared.get(parameter.holders)

    def check_loss(self, loss: object) -> None:
        """See whether the loss fits the layers. Local.

        Raises:
            ModuleError: If it is split over another group, or needs all logits where each rank has
                a part of them.
        """
        if self._output is not None and type(loss) is CrossEntropy:
            raise ModuleError(
                f"the last layer gives this rank {self._output}, and {loss!r} needs all classes: "
                f"take VocabParallelCrossEntropy({self._output.extent}, group=...), or "
                "gather_output=True for that layer"
            )
        for group in tensor_groups(loss):
            if self.group is not None and group is not self.group:
                raise ModuleError(
                    f"the loss is split over group {group.name!r}, but the layers over "
                    f"{self.group.name!r}: make both with the same group"
                )

    # -- in a step ------------------------------------------------------------------------

    def begin(self, check_abort: Callable[[], None]) -> None:
        """Let the waits of the layers, and of the loss, call `check_abort`. Local."""
        if self._apart is None or self.group is None:
            return
        self._watch = _Watch(self._apart, check_abort)
        watch(self.group, self._watch.start)

    def end(self) -> None:
        """Let go of the step. Local."""
        if self.group is not None:
            watch(self.group, None)
        self._watch = None

    # -- norms ----------------------------------------------------------------------------

    def copies(self, parameters: Iterable[Parameter], *, divided: bool = False) -> list[Parameter]:
        """Return those that another rank of the group counts in norms. Local.

        Args:
            parameters: This rank's.
            divided: Whether ranks that share a parameter divide its gradient, so that each counts
                its own part.
        """
        if self.group is None or not self.is_split:
            return []
        rank = self.group.rank

        def counts(one: Parameter) -> bool:
            if one.layout is None:
                return rank == 0
            return divided or one.holders[:1] in ((), (rank,))

        return [one for one in parameters if not counts(one)]

    # -- values ---------------------------------------------------------------------------

    def agree_values(self, named: Sequence[tuple[str, Parameter]]) -> None:
        """Return if all ranks that hold the same part of a parameter hold the same. Collective.

        Raises:
            MismatchError: On every rank, naming the first parameter that differs.
        """
        if self.group is None:
            return
        agree_values([(name, one) for name, one in named if not _is_split(one)], self.group)
        # Of what is split, too, several ranks may hold one part, such as a key head.
        split = [(name, one) for name, one in named if _is_split(one)]
        shared = [(name, one) for name, one in split if one.is_shared]
        if self.is_split and shared:
            mine = [digest(one) for _, one in shared]
            what = Call("shared parameters", self.group.name)
            everyone: list[list[str]] = agree(self.group, what, mine)
            for place, (name, one) in enumerate(shared):
                for holders in one.blocks.values():
                    check_alike(
                        {rank: f"values {everyone[rank][place]}" for rank in holders},
                        f"ranks {list(holders)} of group {self.group.name!r} hold the same part of "
                        f"parameter {name!r}, and must have the same values of it",
                    )

    def whole(self, parameter: Parameter, part: Array = None) -> HostArray:
        """Return the values of a parameter, put together if it is split. Collective if so.

        Args:
            parameter: The parameter.
            part: Something else of its shape, such as a state, in place of its values.
        """
        return whole_array(parameter, parameter.value() if part is None else part, self.group)


def local_part(name: str, parameter: Parameter, whole: Array) -> Array:
    """Return what this rank holds of the values `whole` of a parameter.

    Raises:
        ShapeError: If they have another shape.
    """
    if parameter.layout is None:
        return whole
    check_shape(name, parameter.global_shape, whole)
    return np.array(view(to_numpy(whole), parameter.box))


def who_holds(parameter: Parameter) -> object:
    """Return what must be alike on all ranks that share a model: nothing of the rank itself."""
    return parameter.global_shape, list(parameter.blocks.items())


def _is_split(parameter: Parameter) -> bool:
    return parameter.layout is not None and not parameter.layout.is_replicated


# -- a split array put together: of the ranks with the same part of it, one sends -----------------


def whole_array(parameter: Parameter, part: Array, group: ProcessGroup | None) -> HostArray:
    """Return the array of which this rank has a part, as it has one of a parameter.

    Collective over `group` where the ranks' parts differ, else local.

    Args:
        parameter: Says who has what.
        part: This rank's part: the parameter's values, or something else of their shape.
        group: The ranks over which layers are split; None if none are.

    Cost:
        One all-gather of the whole array, however many ranks have the same part of it.
    """
    values = np.array(to_numpy(part))
    if group is None or not _is_split(parameter):
        return values
    boxes = {ranks[0]: box for box, ranks in parameter.blocks.items()}
    sizes = [volume(boxes[rank]) if rank in boxes else 0 for rank in range(group.size)]
    mine = values.reshape(-1)[: sizes[parameter.rank]]
    parts = group.all_gather(mine, sizes=sizes).resolve()
    whole: HostArray = np.empty(parameter.global_shape, values.dtype)
    start = 0
    for box in boxes.values():
        view(whole, box)[...] = parts[start : start + volume(box)].reshape(extent(box))
        start += volume(box)
    return whole


# -- values of parameters that replicas divide, gathered layer by layer ---------------------------


class LayerValues(_Watching):
    """The values of this rank's layers, of which it has a part between their uses; at first none.

    Attributes:
        shards: The shards of which only a part is here.
        meets: Whether replicas meet in layers, so that all run the same number of microbatches:
            some rank has such shards.
    """

    def __init__(self) -> None:
        self.shards: list[BucketShard] = []
        self.meets = False
        self._group: ProcessGroup | None = None
        self._pool = ArrayPool(aligned_bytes)
        # The shards that are here: their gathers, None once the values are shown.
        self._here: dict[BucketShard, Any] = {}
        self._are_whole = False
        self._asking: list[Sequential] = []
        self._roots: set[int] = set()  # the stages
        self._nested: set[int] = set()  # the Sequentials in them that run as if they were not there
        self._path: list[int] = []  # the Sequentials that are running, from a stage inwards
        self._needs: dict[int, tuple[BucketShard, ...]] = {}
        # What the layer needs that comes after one, forward and backward.
        self._ahead: tuple[dict[int, tuple[BucketShard, ...]], ...] = ({}, {})

    def bring(
        self,
        stages: Iterable[Sequential],
        buckets: Iterable[Bucket],
        scope: ProcessGroup,
        mesh: DeviceMesh,
        dim: str,
    ) -> None:
        """Bring what layers need from now on, if buckets have only a part of their values.

        Collective over the ranks that step together; and if it is so for any, over the mesh: the
        replicas get a group for these gathers alone, because after a failure some are under way
        when the ranks meet elsewhere.

        Args:
            stages: The stages of this rank.
            buckets: The buckets.
            scope: The ranks that step together.
            mesh: The mesh.
            dim: The dim of the replicas.
        """
        shards = [bucket.shard for bucket in buckets if bucket.shard is not None]
        self.shards = [shard for shard in shards if shard.values is None]
        self.meets = any(agree(scope, "values by layers", bool(self.shards)))
        if not self.meets:
            return
        lines: dict[tuple[int, ...], list[Line]] = {(): lines_along(mesh, dim)}
        self._group = groups_of_lines(mesh, lines, kind="layers of", apart=True)[()]
        of = {id(one): shard for shard in self.shards for one in shard.parameters}
        for stage in stages:
            self._roots.add(id(stage))
            needs: list[tuple[int, tuple[BucketShard, ...]]] = []
            for layer in self._layers_in(stage):
                found = (of.get(id(parameter)) for parameter in layer.parameters())
                if wanted := tuple(dict.fromkeys(filter(None, found))):
                    needs.append((id(layer), wanted))
            self._needs.update(needs)
            for ahead, order in zip(self._ahead, (needs, needs[::-1]), strict=True):
                ahead.update((layer, after) for (layer, _), (_, after) in pairwise(order))

    def _layers_in(self, layers: Sequential) -> Iterator[Any]:
        """Yield the layers that run one after the other, and have them ask before they run."""
        layers.before = partial(self.need, layers)
        self._asking.append(layers)
        for layer in layers.layers:
            if is_plain(layer):
                self._nested.add(id(layer))
                yield from self._layers_in(layer)
            else:
                yield layer

    # -- in a step: what all replicas do in the same order --------------------------------------

    def begin(self, check_abort: Callable[[], None]) -> None:
        """Let the waits of a step call `check_abort`, which raises if it is to be left. Local."""
        if self._group is not None:
            self._watch = _Watch(self._group, check_abort, most=len(self.shards))

    def need(self, asking: Sequential, layer: object, backward: bool) -> None:
        """Have the values of a layer here, and let go of others. Collective over the replicas.

        Args:
            asking: The Sequential that is about to run it. Where it runs inside of a layer that has
                all its values already, such as a Checkpoint, nothing is to be done.
            layer: The layer.
            backward: Whether it runs backward.
        """
        watch = self._watch
        if watch is None:
            raise ModuleStateError(f"{layer!r} cannot run outside of a step: {_OUTSIDE}")
        path = self._path
        if id(asking) in self._roots:
            path.clear()
        elif id(asking) not in path:
            return
        else:
            del path[path.index(id(asking)) :]
        path += [id(asking), id(layer)] if id(layer) in self._nested else [id(asking)]
        wanted = self._needs.get(id(layer))
        if wanted is None:
            return
        here = self._here
        soon = (*wanted, *self._ahead[backward].get(id(layer), ()))
        for shard in [one for one in here if one not in soon]:
            self._settle(shard)
            shard.hide()
            del here[shard]
        for shard in soon:
            if shard not in here:
                shard.check_hidden()
                size, dtype = sum(shard.sizes), shard.dtype
                is_host = shard.xp is np
                out = self._pool.take((size,), dtype) if is_host else shard.xp.empty(size, dtype)
                here[shard] = watch.start(
                    "all_gather", shard.own, axis=0, sizes=shard.sizes, out=out, label="values"
                )
        for shard in wanted:
            self._settle(shard)

    def _settle(self, shard: BucketShard) -> None:
        """Wait for the values of a shard, if they are under way, and show them."""
        handle = self._here[shard]
        if handle is not None:
            shard.show(handle.resolve())
            self._here[shard] = None

    def settle(self) -> None:
        """Wait for what is under way and was not needed in the end. Collective."""
        for shard in self._here:
            self._settle(shard)

    def end(self) -> None:
        """Let go of the step, and of the values. Local."""
        for shard in self._here:
            shard.hide()
        self._here.clear()
        self._pool.end_step()
        self._path.clear()
        self._watch = None

    @property
    def nbytes(self) -> int:
        """Bytes of memory for values that come and go."""
        return self._pool.nbytes

    # -- between steps: collective over the replicas, where they divide values -----------------

    @contextmanager
    def whole(self, *, write: bool = False) -> Iterator[None]:
        """Have all values here for a moment; inside of another such moment for as long as that.

        Args:
            write: Keep what was written to them.
        """
        is_inner = self._are_whole
        if not is_inner:
            self._gather()
            self._are_whole = True
        try:
            yield
            for shard in self.shards if write else ():
                shard.keep()
        finally:
            if not is_inner:
                self._are_whole = False
                for shard in self.shards:
                    shard.hide()

    def restore(self) -> None:
        """Have all values here for good."""
        self._gather()
        self.shards = []
        self.meets = False
        self._needs.clear()
        for ahead in self._ahead:
            ahead.clear()
        for layers in self._asking:
            layers.before = None
        self._asking.clear()
        self._roots.clear()
        self._nested.clear()

    def _gather(self) -> None:
        group = self._group
        if group is None:
            return
        handles = [
            group.all_gather(shard.own, sizes=shard.sizes, label="values") for shard in self.shards
        ]
        for shard, handle in zip(self.shards, handles, strict=True):
            shard.show(handle.resolve())
