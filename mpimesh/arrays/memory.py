"""Memory of arrays: aligned, and in huge pages where it is large.

Rows of ordinary 4 KiB pages cost a large reduction a quarter of its speed in
address translation (measured: 16 MiB, 5.8 against 4.5 ms). NumPy asks for huge
pages only where its allocator happens to map fresh memory, so we ask ourselves.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from ctypes import addressof, c_char
from operator import index
from typing import Any, SupportsIndex

import numpy as np

from mpimesh.arguments import MOST, shown
from mpimesh.arrays.dtypes import as_dtype
from mpimesh.arrays.reduction import refuse_objects
from mpimesh.arrays.types import DType, HostArray
from mpimesh.errors import DTypeError, ShapeError

__all__ = ["address_of", "aligned_bytes", "aligned_empty", "array_shape", "memory_at"]

_CACHE_LINE_BYTES = 64
_HUGE_PAGE_BYTES = 2 << 20
_HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)


def address_of(x: HostArray) -> int | None:
    """Return where an array begins; None if it is read-only, empty, or not in one piece."""
    buffer: Any = x
    try:
        return addressof(c_char.from_buffer(buffer))
    except (BufferError, TypeError, ValueError):
        return None


def memory_at(address: int, nbytes: int, dtype: DType) -> HostArray:
    """Return an array over memory that it does not keep alive."""
    whole: Any = (c_char * nbytes).from_address(address)
    memory: HostArray = np.frombuffer(whole, dtype)
    return memory


def aligned_bytes(nbytes: int) -> HostArray:
    """Return uninitialised bytes that start on a cache line, or on a huge page if they fill one.

    The memory lives as long as an array refers to it.
    """
    if nbytes < _HUGE_PAGE_BYTES or _HUGE_PAGES is None:
        return _from(np.empty(nbytes + _CACHE_LINE_BYTES, np.uint8), nbytes, _CACHE_LINE_BYTES)
    mapping = mmap.mmap(-1, nbytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(_HUGE_PAGES)
    return _from(np.frombuffer(mapping, np.uint8), nbytes, _HUGE_PAGE_BYTES)


def _from(raw: HostArray, nbytes: int, alignment_bytes: int) -> HostArray:
    start = -raw.ctypes.data % alignment_bytes
    return raw[start : start + nbytes]


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
