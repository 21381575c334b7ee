"""Sort one row over many ranks, by regular sampling (Shi and Schaeffer 1992)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpimesh.arrays import HostArray
from mpimesh.dtensor.arguments import moved_to
from mpimesh.dtensor.pieces import exchange_counts, exchange_pieces, place_in
from mpimesh.dtensor.tensor import DTensor
from mpimesh.layout import Layout, Placement, PlacementSpec, Shard
from mpimesh.layout.axis_rules import row_dim, rows_placement
from mpimesh.layout.tiling import places_of

if TYPE_CHECKING:
    from mpimesh.layout.tiling import Integers

__all__ = ["sorted_row"]


def sorted_row(x: DTensor, *, indices: bool) -> DTensor:
    """Sort an array of one axis, or say where each element has been. Collective.

    Every rank sorts its block; samples of all blocks at regular distances give the values that
    separate the ranks, of equal elements by their places; each rank gets what is its own, and
    sorts it. In the end blocks get the lengths that they had.

    Args:
        x: The array, with no sums to wait for.
        indices: Return the places of the elements before; equal ones keep their order.

    Returns:
        The elements, or their places, in the layout of `x`.

    Cost:
        p * p samples on every rank for p ranks along the axis; then each element moves once, and
        those at the edges once more. No rank gets more than about twice its share.
    """
    row = moved_to(x, rows_placement(x.placement, x.shape, 1))
    dim = row_dim(row.placement)
    kind = np.dtype(np.intp) if indices else x.dtype
    if not x.is_member:
        return DTensor(x.mesh, x.layout, x.shape, kind, None)
    before: HostArray
    if indices:
        before = np.argsort(row.local, kind="stable")
        values = row.local[before]
    else:  # equal elements are alike: any order of them will do
        values, before = np.sort(row.local), np.arange(len(row.local))
    before = before + row.global_offset[0]
    if dim is None:
        block = before if indices else values
        return moved_to(DTensor(x.mesh, row.layout, x.shape, kind, block), x.placement)
    return _exchanged(x, row, dim, values, before, indices=indices)


def _exchanged(
    x: DTensor, row: DTensor, dim: int, values: HostArray, before: HostArray, *, indices: bool
) -> DTensor:
    mesh, table = x.mesh, places_of(x.layout.mesh)
    me = place_in(mesh)
    same = np.delete(table.coords, dim, axis=1)
    team = np.flatnonzero((same == same[me]).all(axis=1)).tolist()  # in order along the dim
    cuts = [0, *_cuts(row, dim, values, before, len(team)), len(values)]
    lengths = np.zeros(len(table.ranks), np.int64)
    lengths[team] = np.diff(cuts)
    counts = exchange_counts(mesh, "sort", lengths)
    parts = {who: slice(cuts[at], cuts[at + 1]) for at, who in enumerate(team)}
    sizes = counts[np.ix_(team, team)].sum(axis=0).tolist()
    specs: list[PlacementSpec] = list(row.placement)
    specs[dim] = Shard(0, sizes=sizes)
    layout = Layout(mesh, Placement(specs))
    found = []
    for rows in (values, before) if indices else (values,):
        pieces = {who: rows[part] for who, part in parts.items() if who != me}
        got = exchange_pieces(mesh, "sort", pieces, counts, rows.dtype)
        got[me] = rows[parts[me]]
        found.append(np.concatenate([got[who] for who in team if who in got]))
    # Sorted runs behind each other, which a stable sort merges.
    merge = np.argsort if indices else np.sort
    rows = merge(found[0], kind="stable")
    block = found[1][rows] if indices else rows
    merged = DTensor(mesh, layout, x.shape, block.dtype, block)
    return merged.redistribute(x.placement)


def _cuts(row: DTensor, dim: int, values: HostArray, before: HostArray, parts: int) -> list[int]:
    """Return where this rank's sorted block is cut, one part for each rank. Collective."""
    bounds = row.layout.tiling(row.shape).bounds[0]
    taken = [min(parts, int(n)) for n in np.diff(bounds)]
    specs: list[PlacementSpec] = list(row.placement)
    specs[dim] = Shard(0, sizes=taken)
    layout = Layout(row.mesh, Placement(specs))
    count = min(parts, len(values))
    chosen: Integers = np.arange(count) * len(values) // max(count, 1)
    samples, homes = (
        DTensor(row.mesh, layout, (sum(taken),), rows.dtype, rows[chosen]).full()
        for rows in (values, before)
    )
    # Samples stand in the order of ranks, and so equal ones in the order of their places.
    order = np.argsort(samples, kind="stable")
    if not len(order):
        return [0] * (parts - 1)
    cuts = []
    for edge in order[[len(order) * part // parts for part in range(1, parts)]].tolist():
        value = samples[edge : edge + 1]
        low = int(np.searchsorted(values, value, "left")[0])
        high = int(np.searchsorted(values, value, "right")[0])
        cuts.append(low + int(np.searchsorted(before[low:high], homes[edge])))
    return cuts
