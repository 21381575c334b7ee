"""What NumPy's functions say of arrays without looking at their elements. Local."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpimesh.dtensor.arguments import axes_of
from mpimesh.dtensor.registry import implements
from mpimesh.dtensor.tensor import DTensor

__all__ = ["result_type"]


@implements(np.shape)
def shape(a: Any) -> tuple[int, ...]:
    """Return the global shape."""
    return tuple(a.shape)


@implements(np.ndim)
def ndim(a: Any) -> int:
    """Return the number of axes."""
    return int(a.ndim)


@implements(np.size)
def size(a: Any, axis: Any = None) -> int:
    """Return the number of elements, of all or along axes."""
    axes = range(a.ndim) if axis is None else axes_of(axis, a.ndim)
    return int(np.prod([a.shape[one] for one in axes], dtype=int))


@implements(np.result_type)
def result_type(*arrays_and_dtypes: Any) -> np.dtype[Any]:
    """Return the dtype that operands are brought to."""
    return np.result_type(*[x.dtype if isinstance(x, DTensor) else x for x in arrays_and_dtypes])


@implements(np.can_cast)
def can_cast(from_: Any, to: Any, casting: Any = "safe") -> bool:
    """Tell whether a cast is allowed."""
    kinds = [x.dtype if isinstance(x, DTensor) else x for x in (from_, to)]
    return np.can_cast(kinds[0], kinds[1], casting)


@implements(np.iscomplexobj)
def iscomplexobj(x: Any) -> bool:
    """Tell whether elements are complex numbers."""
    return bool(x.dtype.kind == "c")


@implements(np.isrealobj)
def isrealobj(x: Any) -> bool:
    """Tell whether elements are no complex numbers."""
    return not iscomplexobj(x)
