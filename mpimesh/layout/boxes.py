"""Boxes, parts of arrays as (start, stop) along each axis, and exchanges of boxes between ranks.

Plain arithmetic. A box of an array without axes is `()`, and has one element.

In an exchange each rank lists what it *takes*, with its place in the blocks of others, and what it
*gives*, which is what the others take of its own block. A planner makes the lists, in the numbers
of ranks of a communicator and in boxes of the blocks themselves, so they are executed as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = [
    "Box",
    "Give",
    "Part",
    "Regions",
    "Take",
    "common",
    "even_sizes",
    "extent",
    "fits",
    "flat_fragments",
    "flat_runs",
    "global_box",
    "local_box",
    "local_regions",
    "run_start",
    "slices",
    "tiles",
    "uncovered",
    "view",
    "volume",
    "whole",
]


Box: TypeAlias = tuple[tuple[int, int], ...]
"""(start, stop) along each axis."""


def whole(shape: Sequence[int]) -> Box:
    """Return the box of an array of `shape`."""
    return tuple([(0, size) for size in shape])


def extent(box: Box) -> tuple[int, ...]:
    """Return the shape of a box."""
    return tuple([stop - start for start, stop in box])


def volume(box: Box) -> int:
    """Return the number of elements of a box."""
    return prod([stop - start for start, stop in box])


def fits(box: Box, shape: Sequence[int]) -> bool:
    """Tell whether a box is in an array of `shape`."""
    return len(box) == len(shape) and all(
        stop <= size for (_, stop), size in zip(box, shape, strict=True)
    )


def common(box: Box, other: Box) -> Box | None:
    """Return the box of what is in both; None if nothing is."""
    both = tuple(
        [
            (max(start, first), min(stop, last))
            for (start, stop), (first, last) in zip(box, other, strict=True)
        ]
    )
    return both if all(start < stop for start, stop in both) else None


def local_box(box: Box, block: Box) -> Box:
    """Return a box of the array, counted from where `block` begins."""
    return tuple(
        [
            (start - first, stop - first)
            for (start, stop), (first, _) in zip(box, block, strict=True)
        ]
    )


def global_box(box: Box, block: Box) -> Box:
    """Return a box counted from where `block` begins, in the array that the block is of."""
    return tuple(
        [
            (first + start, first + stop)
            for (start, stop), (first, _) in zip(box, block, strict=True)
        ]
    )


def slices(box: Box) -> tuple[slice, ...]:
    """Return the index of a box."""
    return tuple([slice(start, stop) for start, stop in box])


def view(array: npt.NDArray[Any], box: Box) -> npt.NDArray[Any]:
    """Return a box of an array as an array, also of an array with no axes."""
    index: tuple[Any, ...] = (*[slice(start, stop) for start, stop in box], ...)
    part: npt.NDArray[Any] = array[index]
    return part


def run_start(box: Box, shape: Sequence[int]) -> int:
    """Return where a box begins in a C-contiguous array if it is one run in it; -1 if it is not.

    The box has at least one element.

    Example:
        >>> run_start(((2, 4), (0, 5)), (6, 5))
        10
        >>> run_start(((2, 4), (1, 5)), (6, 5))
        -1
    """
    begin = 0
    stride = 1
    is_whole = True  # all axes so far, from the last on
    for (start, stop), size in zip(reversed(box), reversed(shape), strict=True):
        length = stop - start
        if not is_whole and length != 1:
            return -1
        is_whole = is_whole and length == size
        begin += start * stride
        stride *= size
    return begin


def flat_runs(box: Box, shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of each run of a box in an array of `shape` laid out flat, rising.

    Example:
        >>> list(flat_runs(((1, 3), (0, 5)), (4, 5))), list(flat_runs(((1, 3), (2, 4)), (4, 5)))
        ([(5, 15)], [(7, 9), (12, 14)])
    """
    axis = len(shape)
    while axis and box[axis - 1] == (0, shape[axis - 1]):
        axis -= 1
    inner = prod(shape[axis:])
    if not axis:
        yield 0, inner
        return
    first, last = box[axis - 1]
    for row in product(*[range(start, stop) for start, stop in box[: axis - 1]]):
        begin = 0
        for place, size in zip(row, shape, strict=False):
            begin = begin * size + place
        begin *= shape[axis - 1]
        yield (begin + first) * inner, (begin + last) * inner


def tiles(shape: Sequence[int], most: int) -> Iterator[Box]:
    """Cut an array of `shape` into boxes of at most `most` elements, in memory order.

    They are as few as they can be made of whole inner axes.
    """
    if prod(shape) <= most:
        yield whole(shape)
        return
    rows = most // prod(shape[1:])
    if rows:
        rest = whole(shape[1:])
        for start in range(0, shape[0], rows):
            yield ((start, min(start + rows, shape[0])), *rest)
        return
    for row in range(shape[0]):
        for tile in tiles(shape[1:], most):
            yield ((row, row + 1), *tile)


def even_sizes(length: int, parts: int) -> list[int]:
    """Return the sizes of even parts: the first ``length % parts`` have one element more."""
    quotient, rest = divmod(length, parts)
    return [quotient + (part < rest) for part in range(parts)]


def uncovered(boxes: Sequence[Box], rest: Box) -> Box | None:
    """Return a box of `rest` that is in none of `boxes`; None if they cover it.

    Each of them has elements, and is in `rest`. They may overlap.

    Cost:
        Sorts them along each axis. It is linear in their number if they are a grid.

    Example:
        >>> uncovered([((0, 4), (0, 2)), ((0, 3), (2, 6))], ((0, 4), (0, 6)))
        ((3, 4), (2, 6))
    """
    if not boxes:
        return rest
    if rest in boxes:
        return None
    inner = rest[1:]
    begins: dict[int, list[int]] = {rest[0][0]: []}
    ends: dict[int, list[int]] = {rest[0][1]: []}
    for number, box in enumerate(boxes):
        begins.setdefault(box[0][0], []).append(number)
        ends.setdefault(box[0][1], []).append(number)
    active: dict[int, Box] = {}
    for start, stop in pairwise(sorted({*begins, *ends})):
        for number in ends.get(start, ()):
            del active[number]
        active.update((number, boxes[number][1:]) for number in begins.get(start, ()))
        gap = uncovered(list(active.values()), inner)
        if gap is not None:
            return ((start, stop), *gap)
    return None


def flat_fragments(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Return the boxes that hold elements `start` to `stop` of an array, in memory order.

    Example:
        >>> [extent(box) for box in flat_fragments((4, 5), 3, 17)]
        [(1, 2), (2, 5), (1, 2)]
    """
    if start >= stop:
        return []
    if stop - start == prod(shape):
        return [whole(shape)]
    inner = prod(shape[1:])
    first, head = divmod(start, inner)
    last, tail = divmod(stop, inner)
    if first == last:
        return _in_row(shape, first, head, tail)
    boxes: list[Box] = []
    if head:
        boxes += _in_row(shape, first, head, inner)
        first += 1
    if first < last:
        boxes.append(((first, last), *whole(shape[1:])))
    return boxes + _in_row(shape, last, 0, tail)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> list[Box]:
    return [((row, row + 1), *box) for box in flat_fragments(shape[1:], start, stop)]


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of the block of a rank.

    Attributes:
        rank: The rank of the block, which may be the one that takes.
        shape: The shape of that rank's block, which is C-contiguous.
        box: The piece in it.
    """

    rank: int
    shape: tuple[int, ...]
    box: Box


@dataclass(frozen=True, slots=True)
class Take:
    """One box that this rank is to get.

    Attributes:
        box: Where it goes in this rank's target.
        parts: Its sources: one part is copied, several are reduced in their order. All have
            the extent of `box`.
        op: ``"sum"``, ``"prod"``, ``"min"`` or ``"max"`` if there are several parts.
    """

    box: Box
    parts: tuple[Part, ...]
    op: str = ""

    @property
    def reduces(self) -> bool:
        """True if there are several parts."""
        return len(self.parts) > 1


@dataclass(frozen=True, slots=True)
class Give:
    """One box of this rank's source that another rank takes.

    Attributes:
        rank: The other.
        box: The box that this one's part has in the other's take.
    """

    rank: int
    box: Box


@dataclass(frozen=True, slots=True, eq=False)
class Regions:
    """All that one rank takes and gives in an exchange.

    Make it once and pass it again with every exchange of the same kind: what is worked out for
    the first one is cached, by its identity.

    Attributes:
        takes: What this rank gets. Boxes of different takes do not overlap.
        gives: For each rank that takes of this one, all its parts here, in the order of its
            takes and of their parts. What this rank takes of itself may be listed or not.
    """

    takes: tuple[Take, ...] = ()
    gives: tuple[Give, ...] = ()
    _prepared: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    def prepared(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what `make` gives, from the last time if it was asked for by this key."""
        try:
            value: T = self._prepared[key]
        except KeyError:
            value = self._prepared[key] = make()
        return value


def local_regions(
    takes: Iterable[tuple[Box, Box, Sequence[int]]],
    gives: Sequence[tuple[int, Box]],
    rank: int,
    block_of: Callable[[int], Box],
    number_of: Callable[[int], int],
    op: str = "",
) -> Regions:
    """Return what a rank takes and gives of an array, in boxes of the blocks that the ranks hold.

    Args:
        takes: For each box where it goes in this rank's target, its place in the array, and
            the ranks that hold it.
        gives: The ranks that take of this one, and which boxes of the array.
        rank: This rank.
        block_of: Gives the box of the array that a rank holds.
        number_of: Gives the number of a rank in the communicator.
        op: The reduction of what several ranks hold.
    """

    def part(holder: int, box: Box) -> Part:
        block = block_of(holder)
        return Part(number_of(holder), extent(block), local_box(box, block))

    own = block_of(rank) if gives else ()
    return Regions(
        tuple(
            [
                Take(into, tuple([part(one, box) for one in ranks]), op if len(ranks) > 1 else "")
                for into, box, ranks in takes
            ]
        ),
        tuple([Give(number_of(other), local_box(box, own)) for other, box in gives]),
    )
