"""Cumulative sums and products, and functions of an element and its neighbours along an axis.

A scan has NumPy's value of each element, whatever the number of ranks: infinite and not a number
where that is, and else up to rounding. For neighbours, where one mesh dim splits the axis, each
rank gets the few elements next to its block; where several do, the axis is brought whole.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from operator import index
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from mpimesh.arrays import HostArray
from mpimesh.dtensor.consistency import raise_together
from mpimesh.dtensor.dispatch import implements
from mpimesh.dtensor.dtensor import DTensor
from mpimesh.dtensor.elementwise import refuses_values, tried
from mpimesh.dtensor.halo_exchange import Reading
from mpimesh.dtensor.joining import concatenate
from mpimesh.dtensor.methods import reduced
from mpimesh.dtensor.picking import pick, pick_along, place_in, true_anywhere
from mpimesh.dtensor.reduce import reduce
from mpimesh.dtensor.reshape import moveaxis, ravel, row_along
from mpimesh.dtensor.run import (
    as_tensor,
    as_tensors,
    axes_of,
    implements_by_name,
    moved_to,
    on_stacks,
    plain_values,
)
from mpimesh.errors import DTypeError, ShapeError
from mpimesh.layout import Layout, Placement, Shard
from mpimesh.layout.axis_rules import unsplit
from mpimesh.layout.reads import near_reads
from mpimesh.layout.tiling import places_of
from mpimesh.runtime import MAX_TAG
from mpimesh.runtime.operands import normal_axis

if TYPE_CHECKING:
    from mpimesh.layout.axis_rules import Picks

__all__: list[str] = []


def _scan(ufunc: np.ufunc, a: DTensor, axis: Any, dtype: Any, first: Any = None) -> DTensor:
    """Do ``ufunc.accumulate``, of sums and products in the dtype of NumPy's functions.

    Args:
        ufunc: A ufunc of two operands.
        a: The array.
        axis: The axis; None for all elements in a row.
        dtype: The result's dtype; None for NumPy's choice.
        first: What is done with each block before; None for nothing.

    Cost:
        If the axis is split, every rank gets one element of each line from each other rank. Where
        only NumPy's order gives its result, blocks wait for the one before instead.
    """
    x, which = row_along(a, axis)
    x = reduced(x)
    kind = ufunc.accumulate(np.ones(2, x.dtype), dtype=dtype).dtype
    layout = x.layout
    if not x.is_member:
        return DTensor(x.mesh, layout, x.shape, kind, None)
    values = x.local if first is None else first(x.local)
    block = x.mesh.shared_empty(values.shape, kind)
    if not layout.sharding_dims(which):
        ufunc.accumulate(values, which, dtype=kind.type, out=block)
    elif not _scan_at_once(ufunc, x, which, values, block):
        _scan_in_turn(ufunc, x, which, values, block)
    return DTensor(x.mesh, layout, x.shape, kind, block)


def _scan_at_once(
    ufunc: np.ufunc, x: DTensor, axis: int, values: HostArray, block: HostArray
) -> bool:
    """Scan all blocks at once, then put to each what all before it come to. Collective.

    Returns:
        Whether that is NumPy's result: to the bit, or for sums and products of floats within the
        rounding errors of its order, and then with nothing infinite or NaN in either order.
    """
    kind = block.dtype
    exact = ufunc in _EXACT and kind.kind != "c"
    if ufunc in _SUMS and kind.kind in "fc":
        # A sum in NumPy's order is off by at most n * eps / 2 of the largest one on its way, a
        # product by some n * eps of itself. With n * eps < 1, both are below 4 times the largest
        # value of the blocks, before and after the others are put to them.
        if x.shape[axis] * np.finfo(kind).eps >= 1:
            return False
    elif not exact and not (ufunc in _SUMS and kind.kind in "biu"):
        return False
    floats = not exact and kind.kind in "fc"
    with np.errstate(all="ignore"):  # of integers nothing is told, and of these floats is nothing
        ufunc.accumulate(values, axis, dtype=kind.type, out=block)
        safe = not floats or _is_far_from_limits(ufunc, block)
        total = np.zeros(_with(block.shape, axis, 1), kind)
        if block.shape[axis]:
            total[...] = block[(*(slice(None),) * axis, slice(-1, None))]
        before = _of_blocks_before(ufunc, x, axis, total)
        if before is not None:
            ufunc(block, before, out=block)
            safe = safe and (not floats or _is_far_from_limits(ufunc, block))
    return not floats or not true_anywhere(x.mesh, f"np.{ufunc.__name__}.accumulate", not safe)


_SUMS = (np.add, np.multiply)
_EXACT = (np.minimum, np.maximum)


def _is_far_from_limits(ufunc: np.ufunc, block: HostArray) -> bool:
    """Tell whether all values are far from the largest of their dtype, and products from 0."""
    size, limits = np.abs(block), np.finfo(block.dtype)
    if not (size.max(initial=0.0) < limits.max / 16):  # not if one is NaN
        return False
    return ufunc is np.add or bool(size.min(initial=1.0) > limits.tiny * 16)


def _scan_in_turn(
    ufunc: np.ufunc, x: DTensor, axis: int, values: HostArray, block: HostArray
) -> None:
    """Scan each block from the last elements of the one before, as NumPy does. Collective."""
    mesh, coords = x.mesh, places_of(x.layout.mesh).coords
    me = place_in(mesh)
    dims = [d for d, s in enumerate(x.placement) if isinstance(s, Shard) and s.axis == axis]
    same = np.delete(coords, dims, axis=1)
    team = np.flatnonzero((same == same[me]).all(axis=1))
    # Row-major in the mesh is in order along the axis. What has no elements is passed by.
    lengths = np.diff(x.layout.tiling(x.shape).bounds[axis])
    team = team[lengths > 0].tolist()
    name = f"np.{ufunc.__name__}.accumulate"
    needed = refuses_values(ufunc, [x, x], [block.dtype])
    with raise_together(mesh, name, needed=needed):
        if me not in team:
            return
        turn, group = team.index(me), mesh.group()
        rows = values.astype(block.dtype, copy=False)
        if turn:
            edge = group.recv(
                team[turn - 1],
                shape=_with(block.shape, axis, 1),
                dtype=block.dtype,
                tag=_TAG,
                label=name,
            ).resolve()
            rows = np.concatenate([edge, rows], axis)
        try:
            found = ufunc.accumulate(rows, axis, dtype=block.dtype.type)
            block[...] = found[(*(slice(None),) * axis, slice(-block.shape[axis], None))]
        finally:  # also after an error: the next ones wait
            if turn + 1 < len(team):
                last = block[(*(slice(None),) * axis, slice(-1, None))]
                group.send(last, team[turn + 1], tag=_TAG, label=name).resolve()


_TAG = MAX_TAG


def _of_blocks_before(ufunc: np.ufunc, x: DTensor, axis: int, total: HostArray) -> HostArray | None:
    """Return the sum of the totals of all blocks of a line before this rank's. Collective.

    None where there are no elements before: a sum with 0, or a product with 1, may differ from the
    other operand, in the sign of 0 or in an infinite complex number.
    """
    lengths = np.diff(x.layout.tiling(x.shape).bounds[axis])
    # One element of each block, in an array that is split as x is.
    specs = [Shard(axis) if isinstance(s, Shard) and s.axis == axis else s for s in x.placement]
    shape = _with(x.shape, axis, len(lengths))
    totals = DTensor(x.mesh, Layout(x.mesh, Placement(specs)), shape, total.dtype, total)
    every = moved_to(totals, unsplit(totals.placement, {axis})).local
    filled = np.flatnonzero(lengths[: totals.global_offset[axis]])
    if not filled.size:
        return None
    line: HostArray = every.take(filled, axis)
    found: HostArray = ufunc.reduce(line, axis, dtype=total.dtype.type, keepdims=True)
    return found


def _with(shape: tuple[int, ...], axis: int, length: int) -> tuple[int, ...]:
    return (*shape[:axis], length, *shape[axis + 1 :])


def _ones_for_nan(value: Any) -> Callable[[HostArray], HostArray]:
    def replaced(block: HostArray) -> HostArray:
        found: HostArray = np.where(np.isnan(block), block.dtype.type(value), block)
        return found

    return replaced


@implements(np.ufunc.accumulate)
def accumulate(ufunc: np.ufunc, array: Any, axis: Any = 0, dtype: Any = None) -> DTensor:
    """Do ``ufunc.accumulate``. Collective, if the axis is split.

    Of sums and products see :func:`cumsum` and :func:`cumprod`; minima and maxima are taken of all
    blocks at once, and for other ufuncs the ranks go one after the other.
    """
    ufunc.accumulate(np.ones((1,) * array.ndim, array.dtype), axis, dtype)  # as NumPy refuses
    return _scan(ufunc, array, axis, dtype)


@implements_by_name(np.cumsum)
def cumsum(a: Any, axis: Any = None, dtype: Any = None) -> DTensor:
    """Return the sums of all elements up to each one. Collective, if the axis is split.

    Along a split axis floats are added block by block, within the error bound of NumPy's order.
    Where that order matters, because sums come near the largest number of the dtype, are infinite
    or NaN, or there are more elements than ``1 / eps``, the ranks go one after the other, and
    find NumPy's sums to the bit.
    """
    return _scan(np.add, a, axis, dtype)


@implements_by_name(np.cumprod)
def cumprod(a: Any, axis: Any = None, dtype: Any = None) -> DTensor:
    """Return the products of all elements up to each one. Collective, if the axis is split.

    Products of floats soon leave the range of their dtype, and stay 0, infinite or NaN in the order
    in which they are taken: ``1e-200 * 1e-200 * 1e200 * 1e200`` is 0. So only where all products,
    those of each block alone, too, are well inside are blocks worked on at once; else the ranks go
    one after the other, and find NumPy's products to the bit, as late as one rank would.
    """
    return _scan(np.multiply, a, axis, dtype)


@implements_by_name(np.nancumsum)
def nancumsum(a: Any, axis: Any = None, dtype: Any = None) -> DTensor:
    """Return :func:`cumsum`, with 0 for what is not a number."""
    return _scan(np.add, a, axis, dtype, _ones_for_nan(0) if a.dtype.kind in "fc" else None)


@implements_by_name(np.nancumprod)
def nancumprod(a: Any, axis: Any = None, dtype: Any = None) -> DTensor:
    """Return :func:`cumprod`, with 1 for what is not a number."""
    return _scan(np.multiply, a, axis, dtype, _ones_for_nan(1) if a.dtype.kind in "fc" else None)


def _cumulative(function: Callable[..., Any], ufunc: np.ufunc) -> None:
    """Register the array API's cumulative sum or product."""

    @implements_by_name(function)
    def do(
        x: DTensor, *, axis: Any = None, dtype: Any = None, include_initial: bool = False
    ) -> DTensor:
        if axis is None and x.ndim > 1:
            raise ShapeError(f"axis= must be given for an array of {x.ndim} axes")
        which = 0 if axis is None else axis
        found = _scan(ufunc, x, which, dtype)
        if not include_initial:
            return found
        which = normal_axis(which, found.ndim)
        first = np.full(_with(found.shape, which, 1), ufunc.identity, found.dtype)
        return concatenate([first, found], which)


_cumulative(np.cumulative_sum, np.add)
_cumulative(np.cumulative_prod, np.multiply)


@implements_by_name(np.diff)
def diff(a: DTensor, n: int = 1, axis: int = -1) -> DTensor:
    """Return the differences of neighbours, `n` times. Collective, if the axis is split.

    Cost:
        Along a split axis each rank gets one element of each line from the next one.
    """
    if index(n) == 0:
        return a.copy()  # whatever its axes
    if a.ndim == 0 or index(n) < 0:
        raise ShapeError(f"np.diff takes n >= 0 and at least 1 axis, got n={n}, shape {a.shape}")
    which, x = normal_axis(axis, a.ndim), reduced(a)
    minus = np.not_equal if x.dtype == bool else np.subtract
    # Once also where there is nothing: the dtype counts.
    for _ in range(min(index(n), max(1, x.shape[which]))):
        length, one = x.shape[which], np.zeros(1, x.dtype)
        dtype = minus(one, one).dtype
        first = pick_along(x, {which: range(max(0, length - 1))}, name="diff")
        every: list[Picks] = [range(n) for n in x.shape]
        every[which] = range(min(1, length), length)
        later = pick(x, every, first.placement, name="diff")
        block: HostArray | None = None
        if x.is_member:
            out = later.local if dtype == x.dtype else None
            block = minus(later.local, first.local, out=out)
        x = DTensor(x.mesh, first.layout, first.shape, dtype, block)
    return x


def _with_neighbours(
    x: DTensor, axis: int, before: int, after: int
) -> tuple[DTensor, HostArray, int]:
    """Return `x`, split by one dim at most, its block with its neighbours, and where that begins.

    The block has no elements on a rank that has none. Collective, if the axis is split.
    """
    x = reduced(x)
    dims = [d for d, s in enumerate(x.placement) if isinstance(s, Shard) and s.axis == axis]
    if len(dims) > 1:
        x = moved_to(x, unsplit(x.placement, {axis}))
    if not x.is_member:
        return x, np.empty((0,) * x.ndim, x.dtype), 0
    start, stop = x.layout.box(x.shape, x.mesh.rank)[axis]
    if len(dims) != 1 or not x.size:
        return x, x.local, start
    width = min(before, x.shape[axis]), min(after, x.shape[axis])
    low, high = max(0, start - width[0]), min(x.shape[axis], stop + width[1])
    wide = x.mesh.shared_empty(
        _with(x.local.shape, axis, high - low if stop > start else 0), x.dtype
    )
    here = np.ascontiguousarray(x.local)
    rule = f"shape {x.shape}, {x.dtype}, {x.layout}, {width} along axis {axis}"
    _near(x.mesh.rank, x.layout, x.shape, axis, width).once(x.mesh, "halo", rule, here, wide)
    return x, wide, low


@lru_cache(maxsize=64)
def _near(
    rank: int, layout: Layout, shape: tuple[int, ...], axis: int, width: tuple[int, int]
) -> Reading:
    widths = [width if one == axis else (0, 0) for one in range(len(shape))]
    reads = near_reads(layout.tiling(shape), widths)
    return Reading.prepare(rank, reads, lambda other: layout.box(shape, other))


# -- gradients -------------------------------------------------------------------------------


@implements(np.gradient)
def gradient(f: Any, *varargs: Any, axis: Any = None, edge_order: Any = 1) -> Any:
    """Return the gradients along axes, laid out as `f`. Collective along a split axis.

    Cost:
        Along a split axis each rank gets two elements of each line from both sides.
    """
    axes = range(f.ndim) if axis is None else axes_of(axis, f.ndim)
    steps = [plain_values(one) for one in varargs]
    if len(steps) == 1 and np.ndim(steps[0]) == 0:
        steps *= len(axes)
    steps = steps or [1.0] * len(axes)
    if len(steps) != len(axes):
        raise TypeError(f"np.gradient takes a spacing for each of {len(axes)} axes, or one")
    kind = np.gradient(np.zeros(3, f.dtype)).dtype
    found = []
    for one, step in zip(axes, steps, strict=True):
        if f.shape[one] < edge_order + 1 or edge_order not in (1, 2):
            raise ShapeError.everywhere(
                f"a gradient along axis {one} of shape {f.shape} takes at least "
                f"edge_order + 1 elements, and edge_order 1 or 2, got {edge_order}"
            )
        if np.ndim(step) and np.shape(step) != (f.shape[one],):
            raise ShapeError.everywhere(
                f"{np.shape(step)} places do not fit axis {one} of shape {f.shape}"
            )
        found.append(_gradient(f, step, one, edge_order, kind))
    return found[0] if len(found) == 1 else tuple(found)


def _gradient(f: DTensor, step: Any, axis: int, edge_order: Any, kind: Any) -> DTensor:
    x, wide, first = _with_neighbours(f, axis, 2, 2)
    if not x.is_member:
        return DTensor(x.mesh, x.layout, x.shape, kind, None)
    start, stop = x.layout.box(x.shape, x.mesh.rank)[axis]
    block, here = np.zeros(x.local.shape, kind), step
    if np.ndim(step):
        here = np.asarray(step)[first : first + wide.shape[axis]]
    if block.size:
        found = np.gradient(cast(Any, wide), here, axis=axis, edge_order=edge_order)
        block = found[(*(slice(None),) * axis, slice(start - first, stop - first))]
    return DTensor(x.mesh, x.layout, x.shape, kind, block)


# -- convolutions ----------------------------------------------------------------------------


@implements(np.convolve)
def convolve(a: Any, v: Any, mode: Any = "full") -> DTensor:
    """Convolve two rows: the longer one stays split, and all ranks get the shorter one. Collective.

    Cost:
        Each rank gets as many elements from before its block as the shorter row has, less one.
    """
    x, kernel = as_tensors([a, v])
    if x.ndim > 1 or kernel.ndim > 1 or 0 in (x.size, kernel.size):
        raise ShapeError.everywhere(
            f"np.convolve takes two rows, got shapes {x.shape} and {kernel.shape}"
        )
    x, kernel = ravel(x), ravel(kernel)
    if kernel.shape[0] > x.shape[0]:
        x, kernel = kernel, x
    if mode not in ("full", "same", "valid"):
        raise ShapeError.everywhere(f"mode is full, same or valid, got {mode!r}")
    count, length = kernel.shape[0], x.shape[0]
    first, total = {
        "full": (0, length + count - 1),
        "same": ((count - 1) // 2, length),
        "valid": (count - 1, length - count + 1),
    }[mode]
    row = plain_values(kernel)
    kind = np.convolve(np.zeros(1, x.dtype), np.zeros(1, row.dtype)).dtype
    # What goes with each element of `x`; the last one of all has the tail.
    x, wide, low = _with_neighbours(x, 0, count - 1, count - 1)
    edges = x.layout.tiling(x.shape).bounds[0].tolist()
    ends = [min(max(edge - first, 0), total) for edge in edges]
    ends = [total if edge == length else end for edge, end in zip(edges, ends, strict=True)]
    specs = [
        Shard.of_sizes(0, np.diff(ends).tolist()) if isinstance(s, Shard) else s
        for s in x.placement
    ]
    layout = Layout(x.mesh, Placement(specs))
    if not x.is_member:
        return DTensor(x.mesh, layout, (total,), kind, None)
    start, stop = layout.box((total,), x.mesh.rank)[0]
    block = np.zeros(stop - start, kind)
    if stop > start:
        found = np.convolve(wide, row)
        block[...] = found[start + first - low : stop + first - low]
    return DTensor(x.mesh, layout, (total,), kind, block)


@implements(np.correlate)
def correlate(a: Any, v: Any, mode: Any = "valid") -> DTensor:
    """Correlate two rows: a convolution with the second one turned around."""
    rows = as_tensors([a, v])
    if any(one.ndim != 1 for one in rows):
        raise ShapeError.everywhere(
            f"np.correlate takes two rows, got shapes {rows[0].shape} and {rows[1].shape}"
        )
    first, second = rows
    if second.shape[0] > first.shape[0]:
        # NumPy turns around what it finds with the two exchanged: "same" has another middle then.
        found = correlate(second, first, mode)
        back = pick_along(found, {0: range(found.shape[0] - 1, -1, -1)}, name="correlate")
        return back.conj() if back.dtype.kind == "c" else back
    turned = pick_along(second, {0: range(second.shape[0] - 1, -1, -1)}, name="correlate")
    return convolve(a, turned.conj() if turned.dtype.kind == "c" else turned, mode)


# -- differences -------------------------------------------------------------------------------


@implements(np.ediff1d)
def ediff1d(ary: Any, to_end: Any = None, to_begin: Any = None) -> DTensor:
    """Return the differences of all elements in a row, with others around them."""
    row = ravel(ary)
    tried(np.subtract, [row, row])  # refuses truth values
    ends = [None if one is None else as_tensor(one, row.mesh) for one in (to_begin, to_end)]
    for end in ends:
        if end is not None and not np.can_cast(end.dtype, row.dtype, "same_kind"):
            raise DTypeError.everywhere(
                f"np.ediff1d puts no {end.dtype} around differences of {row.dtype}"
            )
    found = diff(row)
    rows = [None if one is None else ravel(one).astype(found.dtype) for one in ends]
    parts = [one for one in (rows[0], found, rows[1]) if one is not None]
    return concatenate(parts) if len(parts) > 1 else found


@implements(np.trapezoid)
def trapezoid(y: Any, x: Any = None, dx: Any = 1.0, axis: int = -1) -> Any:
    """Return the integral along an axis by the trapezoidal rule; of a split one it is in parts."""
    (values, *places), width = as_tensors([y] if x is None else [y, x]), dx
    values = moveaxis(values, normal_axis(axis, values.ndim), -1)
    if places:
        (row,) = places
        width = diff(row if row.ndim == 1 else moveaxis(row, axis, -1))
    pairs: Any = values[..., 1:] + values[..., :-1]
    return reduce(np.add, width * pairs / 2.0, -1)


@implements(np.unwrap)
def unwrap(p: Any, discont: Any = None, axis: int = -1, *, period: Any = 2 * np.pi) -> DTensor:
    """Take jumps of whole periods out of lines, which are brought whole."""
    which = normal_axis(axis, p.ndim)

    def lines(block: HostArray) -> HostArray:
        found: HostArray = np.unwrap(block, discont, period=period)
        return found

    (found,) = on_stacks(lines, [moveaxis(p, which, -1)], ["n"], refuses=False)
    return moveaxis(found, -1, which)
