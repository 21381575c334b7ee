"""Placements after the axes of an array change places, come or go."""

from __future__ import annotations

from collections.abc import Mapping

from mpimesh.layout.placement import Placement
from mpimesh.layout.spec import Replicate, Shard

__all__ = ["renumbered", "unsplit"]


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
