"""Arguments of NumPy's functions, checked before anything moves."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import Any

import numpy as np

from mpimesh.arrays import refuse_masked, refuse_objects
from mpimesh.dtensor.tensor import DTensor
from mpimesh.errors import AxisError, LayoutError, NoRuleError
from mpimesh.layout import Layout, Placement
from mpimesh.runtime import DeviceMesh

__all__ = ["as_tensor", "axes_of", "axis_of", "moved_to", "refuse_given", "whole_key"]


def axis_of(axis: Any, ndim: int, what: str = "axis") -> int:
    """Return an axis counted from 0.

    Raises:
        AxisError: If there is no such axis.
    """
    try:
        number = index(axis)
    except TypeError:
        raise AxisError(f"{what} must be a whole number, got {axis!r}") from None
    if not -ndim <= number < ndim:
        raise AxisError(f"{what} {number} is out of bounds for an array of {ndim} axes")
    return number % ndim


def axes_of(axes: Any, ndim: int, what: str = "axis") -> tuple[int, ...]:
    """Return one axis or several, counted from 0.

    Raises:
        AxisError: If there is no such axis, or one is named twice.
    """
    rows = tuple(axes) if isinstance(axes, Iterable) else (axes,)
    found = tuple(axis_of(one, ndim, what) for one in rows)
    if len(set(found)) != len(found):
        raise AxisError(f"{what} names an axis twice: {rows}")
    return found


def refuse_given(name: str, **options: Any) -> None:
    """Refuse options that a function of NumPy has, and its rule for split arrays has not.

    Raises:
        NoRuleError: If one is not None.
    """
    given = [key for key, value in options.items() if value is not None]
    if given:
        raise NoRuleError(f"numpy.{name} of split arrays takes no {', '.join(given)}")


def as_tensor(x: Any, mesh: DeviceMesh) -> DTensor:
    """Return `x`, or a plain array that all ranks have alike as a replicated one. Local.

    Raises:
        LayoutError: If `x` is on another mesh.
        DTypeError: If it holds Python objects, or has a mask.
    """
    if isinstance(x, DTensor):
        if x.mesh is not mesh:
            raise LayoutError(
                f"operands must be on one mesh, but {x!r} is not on {mesh.dims_text}; bring it "
                "over with x.redistribute(placements, mesh=...)"
            )
        return x
    refuse_masked(x)
    whole = np.asarray(x)
    refuse_objects(whole.dtype)
    layout = Layout.replicated(mesh)
    block = whole if layout.mesh.contains_rank(mesh.rank) else None
    return DTensor(mesh, layout, whole.shape, whole.dtype, block)


def whole_key(key: Any) -> Any:
    """Return a key with plain arrays in place of split ones. Collective, if there are any."""
    if isinstance(key, tuple):
        return tuple(map(whole_key, key))
    return key.full() if isinstance(key, DTensor) else key


def moved_to(x: DTensor, placement: Placement) -> DTensor:
    """Return `x` in another placement. Collective, if it is another."""
    return x if x.placement == placement else x.redistribute(placement)
