"""Elements that change ranks while their order in memory stays: a reshape that has to move some."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod
from typing import TYPE_CHECKING

import numpy as np

from mpimesh.dtensor.pieces import exchange_counts, exchange_pieces, place_in
from mpimesh.dtensor.tensor import DTensor
from mpimesh.layout import Layout, Tiling
from mpimesh.layout.tiling import places_of

if TYPE_CHECKING:
    from mpimesh.layout.tiling import Integers

__all__ = ["reflow"]


def reflow(x: DTensor, shape: tuple[int, ...], layout: Layout) -> DTensor:
    """Return `x` in C order with another shape, in `layout`. Collective.

    Args:
        x: The array.
        shape: The new shape.
        layout: Where the result is to lie. Dims along which `x` has copies or summands stay so.

    Cost:
        Each rank gets the elements that its new block has and its old one has not, in one
        exchange, after one of counts.
    """
    if not x.is_member:
        return DTensor(x.mesh, layout, shape, x.dtype, None)
    before, after = x.layout.tiling(x.shape), layout.tiling(shape)
    unit = gcd(_unit(before), _unit(after)) or 1
    old, new = _Units.of(before, unit), _Units.of(after, unit)
    me, rank = place_in(x.mesh), x.mesh.rank
    places = places_of(layout.mesh)
    tied = list(before.free_dims)
    near = [
        place
        for place in range(layout.mesh.size)
        if (places.coords[place, tied] == places.coords[me, tied]).all()
    ]
    mine, wanted = old.of_rank(rank), new.of_rank(rank)
    gives = new.by_owner(mine, near)
    takes = old.by_owner(wanted, near)
    counts = exchange_counts(
        x.mesh,
        "reshape",
        np.array([unit * len(gives.get(place, ())) for place in range(layout.mesh.size)]),
    )
    units = x.local.reshape(-1, unit)
    pieces = {place: units[where] for place, where in gives.items() if place != me}
    found = exchange_pieces(x.mesh, "reshape", pieces, counts, x.dtype)
    if me in gives:
        found[me] = units[gives[me]]
    block = x.mesh.shared_empty((len(wanted), unit), x.dtype)
    for place, where in takes.items():
        block[where] = found[place].reshape(-1, unit)
    local = block.reshape(layout.local_shape(shape, rank))
    return DTensor(x.mesh, layout, shape, x.dtype, local)


def _unit(tiling: Tiling) -> int:
    """Return a number of elements that no block's edge cuts through, the larger the better."""
    split = [axis for axis, dims in enumerate(tiling.axis_dims) if dims]
    if not split:
        return prod(tiling.shape)
    inner = prod(tiling.shape[split[-1] + 1 :])
    return inner * gcd(*tiling.bounds[split[-1]].tolist())


@dataclass(frozen=True, slots=True, eq=False)
class _Units:
    """The tiles of an array whose elements are counted in units.

    Attributes:
        tiling: The tiles.
        shape: The lengths of its axes up to the innermost that is split, that one in units.
        bounds: Where the intervals of these axes begin.
    """

    tiling: Tiling
    shape: tuple[int, ...]
    bounds: tuple[Integers, ...]

    @classmethod
    def of(cls, tiling: Tiling, unit: int) -> _Units:
        split = [axis for axis, dims in enumerate(tiling.axis_dims) if dims]
        last = split[-1] if split else 0
        inner = prod(tiling.shape[last + 1 :])
        if not tiling.shape:
            return cls(tiling, (1,), (np.array([0, 1]),))
        edges = tiling.bounds[last] * inner // unit
        shape = (*tiling.shape[:last], tiling.shape[last] * inner // unit)
        return cls(tiling, shape, (*tiling.bounds[:last], edges))

    def of_rank(self, rank: int) -> Integers:
        """Return the units of the tile of `rank`, in order."""
        leaves = self._leaves(rank)
        flat = np.zeros(1, np.int64)
        for length, bounds, leaf in zip(self.shape, self.bounds, leaves, strict=True):
            part = np.arange(bounds[leaf], bounds[leaf + 1])
            flat = (flat[:, None] * length + part).reshape(-1)
        return flat

    def by_owner(self, units: Integers, places: list[int]) -> dict[int, Integers]:
        """Return, for each of some places, which of `units` (as positions) its tile has."""
        home = np.zeros(len(units), np.int64)
        indices = np.unravel_index(units, self.shape)
        for index, bounds in zip(indices, self.bounds, strict=True):
            leaf = np.searchsorted(bounds, index, "right") - 1
            home = home * (len(bounds) - 1) + leaf
        order = np.argsort(home, kind="stable")
        ordered = home[order]
        ranks = places_of(self.tiling.mesh).ranks
        found = {}
        for place in places:
            key = 0
            leaves = self._leaves(int(ranks[place]))
            for own, bounds in zip(leaves, self.bounds, strict=True):
                key = key * (len(bounds) - 1) + own
            first, last = np.searchsorted(ordered, [key, key + 1]).tolist()
            if first < last:
                found[place] = order[first:last]
        return found

    def _leaves(self, rank: int) -> list[int]:
        coords = np.array([self.tiling.mesh.coords_of(rank)], np.int64)
        coords = coords.reshape(1, self.tiling.mesh.ndim)
        rows = [int(leaf[0]) for leaf in self.tiling.leaves_of(coords)]
        return rows[: len(self.shape)] if self.tiling.shape else [0]
