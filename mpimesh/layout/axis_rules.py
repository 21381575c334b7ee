"""Placements that operations along axes need, and the placements that they make."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple, TypeAlias

import numpy as np

from mpimesh.errors import LayoutError, ShapeError
from mpimesh.layout.boxes import Box, run_start, volume
from mpimesh.layout.layout import Layout
from mpimesh.layout.op_rules import Operand, OpRule
from mpimesh.layout.placement import Partial, Placement, PlacementSpec, Replicate, Shard
from mpimesh.layout.tiling import Cut, Integers, Tiling, axis_bounds
from mpimesh.mesh import Mesh

__all__ = [
    "AxisGroup",
    "as_indices",
    "as_picks",
    "axis_groups",
    "counts_between",
    "full_shape",
    "has_unit_runs",
    "interval_numbers",
    "is_sorted",
    "join_rules",
    "lines_placement",
    "met",
    "overlaps",
    "pick_count",
    "picked_placement",
    "renumbered",
    "reshaped_placement",
    "row_dim",
    "rows_placement",
    "stays",
    "unit_runs",
    "unsplit",
]


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


# -- ranks with whole lines along an axis --------------------------------------------------


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


# -- the first axes in order from rank to rank ---------------------------------------------


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
            alone = _axis(spec) == 0 and sum(_axis(one) == 0 for one in placement) == 1
            specs.append(spec if alone else Shard(0))
        elif dim in inside or (only and isinstance(spec, Shard)):
            specs.append(Replicate())
        else:
            specs.append(spec)
    return Placement(specs)


def row_dim(placement: Placement) -> int | None:
    """Return the only dim that splits axis 0; None if none does."""
    return next((dim for dim, spec in enumerate(placement) if _axis(spec) == 0), None)


def _axis(spec: PlacementSpec) -> int:
    return spec.axis if isinstance(spec, Shard) else -1


# -- arrays joined along an axis -----------------------------------------------------------


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
    ops = [{spec.op for spec in one.placement if isinstance(spec, Partial)} for one in operands]
    summed = all(one == ops[0] for one in ops)
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


Picks: TypeAlias = "range | tuple[range, ...] | Integers"
"""Indices along an axis: evenly spaced ones, several rows of these one behind the other, or any."""

MOST_RUNS = 64
"""More rows than that are better looked up one index at a time."""


def pick_count(picks: Picks) -> int:
    """Return how many indices there are."""
    return sum(map(len, picks)) if isinstance(picks, tuple) else len(picks)


def as_picks(picks: Picks) -> Picks:
    """Return rows that are too many as one array of indices."""
    return as_indices(picks) if isinstance(picks, tuple) and len(picks) > MOST_RUNS else picks


def as_indices(picks: Picks) -> Integers:
    """Return picks as an array of indices."""
    if isinstance(picks, np.ndarray):
        return picks
    rows = picks if isinstance(picks, tuple) else (picks,)
    return np.concatenate([np.arange(run.start, run.stop, run.step) for run in rows])


def unit_runs(
    picks: range | tuple[range, ...], start: int, stop: int
) -> Iterator[tuple[int, range]]:
    """Yield rows of the picks `start` to `stop`, and where they stand behind `start`."""
    at = 0
    for run in picks if isinstance(picks, tuple) else (picks,):
        first = max(start - at, 0)
        part = run[first : max(stop - at, first)]
        if part:
            yield at + first - start, part
        at += len(run)


def has_unit_runs(picks: Picks) -> bool:
    """Tell whether the indices are rows without gaps, forward or backward."""
    rows = picks if isinstance(picks, tuple) else (picks,)
    return all(isinstance(run, range) and (abs(run.step) == 1 or len(run) < 2) for run in rows)


def stays(picks: Picks, bounds: Integers, source: Integers) -> bool:
    """Tell whether each interval of the new axis takes of the same one of the old axis alone.

    Shapes:
        bounds: (intervals + 1,).
        source: (intervals + 1,).
    """
    if isinstance(picks, range) and picks == range(int(source[-1])):
        return bounds is source or bool((bounds == source).all())
    for (start, stop), (low, high) in zip(_pairs(bounds), _pairs(source), strict=True):
        if start == stop:
            continue
        if isinstance(picks, np.ndarray):
            part = picks[start:stop]
            ends = [int(part.min()), int(part.max())]
        else:
            ends = [end for _, run in unit_runs(picks, start, stop) for end in (run[0], run[-1])]
        if min(ends) < low or max(ends) >= high:
            return False
    return True


def met(
    picks: range | Integers, start: int, stop: int, low: int, high: int
) -> tuple[slice | Integers, slice | Integers, int]:
    """Return which of the picks `start` to `stop` have an index from `low` to below `high`.

    Returns:
        Where they stand behind `start`; their indices less `low`; how many they are.

    Example:
        >>> met(range(1, 20, 3), 1, 5, 6, 12)  # 4, 7, 10, 13: 7 and 10
        (slice(1, 3, 1), slice(1, 5, 3), 2)
    """
    if not isinstance(picks, range):
        part = picks[start:stop]
        if is_sorted(part):
            first, last = np.searchsorted(part, [low, high]).tolist()
            return slice(first, last, 1), _as_slice(part[first:last] - low), last - first
        where = np.flatnonzero((part >= low) & (part < high))
        return _as_slice(where), _as_slice(part[where] - low), len(where)
    part_range = picks[start:stop]
    first, step = part_range.start, part_range.step
    if step > 0:
        begin, end = -((first - low) // step), -((first - high) // step)
    else:
        begin, end = (first - high) // -step + 1, (first - low) // -step + 1
    begin = min(max(begin, 0), len(part_range))
    end = min(max(end, begin), len(part_range))
    found = part_range[begin:end]
    return slice(begin, end, 1), _slice_of(found.start - low, len(found), step), len(found)


def counts_between(picks: Picks, bounds: Integers, source: Integers) -> Integers:
    """Return how many picks of each interval of the new axis lie in each of the old axis.

    Shapes:
        bounds: (new intervals + 1,).
        source: (old intervals + 1,).
        result: (new intervals, old intervals).
    """
    if isinstance(picks, tuple):
        ends = [0, *accumulate(map(len, picks))]
        found = np.zeros((len(bounds) - 1, len(source) - 1), np.int64)
        for at, run in zip(ends, picks, strict=False):
            found += counts_between(run, np.clip(bounds - at, 0, len(run)), source)
        return found
    if isinstance(picks, range):
        rows = [
            [met(picks, a, b, low, high)[2] for low, high in _pairs(source)]
            for a, b in _pairs(bounds)
        ]
        return np.array(rows, np.int64).reshape(len(bounds) - 1, len(source) - 1)
    parts = len(source) - 1
    counts = np.zeros((len(bounds) - 1, parts), np.int64)
    for row, (start, stop) in zip(counts, _pairs(bounds), strict=True):
        part = picks[start:stop]
        if is_sorted(part):
            row[:] = np.diff(np.searchsorted(part, source))
        else:
            row[:] = np.bincount(interval_numbers([part], [source]), minlength=parts)
    return counts


def interval_numbers(rows: Sequence[Integers], bounds: Sequence[Integers]) -> Integers:
    """Return in which tile, in row-major order, the element at an index of each axis is.

    Shapes:
        rows: (n,) for each axis.
        bounds: (intervals + 1,) for each axis.
        result: (n,), of small integers if these are enough.
    """
    tiles = prod(len(edges) - 1 for edges in bounds)
    found: Integers = np.zeros(len(rows[0]), np.uint8 if tiles <= _FEW_TILES else np.int64)
    for row, edges in zip(rows, bounds, strict=True):
        if len(edges) == 2:
            continue
        found *= found.dtype.type(len(edges) - 1)
        if len(edges) - 1 <= _FEW:
            for edge in edges[1:-1].tolist():
                found += row >= edge
        else:
            found += (np.searchsorted(edges, row, "right") - 1).astype(found.dtype)
    return found


_FEW_TILES = 255
_FEW = 16
"""Of so many intervals, comparing all indices with each edge is quicker than looking each up."""


def is_sorted(indices: Integers) -> bool:
    """Tell whether none is less than the one before."""
    # Most that are not show it at once.
    head = indices[:64]
    if len(indices) > 64 and not (head[:-1] <= head[1:]).all():
        return False
    return bool((indices[:-1] <= indices[1:]).all())


def picked_placement(
    mesh: Mesh, placement: Placement, shape: tuple[int, ...], picks: tuple[Picks, ...]
) -> Placement:
    """Return where the picked elements are to lie.

    They stay where they are, with blocks as long as the picks that lie in them, if the picks of
    an axis go through its blocks in order, as a slice does. Else the axis is split as it was,
    if it is as long as it was, and evenly if not; then elements move. The same goes for
    an axis that several dims split, because its blocks cannot have any sizes.
    """
    tiling = Layout(mesh, placement).tiling(shape)
    specs: list[PlacementSpec] = list(placement)
    for axis, (length, pick) in enumerate(zip(shape, picks, strict=True)):
        dims = tiling.axis_dims[axis]
        if not dims or (isinstance(pick, range) and pick == range(length)):
            continue
        bounds = tiling.bounds[axis]
        if len(dims) == 1 and _in_order(pick, bounds):
            every = np.array([0, pick_count(pick)], np.int64)
            sizes = counts_between(pick, every, bounds)[0].tolist()
            specs[dims[0]] = Shard.of_sizes(axis, sizes)
        elif pick_count(pick) != length:
            for dim in dims:
                specs[dim] = Shard(axis)
    return Placement(specs)


def _in_order(picks: Picks, bounds: Integers) -> bool:
    if isinstance(picks, range):
        return picks.step > 0 or len(picks) < 2
    if isinstance(picks, tuple):
        ends = [end for run in picks if run for end in (run[0], run[-1])]
        return is_sorted(np.searchsorted(bounds, ends, "right"))
    if len(bounds) == 2 or is_sorted(picks):
        return True
    head = np.searchsorted(bounds, picks[:64], "right")
    if not is_sorted(head):
        return False
    return is_sorted(np.searchsorted(bounds, picks, "right"))


def _pairs(bounds: Integers) -> list[tuple[int, int]]:
    row = bounds.tolist()
    return list(pairwise(row))


def _slice_of(start: int, count: int, step: int) -> slice:
    """Return the slice with `count` indices from `start` on, which may end at index 0."""
    if count == 0:
        return slice(0, 0, 1)
    stop = start + step * (count - 1) + (1 if step > 0 else -1)
    return slice(start, stop if stop >= 0 else None, step)


def _as_slice(indices: Integers) -> slice | Integers:
    """Return evenly spaced indices as a slice, which is quicker."""
    if len(indices) < 2:
        return _slice_of(int(indices[0]) if len(indices) else 0, len(indices), 1)
    step, last = int(indices[1] - indices[0]), len(indices) - 1
    if (
        step != 0
        and int(indices[last] - indices[0]) == step * last
        and (np.diff(indices) == step).all()
    ):
        return _slice_of(int(indices[0]), len(indices), step)
    return indices


class AxisGroup(NamedTuple):
    """Old axes that become new axes, none of which a smaller number of them would make."""

    old: tuple[int, ...]
    new: tuple[int, ...]


def axis_groups(old: Sequence[int], new: Sequence[int]) -> list[AxisGroup]:
    """Return which axes become which. Both shapes have the same number of elements, not 0.

    Axes of length 1 are in no group.

    Example:
        >>> axis_groups((4, 6, 5), (2, 2, 30))
        [AxisGroup(old=(0,), new=(0, 1)), AxisGroup(old=(1, 2), new=(2,))]
    """
    rows = [axis for axis, length in enumerate(old) if length != 1]
    cols = [axis for axis, length in enumerate(new) if length != 1]
    groups, i, j = [], 0, 0
    while i < len(rows):
        first, second = i, j
        left, right = old[rows[i]], new[cols[j]]
        i, j = i + 1, j + 1
        while left != right:
            if left < right:
                left *= old[rows[i]]
                i += 1
            else:
                right *= new[cols[j]]
                j += 1
        groups.append(AxisGroup(tuple(rows[first:i]), tuple(cols[second:j])))
    return groups


def full_shape(old: Sequence[int], new: Sequence[int]) -> tuple[int, ...]:
    """Return `new` with the length that stands for -1.

    Raises:
        ShapeError: If the numbers of elements differ.
    """
    size, known = prod(old), prod(n for n in new if n != -1)
    wild = sum(n == -1 for n in new)
    good = (known > 0 and size % known == 0) if wild == 1 else (wild == 0 and known == size)
    if not good or any(n < -1 for n in new):
        raise ShapeError(
            f"an array of shape {tuple(old)} has {size} elements and cannot be reshaped to "
            f"{tuple(new)}"
        )
    return tuple(size // known if n == -1 else n for n in new)


@lru_cache(maxsize=1024)
def reshaped_placement(
    mesh: Mesh, placement: Placement, old: tuple[int, ...], new: tuple[int, ...]
) -> tuple[Placement, bool]:
    """Return where the elements are to lie after a reshape, and whether any have to move there.

    A dim that splits the outermost axis of a group of old axes splits that of the new ones, if
    its blocks are whole numbers of the new axis; then nothing moves. Else the new axis is
    split evenly, and elements move. Of several dims that split one axis, as many as can
    be split the axes of the new group one after the other.
    """
    if 0 in old:
        specs = [Replicate() if isinstance(s, Shard) else s for s in placement]
        return Placement(specs), False
    target: list[PlacementSpec] = list(placement)
    before = Layout(mesh, placement).tiling(old)
    groups = axis_groups(old, new)
    for axis, dims in enumerate(before.axis_dims):
        group = next((g for g in groups if axis in g.old), None)
        if group is None:  # its length is 1: some ranks have nothing
            for dim in dims:
                target[dim] = Replicate()
            continue
        for dim in dims:
            target[dim] = Shard(group.new[0])
    for group in groups:
        if before.axis_dims[group.old[0]]:
            _keep(mesh, before, group, new, target)
    kept = Placement(target)
    return kept, not _same_elements(before, Layout(mesh, kept).tiling(new), groups)


def _keep(
    mesh: Mesh,
    before: Tiling,
    group: AxisGroup,
    new: tuple[int, ...],
    target: list[PlacementSpec],
) -> None:
    """Give the dims that split the outermost axis of a group the new axes where nothing moves."""
    axis = group.old[0]
    dims = before.axis_dims[axis]
    sharers = [spec for spec in target if isinstance(spec, Shard) and spec.axis == group.new[0]]
    inner_old = prod(before.shape[a] for a in group.old[1:])
    edges = [int(b) * inner_old for b in before.bounds[axis]]
    if len(dims) == 1:
        inner = prod(new[a] for a in group.new[1:])
        if len(sharers) == 1 and all(edge % inner == 0 for edge in edges):
            ends = [edge // inner for edge in edges]
            sizes = [b - a for a, b in pairwise(ends)]
            plain = Layout(mesh, Placement(target)).tiling(new).bounds[group.new[0]].tolist()
            target[dims[0]] = Shard(group.new[0], sizes=None if plain == ends else sizes)
        return
    # One new axis after the other takes dims, as long as it is cut into single elements.
    trial, place = list(target), 0
    room = new[group.new[0]]
    for dim in dims:
        if room == 1 and place + 1 < len(group.new):
            place += 1
            room = new[group.new[place]]
        trial[dim] = Shard(group.new[place])
        if room % mesh.dims[dim].size == 0:
            room //= mesh.dims[dim].size
    try:
        tiling = Layout(mesh, Placement(trial)).tiling(new)
    except LayoutError:
        return
    if _same_elements(before, tiling, [group], only=dims):
        for dim in dims:
            target[dim] = trial[dim]


def _same_elements(
    before: Tiling, after: Tiling, groups: Sequence[AxisGroup], only: Sequence[int] = ()
) -> bool:
    """Tell whether every rank has the same elements of each group before and after."""
    for rank in before.mesh.ids.tolist():
        old, new = before.box(rank), after.box(rank)
        if not only and any(a == b for a, b in old) and any(a == b for a, b in new):
            continue
        for group in groups:
            runs = [
                _run(tuple(box[a] for a in axes), [shape[a] for a in axes])
                for box, shape, axes in (
                    (old, before.shape, group.old),
                    (new, after.shape, group.new),
                )
            ]
            if None in runs or runs[0] != runs[1]:
                return False
        if not only and any(b - a != n for (a, b), n in _ones(before, old)):
            return False
        if not only and any(b - a != n for (a, b), n in _ones(after, new)):
            return False
    return True


def _ones(tiling: Tiling, box: Sequence[tuple[int, int]]) -> list[tuple[tuple[int, int], int]]:
    return [(part, n) for part, n in zip(box, tiling.shape, strict=True) if n == 1]


def _run(box: Box, shape: Sequence[int]) -> tuple[int, int] | None:
    """Return (start, stop) of a box among the elements of its axes; None if it is no run."""
    length = volume(box)
    if not length:
        return (0, 0)
    start = run_start(box, shape)
    return None if start < 0 else (start, start + length)
