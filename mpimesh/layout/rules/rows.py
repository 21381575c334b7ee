"""Layouts in which the elements of the first axes follow each other from rank to rank."""

from __future__ import annotations

from collections.abc import Sequence

from mpimesh.layout.placement import Placement
from mpimesh.layout.spec import PlacementSpec, Replicate, Shard

__all__ = ["row_dim", "rows_placement"]


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
