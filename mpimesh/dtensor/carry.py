"""Start the exchange that takes blocks from one layout to another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mpimesh.arrays import DType, HostArray
from mpimesh.dtensor.move import Move, prepared_move
from mpimesh.errors import ClosedError, LayoutError, ReduceOpError, ShapeError
from mpimesh.layout import Layout, RedistributionPlan, plan_redistribution
from mpimesh.mesh import Mesh
from mpimesh.runtime import CollectiveTensor, DeviceMesh, ProcessGroup
from mpimesh.runtime.traffic import sparse
from mpimesh.transport import Request, Steps

__all__ = ["plan_carry", "start_carry"]

_MOST_KEPT = 256


@dataclass(frozen=True, slots=True, eq=False)
class _Carry:
    """A way from one layout to another on one rank.

    Attributes:
        source: Where it begins, kept so that no other layout gets its address.
        target: Where it ends.
        group: The ranks that take part.
        move: What this rank does.
        rule: What must agree over ranks.
    """

    source: Layout
    target: Layout
    group: ProcessGroup
    move: Move
    rule: str


def start_carry(
    mesh: DeviceMesh,
    source: Layout,
    goal: DeviceMesh,
    target: Layout,
    shape: tuple[int, ...],
    dtype: DType,
    block: HostArray | None,
    finish: Callable[[HostArray | None], Any],
    *,
    max_bytes: int = 0,
) -> CollectiveTensor:
    """Start to carry an array from one layout to another. Collective.

    Among the ranks of `mesh`, if both meshes are that one or layouts of its ranks; else among all
    ranks that both meshes were made from.

    Args:
        mesh: The live mesh of `source`.
        source: The layout that the array has.
        goal: The live mesh of `target`.
        target: The layout that it is to have.
        shape: Its global shape.
        dtype: Its dtype.
        block: This rank's block; None if it has none.
        finish: Makes the result out of the new block, or of None.
        max_bytes: Most packed bytes at a time; 0 for no limit.

    Raises:
        LayoutError: If the meshes are not of the same ranks, or a block cannot be reduced so.
    """
    if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 0:
        raise ShapeError(
            f"max_bytes must be a number of bytes, or 0 for no limit; got {max_bytes!r}"
        )
    # By their addresses: layouts of a mesh are kept, and comparing them would take longer.
    key = ("carry", id(source), id(goal), id(target), shape, dtype)
    carry = mesh.kept.get(key)
    if carry is None:
        carry = _carry(mesh, source, goal, target, shape, dtype)
        if len(mesh.kept) >= _MOST_KEPT:
            mesh.kept.clear()
        mesh.kept[key] = carry
    group, move = carry.group, carry.move
    if move.plan.collective is not None and block is not None and not max_bytes:
        return _start_collective(carry, mesh, block).map(finish)
    held = block if block is None or block.flags.c_contiguous else block.copy()
    begin: Callable[[], Request | Steps]
    end: Callable[[], HostArray | None]
    if move.moves and group.size > 1:
        side = group.communicator
        begin, end = move.begin(side, held, dtype, mesh.shared_empty, max_bytes)
    else:
        begin, end = _nothing, partial(move.alone, held, dtype, mesh.shared_empty)
    return group.compose(
        "redistribute",
        begin,
        rule=f"{carry.rule}, max_bytes {max_bytes}" if max_bytes else carry.rule,
        nbytes=move.sent_bytes,
        finish=lambda: finish(end()),
        lock=block,
        receives=(sparse, move.received) if move.received else None,
    )


def _nothing() -> Steps:
    """Take no steps: every rank has what it is to have."""
    yield from ()


def _carry(
    mesh: DeviceMesh,
    source: Layout,
    goal: DeviceMesh,
    target: Layout,
    shape: tuple[int, ...],
    dtype: DType,
) -> _Carry:
    for layout in (source, target):
        if layout.partial_op == "mean" and dtype.kind not in "fcV":
            raise ReduceOpError(f"a mean of {dtype} would be cut off; {layout} needs floats")
    group, numbering = _who(mesh, goal)
    nodes = _nodes(group)
    groups = _has_groups(mesh, goal, source, target)
    move = prepared_move(
        source, target, shape, dtype.itemsize, mesh.rank, numbering, nodes, mesh.links, groups
    )
    meshes = "" if source.mesh == target.mesh else f"{source.mesh!r} to {target.mesh!r}, "
    rule = f"shape {shape}, {dtype}, {meshes}{source} -> {target}"
    return _Carry(source, target, group, move, rule)


def _who(mesh: DeviceMesh, goal: DeviceMesh) -> tuple[ProcessGroup, Mesh | None]:
    """Return who takes part, and the mesh whose places are their numbers; None for the ranks."""
    if goal is not mesh:
        if goal.closed:
            raise ClosedError(f"rank {mesh.rank} cannot move an array to {goal!r}: it is closed")
        _check_same_ranks(mesh, goal)
        return mesh.everyone, None
    if mesh.contains_rank(mesh.rank):
        return mesh.group(), mesh.value
    return mesh.everyone.alone(), None  # it holds nothing, and takes no part


def plan_carry(
    mesh: DeviceMesh,
    source: Layout,
    goal: DeviceMesh,
    target: Layout,
    shape: tuple[int, ...],
    itemsize: int,
) -> RedistributionPlan:
    """Return the plan by which :func:`start_carry` would carry an array. Local."""
    nodes: tuple[int, ...] = ()
    if not mesh.closed and not goal.closed:
        inside = mesh.contains_rank(mesh.rank)
        # A rank that is left out knows the nodes of all by the communicator of all.
        nodes = _nodes(_who(mesh, goal)[0] if inside else mesh.everyone)
    return plan_redistribution(
        source,
        target,
        shape,
        itemsize,
        nodes=nodes,
        links=mesh.links,
        collectives=_has_groups(mesh, goal, source, target),
    )


def _has_groups(mesh: DeviceMesh, goal: DeviceMesh, source: Layout, target: Layout) -> bool:
    """Tell whether both layouts are of the live mesh as it is, which has a group for each dim."""
    return goal is mesh and source.mesh == target.mesh == mesh.value


def _start_collective(carry: _Carry, mesh: DeviceMesh, block: HostArray) -> CollectiveTensor:
    """Start the collective of a group that does it all."""
    plan = carry.move.plan
    collective, source = plan.collective, plan.source
    names = () if collective is None else collective.dims
    group = mesh.group(names[0]) if len(names) == 1 else mesh.group()
    out = mesh.shared_empty(carry.move.block_shape or (), block.dtype)
    if collective is None or collective.kind == "all_reduce":
        return group.all_reduce(block, source.partial_op, out=out)
    axis, joined = collective.axis, collective.joined_axis
    shape, target = plan.shape, plan.target
    if collective.kind == "all_gather":
        sizes = _sizes(source, shape, group.ranks, axis)
        return group.all_gather(block, axis=axis, sizes=sizes, out=out)
    sizes = _sizes(target, shape, group.ranks, axis)
    if collective.kind == "reduce_scatter":
        return group.reduce_scatter(block, collective.op, axis=axis, sizes=sizes, out=out)
    return group.all_to_all(
        block,
        split_axis=axis,
        concat_axis=joined,
        sizes=sizes,
        recv_sizes=_sizes(source, shape, group.ranks, joined),
        out=out,
    )


def _sizes(layout: Layout, shape: tuple[int, ...], ranks: Sequence[int], axis: int) -> list[int]:
    """Return how long the blocks of some ranks are along an axis."""
    return [layout.local_shape(shape, rank)[axis] for rank in ranks]


def _nodes(group: ProcessGroup) -> tuple[int, ...]:
    """Return the node of each rank, by its number; empty if all share one."""
    found = group.communicator.nodes
    if not found:
        return ()
    by_rank = dict(zip(group.ranks, found, strict=True))
    return tuple(by_rank.get(rank, -1) for rank in range(max(by_rank) + 1))


def _check_same_ranks(mesh: DeviceMesh, goal: DeviceMesh) -> None:
    if (mesh.rank, mesh.world_size) != (goal.rank, goal.world_size):
        raise LayoutError(
            f"arrays move between meshes that were made from the same ranks, but rank {mesh.rank} "
            f"of {mesh.world_size} of mesh {mesh.dims_text} is rank {goal.rank} of "
            f"{goal.world_size} of mesh {goal.dims_text}"
        )
