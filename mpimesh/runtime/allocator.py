"""Arrays for exchange: gradient buckets, pipeline slots, blocks, and one for all of a node."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import index
from typing import TYPE_CHECKING, Any, SupportsIndex

from mpimesh.arguments import MOST, shown
from mpimesh.arrays import DType, HostArray, aligned_bytes, refuse_objects
from mpimesh.arrays.dtypes import as_dtype
from mpimesh.errors import DTypeError, ShapeError
from mpimesh.runtime.agreement import agreed, exchange
from mpimesh.runtime.call import Call

if TYPE_CHECKING:
    from mpimesh.runtime.group_core import GroupCore

__all__ = ["aligned_empty", "array_shape", "empty_once"]


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


def empty_once(
    group: GroupCore,
    shape: Sequence[SupportsIndex] | SupportsIndex,
    dtype: Any,
    take: Callable[[int], HostArray],
) -> tuple[HostArray, bool]:
    """Return an array that exists once for the ranks of a node, and whether this rank writes it.

    See :meth:`ProcessGroup.empty_once`.
    """
    progress, communicator = group.progress, group.communicator
    sizes, kind = agreed(
        progress,
        communicator,
        "empty_once",
        lambda: array_shape(shape, dtype),
        lambda found: f"{found[0]} {found[1]}",
    )
    nbytes = math.prod(sizes) * kind.itemsize
    offered = communicator.offer_once(nbytes)
    places = exchange(progress, communicator, offered, what=Call("empty_once", group.name))
    found = communicator.take_once(places, nbytes)
    if found is None:
        return aligned_empty(sizes, kind, take), True
    memory, writes = found
    array: HostArray = memory.view(kind).reshape(sizes)
    array.flags.writeable = writes
    return array, writes
