"""Arrays of one element as numbers."""

from __future__ import annotations

from math import prod
from operator import index as to_index
from typing import TYPE_CHECKING, Any

from mpimesh.errors import IndexOutOfRangeError, RankError, ShapeError, on_all_ranks

if TYPE_CHECKING:
    from mpimesh.dtensor.tensor import DTensor

__all__ = ["item_of", "place_of"]


def place_of(index: tuple[Any, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the index of one element in all axes, as :meth:`numpy.ndarray.item` reads it.

    Raises:
        ShapeError: If there are other than one number, and not one for each axis.
        IndexOutOfRangeError: If the array has no such element.
    """
    if len(index) == 1 and isinstance(index[0], tuple):
        (index,) = index
    places = tuple(map(to_index, index))
    if len(places) == 1 and len(shape) != 1:
        size = prod(shape)
        if not -size <= places[0] < size:
            raise on_all_ranks(
                IndexOutOfRangeError(f"index {places[0]} is out of bounds for {size} elements")
            )
        rest, found = places[0] % size, []
        for length in reversed(shape):
            rest, place = divmod(rest, length)
            found.append(place)
        return tuple(reversed(found))
    if len(places) != len(shape):
        raise on_all_ranks(
            ShapeError(f"{len(places)} numbers are no index into an array of shape {shape}")
        )
    return places


def item_of(x: DTensor, what: str) -> Any:
    """Return the element of an array that has one. Collective, unless all ranks have it.

    Args:
        x: The array.
        what: What it is to become, for messages.

    Raises:
        ShapeError: On every rank, if it has another number of elements.
        RankError: If this rank is not in the mesh.
    """
    if x.size != 1:
        raise on_all_ranks(
            ShapeError(
                f"{x!r} has {x.size} elements, and only an array of one can {what}; reduce it "
                "first, with x.any(), x.all() or x.sum(), or take x.full() for the whole array"
            )
        )
    if not x.is_member:
        raise RankError(f"rank {x.mesh.rank} is not in the mesh of {x!r} and has no value of it")
    whole = x.local if x.layout.is_replicated else x.full()
    return whole.item()
