"""Reads of ranks from each other's blocks, axis by axis: halos and shifted arrays.

Along each axis every block reads some runs of elements, of its own block and of others, whatever
the other axes do. So a rank reads the product of the runs of its axes, and the readers of its own
block follow in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import product
from math import prod
from numbers import Number
from typing import Any, TypeAlias

import numpy as np

from mpimesh.errors import LayoutError
from mpimesh.layout.axis_rules import unit_runs
from mpimesh.layout.boxes import Box, Regions, extent, local_regions, volume
from mpimesh.layout.layout import Layout
from mpimesh.layout.tiling import Integers, Tiling, places_of

__all__ = [
    "MOST_ELEMENTS",
    "MOST_READS",
    "HaloPlan",
    "Read",
    "Reads",
    "Run",
    "cut_runs",
    "most_runs",
    "near_reads",
    "picked_reads",
    "plan_halo",
    "shift_reads",
    "source_of",
    "wrapped_runs",
]


@dataclass(frozen=True, slots=True)
class Run:
    """Elements of one axis that one block reads of another, or of itself.

    Attributes:
        at: Where they go, counted in what the reader fills.
        length: How many they are.
        start: Where they lie in the array.
        leaf: The interval of the axis that they lie in.
    """

    at: int
    length: int
    start: int
    leaf: int


@dataclass(frozen=True, slots=True)
class Read:
    """A box that a rank reads.

    Attributes:
        rank: Who has it.
        box: Its place in the array.
        into: Where it goes, counted in what the reader fills.
    """

    rank: int
    box: Box
    into: Box


@dataclass(frozen=True, slots=True, eq=False)
class Reads:
    """All that the ranks of a mesh read.

    Of several copies of a block a rank reads the one at its own coordinates.

    Attributes:
        tiling: The blocks that there are.
        runs_of: For each axis what gives the runs that the block of an interval reads.
        skip: Tells of a run for each axis and of the reader's intervals that nothing is read.
    """

    tiling: Tiling
    runs_of: tuple[Callable[[int], tuple[Run, ...]], ...]
    skip: Callable[[tuple[Run, ...], tuple[int, ...]], bool] = field(
        default=lambda runs, own: False
    )

    def takes(self, rank: int) -> list[Read]:
        """Return what `rank` reads, of others and of itself, in row-major order of its runs."""
        own = self._leaves(rank)
        reads = []
        for runs in product(*(of(leaf) for of, leaf in zip(self.runs_of, own, strict=True))):
            if not self.skip(runs, own):
                owner = self._rank_at(tuple(run.leaf for run in runs), rank)
                reads.append(Read(owner, _source_box(runs), _target_box(runs)))
        return reads

    def gives(self, rank: int) -> list[tuple[int, Box]]:
        """Return which other ranks read what of `rank`: for each of them in the order it reads."""
        own = self._leaves(rank)
        rows = [
            [(leaf, run) for leaf in range(len(bounds) - 1) for run in of(leaf) if run.leaf == mine]
            for of, bounds, mine in zip(self.runs_of, self.tiling.bounds, own, strict=True)
        ]
        gives = []
        for row in product(*rows):
            leaves, runs = tuple(leaf for leaf, _ in row), tuple(run for _, run in row)
            reader = self._rank_at(leaves, rank)
            if reader != rank and not self.skip(runs, leaves):
                gives.append((reader, _source_box(runs)))
        return gives

    def regions(self, rank: int, block_of: Callable[[int], Box]) -> Regions:
        """Return what `rank` takes and gives, with ranks numbered by their places in the mesh.

        Args:
            rank: The rank.
            block_of: Gives the box of the whole array that the array has in which a rank holds its
                block; it may go over the ends.
        """
        takes = [(read.into, read.box, (read.rank,)) for read in self.takes(rank)]
        number_of = self.tiling.mesh.offset_of
        return local_regions(takes, self.gives(rank), rank, block_of, number_of)

    def received(self, rank: int) -> tuple[int, int]:
        """Return how many elements, in how many boxes, `rank` reads of others."""
        foreign = [read for read in self.takes(rank) if read.rank != rank]
        return sum(volume(read.box) for read in foreign), len(foreign)

    @property
    def moves(self) -> bool:
        """Whether along any axis a block reads of another: the same on all ranks."""
        return any(
            run.leaf != leaf
            for of, bounds in zip(self.runs_of, self.tiling.bounds, strict=True)
            for leaf in range(len(bounds) - 1)
            for run in of(leaf)
        )

    def _leaves(self, rank: int) -> tuple[int, ...]:
        coords = np.array([self.tiling.mesh.coords_of(rank)], np.int64).reshape(1, -1)
        return tuple(int(leaf[0]) for leaf in self.tiling.leaves_of(coords))

    def _rank_at(self, leaves: tuple[int, ...], near: int) -> int:
        """Return who holds the tile of these intervals, at the coordinates of `near` else."""
        mesh = self.tiling.mesh
        coords = list(mesh.coords_of(near))
        for dims, leaf in zip(self.tiling.axis_dims, leaves, strict=True):
            for dim in reversed(dims):
                leaf, coords[dim] = divmod(leaf, mesh.dims[dim].size)
        offset = 0
        for size, place in zip(mesh.shape, coords, strict=True):
            offset = offset * size + place
        return int(places_of(mesh).ranks[offset])


def cut_runs(bounds: Iterable[int], pieces: Iterable[tuple[int, int, int]]) -> tuple[Run, ...]:
    """Cut (at, length, start) where the intervals of an axis end; leave out what is empty."""
    edges = np.asarray(bounds)
    runs = []
    for at, length, start in pieces:
        while length > 0:
            leaf = int(np.searchsorted(edges, start, "right")) - 1
            part = min(length, int(edges[leaf + 1]) - start)
            runs.append(Run(at, part, start, leaf))
            at, length, start = at + part, length - part, start + part
    return tuple(runs)


def wrapped_runs(start: int, stop: int, length: int) -> Iterator[tuple[int, int, int]]:
    """Return (at, length, start) of elements `start` to `stop` of an axis that repeats itself.

    Example:
        >>> list(wrapped_runs(-1, 4, 3))
        [(0, 1, 2), (1, 3, 0), (4, 1, 0)]
    """
    at = start
    while at < stop:
        part = min(stop - at, length - at % length)
        yield at - start, part, at % length
        at += part


def _cached(function: Callable[[int], tuple[Run, ...]]) -> Callable[[int], tuple[Run, ...]]:
    """Keep what a function gives for each interval."""
    return lru_cache(maxsize=None)(function)


def _source_box(runs: tuple[Run, ...]) -> Box:
    return tuple((run.start, run.start + run.length) for run in runs)


def _target_box(runs: tuple[Run, ...]) -> Box:
    return tuple((run.at, run.at + run.length) for run in runs)


# -- a shifted array -----------------------------------------------------------------------


def shift_reads(layout: Layout, shape: Sequence[int], steps: Sequence[int], wrap: bool) -> Reads:
    """Plan who reads what if element i of the result is element ``i - steps`` of the array.

    Args:
        layout: The layout of the array and of the result.
        shape: Its global shape.
        steps: For each axis how far it is shifted; negative for towards its beginning.
        wrap: Whether what leaves an end comes back at the other. If not, nothing is read for it.

    Raises:
        LayoutError: If the layout does not fit `shape`.
    """
    tiling = layout.tiling(shape)
    runs_of = tuple(
        _cached(partial(_shifted_runs, bounds, step, wrap))
        for bounds, step in zip(tiling.bounds, steps, strict=True)
    )
    return Reads(tiling, runs_of)


def _shifted_runs(bounds: Integers, step: int, wrap: bool, leaf: int) -> tuple[Run, ...]:
    length, start, stop = int(bounds[-1]), int(bounds[leaf]), int(bounds[leaf + 1])
    if start == stop:
        return ()
    first, last = start - step, stop - step
    if wrap:
        return cut_runs(bounds, wrapped_runs(first, last, length))
    inside = max(first, 0), min(last, length)
    return cut_runs(bounds, [(inside[0] - first, inside[1] - inside[0], inside[0])])


# -- picked elements, and those near a block ------------------------------------------------


def picked_reads(source: Tiling, target: Tiling, picks: Sequence[Any]) -> Reads:
    """Plan who reads what of an array of which picks are taken along each axis.

    Args:
        source: The blocks of the array.
        target: Those of the result; the same dims split each axis.
        picks: For each axis rows of indices without gaps; those of one that goes backward come
            forward.
    """
    runs_of = tuple(
        _cached(partial(_picked_runs, old, new, one))
        for old, new, one in zip(source.bounds, target.bounds, picks, strict=True)
    )
    return Reads(source, runs_of)


def _picked_runs(old: Integers, new: Integers, picks: Any, leaf: int) -> tuple[Run, ...]:
    rows = unit_runs(picks, int(new[leaf]), int(new[leaf + 1]))
    return cut_runs(old, [(at, len(run), min(run[0], run[-1])) for at, run in rows])


def near_reads(tiling: Tiling, widths: Sequence[tuple[int, int]]) -> Reads:
    """Plan that each block that has elements reads itself and those before and after it."""
    runs_of = tuple(
        _cached(partial(_near_runs, bounds, width))
        for bounds, width in zip(tiling.bounds, widths, strict=True)
    )
    return Reads(tiling, runs_of)


def _near_runs(bounds: Integers, width: tuple[int, int], leaf: int) -> tuple[Run, ...]:
    start, stop, length = int(bounds[leaf]), int(bounds[leaf + 1]), int(bounds[-1])
    if start == stop:
        return ()
    start, stop = max(0, start - width[0]), min(length, stop + width[1])
    return cut_runs(bounds, [(0, stop - start, start)])


BOUNDARIES = ("periodic", "edge", "reflect", "symmetric", "none")
"""The names of what may lie beyond an end; a number is a fixed value."""

End: TypeAlias = "str | complex"
"""One of `BOUNDARIES`, or the value there."""

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
        layout: The layout of the array.
        shape: Its global shape.
        width: For each axis the elements before and after a block.
        ends: For each axis what is beyond its lower and upper end.
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
        """Return boxes that hold the other elements of the block, each _cached."""
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
        layout: The layout of the array; without `Partial`.
        shape: Its global shape.
        width: Elements on each side, or (before, after), for all axes, also those that are
            not split; or a mapping by axis, in which the others have none.
        boundary: The values beyond the ends: ``"periodic"``, ``"edge"``, ``"reflect"``,
            ``"symmetric"``, ``"none"`` or a number; a pair for the lower and the upper end; or a
            mapping by axis, in which the others are periodic.

    Raises:
        LayoutError: If the layout does not fit `shape`, the values break a rule, or the halo is so
            wide that a rank would read more than `MOST_READS` boxes, or have more
            than `MOST_ELEMENTS` elements along an axis.

    Cost:
        O(blocks along an axis) for each axis, _cached.

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
        _cached(partial(_padded_runs, bounds, pair, end))
        for bounds, pair, end in zip(tiling.bounds, widths, ends, strict=True)
    )
    befores = tuple(before for before, _ in widths)

    def is_own(runs: tuple[Run, ...], own: tuple[int, ...]) -> bool:
        # What a block reads of itself at the place of its own beginning is the block.
        rows = zip(runs, own, befores, strict=True)
        return all(run.leaf == leaf and run.at == before for run, leaf, before in rows)

    return HaloPlan(layout, shape, widths, ends, Reads(tiling, runs_of, is_own))


def _padded_runs(
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
    """Return what is beyond the lower and the upper end.

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
    values = [read(rest)] * ndim
    for axis, one in value.items():
        if isinstance(axis, bool) or not isinstance(axis, int) or not -ndim <= axis < ndim:
            raise LayoutError(f"axis {axis!r} does not exist in an array with {ndim} axes")
        values[axis] = read(one)
    return tuple(values)


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
    """Return which element is at a place beyond an end, as :func:`numpy.pad` has it.

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
    """Refuse a halo too large to plan or to store. Local, and alike on all ranks.

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
        runs = np.abs(_interval(bounds, far) - _interval(bounds, near)) + 1
        return int(np.minimum(runs, width).max())
    inside = np.clip(far, 0, length)
    runs = np.abs(_interval(bounds, inside) - _interval(bounds, near)) + 1
    mirrored = np.abs(far - inside) if end in ("edge", "reflect", "symmetric") else 0
    runs = np.minimum(np.minimum(runs, parts), np.abs(inside - near)) + mirrored
    return int(runs.max())


def _interval(bounds: Integers, at: Integers) -> Integers:
    """Return the number of the interval at places of an axis that repeats itself."""
    periods, rest = np.divmod(at, int(bounds[-1]))
    intervals: Integers = periods * (len(bounds) - 1) + np.searchsorted(bounds, rest, "right") - 1
    return intervals
