"""The namespace of the Python array API standard, 2023.12, for split arrays.

Most names are NumPy's own. A `device` is a :class:`~mpimesh.DeviceMesh`; creation functions take
`placements`, too, or stand within :func:`~mpimesh.default_layout`. What is not
here is in :data:`MISSING`.

Example:
    >>> xp = x.__array_namespace__()
    >>> y = xp.concat([x, xp.flip(x, axis=0)], axis=0)
"""

from __future__ import annotations

from sys import modules
from typing import Any

import numpy as np

from mpimesh.arrays.namespace import is_cupy
from mpimesh.dtensor import creation
from mpimesh.dtensor.defaults import current_mesh, layout_for
from mpimesh.dtensor.dtensor import DTensor
from mpimesh.dtensor.methods import Methods
from mpimesh.dtensor.reshape import shape_tuple
from mpimesh.errors import LayoutError
from mpimesh.layout import Layout
from mpimesh.runtime.operands import split_array

__array_api_version__ = "2023.12"

_OF_NUMPY = """
abs acos acosh add all any argmax argmin asin asinh atan atan2 atanh bitwise_and bitwise_invert
bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor bool broadcast_arrays broadcast_to
can_cast ceil clip complex64 complex128 concat conj copysign cos cosh cumulative_prod
cumulative_sum diff divide e equal exp expand_dims expm1 flip float32 float64 floor floor_divide
greater greater_equal hypot imag inf int8 int16 int32 int64 isdtype isfinite isinf isnan less
less_equal log log1p log2 log10 logaddexp logical_and logical_not logical_or logical_xor matmul
matrix_transpose max maximum mean min minimum moveaxis multiply nan negative newaxis nonzero
not_equal permute_dims pi positive pow prod real remainder repeat reshape result_type roll round
searchsorted sign signbit sin sinh sqrt square squeeze stack std subtract sum take take_along_axis
tan tanh tensordot tile tril triu trunc uint8 uint16 uint32 uint64 unique_all unique_counts
unique_inverse unique_values unstack var vecdot where
"""
"""Names that are NumPy's own: its functions find the rules of split arrays."""

__all__ = [
    "MISSING",
    "__array_api_version__",
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
    *_OF_NUMPY.split(),
]

MISSING = {
    "linalg": "an extension; numpy.linalg has rules for norms, products, stacks of matrices, and "
    "for qr and svd of a tall split one: use it",
    "fft": "an extension; numpy.fft has rules for split arrays, also along split axes: use it",
    "__dlpack__": "the array is on several ranks; x.local is NumPy's and has it",
    "__dlpack_device__": "the array is on several ranks; x.local is NumPy's and has it",
}
"""Names of the standard that split arrays do not have, with the reason."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"the array namespace has no {name!r}")
    return getattr(np, name)


def __dir__() -> list[str]:
    return __all__


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

    With another dtype or mesh, and always with `placements`, a new one.

    Raises:
        LayoutError: If `copy` is False and a copy is needed.
    """
    if isinstance(obj, DTensor):
        x = obj if dtype is None else obj.astype(dtype, copy=False)
        if device is not None and device is not x.mesh:
            x = x.to_device(device)
        if placements is not None:
            x = x.redistribute(placements)
        if x is not obj and copy is False:
            raise LayoutError(f"{obj!r} cannot become {x!r} without a copy")
        return x.copy() if copy and x is obj else x
    if copy is False:
        raise LayoutError("an array is split without a copy only by DTensor.from_local")
    whole = split_array(obj if is_cupy(obj) else np.asanyarray(obj, dtype))  # which refuses masks
    mesh, where = layout_for(whole.ndim, device, placements)
    return creation.distribute(whole, mesh, where)


def from_dlpack(
    x: Any, /, *, device: Any = None, copy: bool | None = None, placements: Any = None
) -> DTensor:
    """Return an array of another library, which all ranks have alike, as a split one."""
    if isinstance(x, DTensor):
        return asarray(x, device=device, copy=copy, placements=placements)
    return asarray(np.from_dlpack(x), device=device, copy=copy, placements=placements)


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
    mesh, where = layout_for(1, device, placements)
    return creation.arange(start, stop, step, mesh=mesh, placements=where, dtype=dtype)


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
    mesh, where = layout_for(1, device, placements)
    return creation.linspace(
        start, stop, num, mesh=mesh, placements=where, endpoint=endpoint, dtype=dtype
    )


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
    mesh, where = layout_for(2, device, placements)
    kind = float if dtype is None else dtype
    return creation.eye(n_rows, n_cols, mesh=mesh, placements=where, k=k, dtype=kind)


def full(
    shape: Any, fill_value: Any, *, dtype: Any = None, device: Any = None, placements: Any = None
) -> DTensor:
    """Return an array with one value everywhere."""
    mesh, where = layout_for(len(shape_tuple(shape)), device, placements)
    return creation.full(shape_tuple(shape), fill_value, mesh, where, dtype=dtype)


def zeros(shape: Any, *, dtype: Any = None, device: Any = None, placements: Any = None) -> DTensor:
    """Return an array of zeros."""
    kind = float if dtype is None else dtype
    return full(shape, np.zeros((), kind)[()], dtype=kind, device=device, placements=placements)


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


def meshgrid(*arrays: Any, indexing: Any = "xy") -> list[Any]:
    """Return the coordinates that rows of numbers make, one array for each row."""
    return list(np.meshgrid(*arrays, indexing=indexing)) if arrays else []


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


def sort(x: Any, /, *, axis: int = -1, descending: Any = False, stable: Any = True) -> Any:
    """Return the array sorted along an axis. Collective, if the axis is split."""
    found = np.sort(x, axis, stable=stable)
    return np.flip(found, axis) if descending else found


def argsort(x: Any, /, *, axis: int = -1, descending: Any = False, stable: Any = True) -> Any:
    """Return the indices that would sort an axis; of equal elements the first comes first."""
    if not descending:
        return np.argsort(x, axis, stable=stable)
    # Backwards twice: so equal elements keep their order.
    return x.shape[axis] - 1 - np.flip(np.argsort(np.flip(x, axis), axis, stable=True), axis)


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


# The arrays give it out, and it is made of functions of them.
Methods._namespace = modules[__name__]
