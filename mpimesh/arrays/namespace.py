"""Find the library an array belongs to, without importing one that is not in use.

A CuPy array can only exist once somebody imported CuPy, so looking into
`sys.modules` is enough, and a program that never uses a GPU never pays for one.
"""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np

from mpimesh.arrays.types import Array

__all__ = ["is_cupy", "moved", "namespace", "to_numpy"]


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
