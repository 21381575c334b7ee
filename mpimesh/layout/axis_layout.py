"""`AxisLayout`: TensorFlow's `Layout`, which says for each array axis what dim splits it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpimesh.arguments import as_int
from mpimesh.errors import LayoutError
from mpimesh.layout.axis_shards import AxisShards, axis_number
from mpimesh.layout.axis_specs import MATCH, UNSHARDED, as_specs, placement_of_specs
from mpimesh.layout.layout import Layout, as_mesh
from mpimesh.layout.placement import Placement
from mpimesh.mesh import DeviceSpec, Mesh, MeshLike

__all__ = ["AxisLayout"]

_TEXT = re.compile(r"sharding_specs:(?P<specs>(?:[^,\s]+,)*) mesh:(?P<mesh>.*)", re.DOTALL)
_FIELDS = ("sharding_specs", "mesh_config", "type")


@dataclass(frozen=True, slots=True, init=False, repr=False)
class AxisLayout(AxisShards):
    """TensorFlow's layout: one spec for each array axis, in its names and with its text.

    It says less than :class:`Layout`: each dim splits one axis at most, each axis is split by one
    dim at most, into equal blocks, and nothing waits for a reduction. :attr:`layout` is the same
    as a :class:`Layout`, which is what arrays are made with. `rank` is the number of axes here.
    What can be asked of it, :class:`AxisShards` holds.

    Args:
        sharding_specs: For each axis the name of a dim, ``"unsharded"``, or ``"match"`` for an
            axis that is to stay split as it is, see :meth:`matching`.
        mesh: A :class:`~mpimesh.Mesh` or a live :class:`~mpimesh.DeviceMesh`.

    Raises:
        LayoutError: If a spec is none of these, a dim is repeated, or `mesh` is no mesh.

    Example:
        >>> layout = AxisLayout(["x", UNSHARDED], Mesh("x=3,y=2"))
        >>> layout.shape, layout.local_shape_from_global_shape([6, 4])
        ([3, 1], (2, 4))
        >>> layout.layout
        Layout(Mesh('x=3,y=2'), 'x=S0, y=R')

    Attributes:
        specs: The specs, as a tuple.
        mesh: The mesh, as a value.
    """

    specs: tuple[str, ...]
    mesh: Mesh

    def __init__(self, sharding_specs: Sequence[str], mesh: MeshLike) -> None:
        value = as_mesh(mesh)
        object.__setattr__(self, "mesh", value)
        object.__setattr__(self, "specs", as_specs(sharding_specs, value))

    # -- other ways to make one ------------------------------------------------------

    @classmethod
    def replicated(cls, mesh: MeshLike, rank: int) -> AxisLayout:
        """Return the layout of `rank` axes of which none is split."""
        return cls([UNSHARDED] * as_int(rank, "the number of axes", LayoutError, least=0), mesh)

    @classmethod
    def batch_sharded(cls, mesh: MeshLike, batch_dim: str, rank: int, axis: int = 0) -> AxisLayout:
        """Return the layout of `rank` axes of which `axis` is split by `batch_dim`.

        Raises:
            LayoutError: If there is no such axis or dim; so always for a `rank` of 0.
        """
        specs = [UNSHARDED] * as_int(rank, "the number of axes", LayoutError, least=0)
        specs[axis_number(axis, len(specs))] = batch_dim
        return cls(specs, mesh)

    @classmethod
    def inner_sharded(cls, mesh: MeshLike, inner_dim: str, rank: int) -> AxisLayout:
        """Return the layout of `rank` axes of which the last one is split by `inner_dim`.

        Raises:
            LayoutError: If there is no such dim, or `rank` is 0.
        """
        last = max(as_int(rank, "the number of axes", LayoutError, least=0) - 1, 0)
        return cls.batch_sharded(mesh, inner_dim, rank, last)

    @classmethod
    def from_device(cls, device: str | DeviceSpec, rank: int = 0) -> AxisLayout:
        """Return the layout of `rank` axes on the mesh that is one device."""
        return cls.from_single_device_mesh(Mesh.from_device(device), rank)

    @classmethod
    def from_single_device_mesh(cls, mesh: MeshLike, rank: int = 0) -> AxisLayout:
        """Return the layout of `rank` axes on such a mesh.

        Raises:
            LayoutError: If `mesh` is not a single device.
        """
        value = as_mesh(mesh)
        if not value.is_single_device():
            raise LayoutError(f"mesh {value.dims_text or '()'} is not a single device")
        return cls.replicated(value, rank)

    @classmethod
    def of(cls, layout: Layout, rank: int) -> AxisLayout:
        """Return `layout`, for an array of `rank` axes, in this spelling.

        Raises:
            LayoutError: If it cannot be said; see :meth:`Layout.sharding_specs`.
        """
        return cls(layout.sharding_specs(rank), layout.mesh)

    def delete(self, axes: Sequence[int]) -> AxisLayout:
        """Return the layout without `axes`.

        Raises:
            LayoutError: If there is no such axis.
        """
        gone = {axis_number(axis, self.rank) for axis in axes}
        return AxisLayout([s for k, s in enumerate(self.specs) if k not in gone], self.mesh)

    def matching(self, other: AxisLayout | Layout) -> AxisLayout:
        """Return the layout with each ``"match"`` replaced by how `other` splits that axis.

        Raises:
            LayoutError: If `other` has another number of axes, or splits an axis that is to match
                by a dim that this mesh does not have or that splits another axis here.
        """
        if MATCH not in self.specs:
            return self
        theirs = AxisLayout.of(other, self.rank) if isinstance(other, Layout) else other
        if theirs.rank != self.rank:
            raise LayoutError(
                f"{self.sharding_specs} matches only layouts of {self.rank} axes, got "
                f"{theirs.sharding_specs}"
            )
        pairs = zip(self.specs, theirs._known(), strict=True)
        specs = [there if here == MATCH else here for here, there in pairs]
        try:
            return AxisLayout(specs, self.mesh)
        except LayoutError as error:
            raise LayoutError(
                f"{self.sharding_specs} cannot match {theirs.sharding_specs}: {error}"
            ) from None

    def to_parted(self) -> AxisLayout:
        """Refuse: a parted layout gives each device a block of any shape, and no array has it.

        Raises:
            LayoutError: Always.
        """
        raise LayoutError(
            f"{self!r} cannot be made parted: blocks whose shapes follow from no global shape are "
            "no array; for uneven blocks use Shard(axis, sizes=...) in a Layout"
        )

    # -- what it says ----------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        """The same as a :class:`Layout`: for each dim the axis that it splits.

        Raises:
            LayoutError: If an axis is ``"match"``.
        """
        return Layout(self.mesh, self.placement)

    @property
    def placement(self) -> Placement:
        """One spec for each dim of the mesh, as :attr:`layout` has it; errors as there."""
        return placement_of_specs(self.specs, self.mesh)

    # -- text ------------------------------------------------------------------------

    def to_string(self) -> str:
        """Write TensorFlow's text, ``sharding_specs:x,unsharded, mesh:<text of the mesh>``."""
        return f"sharding_specs:{''.join(f'{s},' for s in self.specs)} mesh:{self.mesh.to_string()}"

    @classmethod
    def from_string(cls, text: str) -> AxisLayout:
        """Read the text of :meth:`to_string`.

        Raises:
            LayoutError: If it is malformed, or the specs do not fit the mesh.
            MeshError: If the text of the mesh is malformed.
        """
        found = _TEXT.fullmatch(text) if isinstance(text, str) else None
        if found is None:
            raise LayoutError(
                f"a layout is written 'sharding_specs:x,unsharded, mesh:<mesh>', got {text!r}"
            )
        return cls(found["specs"].split(",")[:-1], Mesh.from_string(found["mesh"]))

    def as_proto(self) -> dict[str, Any]:
        """Write the fields as a record of JSON's types, which :meth:`from_proto` reads."""
        specs = [{"sharding_spec": spec} for spec in self.specs]
        record = (specs, self.mesh.as_proto(), self.type)
        return dict(zip(_FIELDS, record, strict=True))

    @classmethod
    def from_proto(cls, record: Mapping[str, Any]) -> AxisLayout:
        """Read the record that :meth:`as_proto` writes.

        Raises:
            LayoutError: If a field is missing, unknown or malformed.
            MeshError: If the record of the mesh is.
        """
        if not isinstance(record, Mapping) or set(record) != set(_FIELDS):
            raise LayoutError(
                f"a layout record has exactly the fields {', '.join(_FIELDS)}, got {record!r}"
            )
        rows = record["sharding_specs"]
        known = isinstance(rows, list) and all(
            isinstance(row, Mapping) and set(row) == {"sharding_spec"} for row in rows
        )
        if not known:
            raise LayoutError(
                f"sharding_specs in a layout record must be a list of {{'sharding_spec': ...}}, "
                f"got {rows!r}"
            )
        layout = cls([row["sharding_spec"] for row in rows], Mesh.from_proto(record["mesh_config"]))
        if record["type"] != layout.type:
            raise LayoutError(
                f"type in a layout record must be {layout.type} on this mesh, got "
                f"{record['type']!r}"
            )
        return layout

    def __repr__(self) -> str:
        return f"AxisLayout({self.sharding_specs}, {self.mesh!r})"
