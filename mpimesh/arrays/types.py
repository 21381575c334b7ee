"""Array types shared by all rooms: NumPy and CuPy arrays are told apart at run time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

__all__ = ["Array", "DType", "HostArray"]

if TYPE_CHECKING:
    import numpy.typing as npt

    HostArray: TypeAlias = npt.NDArray[Any]
    """A NumPy array of any dtype."""
else:
    # Importing `numpy.typing` would take a third of the time that importing NumPy does.
    HostArray = np.ndarray

Array: TypeAlias = Any
"""A NumPy or CuPy array. CuPy has no types to name, so this is `Any` to a type checker."""

DType: TypeAlias = np.dtype[Any]
