"""Elements of split arrays at given indices, along each axis or in pairs, sent between ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from mpimesh.arrays import DType, HostArray
from mpimesh.comm import Steps
from mpimesh.comm.regions import copy_own
from mpimesh.dtensor.dtensor import DTensor
from mpimesh.dtensor.halo_exchange import Reading
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
from mpimesh.layout.axis_rules import (
    as_indices,
    as_picks,
    has_unit_runs,
    interval_numbers,
    met,
    pick_count,
    picked_placement,
    stays,
    unit_runs,
)
from mpimesh.layout.boxes import extent, volume, whole
from mpimesh.layout.reads import picked_reads
from mpimesh.layout.tiling import places_of
from mpimesh.runtime import DeviceMesh
from mpimesh.runtime.traffic import sparse, uniform

if TYPE_CHECKING:
    from mpimesh.layout.axis_rules import Picks
    from mpimesh.layout.tiling import Integers

__all__ = [
    "exchange_counts",
    "exchange_pieces",
    "keys_here",
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
    _exchange(mesh, name, packed, target, regions, packed.nbytes, received)
    return found


def _exchange(
    mesh: DeviceMesh,
    name: str,
    packed: HostArray,
    target: HostArray,
    regions: Regions,
    nbytes: int,
    received: list[int],
) -> None:
    """Exchange regions, and count what is sent, and what is received of whom."""
    group = mesh.group()
    group._core.compose(
        name,
        group.communicator.prepare("exchange_regions", (packed, target, regions)),
        rule=f"{name} of {target.dtype}",
        nbytes=nbytes,
        receives=(sparse, tuple(received)) if received else None,
    ).resolve()


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
        An exchange, in which each rank gets what it lacks; one more for each axis with an array of
        indices, or with a step, that moves.
    """
    every: tuple[Any, ...] = tuple(map(as_picks, picks))
    if placement is None:
        placement = picked_placement(x.layout.mesh, x.placement, x.shape, every)
    shape, layout = tuple(map(pick_count, every)), Layout(x.mesh, placement)
    if not x.is_member:
        return DTensor(x.mesh, layout, shape, x.dtype, None)
    keys = keys_here(x, every, shape, layout)
    if keys is None:
        looked_up = [axis for axis, one in enumerate(every) if not has_unit_runs(one)]
        if looked_up:
            return _looked_up(x, every, placement, looked_up, name)
        block = _read_rows(x, layout, shape, every, name)
    else:
        block = x.mesh.shared_empty(layout.local_shape(shape, x.mesh.rank), x.dtype)
        block[...] = x.local[_outer(keys)]
    return DTensor(x.mesh, layout, shape, x.dtype, block)


def keys_here(
    x: DTensor, picks: tuple[Any, ...], shape: tuple[int, ...], layout: Layout
) -> list[slice | HostArray] | None:
    """Return for each axis what is picked of this rank's block; None if any element moves.

    Args:
        x: An array; this rank has a block of it.
        picks: For each axis the indices.
        shape: The result's shape.
        layout: The result's layout.
    """
    source, target = x.layout.tiling(x.shape), layout.tiling(shape)
    rows = zip(picks, target.bounds, source.bounds, strict=True)
    if not all(stays(*row) for row in rows) or any(isinstance(one, tuple) for one in picks):
        return None
    boxes = zip(picks, target.box(x.mesh.rank), source.box(x.mesh.rank), strict=True)
    return [met(one, *new, *old)[1] for one, new, old in boxes]


def _read_rows(
    x: DTensor, layout: Layout, shape: tuple[int, ...], picks: tuple[Any, ...], name: str
) -> HostArray:
    """Return this rank's block of picks without gaps, read where they are."""
    reading = _prepared(x.mesh.rank, x.layout, x.shape, layout, shape, picks)
    block = x.mesh.shared_empty(layout.local_shape(shape, x.mesh.rank), x.dtype)
    if reading.moves:
        here = np.ascontiguousarray(x.local).reshape(x.local.shape)
        rule = f"shape {x.shape}, {x.dtype}, {x.layout} -> {shape}, {layout}"
        reading.once(x.mesh, name, rule, here, block)
    else:
        copy_own(reading.regions, x.local, block)
    for axis, (one, box) in enumerate(zip(picks, layout.box(shape, x.mesh.rank), strict=True)):
        for at, run in unit_runs(one, *box):
            if run.step < 0:  # it has come forward
                part = block[(*(slice(None),) * axis, slice(at, at + len(run)))]
                part[...] = np.flip(part, axis)
    return block


@lru_cache(maxsize=64)
def _prepared(
    rank: int,
    source: Layout,
    shape: tuple[int, ...],
    target: Layout,
    made: tuple[int, ...],
    picks: tuple[Any, ...],
) -> Reading:
    """Return what `rank` has to do; the same object for the same question."""
    reads = picked_reads(source.tiling(shape), target.tiling(made), picks)
    return Reading.prepare(rank, reads, lambda other: source.box(shape, other))


def _looked_up(
    x: DTensor, picks: tuple[Any, ...], placement: Placement, axes: list[int], name: str
) -> DTensor:
    """Pick along all other axes first, then along one after the other of these, index by index."""
    rest = tuple(range(n) if a in axes else picks[a] for a, n in enumerate(x.shape))
    tiling = x.layout.tiling(x.shape)
    dims = [tiling.axis_dims[axis] for axis in axes]
    found = x
    if any(isinstance(one, tuple) or one != range(n) for one, n in zip(rest, x.shape, strict=True)):
        kept = _with_specs(placement, x.placement, chain.from_iterable(dims))
        found = pick(x, rest, kept, name=name)
    for axis, row in zip(axes, dims, strict=True):
        indices = as_indices(picks[axis])
        owners = interval_numbers([indices], [tiling.bounds[axis]])
        found = _gathered(
            found, axis, [indices], owners, _with_specs(found.placement, placement, row), name
        )
    return found


def _with_specs(placement: Placement, other: Placement, dims: Iterable[int]) -> Placement:
    """Return a placement with the specs that another one has for some dims."""
    specs = list(placement)
    for dim in dims:
        specs[dim] = other[dim]
    return Placement(specs)


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
    source = x.layout.tiling(x.shape)
    owners = interval_numbers(rows, source.bounds[: len(rows)])
    placement = _placement(source, x.placement, len(rows), owners, len(rows[0]))
    return _gathered(x, 0, rows, owners, placement, name)


def _gathered(
    x: DTensor,
    axis: int,
    rows: list[Integers],
    owners: Integers,
    placement: Placement,
    name: str,
) -> DTensor:
    """Return the elements at `rows`, indices along `axis` and the next axes, which become one.

    A rank packs all that others, and itself, take of it in the order of the result, so that what
    each takes is one box; a taker puts what has come into order.
    """
    mesh, last = x.mesh, axis + len(rows)
    shape = (*x.shape[:axis], len(rows[0]), *x.shape[last:])
    layout = Layout(mesh, placement)
    if not x.is_member:
        return DTensor(mesh, layout, shape, x.dtype, None)
    source, target = x.layout.tiling(x.shape), layout.tiling(shape)
    places, me = places_of(source.mesh), place_in(mesh)
    bounds, leaves = target.bounds[axis], target.leaves_of(places.coords)[axis]
    homes = np.zeros(len(places.ranks), np.int64)
    split = [*zip(source.leaves_of(places.coords), source.bounds, strict=True)][axis:last]
    for leaf, edges in split:
        homes = homes * (len(edges) - 1) + leaf
    block = mesh.shared_empty(layout.local_shape(shape, mesh.rank), x.dtype)
    before: tuple[Any, ...] = (slice(None),) * axis
    box = source.box(mesh.rank)[axis:last]
    start, stop = bounds[leaves[me]], bounds[leaves[me] + 1]

    def fill(into: HostArray, where: Any) -> None:
        key = [row[where] - low for row, (low, _) in zip(rows, box, strict=True)]
        if len(key) == 1:
            x.local.take(key[0], axis, into, "clip")  # in bounds: it need not buffer
        else:
            into[...] = x.local[(*before, *key)]

    pairs = sorted(set(zip(leaves.tolist(), homes.tolist(), strict=True)))
    if all((owners[bounds[leaf] : bounds[leaf + 1]] == home).all() for leaf, home in pairs):
        fill(block, slice(start, stop))
    elif 0 not in shape:
        dims = [dim for row in source.axis_dims[axis:last] for dim in row]
        apart = np.delete(places.coords, dims, axis=1)
        team = np.flatnonzero((apart == apart[me]).all(axis=1)).tolist()
        low, high = whole(block.shape[:axis]), whole(block.shape[axis + 1 :])
        mine = np.flatnonzero(owners == homes[me])
        packed = mesh.shared_empty(extent((*low, (0, len(mine)), *high)), x.dtype)
        fill(packed, mine)
        cuts = np.searchsorted(mine, bounds).tolist()
        gives, takes, order, at = [], [], [], 0
        received: list[int] = []
        for rank in team:
            given = cuts[leaves[rank]], cuts[leaves[rank] + 1]
            if rank != me and given[0] < given[1]:
                gives.append(Give(rank, (*low, given, *high)))
            where = np.flatnonzero(owners[start:stop] == homes[rank])
            count = len(where)
            if not count:
                continue
            first, after = (
                int(np.count_nonzero(part == homes[rank]))
                for part in (owners[:start], owners[stop:])
            )
            its_shape = extent((*low, (0, first + count + after), *high))
            part = Part(rank, its_shape, (*low, (first, first + count), *high))
            takes.append(Take((*low, (at, at + count), *high), (part,)))
            order.append(where)
            at += count
            if rank != me:
                received += rank, count * volume((*low, *high)) * x.itemsize, 1
        sent = sum(volume(give.box) for give in gives) * x.itemsize
        got = mesh.shared_empty(block.shape, x.dtype)
        _exchange(mesh, name, packed, got, Regions(tuple(takes), tuple(gives)), sent, received)
        if order:
            block[(*before, np.concatenate(order))] = got
    return DTensor(mesh, layout, shape, x.dtype, block)


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
