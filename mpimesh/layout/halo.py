"""The plan of a halo: which elements around its block a rank reads from whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from mpimesh.errors import LayoutError
from mpimesh.layout.boxes import Box, extent
from mpimesh.layout.ends import BOUNDARIES, End, beyond, both_ends, per_axis, width_pair
from mpimesh.layout.halo_limits import refuse_too_wide
from mpimesh.layout.layout import Layout
from mpimesh.layout.reads import Reads, Run, cut_runs, once, wrapped_runs

if TYPE_CHECKING:
    from mpimesh.layout.tiling import Integers

__all__ = ["HaloPlan", "plan_halo"]


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
            wide that a rank would read more than `halo_limits.MOST_READS` boxes, or have more
            than `halo_limits.MOST_ELEMENTS` elements along an axis.

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
    widths = per_axis(width, len(shape), width_pair, 0)
    ends = per_axis(boundary, len(shape), both_ends, "periodic")
    for axis, (length, pair) in enumerate(zip(shape, widths, strict=True)):
        for count, end in zip(pair, ends[axis], strict=True):
            if length == 0 and count and end in BOUNDARIES[:-1]:
                raise LayoutError(
                    f"axis {axis} of shape {shape} has no element that could lie beyond its ends, "
                    f"as boundary {end!r} wants"
                )
    refuse_too_wide(tiling, widths, ends)
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


def _beyond(start: int, stop: int, length: int, end: End) -> Any:
    if end == "periodic":
        return wrapped_runs(start, stop, length) if start < stop else ()
    return beyond(start, stop, length, end)
