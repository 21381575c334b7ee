"""Blocks of arrays whose values follow from the number of each element: ranges, diagonals.

Each function gives the block `box` of an array of `shape`, the same bits as that
slice of the whole array, which never exists. So ranks that hold different blocks
of it, by any layout, agree on its values without a message.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np

from mpimesh.arrays.boxes import Box, block_for
from mpimesh.arrays.reduction import is_half
from mpimesh.arrays.types import Array, DType
from mpimesh.errors import ArrayValueError, DTypeError, ShapeError

__all__ = ["arange_block", "eye_block", "full_block", "linspace_block"]

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

    Shapes:
        shape: (n,), n being how many numbers there are in all.
        out, result: that of `box`.

    Args:
        start: The first number.
        step: From one number to the next.
        shape: The whole array's.
        box: The block's place in it.
        dtype: Of integers or floats.
        xp: Whose array to make, where there is no `out`.
        out: Where the block is written to, C-contiguous.

    Raises:
        ShapeError: If the array is not 1-d, the box not in it, or `out` does not fit it.
        DTypeError: If `dtype` is none of numbers, or not that of `out`.
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
    # These two as they were given: differences are rounded, and 0 + -0.0 is 0.0.
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

    Shapes:
        shape: (n,).
        out, result: that of `box`.

    Args:
        start: The first number.
        stop: The last one, or, without `endpoint`, what would follow it.
        shape: The whole array's.
        box: The block's place in it.
        dtype: Of integers or floats.
        endpoint: Whether `stop` is one of them.
        xp: Whose array to make, where there is no `out`.
        out: Where the block is written to, C-contiguous.

    Raises:
        ShapeError: If the array is not 1-d, the box not in it, or `out` does not fit it.
        DTypeError: If `dtype` is none of numbers, or not that of `out`.

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

    Shapes:
        shape: (rows, columns).
        out, result: that of `box`.

    Args:
        shape: The whole array's.
        box: The block's place in it.
        dtype: Any that holds 0 and 1.
        k: Which diagonal: that of the elements ``[i, i + k]``.
        xp: Whose array to make, where there is no `out`.
        out: Where the block is written to, C-contiguous.

    Raises:
        ShapeError: If the array is not 2-d, the box not in it, or `out` does not fit it.
        DTypeError: If `out` has another dtype.

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

    Shapes:
        out, result: that of `box`.

    Args:
        value: One number.
        shape: The whole array's.
        box: The block's place in it.
        dtype: Any that holds the value.
        xp: Whose array to make, where there is no `out`.
        out: Where the block is written to, C-contiguous.

    Raises:
        ShapeError: If the box is not in the array, or `out` does not fit it.
        DTypeError: If `out` has another dtype.
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
