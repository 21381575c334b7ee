"""Layouts in which ranks have whole lines along an axis."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from mpimesh.layout.placement import Placement
from mpimesh.layout.spec import PlacementSpec, Replicate, Shard
from mpimesh.mesh import Mesh

__all__ = ["lines_placement"]


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
