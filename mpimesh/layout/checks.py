"""What the values of this room take from their callers."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import Any

from mpimesh.errors import LayoutError
from mpimesh.mesh import Mesh

__all__ = ["as_mesh", "as_shape", "as_whole"]


def as_whole(value: object, what: str) -> int:
    """Return `value` as an int that is not negative; a bool, a float or a text is refused.

    Raises:
        LayoutError: If it is none.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = index(value)  # type: ignore[arg-type]
    except TypeError:
        raise LayoutError(f"{what} must be a whole number, got {value!r}") from None
    if number < 0:
        raise LayoutError(f"{what} must not be negative, got {number}")
    return number


def as_shape(shape: object) -> tuple[int, ...]:
    """Return the shape of an array as a tuple.

    Raises:
        LayoutError: If it is no row of whole numbers, or one is negative.
    """
    if not isinstance(shape, Iterable) or isinstance(shape, str | bytes):
        raise LayoutError(f"a shape must be a row of whole numbers, got {shape!r}")
    lengths = tuple(shape)
    return tuple(as_whole(length, f"a length in shape {lengths}") for length in lengths)


def as_mesh(mesh: Any) -> Mesh:
    """Return the mesh as a value; that of a live mesh is the same on all ranks.

    Raises:
        LayoutError: If it is none.
    """
    if isinstance(mesh, Mesh):
        return mesh
    value = getattr(mesh, "value", None)  # of a live mesh
    if isinstance(value, Mesh):
        return value
    raise LayoutError(f"a layout needs a Mesh or a DeviceMesh, got {mesh!r}")
