"""Picks of an axis: its elements that make up an axis of the result, and whose they are.

``x[2:9:3]``, ``np.flip``, ``np.roll``, ``np.take``, ``np.repeat`` and ``np.pad`` all say, axis by
axis, which index of the old axis each index of the new one has: its *picks*. A slice is a
`range`, so that it costs nothing however long it is; any other is an array of indices.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from mpimesh.layout.layout import Layout
from mpimesh.layout.placement import Placement
from mpimesh.layout.spec import PlacementSpec, Shard
from mpimesh.mesh import Mesh

if TYPE_CHECKING:
    from mpimesh.layout.tiling import Integers

    Picks: TypeAlias = "range | Integers"

__all__ = ["counts_between", "met", "picked_placement"]


def met(
    picks: Picks, start: int, stop: int, low: int, high: int
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
    if isinstance(picks, range):
        rows = [
            [met(picks, a, b, low, high)[2] for low, high in _pairs(source)]
            for a, b in _pairs(bounds)
        ]
        return np.array(rows, np.int64).reshape(len(bounds) - 1, len(source) - 1)
    owners = np.searchsorted(source, picks, "right") - 1
    homes = np.searchsorted(bounds, np.arange(len(picks)), "right") - 1
    flat = homes * (len(source) - 1) + owners
    counts = np.bincount(flat, minlength=(len(bounds) - 1) * (len(source) - 1))
    return counts.reshape(len(bounds) - 1, len(source) - 1)


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
        if not dims or _is_whole(pick, length):
            continue
        bounds = tiling.bounds[axis]
        if len(dims) == 1 and _in_order(pick, bounds):
            every = np.array([0, len(pick)], np.int64)
            sizes = counts_between(pick, every, bounds)[0].tolist()
            specs[dims[0]] = Shard.of_sizes(axis, sizes)
        elif len(pick) != length:
            for dim in dims:
                specs[dim] = Shard(axis)
    return Placement(specs)


def _in_order(picks: Picks, bounds: Integers) -> bool:
    if isinstance(picks, range):
        return picks.step > 0 or len(picks) < 2
    owners = np.searchsorted(bounds, picks, "right")
    return bool((owners[:-1] <= owners[1:]).all())


def _is_whole(picks: Picks, length: int) -> bool:
    return isinstance(picks, range) and picks == range(length)


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
    step = int(indices[1] - indices[0])
    if step != 0 and (np.diff(indices) == step).all():
        return _slice_of(int(indices[0]), len(indices), step)
    return indices
