"""NumPy's functions that do not look at elements. Local."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpimesh.arrays import HostArray
from mpimesh.dtensor.arguments import axes_of
from mpimesh.dtensor.registry import implements
from mpimesh.dtensor.tensor import DTensor
from mpimesh.errors import ShapeError, on_all_ranks

__all__ = ["result_type"]


@implements(np.shape, fact=True)
def shape(a: Any) -> tuple[int, ...]:
    """Return the global shape."""
    return tuple(a.shape)


@implements(np.ndim, fact=True)
def ndim(a: Any) -> int:
    """Return the number of axes."""
    return int(a.ndim)


@implements(np.size, fact=True)
def size(a: Any, axis: Any = None) -> int:
    """Return the number of elements, of all or along axes."""
    axes = range(a.ndim) if axis is None else axes_of(axis, a.ndim)
    return int(np.prod([a.shape[one] for one in axes], dtype=int))


@implements(np.result_type, fact=True)
def result_type(*arrays_and_dtypes: Any) -> np.dtype[Any]:
    """Return the dtype that operands are brought to."""
    return np.result_type(*[x.dtype if isinstance(x, DTensor) else x for x in arrays_and_dtypes])


@implements(np.can_cast, fact=True)
def can_cast(from_: Any, to: Any, casting: Any = "safe") -> bool:
    """Tell whether a cast is allowed."""
    kinds = [x.dtype if isinstance(x, DTensor) else x for x in (from_, to)]
    return np.can_cast(kinds[0], kinds[1], casting)


@implements(np.iscomplexobj, fact=True)
def iscomplexobj(x: Any) -> bool:
    """Tell whether elements are complex numbers."""
    return bool(x.dtype.kind == "c")


@implements(np.isrealobj, fact=True)
def isrealobj(x: Any) -> bool:
    """Tell whether elements are no complex numbers."""
    return not iscomplexobj(x)


@implements(np.common_type, fact=True)
def common_type(*arrays: Any) -> Any:
    """Return the inexact type that arrays have together."""
    return np.common_type(*[np.empty(0, x.dtype) for x in arrays])


@implements(np.min_scalar_type, fact=True)
def min_scalar_type(a: Any, /) -> np.dtype[Any]:
    """Return the dtype of an array; of one without axes the smallest for its value. Collective."""
    kind: np.dtype[Any] = a.dtype if a.ndim else np.min_scalar_type(a.full()[()])
    return kind


@implements(np.einsum_path, fact=True)
def einsum_path(subscripts: Any, *operands: Any, **options: Any) -> Any:
    """Return the order in which a contraction takes the fewest steps: a matter of shapes."""
    shapes = [np.broadcast_to(np.zeros((), one.dtype), one.shape) for one in operands]
    return np.einsum_path(subscripts, *shapes, **options)


@implements(np.diag_indices_from, fact=True)
def diag_indices_from(arr: Any) -> tuple[HostArray, ...]:
    """Return the indices of the diagonal, as plain arrays, the same on all ranks."""
    if arr.ndim < 2 or len(set(arr.shape)) > 1:
        raise on_all_ranks(ShapeError(f"a diagonal is of equal axes, got shape {arr.shape}"))
    return np.diag_indices(arr.shape[0], arr.ndim)


@implements(np.tril_indices_from, fact=True)
def tril_indices_from(arr: Any, k: int = 0) -> tuple[HostArray, ...]:
    """Return the indices of the lower triangle, as plain arrays, the same on all ranks."""
    return np.tril_indices(_matrix(arr)[0], k, _matrix(arr)[1])


@implements(np.triu_indices_from, fact=True)
def triu_indices_from(arr: Any, k: int = 0) -> tuple[HostArray, ...]:
    """Return the indices of the upper triangle, as plain arrays, the same on all ranks."""
    return np.triu_indices(_matrix(arr)[0], k, _matrix(arr)[1])


def _matrix(arr: Any) -> tuple[int, int]:
    if arr.ndim != 2:
        raise on_all_ranks(ShapeError(f"a triangle is of a matrix, got shape {arr.shape}"))
    rows, columns = arr.shape
    return rows, columns
