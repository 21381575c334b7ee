"""Elements of split arrays at given indices, along each axis or in pairs, sent between ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from mpimesh.arrays import DType, HostArray
from mpimesh.comm import Steps
from mpimesh.dtensor.dtensor import DTensor
from mpimesh.layout import (
    Give,
    Layout,
    Part,
    Placement,
    PlacementSpec,
    Regions,
    Shard,
    Take,
    Tiling,
)
from mpimesh.layout.axis_rules import counts_between, met, picked_placement
from mpimesh.layout.tiling import places_of
from mpimesh.runtime import DeviceMesh
from mpimesh.runtime.traffic import sparse, uniform

if TYPE_CHECKING:
    from mpimesh.layout.axis_rules import Picks
    from mpimesh.layout.tiling import Integers

__all__ = [
    "exchange_counts",
    "exchange_pieces",
    "pick",
    "pick_along",
    "pick_pairs",
    "place_in",
    "regrown",
    "true_anywhere",
]


def place_in(mesh: DeviceMesh) -> int:
    """Return the place of this rank in the mesh, in row-major order."""
    return mesh.mesh.offset_of(mesh.rank)


def exchange_pieces(
    mesh: DeviceMesh,
    name: str,
    pieces: Mapping[int, HostArray],
    counts: Integers,
    dtype: DType,
) -> dict[int, HostArray]:
    """Send pieces to other ranks, and return what they sent here. Collective over the mesh.

    Args:
        mesh: The mesh; ranks are counted as their places in it.
        name: What is called, for messages.
        pieces: What to send to which rank: arrays without axes to speak of, flattened. None for
            this rank itself.
        counts: How many elements each rank (row) sends each (column); alike on all ranks.
        dtype: The dtype of all pieces.

    Shapes:
        counts: (ranks, ranks); the diagonal counts nothing.
    """
    counts = counts.copy()
    np.fill_diagonal(counts, 0)
    if not counts.any():
        return {}
    me = place_in(mesh)
    packed = mesh.shared_empty((int(counts[me].sum()),), dtype)
    gives, at = [], 0
    for rank in np.flatnonzero(counts[me]).tolist():
        piece = np.asarray(pieces[rank]).reshape(-1)
        packed[at : at + piece.size] = piece
        gives.append(Give(rank, ((at, at + piece.size),)))
        at += piece.size
    target = mesh.shared_empty((int(counts[:, me].sum()),), dtype)
    takes, found, into = [], {}, 0
    received: list[int] = []
    for rank in np.flatnonzero(counts[:, me]).tolist():
        size, start = int(counts[rank, me]), int(counts[rank, :me].sum())
        part = Part(rank, (int(counts[rank].sum()),), ((start, start + size),))
        takes.append(Take(((into, into + size),), (part,)))
        found[rank] = target[into : into + size]
        received += rank, size * dtype.itemsize, 1
        into += size
    regions = Regions(tuple(takes), tuple(gives))
    group = mesh.group()
    group._core.compose(
        name,
        partial(group.communicator.exchange_regions, packed, target, regions),
        rule=f"{name} of {dtype}",
        nbytes=packed.nbytes,
        receives=(sparse, tuple(received)) if received else None,
    ).resolve()
    return found


def exchange_counts(mesh: DeviceMesh, name: str, row: Integers) -> Integers:
    """Return the rows of small numbers of all ranks, in the order of their places. Collective.

    Shapes:
        row: (n,), as many on every rank.
        result: (ranks, n).
    """
    group = mesh.group()
    table = np.empty((group.size, len(row)), np.int64)

    def steps() -> Steps:
        side = group.communicator
        yield side.all_gather(row.astype(np.int64), table.reshape(-1), [len(row)] * side.size)

    nbytes = 8 * len(row)
    group._core.compose(
        name, steps, rule=f"{name}: {len(row)} counts", nbytes=nbytes, receives=(uniform, nbytes)
    ).resolve()
    return table


def true_anywhere(mesh: DeviceMesh, name: str, flag: bool) -> bool:
    """Tell every rank whether any of them has a true flag. Collective over the mesh."""
    return bool(exchange_counts(mesh, name, np.array([flag])).any())


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
        placement: That of the result; None for the rule of
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


def regrown(
    x: DTensor,
    axis: int,
    count: Callable[[int, int], int],
    block_of: Callable[[HostArray, int, int], HostArray],
) -> DTensor | None:
    """Return an array of other blocks along an axis, made where they are. Local.

    Args:
        x: An array; if it is `Partial`, so is the result.
        axis: The axis, which changes its length.
        count: Gives how many elements there are in place of elements `start` to `stop`.
        block_of: Gives these in new memory, of this rank's block and its `start` and `stop`.

    Returns:
        The array; None if several dims split the axis, whose blocks cannot have any sizes.
    """
    tiling = x.layout.tiling(x.shape)
    dims, specs = tiling.axis_dims[axis], list(x.placement)
    if len(dims) > 1:
        return None
    sizes = [count(start, stop) for start, stop in pairwise(tiling.bounds[axis].tolist())]
    if dims:
        specs[dims[0]] = Shard.of_sizes(axis, sizes)
    layout = Layout(x.mesh, Placement(specs))
    shape = (*x.shape[:axis], sum(sizes), *x.shape[axis + 1 :])
    block = None
    if x.is_member:
        block = block_of(x.local, *x.layout.box(x.shape, x.mesh.rank)[axis])
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
    sent = _pair_counts(owners, homes, target.bounds[0], targets[0]) * same * extent[:, None]
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


def _pair_counts(
    owners: Integers, homes: Integers, bounds: Integers, targets: Integers
) -> Integers:
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
