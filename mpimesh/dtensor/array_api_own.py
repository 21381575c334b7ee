"""Names of the Python array API standard that NumPy has otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpimesh.dtensor.defaults import current_mesh
from mpimesh.dtensor.shape_repeat import flip
from mpimesh.dtensor.sorting import argsort as argsort_of
from mpimesh.dtensor.sorting import sort as sort_of
from mpimesh.dtensor.tensor import DTensor

__all__ = ["__array_namespace_info__", "argsort", "astype", "finfo", "iinfo", "sort"]


def astype(x: DTensor, dtype: Any, /, *, copy: Any = True, device: Any = None) -> DTensor:
    """Return the array with elements of another dtype, on another mesh if `device` is one."""
    moved = x if device is None or device is x.mesh else x.to_device(device)
    return moved.astype(dtype, copy=copy and moved is x)


def finfo(type: Any, /) -> Any:  # noqa: A002
    """Return the limits of a dtype of floats, or of an array's."""
    return np.finfo(type.dtype if isinstance(type, DTensor) else type)


def iinfo(type: Any, /) -> Any:  # noqa: A002
    """Return the limits of a dtype of whole numbers, or of an array's."""
    return np.iinfo(type.dtype if isinstance(type, DTensor) else type)


def sort(x: Any, /, *, axis: int = -1, descending: Any = False, stable: Any = True) -> DTensor:
    """Return the array sorted along an axis. Collective, if the axis is split."""
    found = sort_of(x, axis, stable=stable)
    return flip(found, axis) if descending else found


def argsort(x: Any, /, *, axis: int = -1, descending: Any = False, stable: Any = True) -> DTensor:
    """Return the indices that would sort an axis; of equal elements the first comes first."""
    if not descending:
        return argsort_of(x, axis, stable=stable)
    # Backwards twice: so equal elements keep their order.
    found = flip(argsort_of(flip(x, axis), axis, stable=True), axis)
    last = x.shape[axis] - 1
    block = last - found.local if found.is_member else None
    return DTensor(found.mesh, found.layout, found.shape, found.dtype, block)


class __array_namespace_info__:
    """The capabilities of this namespace, in the standard's form."""

    def capabilities(self) -> dict[str, Any]:
        """Return what is supported."""
        found: dict[str, Any] = {
            "boolean indexing": True,
            "data-dependent shapes": True,
            "max dimensions": 64,
        }
        return found

    def default_device(self) -> Any:
        """Return the mesh of the innermost :func:`~mpimesh.default_layout`, or None."""
        return current_mesh()

    def default_dtypes(self, *, device: Any = None) -> dict[str, Any]:
        """Return the dtypes that arrays have whose maker does not say it."""
        return dict(np.__array_namespace_info__().default_dtypes())

    def dtypes(self, *, device: Any = None, kind: Any = None) -> dict[str, Any]:
        """Return the dtypes of a kind, or all."""
        return dict(np.__array_namespace_info__().dtypes(kind=kind))

    def devices(self) -> list[Any]:
        """Return the meshes that are known here: that of :func:`default_device`."""
        mesh = current_mesh()
        return [] if mesh is None else [mesh]
