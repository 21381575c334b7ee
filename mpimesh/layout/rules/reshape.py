"""Splits of an array that outlive a change of its shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import prod

from mpimesh.errors import LayoutError, ShapeError
from mpimesh.layout.layout import Layout
from mpimesh.layout.placement import Placement
from mpimesh.layout.spec import PlacementSpec, Replicate, Shard
from mpimesh.layout.tiling import Tiling
from mpimesh.mesh import Mesh

__all__ = ["AxisGroup", "Reshaped", "axis_groups", "full_shape", "reshaped_placement"]


@dataclass(frozen=True, slots=True)
class AxisGroup:
    """Old axes that become new axes, none of which a smaller number of them would make.

    Axes of length 1 are in no group.

    Attributes:
        old: The numbers of the old axes.
        new: The numbers of the new axes.
    """

    old: tuple[int, ...]
    new: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reshaped:
    """The placement of an array with a new shape.

    Attributes:
        placement: The placement of the result.
        moves: Whether elements have to move; else every rank has the same before and after.
    """

    placement: Placement
    moves: bool


def axis_groups(old: Sequence[int], new: Sequence[int]) -> list[AxisGroup]:
    """Return which axes become which. Both shapes have the same number of elements, not 0.

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
) -> Reshaped:
    """Return where the elements are to lie after a reshape.

    A dim that splits the outermost axis of a group of old axes splits that of the new ones, if
    its blocks are whole numbers of the new axis; then nothing moves. Else the new axis is
    split evenly, and elements move. Of several dims that split one axis, as many as can
    be split the axes of the new group one after the other.
    """
    if 0 in old:
        specs = [Replicate() if isinstance(s, Shard) else s for s in placement]
        return Reshaped(Placement(specs), moves=False)
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
    return Reshaped(kept, moves=not _same_elements(before, Layout(mesh, kept).tiling(new), groups))


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
    for rank in before.mesh.ids.array().reshape(-1).tolist():
        old, new = before.box(rank), after.box(rank)
        if not only and any(a == b for a, b in old) and any(a == b for a, b in new):
            continue
        for group in groups:
            runs = [
                _run([box[a] for a in axes], [shape[a] for a in axes])
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


def _run(box: Sequence[tuple[int, int]], shape: Sequence[int]) -> tuple[int, int] | None:
    """Return (start, stop) of a box among the elements of its axes; None if it is no run."""
    if any(start == stop for start, stop in box):
        return (0, 0)
    start = stop = 0
    whole = True
    inner = 1
    last = 0
    for (first, end), length in zip(reversed(box), reversed(shape), strict=True):
        if not whole and end - first > 1:
            return None
        whole = whole and end - first == length
        start += first * inner
        last += (end - 1) * inner
        inner *= length
    stop = last + 1
    return (start, stop)
