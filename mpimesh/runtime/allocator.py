"""Arrays for exchange: gradient buckets, pipeline slots, blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import index
from typing import Any, SupportsIndex

from mpimesh.arguments import MOST, shown
from mpimesh.arrays import DType, HostArray, aligned_bytes, refuse_objects
from mpimesh.arrays.dtypes import as_dtype
from mpimesh.errors import DTypeError, ShapeError

__all__ = ["aligned_empty", "array_shape"]


def aligned_empty(
    shape: Sequence[SupportsIndex] | SupportsIndex,
    dtype: Any,
    take: Callable[[int], HostArray] = aligned_bytes,
) -> HostArray:
    """Return an uninitialised C-contiguous array that starts on a cache line.

    Args:
        shape: Its shape.
        dtype: Its dtype.
        take: Gives so many bytes, which start on a cache line.

    Raises:
        ShapeError: If a size is negative or no whole number.
        DTypeError: If `dtype` holds Python objects.
        MemoryError: If there is not as much memory.
    """
    sizes, kind = array_shape(shape, dtype)
    nbytes = math.prod(sizes) * kind.itemsize
    try:
        aligned: HostArray = take(nbytes).view(kind).reshape(sizes)
    except OSError as error:
        raise MemoryError(
            f"an array of shape {sizes} and dtype {kind} needs {nbytes / 2**30:.1f} GiB, which "
            f"this machine does not give: {error}"
        ) from None
    return aligned


def array_shape(
    shape: Sequence[SupportsIndex] | SupportsIndex, dtype: Any
) -> tuple[tuple[int, ...], DType]:
    """Return shape and dtype of an array that can be exchanged.

    Raises:
        ShapeError: If a size is negative or no whole number.
        DTypeError: If `dtype` holds Python objects.
    """
    try:
        # First what is most frequent: to ask for a protocol takes ten times as long.
        if type(shape) is tuple or isinstance(shape, Sequence):
            sizes = tuple(map(index, shape))
        else:
            sizes = (
                (index(shape),) if isinstance(shape, SupportsIndex) else tuple(map(index, shape))
            )
    except TypeError:
        raise ShapeError(
            f"a shape is a whole number or a row of whole numbers, got {shown(shape)}"
        ) from None
    if sizes and min(sizes) < 0:
        raise ShapeError(f"sizes of an array must not be negative, got {sizes}")
    kind = as_dtype(dtype)
    refuse_objects(kind)
    if not kind.itemsize:
        raise DTypeError(f"elements of dtype {kind} have no bytes; give their length, as in 'S8'")
    if math.prod(filter(None, sizes)) * kind.itemsize > MOST:
        raise ShapeError(
            f"an array of shape {shown(sizes)} and dtype {kind} has more bytes than an address "
            "can count"
        )
    return sizes, kind
