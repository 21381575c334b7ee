"""Elements beyond the ends of an axis: elements again, a fixed value, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from numbers import Number
from typing import Any, TypeAlias

from mpimesh.errors import LayoutError

__all__ = ["BOUNDARIES", "Boundary", "End", "both_ends", "per_axis", "source_of", "width_pair"]

BOUNDARIES = ("periodic", "edge", "reflect", "symmetric", "none")
"""The names of what may lie beyond an end; a number is a fixed value."""

End: TypeAlias = "str | complex"
"""One of `BOUNDARIES`, or the value that lies there."""

Boundary: TypeAlias = "End | tuple[End, End] | Mapping[int, End | tuple[End, End]]"
"""For all axes and both ends; (lower, upper); or by axis."""


def both_ends(value: Any) -> tuple[End, End]:
    """Return what lies beyond the lower and the upper end.

    Raises:
        LayoutError: If it is not known.
    """
    pair = value if isinstance(value, tuple) else (value, value)
    known = [one in BOUNDARIES if isinstance(one, str) else isinstance(one, Number) for one in pair]
    if len(pair) != 2 or not all(known):
        raise LayoutError(
            f"beyond the ends of an axis lies one of {', '.join(BOUNDARIES)}, a number, or a pair "
            f"of them for its lower and upper end; got {value!r}"
        )
    return pair[0], pair[1]


def width_pair(value: Any) -> tuple[int, int]:
    """Return the elements before and after a block.

    Raises:
        LayoutError: If they are no whole numbers of at least 0.
    """
    pair = value if isinstance(value, tuple | list) else (value, value)
    whole = [isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in pair]
    if len(pair) != 2 or not all(whole):
        raise LayoutError(
            f"a halo's width is a whole number of at least 0, or a pair (before, after) of them; "
            f"got {value!r}"
        )
    return int(pair[0]), int(pair[1])


def per_axis(value: Any, ndim: int, read: Callable[[Any], Any], rest: Any) -> tuple[Any, ...]:
    """Return what `read` makes of a value for each axis.

    Args:
        value: One for all axes, or a mapping by axis.
        ndim: Number of axes.
        read: Makes the value of one axis.
        rest: For axes that a mapping leaves out.

    Raises:
        LayoutError: If it names an axis that there is not.
    """
    if not isinstance(value, Mapping):
        return (read(value),) * ndim
    found = [read(rest)] * ndim
    for axis, one in value.items():
        if isinstance(axis, bool) or not isinstance(axis, int) or not -ndim <= axis < ndim:
            raise LayoutError(f"axis {axis!r} does not exist in an array with {ndim} axes")
        found[axis] = read(one)
    return tuple(found)


def beyond(start: int, stop: int, length: int, end: End) -> Iterator[tuple[int, int, int]]:
    """Return (at, length, start) for places `start` to `stop`, which lie beyond an end.

    Nothing for those that take no element.
    """
    if end not in BOUNDARIES[:-1]:
        return
    for place in range(start, stop):
        yield place - start, 1, source_of(place, length, end)


def source_of(place: int, length: int, end: End) -> int:
    """Return which element lies at a place beyond an end, as :func:`numpy.pad` has it.

    Example:
        >>> [source_of(place, 4, "reflect") for place in (-2, -1, 4, 5)]
        [2, 1, 2, 1]
    """
    if end == "periodic":
        return place % length
    if end == "edge":
        return 0 if place < 0 else length - 1
    if end == "reflect":
        turn = place % max(1, 2 * length - 2)
        return turn if turn < length else 2 * length - 2 - turn
    turn = place % (2 * length)  # symmetric
    return turn if turn < length else 2 * length - 1 - turn
