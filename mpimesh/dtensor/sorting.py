"""Sorted arrays, also along split axes."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpimesh.arrays import HostArray
from mpimesh.dtensor.apply import placed
from mpimesh.dtensor.arguments import as_tensor, axis_of, moved_to, refuse_given
from mpimesh.dtensor.methods import settled
from mpimesh.dtensor.pieces import true_anywhere
from mpimesh.dtensor.registry import implements
from mpimesh.dtensor.samples import sorted_row
from mpimesh.dtensor.shape_axes import permuted
from mpimesh.dtensor.shape_reshape import ravel, row_along
from mpimesh.dtensor.tensor import DTensor
from mpimesh.errors import AxisError, IndexOutOfRangeError, ShapeError, on_all_ranks
from mpimesh.layout import Layout, Shard
from mpimesh.layout.axis_rules import lines_placement, unsplit

__all__ = ["argsort", "sort"]


def _sorted(a: DTensor, axis: Any, kind: Any, *, indices: bool) -> DTensor:
    """Sort along an axis, or say which indices would.

    Cost:
        Nothing moves if the axis is whole. Else the split goes to another axis and comes
        back, if there are enough lines; else the lines are sorted one by one by samples.
    """
    x, which = row_along(a, axis) if indices or axis is None else (a, axis_of(axis, a.ndim))
    x = settled(x)
    target = lines_placement(x.layout.mesh, x.placement, x.shape, which)
    dtype = np.dtype(np.intp) if indices else x.dtype
    if target is None:
        return _line_by_line(x, which, dtype, indices=indices)
    here = moved_to(x, target)
    block = None
    if here.is_member:
        done = np.argsort if indices else np.sort
        block = done(here.local, which, kind=kind)
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


def _kind(kind: Any, stable: Any) -> Any:
    return "stable" if stable else kind


@implements(np.sort)
def sort(
    a: Any, axis: Any = -1, kind: Any = None, order: Any = None, *, stable: Any = None
) -> DTensor:
    """Return the array sorted along an axis, in the layout that it had.

    Collective, if the axis is split. NaNs come last, as NumPy has them.
    """
    refuse_given("sort", order=order)
    return _sorted(a, axis, _kind(kind, stable), indices=False)


@implements(np.argsort)
def argsort(
    a: Any, axis: Any = -1, kind: Any = None, order: Any = None, *, stable: Any = None
) -> DTensor:
    """Return the indices, counted along the whole axis, that would sort it.

    Collective, if the axis is split; then equal elements keep their order, whatever `kind` says.
    """
    refuse_given("argsort", order=order)
    return _sorted(a, axis, _kind(kind, stable), indices=True)


@implements(np.take_along_axis)
def take_along_axis(arr: Any, indices: Any, axis: Any = -1) -> DTensor:
    """Return elements by indices along an axis, line by line.

    Collective, if the axis is split; the result then lies as whole lines do.

    Raises:
        IndexOutOfRangeError: On every rank, if an index is out of bounds.
    """
    mesh = next(one.mesh for one in (arr, indices) if isinstance(one, DTensor))
    x, rows = settled(as_tensor(arr, mesh)), settled(as_tensor(indices, mesh))
    if axis is None:
        x, rows, axis = ravel(x), ravel(rows), 0
    which = axis_of(axis, x.ndim)
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
    x, rows = placed([x, rows], goals)
    block: HostArray | None = None
    if x.is_member:
        length, mine = x.shape[which], rows.local
        wrong = bool(((mine < -length) | (mine >= length)).any())
        if true_anywhere(x.mesh, "take_along_axis", wrong):
            raise on_all_ranks(
                IndexOutOfRangeError(
                    f"an index of {rows!r} is out of bounds for axis {which} of {x!r}"
                )
            )
        block = np.take_along_axis(x.local, mine, which)
    return DTensor(x.mesh, Layout(x.mesh, target), shape, x.dtype, block)


@implements(np.partition)
def partition(a: Any, kth: Any, axis: Any = -1, kind: Any = None, order: Any = None) -> DTensor:
    """Return the array with the `kth` elements in their places: sorted, which is one way."""
    refuse_given("partition", order=order)
    _check_kth(a, kth, axis)
    return sort(a, axis)


@implements(np.argpartition)
def argpartition(a: Any, kth: Any, axis: Any = -1, kind: Any = None, order: Any = None) -> DTensor:
    """Return the indices of :func:`partition`."""
    refuse_given("argpartition", order=order)
    _check_kth(a, kth, axis)
    return argsort(a, axis)


def _check_kth(a: DTensor, kth: Any, axis: Any) -> None:
    if a.size == 0:
        return  # NumPy takes any
    length = a.size if axis is None else a.shape[axis_of(axis, a.ndim)]
    for one in np.ravel(kth).tolist():
        if not -length <= one < length:
            raise ShapeError(f"kth {one} is out of bounds for an axis of {length} elements")


@implements(np.searchsorted)
def searchsorted(a: Any, v: Any, side: Any = "left", sorter: Any = None) -> DTensor:
    """Return where elements of `v` fit into the sorted `a`, laid out as `v`.

    Collective, if `a` is split, which is then gathered.
    """
    refuse_given("searchsorted", sorter=sorter)
    mesh = next(one.mesh for one in (a, v) if isinstance(one, DTensor))
    if np.ndim(a) != 1 or side not in ("left", "right"):
        raise AxisError(f"np.searchsorted takes a sorted row, and side left or right; got {side!r}")
    row = np.asarray(a.full() if isinstance(a, DTensor) else a)
    values = settled(as_tensor(v, mesh))
    block: HostArray | None = None
    if values.is_member:
        block = np.asarray(np.searchsorted(row, values.local, side))
    return DTensor(mesh, values.layout, values.shape, np.intp, block)
