"""Limits on the width of a halo: a rank's reads are counted before any of them is planned."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from mpimesh.errors import LayoutError
from mpimesh.layout.ends import End
from mpimesh.layout.tiling import Tiling

if TYPE_CHECKING:
    from mpimesh.layout.tiling import Integers

__all__ = ["MOST_ELEMENTS", "MOST_READS", "most_runs", "refuse_too_wide"]

MOST_READS = 1_000_000
"""The most boxes that a rank may read for its halo; they are planned one by one."""

MOST_ELEMENTS = 2**40
"""The most elements of a padded block along an axis; no memory holds more."""


def refuse_too_wide(
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
