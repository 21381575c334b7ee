"""The plan of a shifted array: every block reads the elements that stand some steps before it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from mpimesh.layout.layout import Layout
from mpimesh.layout.reads import Reads, Run, cut_runs, once, wrapped_runs

if TYPE_CHECKING:
    from mpimesh.layout.tiling import Integers

__all__ = ["shift_reads"]


def shift_reads(layout: Layout, shape: Sequence[int], steps: Sequence[int], wrap: bool) -> Reads:
    """Plan who reads what if element i of the result is element ``i - steps`` of the array.

    Args:
        layout: How the array lies, and the result, too.
        shape: Its global shape.
        steps: For each axis how far it is shifted; negative for towards its beginning.
        wrap: Whether what leaves an end comes back at the other. If not, nothing is read for it.

    Raises:
        LayoutError: If the layout does not fit `shape`.
    """
    tiling = layout.tiling(shape)
    runs_of = tuple(
        once(partial(_runs, bounds, step, wrap))
        for bounds, step in zip(tiling.bounds, steps, strict=True)
    )
    return Reads(tiling, runs_of)


def _runs(bounds: Integers, step: int, wrap: bool, leaf: int) -> tuple[Run, ...]:
    length, start, stop = int(bounds[-1]), int(bounds[leaf]), int(bounds[leaf + 1])
    if start == stop:
        return ()
    first, last = start - step, stop - step
    if wrap:
        return cut_runs(bounds, wrapped_runs(first, last, length))
    inside = max(first, 0), min(last, length)
    return cut_runs(bounds, [(inside[0] - first, inside[1] - inside[0], inside[0])])
