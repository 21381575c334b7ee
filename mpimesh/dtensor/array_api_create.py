"""Creation functions of the Python array API standard.

The standard's `device` is a :class:`~mpimesh.DeviceMesh` here. Each function also takes
`placements`; without one or the other, :func:`~mpimesh.default_layout` decides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpimesh.arrays import HostArray
from mpimesh.dtensor import create
from mpimesh.dtensor.arguments import as_tensor, moved_to
from mpimesh.dtensor.defaults import layout_for
from mpimesh.dtensor.shape_axes import expand_dims, swapaxes
from mpimesh.dtensor.shape_reshape import broadcast_to, shape_tuple
from mpimesh.dtensor.tensor import DTensor
from mpimesh.errors import LayoutError, ShapeError
from mpimesh.layout import Layout
from mpimesh.runtime.operands import host_array

__all__ = [
    "arange",
    "asarray",
    "empty",
    "empty_like",
    "eye",
    "from_dlpack",
    "full",
    "full_like",
    "linspace",
    "meshgrid",
    "ones",
    "ones_like",
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
    return create.distribute(whole, mesh, where)


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
    return create.made_of_blocks(shape, mesh, layout, part, dtype)


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
    return create.full(shape_tuple(shape), fill_value, mesh, where, dtype=dtype)


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
    return create.empty(shape_tuple(shape), mesh, where, dtype=kind)


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
    return create.full(x.shape, fill_value, x.mesh, placements, dtype=kind)


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
