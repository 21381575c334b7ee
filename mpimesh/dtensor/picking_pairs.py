"""Elements that arrays of indices along several axes pick together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpimesh.dtensor.pieces import exchange_pieces, place_in
from mpimesh.dtensor.tensor import DTensor
from mpimesh.layout import Layout, Placement, PlacementSpec, Shard, Tiling
from mpimesh.layout.tiling import places_of

if TYPE_CHECKING:
    from mpimesh.arrays import HostArray
    from mpimesh.layout.tiling import Integers

__all__ = ["pick_pairs"]


def pick_pairs(x: DTensor, rows: list[Integers], *, name: str = "pick") -> DTensor:
    """Return ``x[tuple(rows)]``, for indices along the first axes.

    Collective if any element moves, which all ranks know beforehand. The first axis of the result
    is split by the dims that split an indexed axis: elements stay where they are, if one dim does
    and the indices go through its blocks in order; else it is split evenly.

    Args:
        x: An array; if it is `Partial`, so is the result.
        rows: Indices along axes 0, 1, ..., none of them negative.
        name: What is called, for messages.

    Shapes:
        rows: (n,) each.
        result: (n, the lengths of the other axes).
    """
    count, length = len(rows), len(rows[0])
    source = x.layout.tiling(x.shape)
    places = places_of(x.layout.mesh)
    owners = np.zeros(length, np.int64)
    homes = np.zeros(len(places.ranks), np.int64)
    leaves = source.leaves_of(places.coords)
    for row, leaf, bounds in zip(rows, leaves[:count], source.bounds[:count], strict=True):
        owners = owners * (len(bounds) - 1) + np.searchsorted(bounds, row, "right") - 1
        homes = homes * (len(bounds) - 1) + leaf
    shape = (length, *x.shape[count:])
    placement = _placement(source, x.placement, count, owners, length)
    layout = Layout(x.mesh, placement)
    if not x.is_member:
        return DTensor(x.mesh, layout, shape, x.dtype, None)
    target = layout.tiling(shape)
    targets = target.leaves_of(places.coords)
    same = np.ones((len(homes), len(homes)), np.bool)
    for leaf in leaves[count:]:
        same &= leaf[:, None] == leaf[None, :]
    for dim in source.free_dims:
        same &= places.coords[:, dim][:, None] == places.coords[:, dim][None, :]
    me = place_in(x.mesh)
    kinds = [np.diff(b)[leaf] for b, leaf in zip(target.bounds[1:], targets[1:], strict=True)]
    extent = np.prod([np.ones(len(homes), np.int64), *kinds], axis=0)
    sent = _counts(owners, homes, target.bounds[0], targets[0]) * same * extent[:, None]
    box, mine = source.box(x.mesh.rank), target.box(x.mesh.rank)[0]

    def between(giver: int, taker: int) -> Integers:
        start, stop = target.box(int(places.ranks[taker]))[0]
        found: Integers = np.flatnonzero(owners[start:stop] == homes[giver]) + start
        return found

    def values(where: Integers) -> HostArray:
        key = tuple(row[where] - low for row, (low, _) in zip(rows, box[:count], strict=True))
        found: HostArray = x.local[key]
        return found

    pieces = {
        taker: values(between(me, taker))
        for taker in np.flatnonzero(sent[me]).tolist()
        if taker != me
    }
    block = x.mesh.shared_empty(layout.local_shape(shape, x.mesh.rank), x.dtype)
    for giver, piece in exchange_pieces(x.mesh, name, pieces, sent, x.dtype).items():
        block[between(giver, me) - mine[0]] = piece.reshape(-1, *block.shape[1:])
    if sent[me, me]:
        where = between(me, me)
        block[where - mine[0]] = values(where)
    return DTensor(x.mesh, layout, shape, x.dtype, block)


def _counts(owners: Integers, homes: Integers, bounds: Integers, targets: Integers) -> Integers:
    """Return how many of the rows each rank (row) has for each (column)."""
    counts = np.zeros((len(homes), len(homes)), np.int64)
    for leaf in np.unique(targets).tolist():
        part = owners[bounds[leaf] : bounds[leaf + 1]]
        found = np.bincount(part, minlength=int(homes.max()) + 1)[homes]
        counts[:, targets == leaf] = found[:, None]
    return counts


def _placement(
    source: Tiling, placement: Placement, count: int, owners: Integers, length: int
) -> Placement:
    dims = [dim for row in source.axis_dims[:count] for dim in row]
    specs: list[PlacementSpec] = [
        Shard(spec.axis - count + 1, sizes=spec.sizes)
        if isinstance(spec, Shard) and spec.axis >= count
        else Shard(0)
        if isinstance(spec, Shard)
        else spec
        for spec in placement
    ]
    if len(dims) == 1 and (owners[:-1] <= owners[1:]).all():
        parts = source.mesh.dims[dims[0]].size
        sizes = np.bincount(owners, minlength=parts).tolist()
        specs[dims[0]] = Shard.of_sizes(0, sizes)
    return Placement(specs)
