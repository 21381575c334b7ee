"""An array that claims to lie on a GPU, for tests on machines without one.

Whatever reads its memory crashes, as MPI does with a device pointer that it was not built
for. So a test with it shows that a program refuses or stages device memory, and never
passes the pointer on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpimesh.arrays import DType

__all__ = ["FakeDeviceArray"]

_NOWHERE = 64
"""An address in the first page of memory, which no process has."""


class FakeDeviceArray:
    """Describes an array by the CUDA array interface, at an address that does not exist.

    Args:
        shape: Its shape.
        dtype: Its dtype.
    """

    def __init__(self, shape: Sequence[int], dtype: Any = float) -> None:
        self.shape = tuple(shape)
        self.dtype: DType = np.dtype(dtype)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Describe the memory, as version 3 of the interface does."""
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (_NOWHERE, False),
            "strides": None,
            "version": 3,
        }

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.dtype.itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Refuse to become a NumPy array, as CuPy's arrays do."""
        raise TypeError("an array on a device does not become a NumPy array by itself")

    def __repr__(self) -> str:
        """Show shape and dtype."""
        return f"FakeDeviceArray({self.shape}, {str(self.dtype)!r})"
