"""Functions of the Python array API standard that NumPy lacks, or has under other terms.

The standard's `device` is a :class:`~mpimesh.DeviceMesh` here. Each creation function also takes
`placements`; without one or the other, :func:`~mpimesh.default_layout` decides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpimesh.arrays import HostArray
from mpimesh.dtensor import creation
from mpimesh.dtensor.defaults import current_mesh, layout_for
from mpimesh.dtensor.dtensor import DTensor
from mpimesh.dtensor.joining import flip
from mpimesh.dtensor.reshape import broadcast_to, expand_dims, shape_tuple, swapaxes
from mpimesh.dtensor.run import as_tensor, moved_to
from mpimesh.dtensor.sorting import argsort as argsort_of, sort as sort_of
from mpimesh.errors import LayoutError, ShapeError
from mpimesh.layout import Layout
from mpimesh.runtime.operands import host_array

__all__ = [
    "__array_namespace_info__",
    "arange",
    "argsort",
    "asarray",
    "astype",
    "empty",
    "empty_like",
    "eye",
    "finfo",
    "from_dlpack",
    "full",
    "full_like",
    "iinfo",
    "linspace",
    "meshgrid",
    "ones",
    "ones_like",
    "sort",
    "zeros",
    "zeros_like",
]


def asarray(
    obj: Any,
    /,
    *,
    dtype: Any = None,
    device: Any = None,
    copy: bool | None = None,
    placements: Any = None,
) -> DTensor:
    """Return a split array: `obj` itself if it is one, else what all ranks have alike.

    Raises:
        LayoutError: If `copy` is False and a copy is needed.
    """
    if isinstance(obj, DTensor):
        x = obj if dtype is None else obj.astype(dtype, copy=False)
        if device is not None and device is not x.mesh:
            x = x.to_device(device)
        if placements is not None:
            x = moved_to(x, Layout(x.mesh, placements).placement)
        if x is not obj and copy is False:
            raise LayoutError(f"{obj!r} cannot become {x!r} without a copy")
        return x.copy() if copy and x is obj else x
    if copy is False:
        raise LayoutError("an array is split without a copy only by DTensor.from_local")
    whole = host_array(np.asanyarray(obj, dtype))  # which refuses masks
    mesh, where = layout_for(whole.ndim, device, placements)
    return creation.distribute(whole, mesh, where)


def from_dlpack(
    x: Any, /, *, device: Any = None, copy: bool | None = None, placements: Any = None
) -> DTensor:
    """Return an array of another library, which all ranks have alike, as a split one."""
    if isinstance(x, DTensor):
        return asarray(x, device=device, copy=copy, placements=placements)
    return asarray(np.from_dlpack(x), device=device, copy=copy, placements=placements)


def _made(
    shape: tuple[int, ...],
    part: Callable[[tuple[slice, ...]], Any],
    dtype: Any,
    device: Any,
    placements: Any,
) -> DTensor:
    """Return the array of which `part` gives any box."""
    mesh, where = layout_for(len(shape), device, placements)
    layout = Layout(mesh, where)
    if layout.partial_op:
        raise LayoutError(f"a new array has values, not summands; got placements {layout.text}")
    return creation.made_of_blocks(shape, mesh, layout, part, dtype)


def arange(
    start: Any,
    /,
    stop: Any = None,
    step: Any = 1,
    *,
    dtype: Any = None,
    device: Any = None,
    placements: Any = None,
) -> DTensor:
    """Return evenly spaced numbers. See :func:`numpy.arange`."""
    ends: Any = (0, start) if stop is None else (start, stop)
    numbers: Any = np.arange
    row: HostArray = numbers(*ends, step, dtype=dtype)
    return _made(row.shape, lambda index: row[index], row.dtype, device, placements)


def linspace(
    start: Any,
    stop: Any,
    /,
    num: int,
    *,
    dtype: Any = None,
    device: Any = None,
    endpoint: bool = True,
    placements: Any = None,
) -> DTensor:
    """Return `num` evenly spaced numbers from `start` to `stop`."""
    row: HostArray = np.linspace(start, stop, num, endpoint=endpoint, dtype=dtype)
    return _made(row.shape, lambda index: row[index], row.dtype, device, placements)


def eye(
    n_rows: int,
    n_cols: int | None = None,
    /,
    *,
    k: int = 0,
    dtype: Any = None,
    device: Any = None,
    placements: Any = None,
) -> DTensor:
    """Return an array with ones on a diagonal."""
    kind = np.dtype(float if dtype is None else dtype)

    def part(index: tuple[slice, ...]) -> HostArray:
        rows, columns = index
        shift = k + rows.start - columns.start
        return np.eye(rows.stop - rows.start, columns.stop - columns.start, shift, kind)

    shape = (n_rows, n_rows if n_cols is None else n_cols)
    return _made(shape, part, kind, device, placements)


def full(
    shape: Any, fill_value: Any, *, dtype: Any = None, device: Any = None, placements: Any = None
) -> DTensor:
    """Return an array with one value everywhere."""
    mesh, where = layout_for(len(shape_tuple(shape)), device, placements)
    return creation.full(shape_tuple(shape), fill_value, mesh, where, dtype=dtype)


def zeros(shape: Any, *, dtype: Any = None, device: Any = None, placements: Any = None) -> DTensor:
    """Return an array of zeros."""
    kind = float if dtype is None else dtype
    return full(shape, 0, dtype=kind, device=device, placements=placements)


def ones(shape: Any, *, dtype: Any = None, device: Any = None, placements: Any = None) -> DTensor:
    """Return an array of ones."""
    kind = float if dtype is None else dtype
    return full(shape, 1, dtype=kind, device=device, placements=placements)


def empty(shape: Any, *, dtype: Any = None, device: Any = None, placements: Any = None) -> DTensor:
    """Return an array whose values are whatever its memory holds."""
    mesh, where = layout_for(len(shape_tuple(shape)), device, placements)
    kind = float if dtype is None else dtype
    return creation.empty(shape_tuple(shape), mesh, where, dtype=kind)


def full_like(
    x: DTensor,
    /,
    fill_value: Any,
    *,
    dtype: Any = None,
    device: Any = None,
    placements: Any = None,
) -> DTensor:
    """Return an array like `x`, in its layout if it waits for no sums, with one value."""
    kind = x.dtype if dtype is None else dtype
    if device not in (None, x.mesh):
        return full(x.shape, fill_value, dtype=kind, device=device, placements=placements)
    if placements is None:
        placements = Layout.replicated(x.mesh).placement if x.layout.partial_op else x.placement
    return creation.full(x.shape, fill_value, x.mesh, placements, dtype=kind)


def zeros_like(
    x: DTensor, /, *, dtype: Any = None, device: Any = None, placements: Any = None
) -> DTensor:
    """Return an array like `x` of zeros."""
    return full_like(x, 0, dtype=dtype, device=device, placements=placements)


def ones_like(
    x: DTensor, /, *, dtype: Any = None, device: Any = None, placements: Any = None
) -> DTensor:
    """Return an array like `x` of ones."""
    return full_like(x, 1, dtype=dtype, device=device, placements=placements)


def empty_like(
    x: DTensor, /, *, dtype: Any = None, device: Any = None, placements: Any = None
) -> DTensor:
    """Return an array like `x` with any values: zeros, as it happens."""
    return zeros_like(x, dtype=dtype, device=device, placements=placements)


def meshgrid(*arrays: Any, indexing: str = "xy") -> list[DTensor]:
    """Return the coordinates that rows of numbers make, one array for each row.

    Collective, if a row that is repeated along other axes is split in a way that they lose.
    """
    if indexing not in ("xy", "ij"):
        raise ShapeError(f"meshgrid has indexing 'xy' and 'ij', got {indexing!r}")
    if not arrays:
        return []
    mesh = next(one.mesh for one in arrays if isinstance(one, DTensor))
    rows = [as_tensor(one, mesh) for one in arrays]
    if any(row.ndim != 1 for row in rows):
        raise ShapeError(f"meshgrid takes rows, got shapes {[row.shape for row in rows]}")
    count = len(rows)
    shape = tuple(row.shape[0] for row in rows)
    found = []
    for axis, row in enumerate(rows):
        others = tuple(one for one in range(count) if one != axis)
        whole = broadcast_to(expand_dims(row, others) if others else row, shape)
        grid = whole.copy()
        found.append(swapaxes(grid, 0, 1) if indexing == "xy" and count > 1 else grid)
    return found


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
