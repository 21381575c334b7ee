"""`shift`: the elements of an array moved along its axes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from operator import index
from typing import Any, SupportsIndex

import numpy as np

from mpimesh.arguments import as_flag, shown
from mpimesh.arrays import DType, HostArray
from mpimesh.dtensor.reading import Reading
from mpimesh.dtensor.tensor import DTensor
from mpimesh.errors import DTypeError, LayoutError, ShapeError
from mpimesh.layout import Layout
from mpimesh.layout.reads import shift_reads
from mpimesh.runtime.operands import normal_axis

__all__ = ["shift"]


def shift(
    x: DTensor,
    steps: SupportsIndex | Sequence[SupportsIndex],
    axis: SupportsIndex | Sequence[SupportsIndex],
    *,
    wrap: bool = True,
    fill: Any = 0,
) -> DTensor:
    """Return the array whose element i along an axis is element ``i - steps`` of `x`.

    Collective over the mesh, and waits. With `wrap` it is :func:`numpy.roll`.

    Args:
        x: The array.
        steps: How far; negative for towards the beginning. One for each axis if there are several.
        axis: Along which axis; or several.
        wrap: Whether what leaves an end comes back at the other.
        fill: What else comes in there.

    Returns:
        An array in the layout of `x`.

    Raises:
        ShapeError: If `x` has no such axis, or there is not one step for each.
        LayoutError: If `x` holds summands and does not wrap.

    Cost:
        A rank gets `steps` elements along the axis, as wide as its block, and nothing
        along axes that are not split.

    Example:
        >>> with mm.DeviceMesh("dp=-1") as mesh:
        ...     x = mm.distribute(np.arange(6), mesh, "dp=S0")
        ...     print(mm.shift(x, 1, 0).full(), mm.shift(x, -2, 0, wrap=False, fill=9).full())
        [5 0 1 2 3 4] [2 3 4 5 9 9]
    """
    if not isinstance(x, DTensor):
        raise LayoutError(f"shift moves the elements of a DTensor, got {shown(x)} as x")
    wrap = as_flag(wrap, "wrap", LayoutError)
    moved = _steps_of(steps, axis, x.ndim)
    filling = None if wrap else _element(fill, x.dtype)
    if x.layout.partial_op and not wrap:
        raise LayoutError(
            f"{x!r} holds summands, and what comes in at an end would count once for each: shift "
            f"x.redistribute(...) without Partial"
        )
    mesh, shape = x.mesh, x.shape
    block: HostArray | None = None
    source: HostArray | None = None
    if x.is_member:
        source = np.ascontiguousarray(x.local).reshape(x.local.shape)
        block = mesh.shared_empty(source.shape, x.dtype)
        if filling is not None:
            _fill_ends(block, filling, x, moved)
    rule = f"shape {shape}, {x.dtype}, {x.layout}, steps {moved}, wrap {wrap}"
    reading = _prepared(mesh.rank, x.layout, shape, moved, wrap)
    reading.start("shift", mesh, rule, source, block, lambda: None, None).resolve()
    return DTensor(mesh, x.layout, shape, x.dtype, block)


@lru_cache(maxsize=64)
def _prepared(
    rank: int, layout: Layout, shape: tuple[int, ...], steps: tuple[int, ...], wrap: bool
) -> Reading:
    """Return what `rank` has to do; the same object for the same question."""
    return Reading.prepare(
        rank,
        shift_reads(layout, shape, steps, wrap),
        lambda other: layout.box(shape, other),
    )


def _steps_of(steps: Any, axis: Any, ndim: int) -> tuple[int, ...]:
    """Return the steps for each axis of an array."""
    axes: list[Any] = list(axis) if isinstance(axis, Sequence) else [axis]
    counts = list(steps) if isinstance(steps, Sequence) else [steps] * len(axes)
    if len(counts) != len(axes):
        raise ShapeError(f"there must be one step for each axis, got {steps!r} and {axis!r}")
    found = [0] * ndim
    for count, one in zip(counts, axes, strict=True):
        try:
            found[normal_axis(one, ndim)] += index(count)
        except TypeError:
            raise ShapeError(f"steps must be whole numbers, got {count!r}") from None
    return tuple(found)


def _fill_ends(block: HostArray, fill: HostArray, x: DTensor, steps: tuple[int, ...]) -> None:
    """Write `fill` where no element of the array comes to."""
    box = x.layout.box(x.shape, x.mesh.rank)
    for axis, ((start, stop), length, step) in enumerate(zip(box, x.shape, steps, strict=True)):
        size = stop - start
        low = min(max(step - start, 0), size)
        high = min(max(length + step - start, 0), size)
        before = (slice(None),) * axis
        block[(*before, slice(0, low))] = fill
        block[(*before, slice(high, size))] = fill


def _element(fill: Any, dtype: DType) -> HostArray:
    """Return what comes in at an end as an element, or a row of them.

    Raises:
        DTypeError: If it is none.
    """
    try:
        element: HostArray = np.asarray(fill).astype(dtype)
    except (TypeError, ValueError) as error:
        raise DTypeError(
            f"fill must be an element of dtype {dtype}, got {shown(fill)}: {error}"
        ) from None
    return element
