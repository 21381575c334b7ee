"""Sorted arrays, also along split axes; unique elements; arrays as sets."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from mpimesh.arrays import HostArray
from mpimesh.dtensor.dispatch import implements
from mpimesh.dtensor.dtensor import DTensor, common_mesh
from mpimesh.dtensor.elementwise import blockwise
from mpimesh.dtensor.indexing import masked, of_rows
from mpimesh.dtensor.joining import concatenate
from mpimesh.dtensor.methods import reduced, require_member
from mpimesh.dtensor.picking import exchange_counts, exchange_pieces, place_in, true_anywhere
from mpimesh.dtensor.reshape import permuted, ravel, reshape, row_along
from mpimesh.dtensor.run import (
    all_redistributed,
    as_tensor,
    as_tensors,
    implements_by_name,
    moved_to,
    plain_values,
)
from mpimesh.errors import AxisError, IndexOutOfRangeError, ShapeError
from mpimesh.layout import Layout, Placement, PlacementSpec, Shard
from mpimesh.layout.axis_rules import lines_placement, row_dim, rows_placement, unsplit
from mpimesh.layout.tiling import places_of
from mpimesh.runtime.operands import normal_axis

if TYPE_CHECKING:
    from mpimesh.layout.tiling import Integers

__all__ = ["argsort", "sort"]


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
    return moved_to(merged, x.placement)


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


def _sorted(a: DTensor, axis: Any, kind: Any, *, indices: bool, kth: Any = None) -> DTensor:
    """Sort along an axis, or say which indices would; with `kth` only partition it.

    Cost:
        Nothing moves if the axis is whole. Else the split goes to another axis and comes
        back, if there are enough lines; else the lines are sorted one by one by samples.
    """
    x, which = row_along(a, axis) if indices or axis is None else (a, normal_axis(axis, a.ndim))
    x = reduced(x)
    target = lines_placement(x.layout.mesh, x.placement, x.shape, which)
    dtype = np.dtype(np.intp) if indices else x.dtype
    if target is None and kth is not None:
        parted = _parted_row(x, kth, indices=indices)
        if parted is not None:
            return parted
    if target is None:
        return _line_by_line(x, which, dtype, indices=indices)
    here = moved_to(x, target)
    block = None
    if here.is_member and kth is None:
        done = np.argsort if indices else np.sort
        block = done(here.local, which, kind=kind)
    elif here.is_member:
        part = np.argpartition if indices else np.partition
        block = part(here.local, kth, which)
    found = DTensor(x.mesh, here.layout, x.shape, dtype, block)
    return moved_to(found, x.placement)


def _line_by_line(x: DTensor, axis: int, dtype: Any, *, indices: bool) -> DTensor:
    order = [*(one for one in range(x.ndim) if one != axis), axis]
    # Fewer lines than ranks: every rank has its part of each of them.
    turned = permuted(x, order)
    last = x.ndim - 1
    turned = moved_to(turned, unsplit(turned.placement, set(range(last))))
    block = None
    if turned.is_member:
        block = np.empty(turned.local.shape, dtype)
    for line in np.ndindex(*turned.shape[:last]):
        specs = [Shard(0, sizes=s.sizes) if isinstance(s, Shard) else s for s in turned.placement]
        row = turned.local[line] if turned.is_member else None
        one = DTensor(x.mesh, Layout(x.mesh, specs), turned.shape[last:], x.dtype, row)
        done = sorted_row(one, indices=indices)
        if block is not None:
            block[line] = done.local
    found = DTensor(x.mesh, turned.layout, turned.shape, dtype, block)
    return moved_to(permuted(found, np.argsort(order).tolist()), x.placement)


@implements_by_name(np.sort)
def sort(a: Any, axis: Any = -1, kind: Any = None, *, stable: Any = None) -> DTensor:
    """Return the array sorted along an axis, in the layout that it had.

    Collective, if the axis is split. NaNs come last, as NumPy has them.
    """
    return _sorted(a, axis, "stable" if stable else kind, indices=False)


@implements_by_name(np.argsort)
def argsort(a: Any, axis: Any = -1, kind: Any = None, *, stable: Any = None) -> DTensor:
    """Return the indices, counted along the whole axis, that would sort it.

    Collective, if the axis is split; then equal elements keep their order, whatever `kind` says.
    """
    return _sorted(a, axis, "stable" if stable else kind, indices=True)


@implements(np.take_along_axis)
def take_along_axis(arr: Any, indices: Any, axis: Any = -1) -> DTensor:
    """Return elements by indices along an axis, line by line.

    Collective, if the axis is split; the result then has the layout of whole lines.

    Raises:
        IndexOutOfRangeError: On every rank, if an index is out of bounds.
    """
    x, rows = map(reduced, as_tensors([arr, indices]))
    if axis is None:
        x, axis = ravel(x), 0
    which = normal_axis(axis, x.ndim)
    if rows.ndim != x.ndim or rows.dtype.kind not in "iu":
        raise ShapeError(
            f"indices must be whole numbers with {x.ndim} axes, got {rows.dtype} of {rows.shape}"
        )
    shape = [max(n, m) if 1 in (n, m) else n for n, m in zip(x.shape, rows.shape, strict=True)]
    shape[which] = rows.shape[which]
    others = [one for one in range(x.ndim) if one != which]
    if any(y.shape[one] not in (1, shape[one]) for y in (x, rows) for one in others):
        raise ShapeError(f"indices of shape {rows.shape} do not fit an array of shape {x.shape}")
    base = rows if rows.size > x.size else x
    target = lines_placement(x.layout.mesh, base.placement, tuple(shape), which)
    if target is None:
        target = unsplit(base.placement, {which})
    goals = [
        unsplit(target, {one for one in others if y.shape[one] != shape[one]}) for y in (x, rows)
    ]
    x, rows = all_redistributed([x, rows], goals)
    block: HostArray | None = None
    if x.is_member:
        length, mine = x.shape[which], rows.local
        wrong = bool(((mine < -length) | (mine >= length)).any())
        if true_anywhere(x.mesh, "take_along_axis", wrong):
            raise IndexOutOfRangeError.everywhere(
                f"an index of {rows!r} is out of bounds for axis {which} of {x!r}"
            )
        block = np.take_along_axis(x.local, mine, which)
    return DTensor(x.mesh, Layout(x.mesh, target), shape, x.dtype, block)


@implements_by_name(np.partition)
def partition(a: Any, kth: Any, axis: Any = -1, kind: Any = None) -> DTensor:
    """Return the array with the `kth` elements in their places; smaller ones before them.

    Cost:
        As of :func:`sort`. A single row of numbers that is split, and one `kth`, are quicker:
        a few thousand elements go to every rank, and then all move once.
    """
    _check_kth(a, kth, axis)
    return _sorted(a, axis, kind, indices=False, kth=kth)


@implements_by_name(np.argpartition)
def argpartition(a: Any, kth: Any, axis: Any = -1, kind: Any = None) -> DTensor:
    """Return the indices of :func:`partition`."""
    _check_kth(a, kth, axis)
    return _sorted(a, axis, kind, indices=True, kth=kth)


def _parted_row(x: DTensor, kth: Any, *, indices: bool) -> DTensor | None:
    """Partition a split row of numbers; None where sorting is to do it."""
    if x.ndim != 1 or np.size(kth) != 1 or x.dtype.kind not in "biuf" or not x.is_member:
        return None
    if not x.size:
        return None
    row = moved_to(x, rows_placement(x.placement, x.shape, 1))
    value = _kth_of(row, int(np.ravel(kth)[0]) % x.shape[0])
    if value is None:
        return None
    # Before it, like it, behind it; NaN, which nothing is less or more than, comes last.
    if value != value:
        kinds = 2 * np.isnan(row.local).astype(np.uint8)
    else:
        kinds = 2 - (row.local <= value).astype(np.uint8) - (row.local < value)
    order = np.argsort(kinds, kind="stable")
    found = order + row.global_offset[0] if indices else row.local[order]
    cuts = np.searchsorted(kinds[order], [1, 2])
    parts = [of_rows(row, part, (), {0: 0}) for part in np.split(found, cuts)]
    return moved_to(concatenate(parts).astype(found.dtype, copy=False), x.placement)


def _kth_of(row: DTensor, k: int) -> Any:
    """Return the element of a row that would be at `k` if it were sorted. Collective.

    It lies between two samples, with few others between them, among which is searched further.
    None if samples do not tell them apart.
    """
    rest = row.local
    if row.dtype.kind == "f" and np.isnan(rest).any():
        rest = rest[~np.isnan(rest)]
    for _ in range(_MOST_ROUNDS):
        all_rest = of_rows(row, rest, (), {0: 0})
        total = all_rest.shape[0]
        if k >= total:
            return np.nan
        if total <= _FEW:
            return np.partition(all_rest.full(), k)[k]
        every = total // _FEW + 1
        samples = np.sort(of_rows(row, rest[::every], (), {0: 0}).full())
        place, near = k * len(samples) // total, 2 * math.isqrt(len(samples))
        low, high = samples[max(place - near, 0)], samples[min(place + near, len(samples) - 1)]
        below, between = rest < low, (rest >= low) & (rest <= high)
        less = of_rows(row, rest[below], (), {0: 0})
        inside = of_rows(row, rest[between], (), {0: 0})
        if k < less.shape[0]:
            rest = less.local
        elif k >= less.shape[0] + inside.shape[0]:
            rest, k = rest[rest > high], k - less.shape[0] - inside.shape[0]
        elif low == high:
            return low
        elif inside.shape[0] == total:
            return None
        else:
            rest, k = inside.local, k - less.shape[0]
    return None


_FEW = 4096
"""So many elements are gathered, to see which one it is, and about so many samples."""
_MOST_ROUNDS = 12


def _check_kth(a: DTensor, kth: Any, axis: Any) -> None:
    if a.size == 0:
        return  # NumPy takes any
    length = a.size if axis is None else a.shape[normal_axis(axis, a.ndim)]
    for one in np.ravel(kth).tolist():
        if not -length <= one < length:
            raise ShapeError(f"kth {one} is out of bounds for an axis of {length} elements")


@implements_by_name(np.searchsorted)
def searchsorted(a: Any, v: Any, side: Any = "left") -> DTensor:
    """Return where elements of `v` fit into the sorted `a`, laid out as `v`.

    Collective, if `a` is split, which is then gathered.
    """
    mesh = common_mesh([a, v])
    if np.ndim(a) != 1 or side not in ("left", "right"):
        raise AxisError(f"np.searchsorted takes a sorted row, and side left or right; got {side!r}")
    row = np.asarray(plain_values(a))
    values = reduced(as_tensor(v, mesh))
    block: HostArray | None = None
    if values.is_member:
        block = np.asarray(np.searchsorted(row, values.local, side))
    return DTensor(mesh, values.layout, values.shape, np.intp, block)


@implements_by_name(np.unique)
def unique(
    ar: Any,
    return_index: bool = False,
    return_inverse: bool = False,
    return_counts: bool = False,
    *,
    equal_nan: bool = True,
    sorted: bool = True,  # noqa: A002
) -> Any:
    """Return the different elements of the array, sorted, on every rank. Collective.

    Also, if asked for: where each comes first, counted in C order; for every element which one of
    them it is, laid out as the array; and how often each comes.

    Cost:
        Every rank gets the different elements of each block.
    """
    x = ravel(reduced(ar))
    x = moved_to(x, rows_placement(x.placement, x.shape, 1))
    require_member(x)
    alike = Layout.replicated(x.mesh)
    if not (return_index or return_inverse or return_counts):  # which NumPy has another way for
        values = np.unique(x.local, equal_nan=equal_nan)
        found = np.unique(of_rows(x, values, (), {0: 0}).full(), equal_nan=equal_nan)
        return DTensor(x.mesh, alike, found.shape, found.dtype, found)
    values, first, own, counts = np.unique(
        x.local, return_index=True, return_inverse=True, return_counts=True, equal_nan=equal_nan
    )
    first += x.global_offset[0]
    parts = [of_rows(x, part, (), {0: 0}) for part in (values, first, counts)]
    start, rows = parts[0].global_offset[0], [part.full() for part in parts]
    # With the index NumPy's sort is stable: equal ones are in the order of their places.
    every, at, which = np.unique(rows[0], True, return_inverse=True, equal_nan=equal_nan)
    total = np.zeros(len(every), counts.dtype)
    np.add.at(total, which, rows[2])
    results: list[Any] = [every, rows[1][at], None, total]
    chosen = (True, return_index, return_inverse, return_counts)
    for place in (0, 1, 3):
        one = results[place]
        results[place] = DTensor(x.mesh, alike, one.shape, one.dtype, one)
    if return_inverse:
        mine = which[start : start + len(values)][own]
        results[2] = reshape(DTensor(x.mesh, x.layout, x.shape, mine.dtype, mine), ar.shape)
    return tuple(one for one, wanted in zip(results, chosen, strict=True) if wanted)


@implements(np.unique_values)
def unique_values(x: Any, /) -> Any:
    """Return the different elements. Here and in the next ones, no NaN is like another."""
    return unique(x, equal_nan=False)


@implements(np.unique_counts)
def unique_counts(x: Any, /) -> Any:
    """Return the different elements, and how often each comes."""
    return np.lib._arraysetops_impl.UniqueCountsResult(
        *unique(x, return_counts=True, equal_nan=False)
    )


@implements(np.unique_inverse)
def unique_inverse(x: Any, /) -> Any:
    """Return the different elements, and for every element which one it is."""
    return np.lib._arraysetops_impl.UniqueInverseResult(
        *unique(x, return_inverse=True, equal_nan=False)
    )


@implements(np.unique_all)
def unique_all(x: Any, /) -> Any:
    """Return all that :func:`unique` knows."""
    return np.lib._arraysetops_impl.UniqueAllResult(*unique(x, True, True, True, equal_nan=False))


@implements(np.isin)
def isin(
    element: Any,
    test_elements: Any,
    assume_unique: bool = False,
    invert: bool = False,
    *,
    kind: Any = None,
) -> DTensor:
    """Tell which elements are among others, laid out as they are. Collective, if those are split.

    Cost:
        Every rank gets the different ones of the others.
    """
    x, _ = as_tensors([element, test_elements])
    others = _whole_set(test_elements) if x.is_member else ()

    def found(block: Any) -> Any:
        return np.isin(block, others, invert=invert, kind=kind)

    return blockwise(found, [reduced(x)], refuses=False)


if hasattr(np, "in1d"):  # NumPy before 2.4

    @implements(np.in1d)
    def in1d(
        ar1: Any, ar2: Any, assume_unique: bool = False, invert: bool = False, *, kind: Any = None
    ) -> DTensor:
        """Return :func:`isin` of the elements in a row."""
        return isin(ravel(as_tensors([ar1, ar2])[0]), ar2, assume_unique, invert, kind=kind)


def _whole_set(x: Any) -> Any:
    """Return the different elements of a split array, on all ranks; a plain one as it is."""
    return unique(x).local if isinstance(x, DTensor) else x


def _alike(values: Any, *arrays: Any) -> DTensor:
    """Return an array that all ranks of split `arrays` have worked out from the same sets."""
    mesh = common_mesh(arrays)
    return DTensor(mesh, Layout.replicated(mesh), values.shape, values.dtype, values)


@implements(np.union1d)
def union1d(ar1: Any, ar2: Any) -> DTensor:
    """Return the elements of both, sorted, on every rank. Collective."""
    return _alike(np.union1d(_whole_set(ar1), _whole_set(ar2)), ar1, ar2)


@implements(np.intersect1d)
def intersect1d(
    ar1: Any, ar2: Any, assume_unique: bool = False, return_indices: bool = False
) -> Any:
    """Return the elements that both have, sorted, on every rank. Collective.

    Also, if asked for, where each comes first in the two.
    """
    if not return_indices:
        return _alike(np.intersect1d(_whole_set(ar1), _whole_set(ar2)), ar1, ar2)
    rows = [unique(one, return_index=True) for one in as_tensors([ar1, ar2])]
    found, *places = np.intersect1d(
        rows[0][0].local, rows[1][0].local, assume_unique=True, return_indices=True
    )
    firsts = [row[1].local[place] for row, place in zip(rows, places, strict=True)]
    return tuple(_alike(one, ar1, ar2) for one in (found, *firsts))


@implements(np.setxor1d)
def setxor1d(ar1: Any, ar2: Any, assume_unique: bool = False) -> DTensor:
    """Return the elements that one of both has, sorted, on every rank. Collective."""
    return _alike(np.setxor1d(_whole_set(ar1), _whole_set(ar2)), ar1, ar2)


@implements(np.setdiff1d)
def setdiff1d(ar1: Any, ar2: Any, assume_unique: bool = False) -> DTensor:
    """Return the elements of the first that the second lacks. Collective.

    They are sorted, on every rank; with `assume_unique` they stay in order, where they are.
    """
    if assume_unique:
        row = ravel(as_tensors([ar1, ar2])[0])
        return masked(row, isin(row, ar2, invert=True))
    return _alike(np.setdiff1d(_whole_set(ar1), _whole_set(ar2)), ar1, ar2)
