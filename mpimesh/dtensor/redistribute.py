"""Redistribution: an array brought from one layout to another, as its plan says."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any, ParamSpec, TypeAlias, TypeVar

import numpy as np

from mpimesh.arrays import DType, HostArray, aligned_empty
from mpimesh.comm import Request, Steps, run_steps
from mpimesh.comm.regions import copy_own, moves_in_memory, near_and_far
from mpimesh.core.call import PlanRecord, Starter
from mpimesh.core.node import Bound, Boxes
from mpimesh.errors import ClosedError, DTypeError, LayoutError, ReduceOpError, ShapeError
from mpimesh.layout import (
    Layout,
    Placement,
    PlacementLike,
    RedistributionPlan,
    Regions,
    Stage,
    plan_redistribution,
)
from mpimesh.layout.boxes import extent, view, volume
from mpimesh.mesh import Mesh
from mpimesh.runtime import CollectiveTensor, DeviceMesh, ProcessGroup
from mpimesh.runtime.group_core import GroupCore
from mpimesh.runtime.operands import AgreedSizes
from mpimesh.runtime.persistent import Persistent, PersistentCollective, plan_exchange
from mpimesh.runtime.traffic import sparse

__all__ = [
    "fitting_layout",
    "identity_of",
    "moves_between_ranks",
    "plan_redistribute",
    "redistribution",
    "window_exchange",
]

P = ParamSpec("P")
T = TypeVar("T")


_SHARED_FROM_BYTES = 32 * 1024

_Empty: TypeAlias = Callable[[Sequence[int], DType], HostArray]
"""Gives memory that the ranks of the node can reach."""


def redistribution(
    mesh: DeviceMesh,
    source: Layout,
    goal: DeviceMesh,
    target: Layout,
    shape: tuple[int, ...],
    dtype: DType,
) -> Redistribution:
    """Return this rank's part in bringing an array from one layout to another. Local.

    It is the same object for the same question. Among the ranks of `mesh`, if both meshes are that
    one or layouts of its ranks; else among all ranks that both meshes were made from.

    Args:
        mesh: The live mesh of `source`.
        source: The layout that the array has.
        goal: The live mesh of `target`.
        target: The layout that it is to have.
        shape: Its global shape.
        dtype: Its dtype.

    Raises:
        LayoutError: If the meshes are not of the same ranks, or a block cannot be reduced so.
    """
    if goal is not mesh:
        _check_goal(mesh, goal)
    key = ("redistribute", source, target, goal is mesh, shape, dtype)
    return _cached(mesh, key, _prepared, mesh, source, goal, target, shape, dtype)


def window_exchange(
    core: GroupCore,
    name: str,
    rule: str,
    regions: Regions,
    source: tuple[tuple[int, ...], DType],
    target: tuple[tuple[int, ...], DType],
    sent_bytes: int,
    received: tuple[int, ...],
) -> tuple[PlanRecord, Boxes] | None:
    """Return the plan of an exchange that one operation of a window does; None for others. Local.

    Args:
        core: The ranks.
        name: What it is called in messages and counts.
        rule: What must agree over ranks.
        regions: What this rank takes and gives.
        source: The shape and dtype of its block.
        target: Those of what it takes into.
        sent_bytes: What others get from this rank.
        received: What it gets: the place of a rank, bytes and messages, one after the other.

    Returns:
        How its starts are counted and compared, as those of a composed one; and the boxes.
    """
    if core.rank is None or core.communicator.window is None:
        return None
    if not moves_in_memory(source, target):
        return None
    boxes = near_and_far(regions, core.rank, core.size, range(core.size), source, target).boxes
    record = PlanRecord(sent_bytes, (sparse, received) if received else None, unequal=True)
    record.name, record.rule, record.kind = name, rule, ""
    core.account(record, name, (name, rule, None, ""))
    return record, boxes


def check_max_bytes(max_bytes: int) -> None:
    """Refuse what is no limit.

    Raises:
        ShapeError: If it is no number of bytes.
    """
    if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 0:
        raise ShapeError(
            f"max_bytes must be a number of bytes, or 0 for no limit; got {max_bytes!r}"
        )


def _copied_out(block: HostArray | None, user_out: HostArray | None, result: Any) -> Any:
    """Return the result, once the new block is in the caller's array, if there is one."""
    if user_out is not None and block is not None and user_out is not block:
        user_out[...] = block
    return result


def plan_redistribute(
    mesh: DeviceMesh,
    source: Layout,
    goal: DeviceMesh,
    target: Layout,
    shape: tuple[int, ...],
    itemsize: int,
) -> RedistributionPlan:
    """Return the plan by which :func:`redistribution` would bring an array. Local."""
    nodes: tuple[int, ...] = ()
    if not mesh.closed and not goal.closed:
        inside = mesh.contains_rank(mesh.rank)
        # A rank that is left out knows the nodes of all by the communicator of all.
        nodes = _nodes(_group_of(mesh, goal)[0] if inside else mesh._core.everyone)
    return _plan(mesh, source, goal, target, shape, itemsize, nodes)


def moves_between_ranks(
    mesh: DeviceMesh, source: Layout, target: Layout, shape: tuple[int, ...], itemsize: int
) -> bool:
    """Tell whether any rank gets anything from another. Local."""
    key = ("moves", source, target, shape, itemsize)
    return _cached(mesh, key, _moves, source, target, shape, itemsize)


def _moves(source: Layout, target: Layout, shape: tuple[int, ...], itemsize: int) -> bool:
    return plan_redistribution(source, target, shape, itemsize).total_messages > 0


def fitting_layout(mesh: DeviceMesh, placements: PlacementLike, shape: tuple[int, ...]) -> Layout:
    """Return the layout on `mesh`, the same object for the same question. Local.

    Raises:
        LayoutError: If it does not fit the mesh, or an array of this shape.
    """
    if not isinstance(placements, (str, Placement, tuple)):
        placements = Placement.of(placements, mesh.dim_names)
    return _cached(mesh, ("fits", placements, shape), _fitting, mesh, placements, shape)


def _fitting(mesh: DeviceMesh, placements: PlacementLike, shape: tuple[int, ...]) -> Layout:
    placement = Placement.of(placements, mesh.dim_names)
    layout = _cached(mesh, ("layout", placement), Layout, mesh, placement)
    layout.tiling(shape)  # refuses what does not fit
    return layout


def identity_of(op: str, dtype: DType) -> object:
    """Return the value that changes nothing in a reduction by ``sum``, ``prod``, ``min``, ``max``.

    Raises:
        DTypeError: If the dtype has none.
    """
    kind = np.dtype(dtype)
    if op == "sum" and kind.kind in "fc":  # x + 0.0 is not x where that is -0.0
        return kind.type(complex(-0.0, -0.0) if kind.kind == "c" else -0.0)
    if (op in ("sum", "prod") and kind.kind in "iufc") or kind.kind == "V":
        return kind.type(op == "prod")
    if kind.kind == "b":
        return op in ("min", "prod")  # "and"
    if kind.kind in "iu":
        limits = np.iinfo(kind)
        return limits.max if op == "min" else limits.min
    if kind.kind == "f":
        return np.inf if op == "min" else -np.inf
    raise DTypeError(f"arrays of {kind} cannot wait for {op!r}: there is no value without effect")


# -- one rank's part -------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Redistribution:
    """One rank's part in bringing arrays of one shape and dtype from one layout to another.

    Attributes:
        group: The ranks that take part.
        plan: The plan.
        stages: The exchanges of this rank, one after the other.
        dtype: The dtype of all blocks.
        moves: Whether any rank of the group gets anything from another.
        sent_bytes: What others get from this rank.
        received: What this rank gets: the place of a rank, bytes and messages, one after the other.
        rule: What must agree over ranks.
        exchange: What is to be started, if one exchange between this rank's blocks is all.
        way: The collective that does it all, if one does, and its arguments.
    """

    group: ProcessGroup
    plan: RedistributionPlan
    stages: tuple[Stage, ...]
    dtype: DType
    moves: bool
    sent_bytes: int
    received: tuple[int, ...]
    rule: str
    exchange: tuple[PlanRecord, Boxes] | None = None
    way: tuple[ProcessGroup, str, tuple[Any, ...], dict[str, Any]] | None = None

    def start(
        self,
        mesh: DeviceMesh,
        block: HostArray | None,
        finish: Callable[[HostArray | None], Any],
        *,
        max_bytes: int = 0,
    ) -> CollectiveTensor:
        """Start it. Collective.

        Args:
            mesh: The live mesh of the array.
            block: This rank's block; None if it has none.
            finish: Makes the result out of the new block, or of None.
            max_bytes: Most packed bytes at a time; 0 for no limit.
        """
        check_max_bytes(max_bytes)
        if block is not None and not max_bytes:
            started = self._start_once(mesh, block, finish)
            if started is not None:
                return started
        exchanges = _Exchanges(self, block, None, mesh.shared_empty)
        return self.group._core.compose(
            "redistribute",
            exchanges.prepare(max_bytes),
            rule=f"{self.rule}, max_bytes {max_bytes}" if max_bytes else self.rule,
            nbytes=self.sent_bytes,
            finish=lambda: finish(exchanges.end()),
            lock=block,
            receives=(sparse, self.received) if self.received else None,
        )

    def bind(self, rank: int) -> None:
        """Work out what each start needs, where one exchange between two blocks is all. Local."""
        source = self.plan.source_block(rank)
        if source is None or not self.moves or len(self.stages) > 1:
            return
        stage = self.stages[0]
        if stage.divisor > 1 or stage.fill or stage.in_place or stage.shape is None:
            return
        kinds = (extent(source), self.dtype), (stage.shape, self.dtype)
        counts = self.sent_bytes, self.received
        core = self.group._core
        self.exchange = window_exchange(
            core, "redistribute", self.rule, stage.regions, *kinds, *counts
        )

    def _start_once(
        self, mesh: DeviceMesh, block: HostArray, finish: Callable[[HostArray], Any]
    ) -> CollectiveTensor | None:
        """Start what one collective, or one exchange between two blocks, does; else None."""
        if self.plan.collective is not None:
            group, name, arguments, options = self._collective(mesh)
            out = self._empty(mesh)
            method: Callable[..., CollectiveTensor] = getattr(group, name)
            started = method(block, *arguments, **options, out=out)
            given: CollectiveTensor = started._give(finish(out))
            return given
        if self.exchange is None or not block.flags.c_contiguous:
            return None
        out = self._empty(mesh)
        core: Starter[CollectiveTensor] = self.group._core
        return core.exchange(*self.exchange, block, out, finish(out))

    def planned(
        self,
        mesh: DeviceMesh,
        block: HostArray | None,
        out: HostArray | None,
        finish: Callable[[HostArray | None], Any],
        which: str,
    ) -> Persistent:
        """Plan it, to be started many times. Local.

        Args:
            mesh: The live mesh of the array.
            block: This rank's block, which each start reads; None if it has none.
            out: Where this rank's new block goes; None for memory of its own, or if it has none.
            finish: Makes the result out of the new block, or of None; called once.
            which: Which array it is, to be compared with checks on.
        """
        user_out = out
        if out is not None and block is not None and np.may_share_memory(out, block):
            out = None  # it would be written while others read it
        if out is not None and not out.flags.c_contiguous:
            out = None
        if self.plan.collective is not None and block is not None:
            group, name, arguments, options = self._collective(mesh)
            into = self._empty(mesh) if out is None else out
            method: Callable[..., PersistentCollective] = getattr(group, f"{name}_init")
            label = which.strip() or None
            planned = method(block, *arguments, **options, out=into, label=label)
            result = finish(into if user_out is None else user_out)
            return planned.map(lambda _: _copied_out(into, user_out, result))
        exchanges = _Exchanges(self, block, out, mesh.shared_empty)
        result = finish(exchanges.last if user_out is None else user_out)
        plain = exchanges.ends and (user_out is None or user_out is exchanges.last)
        return plan_exchange(
            self.group._core,
            "redistribute",
            exchanges.prepare,
            rule=self.rule + which,
            nbytes=self.sent_bytes,
            value=result,
            finish=None if plain else lambda: _copied_out(exchanges.end(), user_out, result),
            lock=block,
            out=user_out,
            receives=(sparse, self.received) if self.received else None,
        )

    def _empty(self, mesh: DeviceMesh) -> HostArray:
        """Return memory for the new block: ordinary, where that is small and others copy it."""
        shape = self.stages[-1].shape or ()
        if prod(shape) * self.dtype.itemsize < _SHARED_FROM_BYTES:
            return np.empty(shape, self.dtype)
        return mesh.shared_empty(shape, self.dtype)

    def _collective(
        self, mesh: DeviceMesh
    ) -> tuple[ProcessGroup, str, tuple[Any, ...], dict[str, Any]]:
        """Return the group whose collective does it all, its name and its arguments."""
        if self.way is not None:
            return self.way
        collective, source = self.plan.collective, self.plan.source
        names = () if collective is None else collective.dims
        group = mesh.group(names[0]) if len(names) == 1 else mesh.group()
        shape, target = self.plan.shape, self.plan.target
        arguments: tuple[Any, ...] = ()
        options: dict[str, Any] = {}
        if collective is None or collective.kind == "all_reduce":
            self.way = group, "all_reduce", (source.partial_op,), options
            return self.way
        axis, joined = collective.axis, collective.joined_axis
        if collective.kind == "all_gather":
            options = {"axis": axis, "sizes": _sizes(source, shape, group.ranks, axis)}
        elif collective.kind == "reduce_scatter":
            arguments = (collective.op,)
            options = {"axis": axis, "sizes": _sizes(target, shape, group.ranks, axis)}
        else:
            options = {"split_axis": axis, "concat_axis": joined}
            sizes = _sizes(target, shape, group.ranks, axis)
            coming = _sizes(source, shape, group.ranks, joined)
            if len(set(sizes)) > 1 or len(set(coming)) > 1:
                options |= {"sizes": AgreedSizes(sizes), "recv_sizes": AgreedSizes(coming)}
        self.way = group, collective.kind, arguments, options
        return self.way


def _sizes(layout: Layout, shape: tuple[int, ...], ranks: Sequence[int], axis: int) -> list[int]:
    """Return how long the blocks of some ranks are along an axis."""
    return [layout.local_shape(shape, rank)[axis] for rank in ranks]


class _Exchanges:
    """One rank's exchanges between the same arrays, to be done once or again and again.

    Args:
        part: This rank's part.
        block: This rank's block; None if it has none.
        out: Where its new block is to go, C-contiguous; None for memory of its own.
        empty: Gives memory that the ranks of the node can reach.

    Attributes:
        last: Where the new block comes.
    """

    __slots__ = ("_arrays", "_block", "_part", "last")

    def __init__(
        self, part: Redistribution, block: HostArray | None, out: HostArray | None, empty: _Empty
    ) -> None:
        self._part = part
        self._block = block
        source = block
        if block is not None and not block.flags.c_contiguous:
            source = aligned_empty(block.shape, block.dtype)
        self._arrays = [source]
        into = -1 if out is None else part.plan.into_block
        for number, stage in enumerate(part.stages):
            if stage.shape is None:
                target = None
            elif stage.in_place:
                target = self._arrays[-1]
            elif number == into:
                target = out
            else:
                target = empty(stage.shape, part.dtype)
            self._arrays.append(target)
        self.last = self._arrays[-1]

    @property
    def ends(self) -> bool:
        """True if the new block is complete as soon as the exchanges are over."""
        part = self._part
        return part.moves and not any(stage.divisor > 1 for stage in part.stages)

    def prepare(self, max_bytes: int = 0) -> Callable[[], Request | Steps]:
        """Return what starts the exchanges, one after the other, as often as wanted."""
        stages, arrays = self._part.stages, self._arrays
        if not self._part.moves:
            return _no_steps
        prepare = self._part.group.communicator.prepare
        begins = [
            prepare("exchange_regions", (*self._known(source, target), stage.regions, max_bytes))
            for source, target, stage in zip(arrays, arrays[1:], stages, strict=False)
        ]
        begin = begins[0]
        if len(begins) == 1 and isinstance(begin, Bound):
            # One operation on all ranks, whatever one of them has to do before.
            if stages[0].fill or arrays[0] is not self._block:
                begin.before = self._before
            return begin
        if len(begins) == 1 and not stages[0].fill and arrays[0] is self._block:
            return begin

        def steps() -> Steps:
            self._read()
            for begin, stage, target in zip(begins, stages, arrays[1:], strict=True):
                self._fill(stage, target)
                yield from run_steps(begin)
                if len(begins) > 1:
                    _divide(stage, target)

        return steps

    def end(self) -> HostArray | None:
        """Return the new block, once the exchanges are over."""
        stages, arrays = self._part.stages, self._arrays
        if self._part.moves:
            return self.last if len(stages) > 1 else _divide(stages[0], self.last)
        self._read()
        for number, stage in enumerate(stages):
            source, target = arrays[number], arrays[number + 1]
            self._fill(stage, target)
            if target is not None and source is not None:
                copy_own(stage.regions, source, target)
            _divide(stage, target)
        return self.last

    def _known(
        self, source: HostArray | None, target: HostArray | None
    ) -> tuple[HostArray | None, HostArray | None]:
        """Return the arrays of an exchange, of which one tells the dtype."""
        if source is None and target is None:
            target = np.empty(0, self._part.dtype)
        return source, target

    def _before(self) -> None:
        self._read()
        self._fill(self._part.stages[0], self.last)

    def _read(self) -> None:
        """Copy the caller's block, if it is not in one run of memory."""
        source = self._arrays[0]
        if source is not None and source is not self._block:
            source[...] = self._block

    def _fill(self, stage: Stage, target: HostArray | None) -> None:
        """Fill what an exchange writes into with what changes nothing, where that is needed."""
        if stage.fill and target is not None and not stage.in_place:
            target[...] = identity_of(stage.fill, self._part.dtype)


def _no_steps() -> Steps:
    yield from ()


def _divide(stage: Stage, target: HostArray | None) -> HostArray | None:
    """Make the mean of what an exchange has summed."""
    if stage.divisor > 1 and target is not None:
        # What a block is filled with is no sum, and must go on changing nothing.
        boxes = [take.box for take in stage.regions.takes]
        for sums in [view(target, box) for box in boxes] if stage.fill else [target]:
            # By a real number: a complex one would make NaN of what is infinite.
            for part in (sums.real, sums.imag) if sums.dtype.kind == "c" else (sums,):
                np.divide(part, stage.divisor, out=part, casting="unsafe")
    return target


# -- preparation -----------------------------------------------------------------------------


def _prepared(
    mesh: DeviceMesh,
    source: Layout,
    goal: DeviceMesh,
    target: Layout,
    shape: tuple[int, ...],
    dtype: DType,
) -> Redistribution:
    for layout in (source, target):
        if layout.partial_op == "mean" and dtype.kind not in "fcV":
            raise ReduceOpError(f"a mean of {dtype} would be cut off; {layout} needs floats")
    group, numbering = _group_of(mesh, goal)
    plan = _plan(mesh, source, goal, target, shape, dtype.itemsize, _nodes(group))
    rank = mesh.rank
    number_of: Callable[[int], int] = int if numbering is None else numbering.offset_of
    stages = plan.stages(rank, number_of)
    gives = [give for stage in stages for give in stage.regions.gives]
    takes = [take for stage in stages for take in stage.regions.takes]
    own = number_of(rank) if numbering is None or numbering.contains_rank(rank) else -1
    received = [
        (part.rank, dtype.itemsize * volume(take.box), 1)
        for take in takes
        for part in take.parts
        if part.rank != own
    ]
    meshes = "" if source.mesh == target.mesh else f"{source.mesh!r} to {target.mesh!r}, "
    made = Redistribution(
        group,
        plan,
        stages,
        dtype,
        plan.total_messages > 0 and group.size > 1,
        dtype.itemsize * sum(volume(give.box) for give in gives),
        tuple(chain.from_iterable(received)),
        f"shape {shape}, {dtype}, {meshes}{source} -> {target}",
    )
    made.bind(rank)
    return made


def _plan(
    mesh: DeviceMesh,
    source: Layout,
    goal: DeviceMesh,
    target: Layout,
    shape: tuple[int, ...],
    itemsize: int,
    nodes: tuple[int, ...],
) -> RedistributionPlan:
    # The live mesh as it is has a group for each dim.
    has_groups = goal is mesh and source.mesh == target.mesh == mesh.mesh
    return plan_redistribution(
        source, target, shape, itemsize, nodes=nodes, links=mesh.links, collectives=has_groups
    )


def _cached(
    mesh: DeviceMesh, key: Hashable, make: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Return what `make` gives for the mesh as it is, from the last time if there was one."""
    cache = mesh._core.layout_cache
    value: T | None = cache.get(key)
    if value is None:
        value = cache[key] = make(*args, **kwargs)
    return value


def _group_of(mesh: DeviceMesh, goal: DeviceMesh) -> tuple[ProcessGroup, Mesh | None]:
    """Return who takes part, and the mesh whose places are their numbers; None for the ranks."""
    if goal is not mesh:
        _check_goal(mesh, goal)
        return mesh._core.everyone, None
    if mesh.contains_rank(mesh.rank):
        return mesh.group(), mesh.mesh
    return mesh._core.everyone.alone(), None  # it holds nothing, and takes no part


def _check_goal(mesh: DeviceMesh, goal: DeviceMesh) -> None:
    if goal.closed:
        raise ClosedError(f"rank {mesh.rank} cannot move an array to {goal!r}: it is closed")
    if (mesh.rank, mesh.world_size) != (goal.rank, goal.world_size):
        raise LayoutError(
            f"arrays move between meshes that were made from the same ranks, but rank {mesh.rank} "
            f"of {mesh.world_size} of mesh {mesh.dims_text} is rank {goal.rank} of "
            f"{goal.world_size} of mesh {goal.dims_text}"
        )


def _nodes(group: ProcessGroup) -> tuple[int, ...]:
    """Return the node of each rank, by its number; empty if all share one."""
    nodes = group.communicator.nodes
    if not nodes:
        return ()
    by_rank = dict(zip(group.ranks, nodes, strict=True))
    return tuple(by_rank.get(rank, -1) for rank in range(max(by_rank) + 1))
