"""The plan of a halo: which elements around its block a rank reads from whom."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from numbers import Number
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from mpimesh.errors import LayoutError
from mpimesh.layout.boxes import Box, extent
from mpimesh.layout.layout import Layout
from mpimesh.layout.reads import Reads, Run, cut_runs, once, wrapped_runs
from mpimesh.layout.tiling import Tiling

if TYPE_CHECKING:
    from mpimesh.layout.tiling import Integers

__all__ = ["MOST_ELEMENTS", "MOST_READS", "HaloPlan", "most_runs", "plan_halo", "source_of"]

BOUNDARIES = ("periodic", "edge", "reflect", "symmetric", "none")
"""The names of what may lie beyond an end; a number is a fixed value."""

End: TypeAlias = "str | complex"
"""One of `BOUNDARIES`, or the value that lies there."""

MOST_READS = 1_000_000
"""The most boxes that a rank may read for its halo; they are planned one by one."""

MOST_ELEMENTS = 2**40
"""The most elements of a padded block along an axis; no memory holds more."""


@dataclass(frozen=True, slots=True, eq=False)
class HaloPlan:
    """Reads of the elements around each rank's block, corners and all.

    A rank's *padded* block is its block with `width` elements before and after along each axis.
    It is what :func:`numpy.pad` makes of the whole array, cut around the block. A rank whose block
    is thinner than the halo of another is one of several that the other reads from.

    Attributes:
        layout: How the array lies.
        shape: Its global shape.
        width: For each axis the elements before and after a block.
        ends: For each axis what lies beyond its lower and upper end.
        reads: Who reads what, with boxes of the padded block to read into.
    """

    layout: Layout
    shape: tuple[int, ...]
    width: tuple[tuple[int, int], ...]
    ends: tuple[tuple[End, End], ...]
    reads: Reads = field(repr=False)

    def padded_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of the padded block of `rank`."""
        return extent(self.padded_box(rank))

    def padded_box(self, rank: int) -> Box:
        """Return where the padded block of `rank` is in the array, over its ends and all."""
        return tuple(
            (start - before, stop + after)
            for (start, stop), (before, after) in zip(self._box(rank), self.width, strict=True)
        )

    def interior(self, rank: int) -> Box:
        """Return where in its padded block the block of `rank` is."""
        return tuple(
            (before, before + stop - start)
            for (start, stop), (before, _) in zip(self._box(rank), self.width, strict=True)
        )

    def inner(self, rank: int) -> Box:
        """Return where in its padded block the elements are that are nowhere near the halo.

        What is worked out for them with `width` neighbours on each side needs no other rank, so it
        can be done while the halo is on its way.
        """
        box = []
        for (first, last), (before, after) in zip(self.interior(rank), self.width, strict=True):
            start = min(first + before, last)
            box.append((start, max(start, last - after)))
        return tuple(box)

    def rim(self, rank: int) -> list[Box]:
        """Return boxes that hold the other elements of the block, each once."""
        boxes, rest = [], list(self.interior(rank))
        for axis, (start, stop) in enumerate(self.inner(rank)):
            first, last = rest[axis]
            edges = ((first, start), (stop, last))
            boxes += [(*rest[:axis], edge, *rest[axis + 1 :]) for edge in edges]
            rest[axis] = (start, stop)
        return [box for box in boxes if all(start < stop for start, stop in box)]

    def fills(self, rank: int) -> list[tuple[Box, complex]]:
        """Return boxes of the padded block beyond the ends, and their fixed values, in order.

        Where several axes end, the last of them counts.
        """
        padded = self.padded_shape(rank)
        fills = []
        for axis, ((start, _), (before, _)) in enumerate(
            zip(self._box(rank), self.width, strict=True)
        ):
            low = (0, min(padded[axis], max(0, before - start)))
            high = (max(0, min(self.shape[axis] - start + before, padded[axis])), padded[axis])
            for edge, end in zip((low, high), self.ends[axis], strict=True):
                if not isinstance(end, str) and edge[0] < edge[1]:
                    whole: list[tuple[int, int]] = [(0, size) for size in padded]
                    whole[axis] = edge
                    fills.append((tuple(whole), end))
        return fills

    def received_bytes(self, rank: int, itemsize: int) -> int:
        """Return the bytes that `rank` gets from others in an exchange."""
        return itemsize * self.reads.received(rank)[0]

    def messages(self, rank: int) -> int:
        """Return how many boxes `rank` gets from others."""
        return self.reads.received(rank)[1]

    def _box(self, rank: int) -> Box:
        return self.reads.tiling.box(rank)


def plan_halo(
    layout: Layout,
    shape: Sequence[int],
    width: Any = 1,
    boundary: Any = "periodic",
) -> HaloPlan:
    """Plan how the ranks get to know the elements around their blocks.

    Args:
        layout: How the array lies; without `Partial`.
        shape: Its global shape.
        width: Elements on each side, or (before, after), for all axes, also those that nobody
            splits; or a mapping by axis, in which the others have none.
        boundary: What lies beyond the ends: ``"periodic"``, ``"edge"``, ``"reflect"``,
            ``"symmetric"``, ``"none"`` or a number; a pair for the lower and the upper end; or a
            mapping by axis, in which the others are periodic.

    Raises:
        LayoutError: If the layout does not fit `shape`, the values break a rule, or the halo is so
            wide that a rank would read more than `MOST_READS` boxes, or have more
            than `MOST_ELEMENTS` elements along an axis.

    Cost:
        O(blocks along an axis) for each axis, once.

    Example:
        >>> plan = plan_halo(Layout(Mesh("x=4"), "x=S0"), (8, 3), {0: (1, 0)}, "edge")
        >>> plan.padded_shape(1), plan.received_bytes(1, 8), plan.received_bytes(0, 8)
        ((3, 3), 24, 0)
    """
    shape = tuple(shape)
    tiling = layout.tiling(shape)
    if layout.partial_op:
        raise LayoutError(f"a halo is of values, not of summands; got placements {layout.text}")
    widths = _per_axis(width, len(shape), _width_pair, 0)
    ends = _per_axis(boundary, len(shape), _both_ends, "periodic")
    for axis, (length, pair) in enumerate(zip(shape, widths, strict=True)):
        for count, end in zip(pair, ends[axis], strict=True):
            if length == 0 and count and end in BOUNDARIES[:-1]:
                raise LayoutError(
                    f"axis {axis} of shape {shape} has no element that could lie beyond its ends, "
                    f"as boundary {end!r} wants"
                )
    _refuse_too_wide(tiling, widths, ends)
    runs_of = tuple(
        once(partial(_runs, bounds, pair, end))
        for bounds, pair, end in zip(tiling.bounds, widths, ends, strict=True)
    )
    befores = tuple(before for before, _ in widths)

    def is_own(runs: tuple[Run, ...], own: tuple[int, ...]) -> bool:
        # What a block reads of itself at the place of its own beginning is the block.
        rows = zip(runs, own, befores, strict=True)
        return all(run.leaf == leaf and run.at == before for run, leaf, before in rows)

    return HaloPlan(layout, shape, widths, ends, Reads(tiling, runs_of, is_own))


def _runs(
    bounds: Integers, width: tuple[int, int], ends: tuple[End, End], leaf: int
) -> tuple[Run, ...]:
    """Return what the padded block of an interval consists of: its halo, and itself."""
    length, start, stop = int(bounds[-1]), int(bounds[leaf]), int(bounds[leaf + 1])
    runs: list[Run] = []
    for first, last in ((start - width[0], start), (start, stop), (stop, stop + width[1])):
        offset = first - start + width[0]
        below, above = min(0, last), max(length, first)
        pieces = [
            *_beyond(first, below, length, ends[0]),
            *((max(first, 0) - first, min(last, length) - max(first, 0), max(first, 0)),),
            *((at + above - first, n, s) for at, n, s in _beyond(above, last, length, ends[1])),
        ]
        runs += cut_runs(bounds, [(at + offset, n, s) for at, n, s in pieces])
    return tuple(runs)


# -- beyond the ends of an axis ------------------------------------------------------------


def _both_ends(value: Any) -> tuple[End, End]:
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


def _width_pair(value: Any) -> tuple[int, int]:
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


def _per_axis(value: Any, ndim: int, read: Callable[[Any], Any], rest: Any) -> tuple[Any, ...]:
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


def _beyond(start: int, stop: int, length: int, end: End) -> Iterator[tuple[int, int, int]]:
    """Yield (at, length, start) for places `start` to `stop`, which lie beyond an end.

    Nothing for those that take no element.
    """
    if end == "periodic":
        yield from wrapped_runs(start, stop, length)
    elif end in BOUNDARIES[:-1]:
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


# -- limits: reads are counted before any of them is planned -------------------------------


def _refuse_too_wide(
    tiling: Tiling, widths: Sequence[tuple[int, int]], ends: Sequence[tuple[End, End]]
) -> None:
    """Refuse a halo that nobody could plan or keep. Local, and alike on all ranks.

    Raises:
        LayoutError: If a rank could read more than `MOST_READS` boxes, or have more than
            `MOST_ELEMENTS` elements along an axis.

    Cost:
        O(blocks along an axis) for each axis, whatever the width.
    """
    for axis, (length, pair) in enumerate(zip(tiling.shape, widths, strict=True)):
        if sum(pair) + length > MOST_ELEMENTS:
            raise LayoutError(
                f"a padded block has at most {MOST_ELEMENTS} elements along an axis, but width "
                f"{pair} along axis {axis} of shape {tiling.shape} makes it longer; take a "
                "narrower halo"
            )
    counts = [
        1 + most_runs(bounds, pair[0], end[0], -1) + most_runs(bounds, pair[1], end[1], 1)
        for bounds, pair, end in zip(tiling.bounds, widths, ends, strict=True)
    ]
    if prod(counts) > MOST_READS:
        raise LayoutError(
            f"a rank reads at most {MOST_READS} boxes for its halo, but width {tuple(widths)} "
            f"around blocks of shape {tiling.shape} with ends {tuple(ends)} may need "
            f"{' x '.join(map(str, counts))} = {prod(counts)}: each period of an axis is read by "
            "itself, and of what is mirrored or repeated each element. Take a narrower halo, or "
            "widths by axis as {0: 1}"
        )


def most_runs(bounds: Integers, width: int, end: End, side: int) -> int:
    """Return how many runs the halo of any block has at most on one side of it."""
    length, parts = int(bounds[-1]), len(bounds) - 1
    if width == 0 or length == 0:
        return 0
    near = bounds[:-1] if side < 0 else bounds[1:]
    far = near + side * width
    if end == "periodic":
        runs = np.abs(_place(bounds, far) - _place(bounds, near)) + 1
        return int(np.minimum(runs, width).max())
    inside = np.clip(far, 0, length)
    runs = np.abs(_place(bounds, inside) - _place(bounds, near)) + 1
    mirrored = np.abs(far - inside) if end in ("edge", "reflect", "symmetric") else 0
    runs = np.minimum(np.minimum(runs, parts), np.abs(inside - near)) + mirrored
    return int(runs.max())


def _place(bounds: Integers, at: Integers) -> Integers:
    """Return the number of the interval at places of an axis that repeats itself."""
    periods, rest = np.divmod(at, int(bounds[-1]))
    found: Integers = periods * (len(bounds) - 1) + np.searchsorted(bounds, rest, "right") - 1
    return found
