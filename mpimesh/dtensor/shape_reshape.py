"""Arrays of other shapes with the same elements: reshape, ravel, broadcast_to."""

from __future__ import annotations

from operator import index
from typing import Any

import numpy as np

from mpimesh.dtensor.arguments import as_tensor, axis_of, refuse_given
from mpimesh.dtensor.reflow import reflow
from mpimesh.dtensor.registry import implements
from mpimesh.dtensor.shape_axes import permuted
from mpimesh.dtensor.tensor import DTensor
from mpimesh.errors import NoRuleError, ShapeError
from mpimesh.layout import Layout
from mpimesh.layout.axis_rules import full_shape, renumbered, reshaped_placement, unsplit

__all__ = ["broadcast_to", "ravel", "reshape", "row_along", "shape_tuple"]


def shape_tuple(shape: Any) -> tuple[int, ...]:
    """Return a shape, which may be one number.

    Raises:
        ShapeError: If it has other things than whole numbers.
    """
    try:
        return (index(shape),) if not hasattr(shape, "__iter__") else tuple(map(index, shape))
    except TypeError:
        raise ShapeError(f"a shape is made of whole numbers, got {shape!r}") from None


@implements(np.reshape)
def reshape(a: DTensor, /, shape: Any, order: str = "C", *, copy: bool | None = None) -> DTensor:
    """Return the elements in another shape. Collective, if any have to move.

    The splits of :func:`~mpimesh.layout.axis_rules.reshaped_placement` stay, and so do sums
    that are waited for. Where nothing moves, the block is a view of that of `a` if NumPy can make
    one.
    """
    if order == "F":
        turned = permuted(a, range(a.ndim)[::-1])
        wanted = shape_tuple(shape)[::-1]
        found = reshape(turned, wanted, copy=copy)
        return permuted(found, range(found.ndim)[::-1])
    if order != "C":
        raise NoRuleError(f"split arrays are reshaped in order 'C' or 'F', got {order!r}")
    new = full_shape(a.shape, shape_tuple(shape))
    if new == a.shape:
        return a.copy() if copy else a
    rule = reshaped_placement(a.layout.mesh, a.placement, a.shape, new)
    layout = Layout(a.mesh, rule.placement)
    if rule.moves:
        if copy is False:
            raise ShapeError(
                f"an array of shape {a.shape} as {a.layout} cannot be reshaped to {new} without a "
                "copy: elements have to change ranks"
            )
        return reflow(a, new, layout)
    block = None
    if a.is_member:
        block = np.reshape(a.local, layout.local_shape(new, a.mesh.rank), copy=copy)
    return DTensor(a.mesh, layout, new, a.dtype, block)


@implements(np.ravel)
def ravel(a: Any, order: str = "C") -> DTensor:
    """Return all elements along one axis. Collective, if any have to move."""
    return reshape(a, (-1,) if a.size else (0,), "C" if order in "AK" else order)


@implements(np.broadcast_to)
def broadcast_to(array: Any, shape: Any, subok: bool = False) -> DTensor:
    """Return the array with axes of length 1 repeated, and with new axes in front.

    Collective only if an axis to be repeated is split, which is then given to all ranks. The
    result cannot be written to.
    """
    refuse_given("broadcast_to", subok=subok or None)
    new = shape_tuple(shape)
    try:
        fits = np.broadcast_shapes(array.shape, new) == new
    except ValueError:
        fits = False
    if not fits:
        raise ShapeError(f"an array of shape {array.shape} cannot be broadcast to {new}")
    before = len(new) - array.ndim
    grown = {axis for axis, n in enumerate(array.shape) if n == 1 and new[before + axis] != 1}
    target = unsplit(array.placement, grown)
    x = array if target == array.placement else array.redistribute(target)
    places = {axis: before + axis for axis in range(x.ndim)}
    layout = Layout(x.mesh, renumbered(x.placement, places))
    block = None
    if x.is_member:
        block = np.broadcast_to(x.local, layout.local_shape(new, x.mesh.rank))
    return DTensor(x.mesh, layout, new, x.dtype, block)


@implements(np.broadcast_arrays)
def broadcast_arrays(*args: Any, subok: bool = False) -> tuple[DTensor, ...]:
    """Return all arrays with the shape that they have together."""
    mesh = next(one.mesh for one in args if isinstance(one, DTensor))
    tensors = [as_tensor(one, mesh) for one in args]
    shape = joint_shape([one.shape for one in tensors])
    return tuple(broadcast_to(one, shape, subok) for one in tensors)


def joint_shape(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape that arrays have when they are broadcast against each other.

    Raises:
        ShapeError: If they do not fit.
    """
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        raise ShapeError(f"shapes {shapes} do not fit each other") from None


def row_along(a: DTensor, axis: Any) -> tuple[DTensor, int]:
    """Return an array and its axis, as NumPy's functions along an axis read them.

    Without an axis it is the row of all elements; an array without axes is a row of one.

    Raises:
        AxisError: If there is no such axis.
    """
    if axis is None:
        return ravel(a), 0
    which = axis_of(axis, max(a.ndim, 1))
    return (a if a.ndim else ravel(a)), which
