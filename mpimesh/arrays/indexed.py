"""Blocks of arrays whose values follow from the number of each element: ranges, diagonals.

Each function gives the block `box` of an array of `shape`, the same bits as that slice of the whole
array, which never exists. So ranks with different blocks of it, by any layout, agree on its values
without a message.

All functions take `shape`, the whole array's; `box`, the block's place in it; `dtype`; `xp`, the
library that makes the block; and `out`, C-contiguous memory of the block's shape and dtype in its
place. They raise ShapeError if the box is not in the array or `out` has another shape, and
DTypeError if `out` has another dtype.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from types import ModuleType
from typing import Any

import numpy as np

from mpimesh.arrays.dtypes import is_half
from mpimesh.arrays.namespace import Array, DType, namespace
from mpimesh.errors import ArrayValueError, DTypeError, ShapeError
from mpimesh.layout.boxes import Box, extent, volume, whole

__all__ = [
    "BlockPieces",
    "arange_block",
    "block_for",
    "box_shape",
    "eye_block",
    "flat_indices",
    "full_block",
    "linspace_block",
]


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
    for axis, ((start, stop), size) in enumerate(zip(box, shape, strict=True)):
        if not 0 <= start <= stop <= size:
            raise ShapeError(
                f"a box is inside its array: 0 <= start <= stop <= {size} on axis {axis} of "
                f"shape {tuple(shape)}, got ({start}, {stop})"
            )
    if math.prod(shape) > _MOST_ELEMENTS:
        raise ShapeError(
            f"an array has at most 2^63 - 1 elements, got shape {tuple(shape)}; "
            "elements past that have no number"
        )
    return extent(box)


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

    `dtype` is int64 or uint64.

    Shapes:
        out, result: that of `box`, C-contiguous.

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
class BlockPieces:
    """The elements of a block, cut into pieces of bounded size, in their order.

    Attributes:
        offsets: Numbers of the elements of a piece less that of its first one, uint64. A
            piece that is shorter has the first of them.
        rows: How many rows of axis `axis` are in a piece.
        axis: The axis along which pieces follow each other.
        box: The block's place.

    Example:
        >>> pieces = BlockPieces.of((4, 6), ((1, 3), (4, 6)))
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
    ) -> BlockPieces:
        """Return the pieces, of at most `most` elements, of the block `box` of a checked `shape`.

        Cost:
            Memory for one piece. At least a fourth of `most` is in the average piece, so there
            are few of them, whatever the shape.
        """
        # Python's integers, which have no end: numbers are computed modulo 2^64 from them.
        shape = tuple(map(operator.index, shape)) or (1,)
        box = tuple((operator.index(a), operator.index(b)) for a, b in box) or ((0, 1),)
        most = (_HOST_PIECE if xp is np else _DEVICE_PIECE) if most is None else most
        sizes = extent(box)
        axis = len(shape) - 1
        inner = 1
        while axis > 0 and inner * sizes[axis] <= most:
            inner *= sizes[axis]
            axis -= 1
        rows = min(sizes[axis], max(1, most // max(1, inner)))
        # As a block of its own at the array's start.
        trailing = (rows, *sizes[axis + 1 :])
        offsets = flat_indices((rows, *shape[axis + 1 :]), whole(trailing), np.uint64, xp=xp)
        return cls(offsets.reshape(-1), rows, axis, shape, box)

    def __iter__(self) -> Iterator[tuple[slice, int]]:
        """Yield, for each piece, its place in the flat block and the number of its first element.

        The number is to be added to `offsets`.
        """
        if any(start == stop for start, stop in self.box):
            return
        strides = _strides(self.shape)
        inner = volume(self.box[self.axis + 1 :])
        corner = sum(start * stride for (start, _), stride in zip(self.box, strides, strict=True))
        first, last = self.box[self.axis]
        place = 0
        for outer in product(*map(range, extent(self.box[: self.axis]))):
            base = corner + sum(
                index * stride for index, stride in zip(outer, strides[: self.axis], strict=True)
            )
            for row in range(0, last - first, self.rows):
                count = min(self.rows, last - first - row) * inner
                yield slice(place, place + count), base + row * strides[self.axis]
                place += count


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return how far the numbers of neighbours are apart, for each axis."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


_RUN = 1 << 16
# Elements at a time: what is computed in another type than the block's stays small.


def arange_block(
    start: float,
    step: float,
    shape: tuple[int, ...],
    box: Box,
    dtype: Any,
    *,
    xp: ModuleType = np,
    out: Array | None = None,
) -> Array:
    """Return a block of the numbers ``start, start + step, ...``, as `numpy.arange` has them.

    As there, the first two are `start` and ``start + step``, rounded to `dtype`, and their
    difference decides on all others: ``first + i * difference``, half types in float32.
    Integers wrap around past the dtype's end.

    `dtype` is one of integers or floats.

    Shapes:
        shape: (n,), n being how many numbers there are in all.
        out, result: that of `box`.

    Raises:
        ShapeError: If the array is not 1-d, the box not in it, or `out` does not fit it.
        DTypeError: If `dtype` is none of numbers.
        ArrayValueError: If an integer `dtype` cannot hold the first two numbers.

    Cost:
        Three passes over the block.

    Example:
        >>> arange_block(10, 5, (100,), ((2, 5),), np.int64)
        array([20, 25, 30])
    """
    wanted = _numbers(dtype)
    xp, block = block_for(_one_axis(shape), box, wanted, xp, out)
    first = np.zeros(2, wanted)
    try:
        for index in range(min(2, shape[0])):
            first[index] = start + step if index else start
    except OverflowError:
        raise ArrayValueError(
            f"{wanted} cannot hold the first numbers of a range from {start} by {step}"
        ) from None
    working = _working(wanted)
    begin, following = first.astype(working)
    with np.errstate(over="ignore"):
        difference = following - begin
    for place, numbers in _runs(xp, box):
        values = numbers.astype(working)
        values *= difference
        values += begin
        block[place] = values.view(np.int64) if wanted.kind == "i" else values
    # These two exactly: differences are rounded, and 0 + -0.0 is 0.0.
    (low, high) = box[0]
    for index in range(low, min(high, 2)):
        block[index - low] = first[index]
    return block


def linspace_block(
    start: float,
    stop: float,
    shape: tuple[int, ...],
    box: Box,
    dtype: Any = np.float64,
    *,
    endpoint: bool = True,
    xp: ModuleType = np,
    out: Array | None = None,
) -> Array:
    """Return a block of n numbers evenly spread over [start, stop], as `numpy.linspace` has them.

    Computed in float64, ``start + i * step``, the last one being `stop` itself, and rounded
    to `dtype`; down to whole numbers where that is a dtype of integers.

    Without `endpoint`, `stop` is the number that would follow the last. `dtype` is one of integers
    or floats.

    Shapes:
        shape: (n,).
        out, result: that of `box`.

    Raises:
        ShapeError: If the array is not 1-d, the box not in it, or `out` does not fit it.
        DTypeError: If `dtype` is none of numbers.

    Cost:
        Four passes over the block.

    Example:
        >>> linspace_block(0, 1, (5,), ((3, 5),))
        array([0.75, 1.  ])
    """
    wanted = _numbers(dtype)
    xp, block = block_for(_one_axis(shape), box, wanted, xp, out)
    count = shape[0]
    first, last = np.float64(start), np.float64(stop)
    span = last - first
    parts = count - 1 if endpoint else count
    step = span / parts if parts > 0 else span
    for place, numbers in _runs(xp, box):
        values = numbers.astype(np.float64)
        if parts > 0 and step == 0:  # the span is so small that its parts are not
            values /= parts
            values *= span
        else:
            values *= step
        values += first
        if endpoint and count > 1 and box[0][0] + place.stop == count:
            values[-1] = last
        block[place] = xp.floor(values) if wanted.kind in "iu" else values
    return block


def eye_block(
    shape: tuple[int, ...],
    box: Box,
    dtype: Any = np.float64,
    *,
    k: int = 0,
    xp: ModuleType = np,
    out: Array | None = None,
) -> Array:
    """Return a block of the array with ones on a diagonal and zeros elsewhere, as `numpy.eye`.

    The diagonal is that of the elements ``[i, i + k]``.

    Shapes:
        shape: (rows, columns).
        out, result: that of `box`.

    Raises:
        ShapeError: If the array is not 2-d, the box not in it, or `out` does not fit it.

    Cost:
        One pass over the block.

    Example:
        >>> eye_block((4, 4), ((2, 4), (1, 4)), int)
        array([[0, 1, 0],
               [0, 0, 1]])
    """
    if len(shape) != 2:
        raise ShapeError(f"an array with a diagonal has two axes, got shape {tuple(shape)}")
    _, block = block_for(shape, box, dtype, xp, out)
    block[...] = 0
    (top, bottom), (left, right) = box
    first, end = max(top, left - k), min(bottom, right - k)
    if first < end:
        width = right - left
        start = (first - top) * width + first + k - left
        stop = start + (end - first - 1) * (width + 1) + 1
        block.reshape(-1)[start : stop : width + 1] = 1
    return block


def full_block(
    value: Any,
    shape: tuple[int, ...],
    box: Box,
    dtype: Any,
    *,
    xp: ModuleType = np,
    out: Array | None = None,
) -> Array:
    """Return a block of the array whose elements are all `value`.

    Raises:
        ArrayValueError: If `value` is an array, or `dtype` cannot hold it.

    Cost:
        One pass over the block.

    Example:
        >>> full_block(7, (3, 5), ((0, 1), (2, 5)), np.int32)
        array([[7, 7, 7]], dtype=int32)
    """
    _, block = block_for(shape, box, dtype, xp, out)
    try:
        if np.ndim(value):
            raise ValueError
        block[...] = value
    except (OverflowError, ValueError):
        raise ArrayValueError(
            f"an array of {block.dtype} is filled with one number that it can hold, got {value!r}"
        ) from None
    return block


def _runs(xp: ModuleType, box: Box) -> Iterator[tuple[slice, Array]]:
    """Yield places in a 1-d block, one after the other, and the numbers of their elements."""
    ((low, high),) = box
    for start in range(low, high, _RUN):
        stop = min(start + _RUN, high)
        yield slice(start - low, stop - low), xp.arange(start, stop, dtype=np.int64)


def _working(dtype: DType) -> DType:
    """Return the type in which ranges of `dtype` are computed."""
    if dtype.kind in "iu":
        return np.dtype(np.uint64)  # wraps around, and so does what is cut off it
    return np.dtype(np.float32) if is_half(dtype) else dtype.newbyteorder("=")


def _numbers(dtype: Any) -> DType:
    """Return `dtype` if it is one of integers or floats."""
    wanted: DType = np.dtype(dtype)
    if wanted.kind not in "iuf" and not is_half(wanted):
        raise DTypeError(f"a range has a dtype of integers or floats, got {wanted}")
    return wanted


def _one_axis(shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) != 1:
        raise ShapeError(f"a range has one axis, got shape {tuple(shape)}")
    return shape
