"""Arrays made of the elements of another that are picked axis by axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpimesh.arrays import HostArray
from mpimesh.dtensor.pieces import exchange_pieces, place_in
from mpimesh.dtensor.tensor import DTensor
from mpimesh.layout import Layout, Placement, Tiling
from mpimesh.layout.axis_rules import counts_between, met, picked_placement
from mpimesh.layout.tiling import places_of

if TYPE_CHECKING:
    from mpimesh.layout.axis_rules import Picks
    from mpimesh.layout.tiling import Integers

__all__ = ["pick", "pick_along"]


def pick_along(x: DTensor, picks: Mapping[int, Picks], *, name: str = "pick") -> DTensor:
    """Return the picked elements along some axes, and all of the others. See :func:`pick`."""
    every = tuple(picks.get(axis, range(length)) for axis, length in enumerate(x.shape))
    return pick(x, every, name=name)


def pick(
    x: DTensor,
    picks: Sequence[Picks],
    placement: Placement | None = None,
    *,
    name: str = "pick",
) -> DTensor:
    """Return ``x[np.ix_(*picks)]`` as a new array.

    Collective if any element moves, which all ranks know beforehand.

    Args:
        x: An array; if it is `Partial`, so is the result.
        picks: For each axis the indices, none of them negative.
        placement: Where the result is to lie; None for the rule of
            :func:`~mpimesh.layout.axis_rules.picked_placement`. The dims that split no axis must
            be as they are.
        name: What is called, for messages.

    Cost:
        One exchange, in which each rank gets what it lacks.
    """
    picks = tuple(picks)
    source = x.layout.tiling(x.shape)
    if placement is None:
        placement = picked_placement(x.layout.mesh, x.placement, x.shape, picks)
    shape = tuple(len(one) for one in picks)
    layout = Layout(x.mesh, placement)
    if not x.is_member:
        return DTensor(x.mesh, layout, shape, x.dtype, None)
    target = layout.tiling(shape)
    counts = _counts(source, target, picks)
    me = place_in(x.mesh)
    pieces = {
        rank: x.local[_keys(source, target, picks, me, rank)[1]]
        for rank in np.flatnonzero(counts[me]).tolist()
        if rank != me
    }
    found = exchange_pieces(x.mesh, name, pieces, counts, x.dtype)
    block = x.mesh.shared_empty(layout.local_shape(shape, x.mesh.rank), x.dtype)
    if counts[me, me]:
        into, where, _ = _keys(source, target, picks, me, me)
        block[into] = x.local[where]
    for rank, values in found.items():
        into, _, extent = _keys(source, target, picks, rank, me)
        block[into] = values.reshape(extent)
    return DTensor(x.mesh, layout, shape, x.dtype, block)


def _counts(source: Tiling, target: Tiling, picks: Sequence[Picks]) -> Integers:
    """Return how many elements each rank (row) has for each (column)."""
    mesh = source.mesh
    coords = places_of(mesh).coords
    counts = np.ones((mesh.size, mesh.size), np.int64)
    rows = zip(
        source.leaves_of(coords),
        target.leaves_of(coords),
        source.bounds,
        target.bounds,
        picks,
        strict=True,
    )
    for mine, theirs, old, new, one in rows:
        counts *= counts_between(one, new, old)[theirs[None, :], mine[:, None]]
    for dim in source.free_dims:  # of copies and of summands, a rank takes that at its coordinate
        counts *= coords[:, dim][:, None] == coords[:, dim][None, :]
    return counts


def _keys(
    source: Tiling, target: Tiling, picks: Sequence[Picks], giver: int, taker: int
) -> tuple[Any, Any, list[int]]:
    """Return where elements go in the block of `taker`, and where they are in that of `giver`.

    Shapes:
        result: two keys for NumPy, and the extent of what they select.
    """
    ranks = places_of(source.mesh).ranks
    into, where, extent = [], [], []
    boxes = zip(target.box(int(ranks[taker])), source.box(int(ranks[giver])), picks, strict=True)
    for (start, stop), (low, high), one in boxes:
        new, old, count = met(one, start, stop, low, high)
        into.append(new)
        where.append(old)
        extent.append(count)
    return _outer(into), _outer(where), extent


def _outer(keys: list[slice | HostArray]) -> tuple[Any, ...]:
    """Return one key for NumPy out of one for each axis."""
    arrays = [key for key in keys if not isinstance(key, slice)]
    if len(arrays) < 2:
        return (*keys, ...)
    return np.ix_(*[_indices(key) for key in keys])


def _indices(key: slice | HostArray) -> HostArray:
    if not isinstance(key, slice):
        return key
    stop = -1 if key.stop is None else key.stop
    return np.arange(key.start, stop, key.step)
