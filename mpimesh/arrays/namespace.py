"""Find the library an array belongs to, without importing one that is not in use.

A CuPy array can only exist once somebody imported CuPy, so looking into
`sys.modules` is enough, and a program that never uses a GPU never pays for one.
"""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np

from mpimesh.arrays.types import Array, DType

__all__ = ["is_cupy", "moved", "namespace", "to_numpy", "zeros_where_not"]

_BITS: dict[int, DType] = {size: np.dtype(f"i{size}") for size in (1, 2, 4, 8)}


def is_cupy(x: object) -> bool:
    """Tell whether `x` is a CuPy array."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(x, cupy.ndarray)


def namespace(*arrays: object) -> ModuleType:
    """Return the module, `numpy` or `cupy`, whose functions work on all `arrays`."""
    return sys.modules["cupy"] if any(is_cupy(x) for x in arrays) else np


def to_numpy(x: Array) -> Array:
    """Return `x` as a NumPy array; copies from the device where it lives on one."""
    return sys.modules["cupy"].asnumpy(x) if is_cupy(x) else np.asarray(x)


def moved(x: Array, library: ModuleType) -> Array:
    """Return `x` as an array of `library`, `numpy` or `cupy`; itself where it is one."""
    return to_numpy(x) if library is np else library.asarray(x)


def zeros_where_not(mask: Array, x: Array) -> Array:
    """Return `x` where `mask` is True and 0 elsewhere, whatever `x` is there, also NaN.

    Shapes:
        mask, x, result: the same; `mask` is boolean.

    Cost:
        On the host a tenth of what `numpy.where` takes, which does not run in vector registers:
        the bits of `x` and of a mask of ones and zeros.
    """
    bits = _BITS.get(x.dtype.itemsize)
    if bits is None or is_cupy(x):
        return namespace(x).where(mask, x, x.dtype.type(0))
    found: Array = np.negative(mask.view(np.int8), dtype=bits)
    found &= x.view(bits)
    return found.view(x.dtype)
