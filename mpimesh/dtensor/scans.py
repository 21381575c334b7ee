"""Sums and products of all elements up to each one, and differences of neighbours."""

from __future__ import annotations

from collections.abc import Callable
from operator import index
from typing import Any

import numpy as np

from mpimesh.arrays import HostArray
from mpimesh.dtensor.arguments import axis_of, refuse_given
from mpimesh.dtensor.methods import settled
from mpimesh.dtensor.picking import pick_along
from mpimesh.dtensor.registry import implements
from mpimesh.dtensor.shape_join import concatenate
from mpimesh.dtensor.shape_reshape import row_along
from mpimesh.dtensor.tensor import DTensor
from mpimesh.errors import ShapeError
from mpimesh.layout import Layout, Placement, Shard
from mpimesh.layout.axis_rules import unsplit

__all__ = ["cumprod", "cumsum", "diff"]


def _scan(ufunc: np.ufunc, a: DTensor, axis: Any, dtype: Any, first: Any = None) -> DTensor:
    """Do ``ufunc.accumulate`` over blocks.

    Args:
        ufunc: ``np.add`` or ``np.multiply``.
        a: The array.
        axis: The axis; None for all elements in a row.
        dtype: The result's dtype; None for NumPy's choice.
        first: What is done with each block before; None for nothing.

    Cost:
        If the axis is split, every rank gets one element of each line from each other rank.
    """
    x, which = row_along(a, axis)
    x = settled(x)
    name = np.cumsum if ufunc is np.add else np.cumprod
    kind = name(np.zeros(1, x.dtype), dtype=dtype).dtype
    dims = x.layout.sharding_dims(which)
    block = total = None
    if x.is_member:
        values = x.local if first is None else first(x.local)
        block = x.mesh.shared_empty(values.shape, kind)
        name(values, which, dtype=dtype, out=block)
        total = np.full_like(block, ufunc.identity, shape=_with(block.shape, which, 1))
        if block.shape[which]:
            total[...] = block[(*(slice(None),) * which, slice(-1, None))]
    if dims:
        before = _of_blocks_before(ufunc, x, which, total)
        if block is not None:
            ufunc(block, before, out=block)
    return DTensor(x.mesh, x.layout, x.shape, kind, block)


def _of_blocks_before(
    ufunc: np.ufunc, x: DTensor, axis: int, total: HostArray | None
) -> HostArray | None:
    """Return the sum of the totals of all blocks of a line before this rank's. Collective."""
    tiling = x.layout.tiling(x.shape)
    parts = len(tiling.bounds[axis]) - 1
    # One element of each block, in an array that is split as x is.
    specs = [Shard(axis) if isinstance(s, Shard) and s.axis == axis else s for s in x.placement]
    shape = _with(x.shape, axis, parts)
    kind = np.dtype(float) if total is None else total.dtype
    totals = DTensor(x.mesh, Layout(x.mesh, Placement(specs)), shape, kind, total)
    if total is None:
        return None
    every = totals.redistribute(unsplit(totals.placement, {axis})).local
    place = totals.global_offset[axis]
    line: HostArray = every[(*(slice(None),) * axis, slice(0, place))]
    found: HostArray = ufunc.reduce(line, axis, dtype=kind.type, keepdims=True)
    return found


def _with(shape: tuple[int, ...], axis: int, length: int) -> tuple[int, ...]:
    return (*shape[:axis], length, *shape[axis + 1 :])


def _ones_for_nan(value: Any) -> Callable[[HostArray], HostArray]:
    def replaced(block: HostArray) -> HostArray:
        found: HostArray = np.where(np.isnan(block), block.dtype.type(value), block)
        return found

    return replaced


@implements(np.cumsum)
def cumsum(a: Any, axis: Any = None, dtype: Any = None, out: Any = None) -> DTensor:
    """Return the sums of all elements up to each one. Collective, if the axis is split.

    Along a split axis floats are added in another order than NumPy's: block by block.
    """
    refuse_given("cumsum", out=out)
    return _scan(np.add, a, axis, dtype)


@implements(np.cumprod)
def cumprod(a: Any, axis: Any = None, dtype: Any = None, out: Any = None) -> DTensor:
    """Return the products of all elements up to each one. Collective, if the axis is split."""
    refuse_given("cumprod", out=out)
    return _scan(np.multiply, a, axis, dtype)


@implements(np.nancumsum)
def nancumsum(a: Any, axis: Any = None, dtype: Any = None, out: Any = None) -> DTensor:
    """Return :func:`cumsum`, with 0 for what is not a number."""
    refuse_given("nancumsum", out=out)
    return _scan(np.add, a, axis, dtype, _ones_for_nan(0) if a.dtype.kind in "fc" else None)


@implements(np.nancumprod)
def nancumprod(a: Any, axis: Any = None, dtype: Any = None, out: Any = None) -> DTensor:
    """Return :func:`cumprod`, with 1 for what is not a number."""
    refuse_given("nancumprod", out=out)
    return _scan(np.multiply, a, axis, dtype, _ones_for_nan(1) if a.dtype.kind in "fc" else None)


def _cumulative(ufunc: np.ufunc, x: DTensor, axis: Any, dtype: Any, initial: bool) -> DTensor:
    if axis is None:
        if x.ndim > 1:
            raise ShapeError(f"axis= must be given for an array of {x.ndim} axes")
        axis = 0
    found = _scan(ufunc, x, axis, dtype)
    if not initial:
        return found
    which = axis_of(axis, found.ndim)
    first = np.full(_with(found.shape, which, 1), ufunc.identity, found.dtype)
    return concatenate([first, found], which)


@implements(np.cumulative_sum)
def cumulative_sum(
    x: Any,
    /,
    *,
    axis: Any = None,
    dtype: Any = None,
    out: Any = None,
    include_initial: bool = False,
) -> DTensor:
    """Return :func:`cumsum`, with a 0 in front if `include_initial`."""
    refuse_given("cumulative_sum", out=out)
    return _cumulative(np.add, x, axis, dtype, include_initial)


@implements(np.cumulative_prod)
def cumulative_prod(
    x: Any,
    /,
    *,
    axis: Any = None,
    dtype: Any = None,
    out: Any = None,
    include_initial: bool = False,
) -> DTensor:
    """Return :func:`cumprod`, with a 1 in front if `include_initial`."""
    refuse_given("cumulative_prod", out=out)
    return _cumulative(np.multiply, x, axis, dtype, include_initial)


@implements(np.diff)
def diff(
    a: DTensor, n: int = 1, axis: int = -1, prepend: Any = None, append: Any = None
) -> DTensor:
    """Return the differences of neighbours, `n` times. Collective, if the axis is split.

    Cost:
        Along a split axis each rank gets one element of each line from the next one.
    """
    refuse_given("diff", prepend=prepend, append=append)
    if index(n) == 0:
        return a  # as NumPy does, whatever its axes
    if a.ndim == 0 or index(n) < 0:
        raise ShapeError(f"np.diff takes n >= 0 and at least 1 axis, got n={n}, shape {a.shape}")
    which, x = axis_of(axis, a.ndim), settled(a)
    minus = np.not_equal if x.dtype == bool else np.subtract
    # Once also where there is nothing: the dtype counts.
    for _ in range(min(index(n), max(1, x.shape[which]))):
        length, one = x.shape[which], np.zeros(1, x.dtype)
        dtype = minus(one, one).dtype
        first = pick_along(x, {which: range(max(0, length - 1))}, name="diff")
        later = pick_along(x, {which: range(min(1, length), length)}, name="diff")
        later = later if later.placement == first.placement else later.redistribute(first.placement)
        block = minus(later.local, first.local) if x.is_member else None
        x = DTensor(x.mesh, first.layout, first.shape, dtype, block)
    return x
