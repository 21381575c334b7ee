"""Boxes: the block of a larger array that one rank has, as (start, stop) for each axis.

What is worked out from the global number of each element is worked out in pieces
of bounded size. A piece holds neighbours of the block, and its numbers are a base
plus the same few offsets as in every other piece: computed once for all of them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from mpimesh.arrays.namespace import namespace
from mpimesh.arrays.types import Array, DType
from mpimesh.errors import DTypeError, ShapeError

__all__ = ["Box", "Pieces", "block_for", "box_shape", "flat_indices"]

Box: TypeAlias = tuple[tuple[int, int], ...]
"""(start, stop) for each axis, counted in the whole array."""

_HOST_PIECE = 1 << 14
# 128 KiB of words: a piece, its scratch and its offsets stay in the second cache.
_DEVICE_PIECE = 1 << 20
# On a device a piece has to outweigh the start of its kernels.
_MOST_ELEMENTS = (1 << 63) - 1


def box_shape(shape: tuple[int, ...], box: Box) -> tuple[int, ...]:
    """Return the shape of the block `box` of an array of `shape`.

    Raises:
        ShapeError: If the box is none of such an array, or the array has 2^63 elements or more.

    Example:
        >>> box_shape((4, 6), ((1, 3), (0, 6)))
        (2, 6)
    """
    if len(box) != len(shape):
        raise ShapeError(
            f"a box has a (start, stop) for each axis of its array: got {len(box)} for shape "
            f"{tuple(shape)}"
        )
    for axis, ((start, stop), extent) in enumerate(zip(box, shape, strict=True)):
        if not 0 <= start <= stop <= extent:
            raise ShapeError(
                f"a box lies inside its array: 0 <= start <= stop <= {extent} on axis {axis} of "
                f"shape {tuple(shape)}, got ({start}, {stop})"
            )
    if math.prod(shape) > _MOST_ELEMENTS:
        raise ShapeError(
            f"an array has at most 2^63 - 1 elements, got shape {tuple(shape)}; "
            "elements past that have no number"
        )
    return tuple(stop - start for start, stop in box)


def block_for(
    shape: tuple[int, ...], box: Box, dtype: Any, xp: ModuleType, out: Array | None
) -> tuple[ModuleType, Array]:
    """Return the library that works on a block, and the block's memory: `out`, or new memory.

    Shapes:
        out, result: that of `box`, C-contiguous.

    Raises:
        ShapeError: If the box is none of `shape`, or `out` has another shape or is not
            C-contiguous.
        DTypeError: If `out` has another dtype.
    """
    block_shape = box_shape(shape, box)
    wanted = np.dtype(dtype)
    if out is None:
        return xp, xp.empty(block_shape, wanted)
    if tuple(out.shape) != block_shape or not out.flags.c_contiguous:
        order = "C-contiguous" if out.flags.c_contiguous else "not C-contiguous"
        raise ShapeError(
            f"out must be a C-contiguous array of shape {block_shape}, that of its box; "
            f"got one of shape {tuple(out.shape)} that is {order}"
        )
    if out.dtype != wanted:
        raise DTypeError(f"out must have the dtype asked for, {wanted}, got {out.dtype}")
    return namespace(out), out


def flat_indices(
    shape: tuple[int, ...],
    box: Box,
    dtype: Any = np.int64,
    *,
    xp: ModuleType = np,
    out: Array | None = None,
) -> Array:
    """Return the row-major numbers, in the whole array, of a block's elements.

    Shapes:
        out, result: that of `box`, C-contiguous.

    Args:
        shape: The whole array's.
        box: The block's place in it.
        dtype: int64 or uint64.
        xp: Whose array to make, where there is no `out`.
        out: Where the block is written to.

    Raises:
        ShapeError: If the box is none of `shape`, or `out` does not fit it.
        DTypeError: If `dtype` is another one, or not that of `out`.

    Cost:
        One pass over the block.

    Example:
        >>> flat_indices((4, 6), ((1, 3), (4, 6)))
        array([[10, 11],
               [16, 17]])
    """
    wanted: DType = np.dtype(dtype)
    if wanted.kind not in "iu" or wanted.itemsize != 8:
        raise DTypeError(f"numbers of elements are int64 or uint64, got {wanted}")
    xp, block = block_for(shape, box, wanted, xp, out)
    block[...] = 0
    if not block.size:  # strides past 64 bits are of arrays without elements only
        return block
    for axis, stride in enumerate(_strides(shape)):
        start, stop = box[axis]
        along = xp.arange(start, stop, dtype=wanted)
        along *= wanted.type(stride)
        block += along.reshape((-1,) + (1,) * (len(shape) - axis - 1))
    return block


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """The elements of a block, cut into pieces of bounded size, in their order.

    Attributes:
        offsets: Numbers of the elements of a piece less that of its first one, uint64. A
            piece that is shorter has the first of them.
        rows: How many rows of axis `axis` are in a piece.
        axis: The axis along which pieces follow each other.
        shape: The whole array's.
        box: The block's place.

    Example:
        >>> pieces = Pieces.of((4, 6), ((1, 3), (4, 6)))
        >>> list(pieces), pieces.offsets
        ([(slice(0, 4, None), 10)], array([0, 1, 6, 7], dtype=uint64))
    """

    offsets: Array
    rows: int
    axis: int
    shape: tuple[int, ...]
    box: Box

    @classmethod
    def of(
        cls,
        shape: tuple[int, ...],
        box: Box,
        *,
        xp: ModuleType = np,
        most: int | None = None,
    ) -> Pieces:
        """Return the pieces, of at most `most` elements, of the block `box` of a checked `shape`.

        Cost:
            Memory for one piece. At least a fourth of `most` is in the average piece, so there
            are few of them, whatever the shape.
        """
        # Python's integers, which have no end: numbers are computed modulo 2^64 from them.
        shape = tuple(map(operator.index, shape)) or (1,)
        box = tuple((operator.index(a), operator.index(b)) for a, b in box) or ((0, 1),)
        most = (_HOST_PIECE if xp is np else _DEVICE_PIECE) if most is None else most
        extents = [stop - start for start, stop in box]
        axis = len(shape) - 1
        inner = 1
        while axis > 0 and inner * extents[axis] <= most:
            inner *= extents[axis]
            axis -= 1
        rows = min(extents[axis], max(1, most // max(1, inner)))
        # As a block of its own at the array's start.
        trailing = (rows, *extents[axis + 1 :])
        offsets = flat_indices(
            (rows, *shape[axis + 1 :]), tuple((0, extent) for extent in trailing), np.uint64, xp=xp
        )
        return cls(offsets.reshape(-1), rows, axis, shape, box)

    def __iter__(self) -> Iterator[tuple[slice, int]]:
        """Yield, for each piece, its place in the flat block and the number of its first element.

        The number is to be added to `offsets`.
        """
        if any(start == stop for start, stop in self.box):
            return
        strides = _strides(self.shape)
        inner = math.prod(stop - start for start, stop in self.box[self.axis + 1 :])
        corner = sum(start * stride for (start, _), stride in zip(self.box, strides, strict=True))
        extent = self.box[self.axis][1] - self.box[self.axis][0]
        place = 0
        for outer in product(*(range(stop - start) for start, stop in self.box[: self.axis])):
            base = corner + sum(
                index * stride for index, stride in zip(outer, strides[: self.axis], strict=True)
            )
            for row in range(0, extent, self.rows):
                count = min(self.rows, extent - row) * inner
                yield slice(place, place + count), base + row * strides[self.axis]
                place += count


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return how far the numbers of neighbours are apart, for each axis."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
