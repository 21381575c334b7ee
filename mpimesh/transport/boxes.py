"""Boxes: pieces of arrays with a start and a stop on each axis, and how they are cut.

All functions are plain arithmetic on slices. A box of an array with no axes has none,
and holds its one element.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, TypeAlias

from mpimesh.arrays.types import HostArray

__all__ = [
    "Box",
    "extent",
    "fits",
    "flat_fragments",
    "inside",
    "is_box",
    "run_start",
    "tiles",
    "view",
    "volume",
]

Box: TypeAlias = tuple[slice, ...]
"""One slice for each axis, with unit steps and ``0 <= start <= stop``."""


def is_box(box: Box) -> bool:
    """Tell whether all slices have whole numbers, unit steps, and ends not before their starts."""
    return all(
        isinstance(part, slice)
        and part.step in (None, 1)
        and isinstance(part.start, int)
        and isinstance(part.stop, int)
        and 0 <= part.start <= part.stop
        for part in box
    )


def extent(box: Box) -> tuple[int, ...]:
    """Return the shape of what is in a box."""
    return tuple([part.stop - part.start for part in box])


def volume(box: Box) -> int:
    """Return how many elements a box has."""
    return prod(extent(box))


def fits(box: Box, shape: Sequence[int]) -> bool:
    """Tell whether a box lies in an array of `shape`."""
    return len(box) == len(shape) and all(
        part.stop <= size for part, size in zip(box, shape, strict=True)
    )


def inside(box: Box, part: Box) -> Box:
    """Return where a part of a box lies in the array that the box is of."""
    return tuple(
        [
            slice(outer.start + inner.start, outer.start + inner.stop)
            for outer, inner in zip(box, part, strict=True)
        ]
    )


def view(array: HostArray, box: Box) -> HostArray:
    """Return what is in a box as an array, also of an array with no axes."""
    place: tuple[Any, ...] = (*box, ...)
    found: HostArray = array[place]
    return found


def run_start(box: Box, shape: Sequence[int]) -> int:
    """Return where a box begins in a C-contiguous array if it is one run in it; -1 if it is not.

    The box has at least one element.

    Example:
        >>> run_start((slice(2, 4), slice(0, 5)), (6, 5))
        10
        >>> run_start((slice(2, 4), slice(1, 5)), (6, 5))
        -1
    """
    begin = 0
    stride = 1
    whole = True  # all axes so far, from the last on
    for part, size in zip(reversed(box), reversed(shape), strict=True):
        length = part.stop - part.start
        if not whole and length != 1:
            return -1
        whole = whole and length == size
        begin += part.start * stride
        stride *= size
    return begin


def tiles(shape: Sequence[int], most: int) -> Iterator[Box]:
    """Cut an array of `shape` into boxes of at most `most` elements, in memory order.

    They are as few as they can be made of whole inner axes.
    """
    if prod(shape) <= most:
        yield tuple([slice(0, size) for size in shape])
        return
    inner = prod(shape[1:])
    rows = most // inner
    if rows:
        rest = tuple([slice(0, size) for size in shape[1:]])
        for at in range(0, shape[0], rows):
            yield (slice(at, min(at + rows, shape[0])), *rest)
        return
    for at in range(shape[0]):
        for tile in tiles(shape[1:], most):
            yield (slice(at, at + 1), *tile)


def flat_fragments(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Return the boxes that hold elements `start` to `stop` of an array, in memory order.

    Example:
        >>> [extent(box) for box in flat_fragments((4, 5), 3, 17)]
        [(1, 2), (2, 5), (1, 2)]
    """
    if start >= stop:
        return []
    if stop - start == prod(shape):
        return [tuple([slice(0, size) for size in shape])]
    inner = prod(shape[1:])
    first, head = divmod(start, inner)
    last, tail = divmod(stop, inner)
    if first == last:
        return _in_row(shape, first, head, tail)
    found: list[Box] = []
    if head:
        found += _in_row(shape, first, head, inner)
        first += 1
    if first < last:
        found.append((slice(first, last), *[slice(0, size) for size in shape[1:]]))
    return found + _in_row(shape, last, 0, tail)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> list[Box]:
    return [(slice(row, row + 1), *box) for box in flat_fragments(shape[1:], start, stop)]
