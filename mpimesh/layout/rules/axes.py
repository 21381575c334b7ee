"""Placements that operations along axes need, and what they make of the placement of an array."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

from mpimesh.layout.cuts import Cut, axis_bounds
from mpimesh.layout.placement import Placement
from mpimesh.layout.rule import Operand, OpRule
from mpimesh.layout.spec import Partial, PlacementSpec, Replicate, Shard
from mpimesh.mesh import Mesh

__all__ = [
    "join_rules",
    "lines_placement",
    "overlaps",
    "renumbered",
    "row_dim",
    "rows_placement",
    "unsplit",
]


def renumbered(placement: Placement, places: Mapping[int, int]) -> Placement:
    """Return the placement for an array whose axis `a` is now axis ``places[a]``.

    What was split along an axis that is gone is replicated: its length is 1, or all ranks
    have the same.

    Example:
        >>> print(renumbered(Placement(["S0", "S1"]), {0: 1}))
        S[1], R
    """
    return Placement(
        [
            spec
            if not isinstance(spec, Shard)
            else Shard(places[spec.axis], sizes=spec.sizes)
            if spec.axis in places
            else Replicate()
            for spec in placement
        ]
    )


def unsplit(placement: Placement, axes: set[int]) -> Placement:
    """Return the placement with copies along all dims that split one of `axes`."""
    return Placement(
        [
            Replicate() if isinstance(spec, Shard) and spec.axis in axes else spec
            for spec in placement
        ]
    )


# -- ranks with whole lines along an axis --------------------------------------------------


def lines_placement(
    mesh: Mesh, placement: Placement, shape: Sequence[int], *axes: int, closed: Collection[int] = ()
) -> Placement | None:
    """Return a placement that does not split `axes`; None if its dims find too few lines.

    The dims that split them split the axis that leaves the longest blocks instead, if these have
    at least one element for each rank. Axes that are `closed` keep their splits, and take no other.

    Example:
        >>> print(lines_placement(Mesh("a=4"), Placement(["S0"]), (100, 8), 0))
        S[1]
    """
    specs: list[PlacementSpec] = list(placement)
    room = list(shape)
    for dim, spec in enumerate(specs):
        if isinstance(spec, Shard):
            room[spec.axis] //= mesh.dims[dim].size
    for axis in (*axes, *closed):
        room[axis] = -1
    for dim, spec in enumerate(specs):
        if not isinstance(spec, Shard) or spec.axis not in axes:
            continue
        best = max(range(len(room)), key=lambda one: room[one])
        if mesh.dims[dim].size == 1:
            specs[dim] = Replicate()
        elif room[best] < mesh.dims[dim].size:
            return None
        else:
            room[best] //= mesh.dims[dim].size
            specs[dim] = Shard(best)
            for other, one in enumerate(specs):  # sizes are those of one dim alone
                if isinstance(one, Shard) and one.axis == best:
                    specs[other] = Shard(best)
    return Placement(specs)


# -- the first axes in order from rank to rank ---------------------------------------------


def rows_placement(
    placement: Placement, shape: Sequence[int], count: int, *, only: bool = False
) -> Placement:
    """Return a placement in which axis 0 alone of the first `count` axes is split, by one dim.

    The dim is that which splits axis 0 now, or the first that splits another of these axes.

    Args:
        placement: Where the array is, with no sums to wait for.
        shape: Its shape.
        count: How many axes.
        only: Leave out the splits of all other axes.
    """
    inside = [
        dim
        for dim, spec in enumerate(placement)
        if isinstance(spec, Shard) and spec.axis < count and count <= len(shape)
    ]
    chosen = min(inside, key=lambda dim: (_axis(placement[dim]) > 0, dim), default=None)
    specs: list[PlacementSpec] = []
    for dim, spec in enumerate(placement):
        if dim == chosen:
            specs.append(spec if _axis(spec) == 0 and _alone(placement, 0) else Shard(0))
        elif dim in inside or (only and isinstance(spec, Shard)):
            specs.append(Replicate())
        else:
            specs.append(spec)
    return Placement(specs)


def row_dim(placement: Placement) -> int | None:
    """Return the only dim that splits axis 0; None if none does."""
    return next((dim for dim, spec in enumerate(placement) if _axis(spec) == 0), None)


def _alone(placement: Placement, axis: int) -> bool:
    return sum(_axis(spec) == axis for spec in placement) == 1


def _axis(spec: PlacementSpec) -> int:
    return spec.axis if isinstance(spec, Shard) else -1


# -- arrays joined along an axis -----------------------------------------------------------


def join_rules(mesh: Mesh, operands: Sequence[Operand], axis: int) -> list[OpRule]:
    """Return the ways to join arrays along an axis that all of them have.

    One way for each layout that an operand has: the others come to it. If it splits the axis, the
    result is split evenly, and each operand is cut where the blocks of the result are, so that
    every rank joins what it has. Of several dims that split the axis only the first goes on.

    Args:
        mesh: The mesh.
        operands: The arrays; they have the same shape but for the length of `axis`.
        axis: The axis along which they follow each other.
    """
    lengths = [one.shape[axis] for one in operands]
    summed = len({_op_of(one) for one in operands}) == 1
    rules = []
    for placement in dict.fromkeys(one.placement for one in operands):
        specs: list[PlacementSpec] = [
            Replicate() if isinstance(spec, Partial) and not summed else spec for spec in placement
        ]
        dims = [d for d, s in enumerate(specs) if isinstance(s, Shard) and s.axis == axis]
        for dim in dims[1:]:
            specs[dim] = Replicate()
        inputs = []
        rows = overlaps(lengths, mesh.dims[dims[0]].size) if dims else [()] * len(lengths)
        for row in rows:
            if dims:
                specs[dims[0]] = Shard(axis, sizes=row)
            inputs.append(Placement(specs))
        if dims:
            specs[dims[0]] = Shard(axis)
        rules.append(OpRule(tuple(inputs), Placement(specs)))
    return rules


def _op_of(operand: Operand) -> str:
    return next((spec.op for spec in operand.placement if isinstance(spec, Partial)), "")


def overlaps(lengths: Sequence[int], parts: int) -> list[tuple[int, ...]]:
    """Return how much of each of several rows, one behind the other, is in each even part of all.

    Example:
        >>> overlaps([3, 5], 2)
        [(3, 0), (1, 4)]
    """
    bounds = axis_bounds(sum(lengths), (Cut(parts),)).tolist()
    rows, start = [], 0
    for length in lengths:
        stop = start + length
        rows.append(tuple(max(0, min(b, stop) - max(a, start)) for a, b in pairwise(bounds)))
        start = stop
    return rows
