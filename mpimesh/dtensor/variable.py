"""`DVariable`: a split array that can be changed, in one layout for its life."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from mpimesh.arrays import Array, DType
from mpimesh.arrays.dtypes import as_dtype
from mpimesh.dtensor.consistency import compare_call, numbered
from mpimesh.dtensor.creation import distribute
from mpimesh.dtensor.defaults import as_live, current_mesh
from mpimesh.dtensor.dispatch import StandIn
from mpimesh.dtensor.dtensor import DTensor
from mpimesh.dtensor.run import moved_to
from mpimesh.errors import DTypeError, LayoutError, MissingPackageError, ShapeError
from mpimesh.layout import Layout, PlacementLike
from mpimesh.runtime import DeviceMesh

__all__ = ["DVariable"]


class DVariable(StandIn, NDArrayOperatorsMixin):
    """A split array whose values can be assigned anew; shape, dtype and layout stay.

    NumPy's functions and operators take it as they take the array in it, and all ranks of the mesh
    call them alike. What :meth:`value` has returned stays as it is when the variable is assigned.

    Args:
        initial_value: A :class:`DTensor`; the whole array, the same on every rank, with a `layout`;
            or a function without arguments that gives one of these.
        layout: Where the values are to be, as a :class:`Layout` or
            placements. A DTensor must be there already.
        mesh: The live mesh for a whole array; the default one if None.
        dtype: The dtype; that of the values if None. A DTensor must have it already.
        name: A name, for messages and files.
        save_as_bf16: Whether :meth:`value_to_save` rounds float32 to bfloat16.

    Raises:
        LayoutError: If a DTensor lies otherwise than `layout` says (both are named), has summands
            (`Partial`), or a whole array has no layout.
        DTypeError: If a DTensor is of another dtype, or `save_as_bf16` is set for one that is not
            float32.
        MissingPackageError: If `save_as_bf16` is set where the package ml_dtypes is not installed.

    Example:
        >>> with mm.DeviceMesh("x=-1") as mesh:
        ...     v = mm.dtensor.DVariable(np.zeros(4), layout="x=S0", mesh=mesh, name="v")
        ...     v.assign_add(mm.arange(4.0, mesh=mesh, placements="x=R"))
        ...     print(v.value().full())
        DVariable('v', shape=(4,), dtype=float64, x=S0 on x=1)
        [0. 1. 2. 3.]

    Attributes:
        name: The name.
    """

    __slots__ = ("__weakref__", "_save_as_bf16", "_value", "name")

    def __init__(
        self,
        initial_value: Any,
        *,
        layout: PlacementLike | None = None,
        mesh: DeviceMesh | None = None,
        dtype: Any = None,
        name: str = "",
        save_as_bf16: bool = False,
    ) -> None:
        kind = None if dtype is None else as_dtype(dtype)
        found = initial_value() if callable(initial_value) else initial_value
        if isinstance(found, DVariable):
            found = found.value()
        if isinstance(found, DTensor):
            value = _checked(found, layout, kind).copy()
        elif layout is None:
            raise LayoutError(
                f"a DVariable of {type(found).__name__} needs a layout=, or a DTensor in its place"
            )
        else:
            live = as_live(current_mesh() if mesh is None else mesh)
            value = distribute(np.asanyarray(found, kind), live, layout)
        if value.layout.partial_op:
            raise LayoutError(
                f"a DVariable holds values, not summands that are to be reduced; got {value!r}"
            )
        self.name = name
        self._value: DTensor = value
        self.save_as_bf16 = save_as_bf16

    # -- facts: local ------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        """The layout of the values on the mesh, always."""
        return self._value.layout

    @property
    def mesh(self) -> DeviceMesh:
        """The live mesh."""
        return self._value.mesh

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return self._value.shape

    @property
    def dtype(self) -> DType:
        """The dtype."""
        return self._value.dtype

    @property
    def ndim(self) -> int:
        """Number of array axes."""
        return self._value.ndim

    @property
    def save_as_bf16(self) -> bool:
        """Whether :meth:`value_to_save` rounds float32 to bfloat16, half of the bytes.

        Raises:
            DTypeError: If it is set for a variable that is not float32.
            MissingPackageError: If it is set where the package ml_dtypes is not installed.
        """
        return self._save_as_bf16

    @save_as_bf16.setter
    def save_as_bf16(self, wanted: bool) -> None:
        if wanted and self.dtype != np.float32:
            raise DTypeError(f"only float32 is saved as bfloat16, and {self!r} is {self.dtype}")
        if wanted and find_spec("ml_dtypes") is None:
            raise MissingPackageError(
                "save_as_bf16=True needs the package ml_dtypes, which has bfloat16 for NumPy: "
                "pip install ml_dtypes, or leave it out"
            )
        self._save_as_bf16 = bool(wanted)

    def value(self) -> DTensor:
        """Return the values of now, without a copy. Later assignments leave them as they are."""
        return self._value

    def value_to_save(self) -> DTensor:
        """Return the values as files are to have them: as bfloat16 if so said. Local."""
        if not self.save_as_bf16:
            return self._value
        import ml_dtypes

        return self._value.astype(ml_dtypes.bfloat16)

    def __repr__(self) -> str:
        """Show name, shape, dtype and layout. Local."""
        return f"DVariable({self.name!r}, shape={self.shape}, dtype={self.dtype}, {self.layout})"

    # -- changing: collective where values have to be moved ------------------------------

    def assign(self, value: Any) -> DVariable:
        """Take over the values of an array, in this variable's layout.

        Collective, unless the array has that layout already.

        Args:
            value: A :class:`DTensor` or another variable, in any layout, on this mesh; or a
                number, for a variable without axes.

        Returns:
            This variable.

        Raises:
            LayoutError: If `value` is NumPy's own array: it could be the whole or a block. Also if
                it is on another mesh.
            ShapeError: If it has another shape.
            DTypeError: If it is of another dtype.
        """
        self._value = self._given(value, "assign").redistribute(self.layout)
        return self

    def assign_add(self, delta: Any) -> DVariable:
        """Add an array. Errors and costs as of :meth:`assign`; summands (`Partial`) are reduced."""
        return self._update(np.add, delta, "assign_add")

    def assign_sub(self, delta: Any) -> DVariable:
        """Subtract an array. Errors and costs as of :meth:`assign_add`."""
        return self._update(np.subtract, delta, "assign_sub")

    def _update(self, ufunc: np.ufunc, delta: Any, what: str) -> DVariable:
        given, now, block = self._given(delta, what), self._value, None
        number = compare_call(now.mesh, what, (now, given))
        moved = moved_to(given, self.layout.placement)
        if now.is_member:
            block = now.mesh.shared_empty(now.local.shape, now.dtype)
            ufunc(now.local, moved.local, out=block)
        made = DTensor(now.mesh, now.layout, now.shape, now.dtype, block)
        self._value = numbered(made, number)
        return self

    def _given(self, value: Any, what: str) -> DTensor:
        given: Any = value.value() if isinstance(value, DVariable) else value
        if not isinstance(given, DTensor):
            if np.shape(given) != self.shape:
                raise ShapeError(f"{what}: {self!r} takes that shape only, got {np.shape(given)}")
            if self.ndim:
                raise LayoutError(
                    f"{what}: {self!r} takes a DTensor, got {type(given).__name__}, which is on no "
                    "mesh; make one with distribute"
                )
            return distribute(np.asanyarray(given, self.dtype), self.mesh, self.layout)
        if given.shape != self.shape:
            raise ShapeError(f"{what}: {self!r} takes that shape only, got {given!r}")
        if given.dtype != self.dtype:
            raise DTypeError(f"{what}: {self!r} takes that dtype only, got {given!r}")
        if given.mesh is not self.mesh:
            raise LayoutError(
                f"{what}: {self!r} is on another mesh than {given!r}; bring it over with "
                "redistribute(placements, mesh=variable.mesh)"
            )
        return given

    # -- NumPy: as the array in it -----------------------------------------------------

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *args: Any, **kwargs: Any) -> Any:
        """Do a ufunc on the values; what is to be written into a variable is assigned."""
        out = kwargs.get("out", ())
        do = getattr(ufunc, method)
        if not any(isinstance(one, DVariable) for one in out):
            return do(*_values(args), **_values(kwargs))
        if len(out) != 1:
            raise LayoutError(f"{ufunc.__name__} cannot write into several arrays if one is {out}")
        rest = {key: one for key, one in kwargs.items() if key != "out"}
        return out[0].assign(_as_dtype(do(*_values(args), **_values(rest)), out[0].dtype))

    def __array_function__(
        self, function: Any, types: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Do a function of NumPy on the values."""
        return function(*_values(args), **_values(kwargs))

    def __getattr__(self, name: str) -> Any:
        """Return what the values have and a variable does not, as `local`, `sum` or `T`."""
        if name.startswith("_"):
            raise AttributeError(f"a DVariable has no {name}")
        return getattr(self._value, name)

    def __getitem__(self, key: Any) -> Any:
        return self._value[key]

    def __len__(self) -> int:
        return len(self._value)

    def __bool__(self) -> bool:
        return bool(self._value)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._value)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Refuse, as the values do."""
        return self._value.__array__(dtype, copy)


def _checked(value: DTensor, layout: PlacementLike | None, dtype: DType | None) -> DTensor:
    """Return `value` if it is as the layout and the dtype say."""
    if dtype is not None and dtype != value.dtype:
        raise DTypeError(f"a DVariable of dtype {dtype} cannot begin with {value!r}")
    if layout is not None and not value.layout.agrees_with(Layout(value.mesh, layout)):
        raise LayoutError(
            f"the layout of a DVariable conflicts with that of its initial value: {value!r} is not "
            f"{Layout(value.mesh, layout)}; redistribute it, or leave layout= out"
        )
    return value


def _as_dtype(value: Any, dtype: DType) -> Any:
    """Return what NumPy would write into an array of `dtype`: it lets numbers lose bits only."""
    if not isinstance(value, DTensor) or value.dtype == dtype:
        return value
    if not np.can_cast(value.dtype, dtype, "same_kind"):
        raise DTypeError(f"{value!r} cannot be written into a DVariable of {dtype}")
    return value.astype(dtype)


def _values(tree: Any) -> Any:
    """Return arguments with the values in place of variables."""
    if isinstance(tree, DVariable):
        return tree.value()
    if isinstance(tree, tuple | list) and not hasattr(tree, "_fields"):
        return type(tree)(_values(one) for one in tree)
    if isinstance(tree, dict):
        return {key: _values(one) for key, one in tree.items()}
    return tree
