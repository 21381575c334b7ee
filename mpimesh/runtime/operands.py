"""The arrays that callers give to operations: which there are, and where their bytes lie."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpimesh.arrays import Array, HostArray, is_cupy, refuse_objects, to_numpy
from mpimesh.errors import DTypeError, ShapeError
from mpimesh.runtime.world import current_world

__all__ = ["check_output", "host_array", "output_array"]


def host_array(x: Array) -> HostArray:
    """Return `x` as a NumPy array; CuPy arrays are copied to the host.

    Raises:
        DTypeError: If `x` holds Python objects, or is memory of a device that mpimesh cannot read.
        ShapeError: If `x` is a list that is no array, such as one with rows of unequal length.
    """
    if x is None:
        raise ShapeError("None given instead of an array; every rank passes one")
    if type(x) is np.ndarray:
        host: HostArray = x
    elif is_cupy(x):
        host = to_numpy(x)
    elif hasattr(x, "__cuda_array_interface__"):
        raise DTypeError(
            f"an array of {type(x).__module__}.{type(x).__qualname__} lies on a device; mpimesh "
            "reads CuPy's arrays there: pass cupy.asarray(x), or a copy on the host"
        )
    else:
        try:
            host = np.asarray(x)
        except (TypeError, ValueError) as error:
            raise ShapeError(f"{type(x).__name__} given, which is no array: {error}") from None
    refuse_objects(host.dtype)
    return host


def check_output(out: Any) -> None:
    """Check that `out` is an array that can be written, each element for itself.

    Raises:
        DTypeError: If it is no array.
        ShapeError: If it is read-only, or elements share memory.
    """
    if not isinstance(out, np.ndarray) and not is_cupy(out):
        raise DTypeError(f"out must be a NumPy or CuPy array, got {type(out).__name__}")
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        holder = current_world().locks.holder(out)
        cure = "pass an array that can be written" if holder is None else "resolve that first"
        why = "" if holder is None else f" while {holder} uses it"
        raise ShapeError(f"out is read-only{why}; {cure}")
    if not out.flags.c_contiguous and _overlaps(out):
        raise ShapeError(
            f"out has elements that share memory, by its strides {out.strides} and shape "
            f"{out.shape}; pass an array where each has its own"
        )


def output_array(out: Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Check an array that is to hold a result.

    Raises:
        ShapeError: If its shape is not `shape`, it is read-only, or elements share memory.
        DTypeError: If it is no array, or its dtype is not `dtype`.
    """
    check_output(out)
    if out.shape != shape:
        raise ShapeError(f"out has shape {out.shape}, but the result has shape {shape}")
    if out.dtype != dtype:
        raise DTypeError(f"out has dtype {out.dtype}, but the result has dtype {dtype}")


def _overlaps(out: Array) -> bool:
    """Tell whether two elements may share memory: axes whose steps do not pass the inner ones."""
    end = out.dtype.itemsize
    axes = zip(out.strides, out.shape, strict=True)
    for stride, length in sorted((abs(stride), length) for stride, length in axes if length != 1):
        if not length:
            return False
        if stride < end:
            return True
        end += stride * (length - 1)
    return False
