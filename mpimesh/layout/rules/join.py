"""Where arrays have to be so that they can be joined along an axis block by block."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from mpimesh.layout.cuts import Cut, axis_bounds
from mpimesh.layout.placement import Placement
from mpimesh.layout.rule import Operand, OpRule
from mpimesh.layout.spec import Partial, PlacementSpec, Replicate, Shard
from mpimesh.mesh import Mesh

__all__ = ["join_rules", "overlaps"]


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
