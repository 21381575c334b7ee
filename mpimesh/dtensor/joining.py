"""Arrays joined along an axis, cut into several, turned, rolled, repeated and padded."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import index
from typing import Any, cast

import numpy as np

from mpimesh.arguments import MOST
from mpimesh.arrays import HostArray
from mpimesh.dtensor.creation import full
from mpimesh.dtensor.dispatch import implements
from mpimesh.dtensor.dtensor import DTensor
from mpimesh.dtensor.halo_exchange import shift as shift_along
from mpimesh.dtensor.methods import reduced
from mpimesh.dtensor.picking import pick_along, regrown
from mpimesh.dtensor.reshape import (
    atleast_1d,
    atleast_2d,
    atleast_3d,
    broadcast_to,
    expand_dims,
    ravel,
    reshape,
    row_along,
    squeeze,
    swapaxes,
)
from mpimesh.dtensor.run import (
    apply_rule,
    as_tensors,
    axes_of,
    implements_by_name,
    moved_to,
    operand_of,
    row_of,
    store,
    whole_key,
)
from mpimesh.errors import AxisError, DTypeError, IndexOutOfRangeError, NoRuleError, ShapeError
from mpimesh.layout import Layout, Placement, Shard, cheapest
from mpimesh.layout.axis_rules import join_rules, unsplit
from mpimesh.layout.boxes import even_sizes
from mpimesh.runtime.operands import normal_axis

__all__ = ["concatenate", "flip", "roll"]


@implements(np.concatenate)
def concatenate(
    arrays: Any,
    /,
    axis: Any = 0,
    out: Any = None,
    *,
    dtype: Any = None,
    casting: Any = "same_kind",
) -> DTensor:
    """Join arrays along an axis. Collective, if anything has to move.

    The layout is that of the operand for which the fewest bytes move. If it splits `axis`, the
    result is split evenly along it. See :func:`~mpimesh.layout.axis_rules.join_rules`.
    """
    tensors = as_tensors(arrays)
    if axis is None:
        tensors, axis = [ravel(one) for one in tensors], 0
    ndim = tensors[0].ndim
    if any(one.ndim != ndim for one in tensors) or ndim == 0:
        raise ShapeError(
            f"arrays to be joined have as many axes, and at least one; got shapes "
            f"{[one.shape for one in tensors]}"
        )
    which = normal_axis(axis, ndim)
    rest = {one.shape[:which] + one.shape[which + 1 :] for one in tensors}
    if len(rest) > 1:
        raise ShapeError(
            f"arrays to be joined along axis {which} have one length along every other axis; got "
            f"shapes {[one.shape for one in tensors]}"
        )
    kind = np.result_type(*[one.dtype for one in tensors]) if dtype is None else np.dtype(dtype)
    wrong = [one.dtype for one in tensors if not np.can_cast(one.dtype, kind, casting)]
    if wrong:
        raise DTypeError(f"arrays of {wrong[0]} are not joined as {kind} with casting={casting!r}")
    tensors = [one.astype(kind, copy=False) for one in tensors]
    mesh = tensors[0].layout.mesh
    operands = [operand_of(one) for one in tensors]
    rule = cheapest(mesh, operands, join_rules(mesh, operands, which))
    shape = list(tensors[0].shape)
    shape[which] = sum(one.shape[which] for one in tensors)

    def join(*blocks: Any) -> Any:
        return np.concatenate(blocks, which)

    made = apply_rule(join, tensors, rule, shape, kind)
    return made if out is None else store(made, out, casting)


@implements(np.append)
def append(arr: Any, values: Any, axis: Any = None) -> DTensor:
    """Join two arrays; without an axis, all elements of both in a row."""
    return concatenate((arr, values), axis=axis)


@implements_by_name(np.stack)
def stack(arrays: Any, axis: Any = 0, *, dtype: Any = None, casting: Any = "same_kind") -> DTensor:
    """Join arrays of one shape along a new axis."""
    tensors = as_tensors(arrays)
    if len({one.shape for one in tensors}) > 1:
        raise ShapeError(f"arrays to be stacked have one shape; got {[x.shape for x in tensors]}")
    which = normal_axis(axis, tensors[0].ndim + 1)
    grown = [expand_dims(one, which) for one in tensors]
    return concatenate(grown, which, dtype=dtype, casting=casting)


@implements(np.vstack)
def vstack(tup: Any, *, dtype: Any = None, casting: Any = "same_kind") -> DTensor:
    """Join arrays as rows."""
    return concatenate(map(atleast_2d, as_tensors(tup)), 0, dtype=dtype, casting=casting)


@implements(np.hstack)
def hstack(tup: Any, *, dtype: Any = None, casting: Any = "same_kind") -> DTensor:
    """Join arrays as columns."""
    rows = [atleast_1d(one) for one in as_tensors(tup)]
    return concatenate(rows, 0 if rows[0].ndim == 1 else 1, dtype=dtype, casting=casting)


@implements(np.dstack)
def dstack(tup: Any) -> DTensor:
    """Join arrays along the third axis."""
    return concatenate(map(atleast_3d, as_tensors(tup)), 2)


@implements(np.column_stack)
def column_stack(tup: Any) -> DTensor:
    """Join arrays as columns, arrays of one axis as one column each."""
    rows = [expand_dims(x, 1) if x.ndim == 1 else atleast_2d(x) for x in as_tensors(tup)]
    return concatenate(rows, 1)


# -- cutting ---------------------------------------------------------------------------


def _cut(x: DTensor, edges: Sequence[int], axis: int) -> list[DTensor]:
    length = x.shape[axis]
    found = []
    for start, stop in zip([0, *edges], [*edges, length], strict=True):
        begin, end, _ = slice(start, stop).indices(length)
        found.append(pick_along(x, {axis: range(begin, max(begin, end))}, name="split"))
    return found


@implements(np.array_split)
def array_split(ary: Any, indices_or_sections: Any, axis: Any = 0) -> list[DTensor]:
    """Cut an array into parts, which may differ in length. Local: elements stay where they are."""
    which = normal_axis(axis, ary.ndim)
    if hasattr(indices_or_sections, "__iter__"):
        return _cut(ary, [index(one) for one in indices_or_sections], which)
    parts = index(indices_or_sections)
    if parts < 1:
        raise ShapeError(f"an array is cut into at least one part, got {parts}")
    return _cut(ary, [*accumulate(even_sizes(ary.shape[which], parts))][:-1], which)


@implements(np.split)
def split(ary: Any, indices_or_sections: Any, axis: Any = 0) -> list[DTensor]:
    """Cut an array into parts of one length, or at some indices. Local.

    Elements stay where they are: a part of a split axis is on the ranks that have it, and
    ``part.redistribute(...)`` spreads it.
    """
    which = normal_axis(axis, ary.ndim)
    if not hasattr(indices_or_sections, "__iter__"):
        parts = index(indices_or_sections)
        if parts < 1 or ary.shape[which] % parts:
            raise ShapeError(
                f"axis {which} of shape {ary.shape} cannot be cut into {parts} parts of one "
                "length; np.array_split takes any number"
            )
    return array_split(ary, indices_or_sections, which)


@implements(np.hsplit)
def hsplit(ary: Any, indices_or_sections: Any) -> list[DTensor]:
    """Cut along axis 1, or along the only one."""
    return split(ary, indices_or_sections, 0 if ary.ndim == 1 else 1)


@implements(np.vsplit)
def vsplit(ary: Any, indices_or_sections: Any) -> list[DTensor]:
    """Cut along axis 0 of at least two."""
    if ary.ndim < 2:
        raise ShapeError(f"np.vsplit takes at least 2 axes, got shape {ary.shape}")
    return split(ary, indices_or_sections, 0)


@implements(np.dsplit)
def dsplit(ary: Any, indices_or_sections: Any) -> list[DTensor]:
    """Cut along axis 2."""
    return split(ary, indices_or_sections, 2)


@implements(np.unstack)
def unstack(x: Any, /, *, axis: Any = 0) -> tuple[DTensor, ...]:
    """Cut along an axis into arrays without it. Collective, if it is split."""
    which = normal_axis(axis, x.ndim)
    ready = moved_to(x, unsplit(x.placement, {which}))
    parts = _cut(ready, range(1, x.shape[which]), which) if x.shape[which] else []
    return tuple(squeeze(part, which) for part in parts)


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
    plane = tuple(axes)
    if len(plane) != 2:
        raise ShapeError(f"np.rot90 turns in the plane of two axes, got {axes!r}")
    first, second = axes_of(plane, m.ndim, "axes")
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
        return reshape(roll(ravel(a), sum(map(index, row_of(shift))), 0), a.shape)
    axes = [normal_axis(one, a.ndim) for one in row_of(axis)]
    shifts = [index(one) for one in row_of(shift)]
    try:
        rows = np.broadcast(axes, shifts)
    except ValueError:
        raise ShapeError(f"np.roll got {len(shifts)} shifts for {len(axes)} axes") from None
    totals = dict.fromkeys(axes, 0)
    for one, by in (map(int, row) for row in rows):
        totals[one] = (totals[one] + by) % max(a.shape[one], 1)
    return shift_along(a, [*totals.values()], [*totals])


@implements(np.repeat)
def repeat(a: Any, repeats: Any, axis: Any = None) -> DTensor:
    """Repeat each element. Local: the copies are where the element is, unless several dims split.

    Without an axis the elements are first put in a row. Split counts are gathered.
    """
    x, which = row_along(a, axis)
    length = x.shape[which]
    repeats = whole_key(repeats)
    times = np.asarray(repeats)
    plain = times.dtype.kind in "iu" and times.ndim < 2 and times.size in (1, length) and length
    try:
        if not plain or times.min() < 0:
            # As NumPy reads it, or refuses it.
            times = np.bincount(np.repeat(np.arange(length), repeats), minlength=length)
    except ValueError as error:
        raise ShapeError(f"np.repeat of axis {which} of shape {x.shape}: {error}") from None
    if int(times.max(initial=0)) * x.nbytes > MOST:  # NumPy would crash
        raise ShapeError.everywhere(f"np.repeat of shape {x.shape} by {times.max()} is too big")
    if times.size == 1:
        times = times.reshape(())

    def count(start: int, stop: int) -> int:
        return int(times[start:stop].sum()) if times.ndim else int(times) * (stop - start)

    def block_of(block: HostArray, start: int, stop: int) -> HostArray:
        return np.repeat(block, times[start:stop] if times.ndim else times, which)

    found = regrown(x, which, count, block_of)
    if found is None:
        found = pick_along(x, {which: np.repeat(np.arange(length), times)}, name="repeat")
    return found


@implements(np.delete)
def delete(arr: Any, obj: Any, axis: Any = None) -> DTensor:
    """Return the array without some slices along an axis. Local: the others stay where they are.

    Split indices, or a split mask, are gathered.
    """
    x, which = (ravel(arr), 0) if axis is None else (arr, normal_axis(axis, arr.ndim))
    length, places = x.shape[which], whole_key(obj)
    try:
        np.delete(np.empty(length, np.int8), places)  # refuses what NumPy does
    except IndexError as error:
        raise IndexOutOfRangeError(f"np.delete, axis {which} of shape {x.shape}: {error}") from None
    kept = np.ones(length, bool)
    if not isinstance(places, slice):
        places = np.asarray(places)
        places = places if places.size else places.astype(np.intp)
    kept[places] = False

    def count(start: int, stop: int) -> int:
        return int(np.count_nonzero(kept[start:stop]))

    def block_of(block: HostArray, start: int, stop: int) -> HostArray:
        gone = np.flatnonzero(~kept[start:stop])
        in_row = len(gone) > 0 and gone[-1] - gone[0] == len(gone) - 1
        return np.delete(block, slice(gone[0], gone[-1] + 1) if in_row else gone, which)

    found = regrown(x, which, count, block_of)
    if found is None:
        found = pick_along(x, {which: np.flatnonzero(kept)}, name="delete")
    return found


@implements(np.tile)
def tile(A: Any, reps: Any) -> DTensor:
    """Put copies of the array side by side. Collective, if a repeated axis is split."""
    times = tuple(map(index, row_of(reps)))
    x = expand_dims(A, tuple(range(len(times) - A.ndim))) if len(times) > A.ndim else A
    times = (1,) * (x.ndim - len(times)) + times
    if any(n < 0 and length for n, length in zip(times, x.shape, strict=True)):
        raise ShapeError(f"np.tile takes counts from 0 on, got {times} for shape {x.shape}")
    picks = {axis: (range(x.shape[axis]),) * n for axis, n in enumerate(times) if n != 1}
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
        array = reduced(array)
        values = _pairs_of(kwargs.get("constant_values", 0), array.ndim, "constant_values")
    if mode in ("constant", "edge") and 0 not in array.shape:
        found = _grown(array, widths, mode, kwargs if mode == "constant" else {})
        if found is not None:
            return found
    if mode == "constant":
        return _framed(array, widths, values)
    picks: dict[int, Any] = {}
    for axis, row in enumerate(widths):
        if row != (0, 0):
            if array.shape[axis] == 0:
                raise ShapeError(f"axis {axis} of shape {array.shape} has no element to pad with")
            picks[axis] = _around(array.shape[axis], *row, mode)
    return pick_along(array, picks, name="pad")


def _around(length: int, before: int, after: int, mode: str) -> Any:
    """Return which elements stand along a padded axis."""
    skipped = int(mode == "reflect")
    if max(before, after) > length - skipped or mode == "edge":
        return np.pad(np.arange(length), (before, after), mode=cast(Any, mode))
    low = range(before - 1 + skipped, -1 + skipped, -1)
    high = range(length - 1 - skipped, length - 1 - skipped - after, -1)
    if mode == "wrap":
        low, high = range(length - before, length), range(after)
    return low, range(length), high


def _grown(
    x: DTensor, widths: list[tuple[Any, Any]], mode: str, options: dict[str, Any]
) -> DTensor | None:
    """Pad the first and the last block; None if several dims split an axis."""
    tiling, specs = x.layout.tiling(x.shape), list(x.placement)
    for axis, (row, dims) in enumerate(zip(widths, tiling.axis_dims, strict=True)):
        if row == (0, 0) or not dims:
            continue
        if len(dims) > 1:
            return None
        sizes = np.diff(tiling.bounds[axis])
        np.add.at(sizes, np.flatnonzero(sizes)[[0, -1]], row)  # it may be one block
        specs[dims[0]] = Shard.of_sizes(axis, sizes.tolist())
    shape = tuple(n + a + b for n, (a, b) in zip(x.shape, widths, strict=True))
    block = None
    if x.is_member:
        edges = zip(widths, x.layout.box(x.shape, x.mesh.rank), x.shape, strict=True)
        here = [
            (a if start == 0 < stop else 0, b if start < stop == n else 0)
            for (a, b), (start, stop), n in edges
        ]
        block = np.pad(x.local, here, cast(Any, mode), **options)
    return DTensor(x.mesh, Layout(x.mesh, Placement(specs)), shape, x.dtype, block)


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
        x = pick_along(array, picks, name="pad")
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
        table = {normal_axis(axis, ndim): row for axis, row in value.items()}
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
    x = m if m.layout.partial_op in ("", "sum") else reduced(m)
    kind = np.promote_types(x.dtype, x.dtype)  # as np.where: native bytes
    if not x.is_member:
        return DTensor(x.mesh, x.layout, x.shape, kind, None)
    row, column = x.global_offset[-2:]
    rows, columns = x.local.shape[-2:]
    inside = np.tri(rows, columns, (k if lower else k - 1) + row - column, dtype=bool)
    zero = np.zeros(1, kind)
    block = np.where(inside, x.local, zero) if lower else np.where(inside, zero, x.local)
    return DTensor(x.mesh, x.layout, x.shape, kind, block)


@implements(np.tril)
def tril(m: Any, k: int = 0) -> DTensor:
    """Return the lower triangle of the last two axes, or of rows that are all alike. Local."""
    return _triangle(m, k, lower=True)


@implements(np.triu)
def triu(m: Any, k: int = 0) -> DTensor:
    """Return the upper triangle of the last two axes, or of rows that are all alike. Local."""
    return _triangle(m, k, lower=False)
