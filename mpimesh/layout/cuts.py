"""Cuts of an array axis into blocks, when one mesh dim after the other splits it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from mpimesh.errors import LayoutError

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Cut", "axis_bounds", "cut_further", "even_sizes"]


@dataclass(frozen=True, slots=True)
class Cut:
    """The cut of one mesh dim through what is left of an axis.

    Attributes:
        parts: How many parts.
        sizes: Their sizes; None for parts that differ by one at most, the larger ones first.
    """

    parts: int
    sizes: tuple[int, ...] | None = None


def even_sizes(length: int, parts: int) -> list[int]:
    """Return the sizes of even parts: the first ``length % parts`` have one element more."""
    quotient, rest = divmod(length, parts)
    return [quotient + (part < rest) for part in range(parts)]


@lru_cache(maxsize=1024)
def axis_bounds(length: int, cuts: tuple[Cut, ...]) -> npt.NDArray[np.int64]:
    """Return where each block of an axis begins, and at last `length`.

    The first of `cuts` is the outermost, so the blocks stand in the row-major order of the
    coordinates: block k is ``bounds[k]`` to ``bounds[k + 1]``.

    Shapes:
        result: (product of all parts + 1,), read-only.

    Raises:
        LayoutError: If sizes do not add up to what they split.
    """
    bounds = np.array([0, length], np.int64)
    for cut in cuts:
        bounds = cut_further(bounds, cut)
    bounds.flags.writeable = False
    return bounds


def cut_further(bounds: npt.NDArray[np.int64], cut: Cut) -> npt.NDArray[np.int64]:
    """Return where the parts begin when each block is cut, and at last where the last one ends.

    Shapes:
        bounds: (blocks + 1,).
        result: (blocks * parts + 1,).

    Raises:
        LayoutError: If sizes do not add up to what they split.
    """
    lengths = np.diff(bounds)
    offsets: npt.NDArray[np.int64]
    if cut.sizes is None:
        part = np.arange(cut.parts)
        quotients, rests = np.divmod(lengths[:, None], cut.parts)
        offsets = part * quotients + np.minimum(part, rests)
    else:
        _check_sizes(cut, lengths)
        sizes = np.array(cut.sizes, np.int64)
        offsets = (np.cumsum(sizes) - sizes)[None, :]
    return np.append(bounds[:-1, None] + offsets, bounds[-1])


def _check_sizes(cut: Cut, lengths: Sequence[int] | npt.NDArray[np.int64]) -> None:
    sizes = cut.sizes or ()
    if len(sizes) != cut.parts:
        raise LayoutError(
            f"sizes {sizes} are {len(sizes)}, but the mesh dim that they are for has {cut.parts} "
            "ranks; give one size for each"
        )
    wrong = [int(length) for length in lengths if length != sum(sizes)]
    if wrong:
        raise LayoutError(
            f"sizes {sizes} add up to {sum(sizes)}, but split {wrong[0]} elements of the axis"
        )
