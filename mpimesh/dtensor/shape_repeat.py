"""Arrays turned, rolled, repeated and padded: the same elements, picked axis by axis."""

from __future__ import annotations

from operator import index
from typing import Any

import numpy as np

from mpimesh.dtensor.arguments import axes_of, axis_of, whole_key
from mpimesh.dtensor.create import full
from mpimesh.dtensor.methods import settled
from mpimesh.dtensor.picking import pick_along
from mpimesh.dtensor.registry import implements
from mpimesh.dtensor.shape_axes import expand_dims, swapaxes
from mpimesh.dtensor.shape_reshape import broadcast_to, ravel, reshape, row_along
from mpimesh.dtensor.tensor import DTensor
from mpimesh.errors import AxisError, DTypeError, IndexOutOfRangeError, NoRuleError, ShapeError
from mpimesh.layout import Layout

__all__ = ["flip", "repeat", "roll"]


@implements(np.flip)
def flip(m: Any, axis: Any = None) -> DTensor:
    """Reverse axes. Collective, if one is split: its blocks change places."""
    axes = range(m.ndim) if axis is None else axes_of(axis, m.ndim)
    return pick_along(m, {one: range(m.shape[one] - 1, -1, -1) for one in axes}, name="flip")


@implements(np.flipud)
def flipud(m: Any) -> DTensor:
    """Reverse axis 0."""
    return flip(m, 0)


@implements(np.fliplr)
def fliplr(m: Any) -> DTensor:
    """Reverse axis 1."""
    return flip(m, 1)


@implements(np.rot90)
def rot90(m: DTensor, k: int = 1, axes: Any = (0, 1)) -> DTensor:
    """Turn by `k` quarters in the plane of two axes."""
    first, second = axes_of(axes, m.ndim, "axes")
    quarters = k % 4
    if quarters == 0:
        return m.copy()
    if quarters == 2:
        return flip(m, (first, second))
    if quarters == 1:
        return swapaxes(flip(m, second), first, second)
    return flip(swapaxes(m, first, second), second)


@implements(np.roll)
def roll(a: Any, shift: Any, axis: Any = None) -> DTensor:
    """Shift elements around axes. Collective, if one is split; it stays split as it is."""
    if axis is None:
        total = sum(map(index, shift)) if hasattr(shift, "__iter__") else index(shift)
        return reshape(roll(ravel(a), total, 0), a.shape)
    axes = [axis_of(one, a.ndim) for one in (axis if hasattr(axis, "__iter__") else (axis,))]
    shifts = [index(one) for one in (shift if hasattr(shift, "__iter__") else (shift,))]
    try:
        rows = np.broadcast(axes, shifts)
    except ValueError:
        raise ShapeError(f"np.roll got {len(shifts)} shifts for {len(axes)} axes") from None
    totals: dict[int, int] = {}
    for one, by in (map(int, row) for row in rows):
        totals[one] = totals.get(one, 0) + by
    picks = {one: np.roll(np.arange(a.shape[one]), by) for one, by in totals.items()}
    return pick_along(a, picks, name="roll")


@implements(np.repeat)
def repeat(a: Any, repeats: Any, axis: Any = None) -> DTensor:
    """Repeat each element. Local: the copies are where the element is, unless several dims split.

    Without an axis the elements are first put in a row. Split counts are gathered.
    """
    x, which = row_along(a, axis)
    try:
        picks = np.repeat(np.arange(x.shape[which]), whole_key(repeats))
    except ValueError as error:
        raise ShapeError(f"np.repeat of axis {which} of shape {x.shape}: {error}") from None
    return pick_along(x, {which: picks}, name="repeat")


@implements(np.delete)
def delete(arr: Any, obj: Any, axis: Any = None) -> DTensor:
    """Return the array without some slices along an axis. Local: the others stay where they are.

    Split indices, or a split mask, are gathered.
    """
    x, which = (ravel(arr), 0) if axis is None else (arr, axis_of(axis, arr.ndim))
    try:
        picks = np.delete(np.arange(x.shape[which]), whole_key(obj))
    except IndexError as error:
        raise IndexOutOfRangeError(f"np.delete, axis {which} of shape {x.shape}: {error}") from None
    return pick_along(x, {which: picks}, name="delete")


@implements(np.tile)
def tile(A: Any, reps: Any) -> DTensor:
    """Put copies of the array side by side. Collective, if a repeated axis is split."""
    times = tuple(map(index, reps)) if hasattr(reps, "__iter__") else (index(reps),)
    if any(n < 0 for n in times):
        raise ShapeError(f"np.tile takes counts from 0 on, got {times}")
    x = expand_dims(A, tuple(range(len(times) - A.ndim))) if len(times) > A.ndim else A
    times = (1,) * (x.ndim - len(times)) + times
    picks = {axis: np.tile(np.arange(x.shape[axis]), n) for axis, n in enumerate(times) if n != 1}
    return pick_along(x, picks, name="tile")


# -- padding ---------------------------------------------------------------------------


@implements(np.pad)
def pad(array: Any, pad_width: Any, mode: Any = "constant", **kwargs: Any) -> DTensor:
    """Put elements around an array. Local with "constant" and "edge" if one dim splits an axis.

    The first and the last block that have any elements grow. Collective with "wrap", "reflect" and
    "symmetric".
    """
    if mode not in ("constant", "edge", "wrap", "reflect", "symmetric") or (
        kwargs.keys() - {"constant_values"}
    ):
        raise NoRuleError(
            "np.pad of split arrays knows the modes constant, edge, wrap, reflect and symmetric, "
            f"got {mode!r} with {kwargs}"
        )
    widths = _pairs_of(pad_width, array.ndim, "pad_width")
    negative = array.ndim == 0 and not isinstance(pad_width, dict) and np.any(np.less(pad_width, 0))
    if negative or any(n < 0 for row in widths for n in row):
        raise ShapeError(f"pad_width must not be negative, got {pad_width!r}")
    if mode == "constant":
        values = _pairs_of(kwargs.get("constant_values", 0), array.ndim, "constant_values")
        return _framed(array, widths, values)
    picks = {}
    for axis, row in enumerate(widths):
        if row != (0, 0):
            if array.shape[axis] == 0:
                raise ShapeError(f"axis {axis} of shape {array.shape} has no element to pad with")
            picks[axis] = np.pad(np.arange(array.shape[axis]), row, mode=mode)
    return pick_along(array, picks, name="pad")


def _framed(array: DTensor, widths: list[tuple[Any, Any]], values: Any) -> DTensor:
    """Pad with constants: with edges first, which has the right layout."""
    shape = tuple(n + a + b for n, (a, b) in zip(array.shape, widths, strict=True))
    if 0 in array.shape:
        x = full(shape, 0, array.mesh, Layout.replicated(array.mesh).placement, dtype=array.dtype)
    else:
        picks = {
            axis: np.pad(np.arange(array.shape[axis]), row, mode="edge")
            for axis, row in enumerate(widths)
            if row != (0, 0)
        }
        x = pick_along(settled(array), picks, name="pad")
    if x.is_member:
        for axis, ((before, after), (first, last)) in enumerate(zip(widths, values, strict=True)):
            block = np.moveaxis(x.local, axis, 0)
            start, stop = x.layout.box(shape, x.mesh.rank)[axis]
            block[: max(0, before - start)] = first
            block[max(0, shape[axis] - after - start) : stop - start] = last
    return x


def _pairs_of(value: Any, ndim: int, what: str) -> list[tuple[Any, Any]]:
    """Return (before, after) for each axis, as NumPy reads them."""
    if isinstance(value, dict):
        table = {axis_of(axis, ndim): row for axis, row in value.items()}
        value = [table.get(axis, (0, 0)) for axis in range(ndim)]
        value = [row if hasattr(row, "__iter__") else (row, row) for row in value]
    whole = np.asarray(value)
    if what == "pad_width" and whole.dtype.kind not in "iu" and whole.size:
        raise DTypeError(f"pad_width is made of whole numbers, got {value!r}")
    try:
        rows = np.broadcast_to(whole, (ndim, 2)).tolist()
    except ValueError:
        raise ShapeError(f"{what} is a pair for each of {ndim} axes, got {value!r}") from None
    return [(first, last) for first, last in rows]


# -- triangles ---------------------------------------------------------------------------


def _triangle(m: DTensor, k: int, *, lower: bool) -> DTensor:
    if m.ndim == 0:
        raise AxisError("a triangle is of an array with axes, got shape ()")
    if m.ndim == 1:
        m = broadcast_to(m, m.shape * 2)
    x = m if m.layout.partial_op in ("", "sum") else settled(m)
    if not x.is_member:
        return x
    row, column = x.global_offset[-2:]
    rows, columns = x.local.shape[-2:]
    inside = np.tri(rows, columns, (k if lower else k - 1) + row - column, dtype=bool)
    zero = np.zeros(1, x.dtype)
    block = np.where(inside, x.local, zero) if lower else np.where(inside, zero, x.local)
    return DTensor(x.mesh, x.layout, x.shape, x.dtype, block)


@implements(np.tril)
def tril(m: Any, k: int = 0) -> DTensor:
    """Return the lower triangle of the last two axes, or of rows that are all alike. Local."""
    return _triangle(m, k, lower=True)


@implements(np.triu)
def triu(m: Any, k: int = 0) -> DTensor:
    """Return the upper triangle of the last two axes, or of rows that are all alike. Local."""
    return _triangle(m, k, lower=False)
