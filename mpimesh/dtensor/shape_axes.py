"""Axes that change places, come and go: the splits go with them, and nothing moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpimesh.dtensor.arguments import as_tensor, axes_of, axis_of, moved_to
from mpimesh.dtensor.registry import implements
from mpimesh.dtensor.tensor import DTensor
from mpimesh.errors import AxisError, ShapeError
from mpimesh.layout import Layout
from mpimesh.layout.axis_rules import renumbered, unsplit

__all__ = ["expand_dims", "permuted", "squeeze"]


def permuted(x: DTensor, axes: Sequence[int]) -> DTensor:
    """Return `x` with its axes in another order; its block is a view of that of `x`."""
    places = {axis: place for place, axis in enumerate(axes)}
    layout = Layout(x.mesh, renumbered(x.placement, places))
    block = x.local.transpose(axes) if x.is_member else None
    return DTensor(x.mesh, layout, [x.shape[axis] for axis in axes], x.dtype, block)


@implements(np.transpose)
def transpose(a: Any, axes: Any = None) -> DTensor:
    """Reverse or permute the axes."""
    if axes is None:
        return permuted(a, range(a.ndim)[::-1])
    order = axes_of(axes, a.ndim, "axes")
    if len(order) != a.ndim:
        raise AxisError(f"axes {order} must name each of the {a.ndim} axes once")
    return permuted(a, order)


@implements(np.matrix_transpose, np.linalg.matrix_transpose)
def matrix_transpose(x: Any, /) -> DTensor:
    """Swap the last two axes."""
    if x.ndim < 2:
        raise ShapeError(f"matrix_transpose takes at least 2 axes, got shape {x.shape}")
    return swapaxes(x, -1, -2)


@implements(np.swapaxes)
def swapaxes(a: Any, axis1: Any, axis2: Any) -> DTensor:
    """Swap two axes."""
    first, second = axis_of(axis1, a.ndim, "axis1"), axis_of(axis2, a.ndim, "axis2")
    order = list(range(a.ndim))
    order[first], order[second] = second, first
    return permuted(a, order)


@implements(np.moveaxis)
def moveaxis(a: Any, source: Any, destination: Any) -> DTensor:
    """Move axes to other places; the rest keep their order."""
    old = axes_of(source, a.ndim, "source")
    new = axes_of(destination, a.ndim, "destination")
    if len(old) != len(new):
        raise ShapeError(f"source {old} and destination {new} must name as many axes")
    order = [axis for axis in range(a.ndim) if axis not in old]
    for place, axis in sorted(zip(new, old, strict=True)):
        order.insert(place, axis)
    return permuted(a, order)


@implements(np.rollaxis)
def rollaxis(a: Any, axis: Any, start: Any = 0) -> DTensor:
    """Move an axis before the one that is at `start`."""
    which = axis_of(axis, a.ndim)
    if not -a.ndim <= start <= a.ndim:
        raise AxisError(f"start {start} is out of bounds for an array of {a.ndim} axes")
    place = start + a.ndim if start < 0 else start
    order = [one for one in range(a.ndim) if one != which]
    order.insert(place - (which < place), which)
    return permuted(a, order)


@implements(np.expand_dims)
def expand_dims(a: Any, axis: Any) -> DTensor:
    """Put in axes of length 1."""
    count = len(axis) if isinstance(axis, tuple | list) else 1
    new = axes_of(axis, a.ndim + count)
    old = [place for place in range(a.ndim + count) if place not in new]
    layout = Layout(a.mesh, renumbered(a.placement, dict(enumerate(old))))
    shape = [1] * (a.ndim + count)
    for axis_, place in enumerate(old):
        shape[place] = a.shape[axis_]
    block = np.expand_dims(a.local, new) if a.is_member else None
    return DTensor(a.mesh, layout, shape, a.dtype, block)


@implements(np.squeeze)
def squeeze(a: Any, axis: Any = None) -> DTensor:
    """Drop axes of length 1; one that is split is first given to all ranks along its dims."""
    if axis is None:
        gone = tuple(one for one, length in enumerate(a.shape) if length == 1)
    else:
        gone = axes_of(axis, a.ndim) if a.ndim or axis not in (0, -1) else ()
    long = [one for one in gone if a.shape[one] != 1]
    if long:
        raise ShapeError(
            f"only axes of length 1 can be dropped, but axis {long[0]} of shape {a.shape} has "
            f"{a.shape[long[0]]}"
        )
    x = moved_to(a, unsplit(a.placement, set(gone)))
    old = [one for one in range(x.ndim) if one not in gone]
    places = {axis_: place for place, axis_ in enumerate(old)}
    layout = Layout(x.mesh, renumbered(x.placement, places))
    block = np.squeeze(x.local, gone) if x.is_member else None
    return DTensor(x.mesh, layout, [x.shape[one] for one in old], x.dtype, block)


def _at_least(x: DTensor, count: int) -> DTensor:
    if x.ndim >= count:
        return x
    # As NumPy does: (n,) becomes (1, n) and (1, n, 1); (m, n) becomes (m, n, 1).
    first = 0 if x.ndim == 2 else 1
    new = tuple(range(first)) + tuple(range(first + x.ndim, count))
    return expand_dims(x, new)


def _each_at_least(arrays: tuple[Any, ...], count: int) -> Any:
    mesh = next(one.mesh for one in arrays if isinstance(one, DTensor))
    found = tuple(_at_least(as_tensor(one, mesh), count) for one in arrays)
    return found[0] if len(found) == 1 else found


@implements(np.atleast_1d)
def atleast_1d(*arys: Any) -> Any:
    """Return arrays with at least one axis."""
    return _each_at_least(arys, 1)


@implements(np.atleast_2d)
def atleast_2d(*arys: Any) -> Any:
    """Return arrays with at least two axes."""
    return _each_at_least(arys, 2)


@implements(np.atleast_3d)
def atleast_3d(*arys: Any) -> Any:
    """Return arrays with at least three axes."""
    return _each_at_least(arys, 3)
