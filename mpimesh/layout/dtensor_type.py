"""`DTensorType`: all that is known of a distributed array but its values, as TVM writes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mpimesh.arguments import as_shape
from mpimesh.errors import DTypeError, LayoutError
from mpimesh.layout.layout import Layout
from mpimesh.layout.placement import Placement, PlacementLike, Shard
from mpimesh.mesh import Mesh, MeshLike

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["DTensorType"]

_FIELDS = ("shape", "dtype", "device_mesh", "placement")


@dataclass(frozen=True, slots=True, init=False, repr=False)
class DTensorType:
    """Shape, dtype, mesh and placement of an array, as a value: TVM's ``DTensorStructInfo``.

    Its text is TVM's, which has no place for the names of the mesh's dims; :meth:`as_proto` keeps
    them.

    Args:
        shape: The global shape.
        dtype: A dtype or its name; its byte order must be this machine's.
        mesh: A :class:`~mpimesh.Mesh` or a live :class:`~mpimesh.DeviceMesh`.
        placement: As for a :class:`Layout`.

    Raises:
        LayoutError: If the placement does not have one spec for each mesh dim, splits an axis that
            the shape does not have, or has sizes that do not add up.
        DTypeError: If there is no such dtype.

    Example:
        >>> made = DTensorType((4, 4), "float32", Mesh("a=2,b=2"), "S[0], R")
        >>> print(made)
        R.DTensor((4, 4), "float32", R.device_mesh((2, 2), R.Range(0, 4)), "S[0], R")
        >>> made.local_shape(rank=3)
        (2, 4)

    Attributes:
        shape: The global shape.
        dtype: The name of the dtype.
        layout: The mesh and the placement.
    """

    shape: tuple[int, ...]
    dtype: str
    layout: Layout

    def __init__(
        self,
        shape: Sequence[int],
        dtype: npt.DTypeLike,
        mesh: MeshLike,
        placement: PlacementLike,
    ) -> None:
        layout = Layout(mesh, placement)
        lengths = as_shape(shape, LayoutError)
        for dim, spec in zip(layout.mesh.dims, layout.placement, strict=True):
            if isinstance(spec, Shard) and spec.axis >= len(lengths):
                raise LayoutError(
                    f"Sharding dimension should be smaller than tensor ndim: {spec} along mesh "
                    f"dim {dim}, but shape {lengths} has {len(lengths)} axes"
                )
        layout.tiling(lengths)
        object.__setattr__(self, "shape", lengths)
        object.__setattr__(self, "dtype", _dtype_name(dtype))
        object.__setattr__(self, "layout", layout)

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        return self.layout.mesh

    @property
    def placement(self) -> Placement:
        """One spec for each dim of the mesh."""
        return self.layout.placement

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def is_even(self) -> bool:
        """Whether all ranks have blocks of one shape, which TVM's lowering needs."""
        return all(
            len(np.unique(np.diff(bounds))) <= 1 for bounds in self.layout.tiling(self.shape).bounds
        )

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of the block of `rank`.

        Raises:
            RankError: If `rank` is not in the mesh.
        """
        return self.layout.local_shape(self.shape, rank)

    # -- text ------------------------------------------------------------------------

    def as_proto(self) -> dict[str, Any]:
        """Write the fields as a record of JSON's types, which :meth:`from_proto` reads."""
        record = (list(self.shape), self.dtype, self.mesh.as_proto(), str(self.placement))
        return dict(zip(_FIELDS, record, strict=True))

    @classmethod
    def from_proto(cls, record: Mapping[str, Any]) -> DTensorType:
        """Read the record that :meth:`as_proto` writes.

        Raises:
            LayoutError: If a field is missing, unknown or malformed.
            MeshError: If the record of the mesh is.
        """
        if not isinstance(record, Mapping) or set(record) != set(_FIELDS):
            raise LayoutError(
                f"a DTensorType record has exactly the fields {', '.join(_FIELDS)}, got {record!r}"
            )
        if not isinstance(record["dtype"], str):
            raise LayoutError(
                f"dtype in a DTensorType record must be a name, got {record['dtype']!r}"
            )
        return cls(
            record["shape"],
            record["dtype"],
            Mesh.from_proto(record["device_mesh"]),
            Placement.from_text(record["placement"]),
        )

    def __str__(self) -> str:
        ids = self.mesh.ids.as_range()
        ranks = str(list(self.mesh.ids))
        if ids is not None and ids.step == 1:
            ranks = f"R.Range({ids.start}, {ids.stop})"
        mesh = f"R.device_mesh({tuple(self.mesh.shape())}, {ranks})"
        return f'R.DTensor({self.shape}, "{self.dtype}", {mesh}, "{self.placement}")'

    def __repr__(self) -> str:
        return f"DTensorType({self.shape}, {self.dtype!r}, {self.mesh!r}, {str(self.placement)!r})"


def _dtype_name(dtype: npt.DTypeLike) -> str:
    """Return the name by which NumPy, or ml_dtypes, knows the dtype again."""
    try:
        known = _known_dtype(dtype)
        if known == _known_dtype(known.name) and not known.hasobject:
            return known.name
    except TypeError:
        pass
    raise DTypeError(
        f"a DTensorType needs a dtype of numbers in this machine's byte order, or its name, got "
        f"{dtype!r}"
    )


def _known_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    if dtype is None:
        raise TypeError  # NumPy would take it for float64
    try:
        return np.dtype(dtype)
    except TypeError:
        try:
            import ml_dtypes
        except ImportError:
            raise TypeError from None
        return np.dtype(getattr(ml_dtypes, str(dtype), dtype))
