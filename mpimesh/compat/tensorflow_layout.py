"""TensorFlow DTensor's `Mesh` and `Layout`: values, with their texts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NoReturn

import numpy as np

from mpimesh import mesh as meshes
from mpimesh.arguments import as_flag, as_int, as_items, check_kind, shown
from mpimesh.arrays import HostArray
from mpimesh.errors import LayoutError, MeshError, RankError
from mpimesh.layout import Layout as CoreLayout, Placement, Replicate, Shard
from mpimesh.mesh import DimsLike, MeshDimension
from mpimesh.mesh.dims import parse_dims
from mpimesh.runtime import DeviceMesh

__all__ = ["MATCH", "UNSHARDED", "Layout", "Mesh", "create_mesh", "full_name", "shape_for"]

UNSHARDED = "unsharded"
MATCH = "match"

_DEVICE = re.compile(r"(?:/job:(\w+)/replica:0/task:(\d+)/device:)?(CPU|GPU):(\d+)", re.IGNORECASE)


def full_name(text: str, job: str = "localhost", task: int = 0) -> str:
    """Return the full name of a device that may be written ``CPU:0``."""
    found = _DEVICE.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise MeshError(
            f"a device is written '/job:localhost/replica:0/task:0/device:CPU:0' or 'CPU:0', of "
            f"device_type CPU or GPU; got {shown(text)}"
        )
    place = f"/job:{found[1] or job}/replica:0/task:{found[2] or task}"
    return f"{place}/device:{found[3].upper()}:{found[4]}"


def _type_of(devices: Sequence[str]) -> str:
    types = sorted({device.rsplit(":", 2)[1] for device in devices})
    if len(types) != 1:
        problem = "Mesh has multiple device_types" if types else "device_type is required"
        raise MeshError(f"{problem}: {', '.join(types) or 'no devices are named'}")
    return types[0]


def kind_of(mesh: DeviceMesh) -> str:
    """Return the type of device that all ranks have."""
    return "GPU" if all(one.backend.is_gpu for one in mesh.all_devices()) else "CPU"


def as_kind(device_type: object, default: str) -> str:
    """Return a type of device in capitals; `default` for None."""
    if device_type is None:
        return default
    wanted = "'CPU' or 'GPU'"
    return check_kind(device_type, str, "device_type", MeshError, wanted=wanted).upper()


# -- meshes ---------------------------------------------------------------------------------------


@dataclass(frozen=True, init=False, repr=False)
class Mesh:
    """A mesh with the devices of this client. A value; with a live one it moves data, too.

    Args:
        dim_names: Name of each dim.
        global_device_ids: Ids that increase by one in row-major order, in the shape of the mesh.
        local_device_ids: Those of this client.
        local_devices: A device name for each of them.
        mesh_name: Name of the mesh.
        global_devices: A device name for each id.
        use_xla_spmd: Must be False.

    Raises:
        MeshError: For each rule of TensorFlow's, and for repeated or reserved names, local ids
            that are repeated or not in the mesh, and an uneven number of them. It is a ValueError.

    Attributes:
        mesh: The :class:`mpimesh.Mesh`.
        name: Its name.
        live: The :class:`mpimesh.DeviceMesh` that moves its data, if it has one; not compared.
    """

    mesh: meshes.Mesh
    name: str
    local_ids: tuple[int, ...]
    local_names: tuple[str, ...]
    global_names: tuple[str, ...]
    live: DeviceMesh | None = field(default=None, compare=False)

    def __init__(
        self,
        dim_names: Sequence[str],
        global_device_ids: Any,
        local_device_ids: list[int],
        local_devices: list[str],
        mesh_name: str = "",
        global_devices: Sequence[str] | None = None,
        use_xla_spmd: bool = False,
    ) -> None:
        wanted = "an ndarray"
        check_kind(global_device_ids, np.ndarray, "global_device_ids", MeshError, wanted=wanted)
        ids = global_device_ids.reshape(-1)
        if not ids.size or ids.dtype.kind not in "iu":
            raise MeshError("global_device_ids must be whole numbers, and not be empty")
        dim_names = as_items(dim_names, "dim_names")
        if not np.array_equal(ids, np.arange(ids[0], ids[0] + ids.size)):
            raise MeshError(f"global_device_ids must sequentially increase, got {ids}")
        if len(dim_names) != global_device_ids.ndim:
            raise MeshError(
                f"the number of dim_names, {len(dim_names)}, must be that of the dims of "
                f"global_device_ids, {global_device_ids.ndim}"
            )
        check_kind(local_device_ids, list, "local_device_ids", MeshError, wanted="a list")
        check_kind(local_devices, list, "local_devices", MeshError, wanted="a list")
        if not local_devices and not global_devices:
            raise MeshError("Empty list of devices not allowed")
        check_spmd(use_xla_spmd)
        mesh = meshes.Mesh(list(zip(dim_names, global_device_ids.shape, strict=True)), ids)
        local = [as_int(one, "a local device id") for one in local_device_ids]
        size, first = ids.size, ids[0]
        rows = local_devices, global_devices or ()
        names, everyone = (tuple(map(full_name, row)) for row in rows)
        for row in (names, everyone):
            if len(set(row)) < len(row) and (len(set(row)) > 1 or _type_of(row) != "CPU"):
                raise MeshError(f"Duplicate devices in mesh: {', '.join(row)}")
        if len(local) > size or len(names) not in (0, len(local)) or len(set(local)) < len(local):
            raise MeshError(
                f"{size} devices of a mesh cannot have {len(local)} local device ids {local} and "
                f"{len(names)} local devices"
            )
        if len(everyone) not in (0, size):
            raise MeshError(f"{len(everyone)} global devices in a mesh of {size}")
        if any(not first <= one < first + size for one in local):
            raise MeshError(f"a local device id of {local} is not in mesh {mesh.dims_text or '()'}")
        if local and size % len(local):
            raise MeshError(
                f"Uneven local clusters: {len(local)} local devices do not divide {size} devices"
            )
        _type_of(names + everyone)
        self._fill(mesh, mesh_name, tuple(local), names, everyone, None)

    def _fill(self, mesh: meshes.Mesh, name: str, *more: Any) -> None:
        """Set all fields, in their order."""
        if not isinstance(name, str) or "|" in name:
            raise MeshError(f"a mesh's name must be text without '|', got {shown(name)}")
        for key, one in zip(self.__dataclass_fields__, (mesh, name, *more), strict=True):
            object.__setattr__(self, key, one)

    @classmethod
    def of(cls, mesh: Any) -> Mesh:
        """Return a :class:`mpimesh.Mesh` or a live one as TensorFlow's. Local."""
        if isinstance(mesh, Mesh):
            return mesh
        if not isinstance(mesh, DeviceMesh | meshes.Mesh):
            raise LayoutError(f"mesh is not a valid Mesh object: {shown(mesh)}")
        made = object.__new__(cls)
        if isinstance(mesh, meshes.Mesh):
            made._fill(mesh, "", (), (), (), None)
            return made
        kind, job = kind_of(mesh), "localhost" if mesh.world_size == 1 else "worker"
        names = [full_name(f"{kind}:0", job, rank) for rank in mesh.mesh.ids.tolist()]
        mine = [mesh.offset_of(mesh.rank)] if mesh.contains_rank(mesh.rank) else []
        ids = tuple(int(mesh.mesh.ids.min()) + offset for offset in mine)
        local = tuple(names[offset] for offset in mine)
        made._fill(mesh.mesh, mesh.name, ids, local, tuple(names), mesh)
        return made

    @classmethod
    def from_device(cls, device: str) -> Mesh:
        """Return the mesh without dims that is one device."""
        return cls([], np.array(0), [0], [device])

    # -- dims and places -----------------------------------------------------------

    @property
    def dim_names(self) -> list[str]:
        """Names of the dims, slowest first."""
        return self.mesh.dim_names

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.mesh.size

    @property
    def strides(self) -> list[int]:
        """Steps in offset for one step along each dim."""
        return self.mesh.strides

    def shape(self) -> list[int]:
        """Return the sizes of the dims."""
        return list(self.mesh.shape)

    def dim_size(self, dim_name: str) -> int:
        """Return the size of a dim; the error of an unknown one lists the dims."""
        return self.mesh.dim_size(dim_name)

    def contains_dim(self, dim_name: str) -> bool:
        """Tell whether there is such a dim."""
        return self.mesh.contains_dim(dim_name)

    def __contains__(self, dim_name: str) -> bool:
        return self.contains_dim(dim_name)

    def __getitem__(self, dim_name: str) -> MeshDimension:
        return self.mesh[dim_name]

    def coords(self, device_idx: int) -> HostArray:
        """Return ``(offset // strides) % shape``: an offset outside of the mesh wraps."""
        return np.array(np.unravel_index(int(device_idx) % self.size, self.shape()), np.int64)

    def device_location(self, offset: int) -> HostArray:
        """Return the coordinates of an offset in range; RankError for another."""
        if not 0 <= offset < self.size:
            raise RankError(f"offset {offset} is outside of a mesh of {self.size} devices")
        return self.coords(offset)

    def unravel_index(self) -> dict[int, dict[str, int]]:
        """Return {offset: {dim: coordinate}}."""
        return {
            k: dict(zip(self.dim_names, self.coords(k).tolist(), strict=True))
            for k in range(self.size)
        }

    # -- devices -------------------------------------------------------------------

    def global_device_ids(self) -> HostArray:
        """Return the ids in the shape of the mesh."""
        return self.min_global_device_id() + np.arange(self.size).reshape(self.shape())

    def min_global_device_id(self) -> int:
        """Return the smallest id."""
        return int(self.mesh.ids.min())

    def global_devices(self) -> list[str]:
        """Return the names of all devices, empty where not known."""
        return list(self.global_names)

    def local_device_ids(self) -> list[int]:
        """Return the ids of this client."""
        return list(self.local_ids)

    def local_device_locations(self) -> list[dict[str, int]]:
        """Return {dim: coordinate} of each of them."""
        places, first = self.unravel_index(), self.min_global_device_id()
        return [places[one - first] for one in self.local_ids]

    def local_devices(self) -> list[str]:
        """Return the names of this client's devices."""
        return list(self.local_names)

    def num_local_devices(self) -> int:
        """Return their number."""
        return len(self.local_ids)

    def device_type(self) -> str:
        """Return ``"CPU"`` or ``"GPU"``."""
        return _type_of(self.local_names or self.global_names)

    def is_remote(self) -> bool:
        """Tell whether this client has none of the devices."""
        return not self.local_ids

    def is_single_device(self) -> bool:
        """Tell whether the mesh is one device, without dims."""
        return not self.mesh.dims and len(self.local_names) == 1

    @property
    def single_device(self) -> str:
        """The name of the one device."""
        if not self.is_single_device():
            raise MeshError(f"mesh {self.mesh.dims_text or '()'} is not a single device")
        return self.local_names[0]

    def use_xla_spmd(self) -> bool:
        """Return False: there is no XLA here."""
        return False

    def host_mesh(self) -> Mesh:
        """Return the mesh of the same ids on CPU devices, without a name."""
        if self.device_type() == "CPU":
            return self
        made = object.__new__(Mesh)
        local, everyone = (
            tuple(one.replace("GPU", "CPU") for one in row)
            for row in (self.local_names, self.global_names)
        )
        made._fill(self.mesh, "", self.local_ids, local, everyone, self.live)
        return made

    # -- text ----------------------------------------------------------------------

    def to_string(self) -> str:
        """Write ``name|x=3,y=2|ids|local ids|local devices[|global devices]``."""
        if self.is_single_device() and not self.name:
            return self.single_device
        ids = self.global_device_ids().reshape(-1).tolist()
        rows = [ids, self.local_ids, self.local_names]
        rows += [self.global_names] if self.global_names else []
        return "|".join([self.name, self.mesh.dims_text, *(",".join(map(str, r)) for r in rows)])

    @classmethod
    def from_string(cls, text: str) -> Mesh:
        """Read what :meth:`to_string` writes, or the short ``name|x=2,y=2|*CPU``."""
        parts = text.split("|") if isinstance(text, str) else []
        if len(parts) == 1 and parts[0].startswith("/job:"):
            return cls.from_device(text)
        if len(parts) < 2:
            raise MeshError(f"Input string is invalid: {shown(text)}")
        if len(parts) not in (3, 5, 6, 7):
            raise MeshError(f"Expected either 5, 6, 7 or 3 mesh parts but found {len(parts)}")
        dims = parse_dims(parts[1]) if parts[1] else ()
        names, shape = [dim.name for dim in dims], [dim.size for dim in dims]
        if len(parts) == 3:
            devices = [full_name(f"{parts[2].removeprefix('*')}:{k}") for k in range(prod(shape))]
            ids = np.arange(prod(shape)).reshape(shape)
            return cls(names, ids, ids.reshape(-1).tolist(), devices, parts[0])
        rows = [part.split(",") if part else [] for part in parts[2:6]]
        try:
            everyone, local = ([*map(int, row)] for row in rows[:2])
        except ValueError:
            raise MeshError(f"device ids must be whole numbers, got {parts[2:4]}") from None
        if len(everyone) != prod(shape):
            raise MeshError(f"{len(everyone)} device ids in a mesh of {prod(shape)}")
        ids = np.array(everyone).reshape(shape)
        everywhere = rows[3] if len(rows) == 4 else None
        return cls(names, ids, local, rows[2], parts[0], everywhere, len(parts) == 7)

    as_proto, from_proto = to_string, from_string

    def __reduce__(self) -> tuple[Any, ...]:
        return Mesh.from_string, (self.to_string(),)

    def __repr__(self) -> str:
        return f"<Mesh {self.to_string()}>"


def create_mesh(
    mesh_dims: DimsLike | None = None,
    mesh_name: str = "",
    devices: Sequence[str] | None = None,
    device_type: str | None = None,
    use_xla_spmd: bool = False,
) -> Mesh:
    """Return a mesh of this client's devices; one dim ``x`` over `devices` if `mesh_dims` is None.

    Raises:
        MeshError: If the devices are not as many as the mesh has places, or of another type, or
            `use_xla_spmd` is not False.
    """
    check_spmd(use_xla_spmd)
    dims = parse_dims({"x": -1} if mesh_dims is None else mesh_dims)
    if devices is None and any(dim.size == -1 for dim in dims):
        raise MeshError("a mesh over all devices needs to know them: give devices=")
    kind = as_kind(device_type, "CPU")
    if devices is None:
        devices = [f"{kind}:{k}" for k in range(prod(d.size for d in dims))]
    names = [*map(full_name, as_items(devices, "devices"))]
    if device_type is not None and names and _type_of(names) != kind:
        raise MeshError(f"device_type is {kind}, but the devices are of type {_type_of(names)}")
    shape = shape_for(dims, len(names), f"length of devices ({len(names)})")
    ids = np.arange(len(names)).reshape(shape)
    return Mesh([d.name for d in dims], ids, ids.reshape(-1).tolist(), names, mesh_name)


def check_spmd(use_xla_spmd: object) -> None:
    """Raise MeshError if a mesh is to be XLA's."""
    if as_flag(use_xla_spmd, "use_xla_spmd"):
        raise MeshError("use_xla_spmd must be False: there is no XLA here, the ranks send by MPI")


def shape_for(dims: Sequence[MeshDimension], total: int, what: str) -> list[int]:
    """Return the sizes of dims over `total` devices; MeshError, naming `what`, without such."""
    fixed = prod(dim.size for dim in dims if dim.size != -1)
    shape = [total // fixed if dim.size == -1 and len(dims) == 1 else dim.size for dim in dims]
    if prod(shape) != total or -1 in shape:
        sizes = [dim.size for dim in dims]
        raise MeshError(f"{what} must be equal to total size of the mesh of shape {sizes}")
    return shape


# -- layouts --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Layout:
    """One spec for each array axis; taken wherever mpimesh takes placements.

    Args:
        sharding_specs: For each axis the name of a dim, :data:`UNSHARDED`, or :data:`MATCH` for
            an axis that :func:`relayout` leaves as it is.
        mesh: A mesh of any kind.

    Raises:
        LayoutError: If a spec is none of these, a dim is repeated, or `mesh` is no mesh.
    """

    specs: tuple[str, ...]
    mesh: Mesh

    def __init__(self, sharding_specs: Sequence[str], mesh: Any) -> None:
        object.__setattr__(self, "mesh", Mesh.of(mesh))
        specs = as_items(sharding_specs, "sharding_specs", LayoutError)
        object.__setattr__(self, "specs", specs)
        for axis, spec in enumerate(self.specs):
            if not isinstance(spec, str) or spec not in (UNSHARDED, MATCH, *self.mesh.dim_names):
                raise LayoutError(
                    f"a spec must either be a valid mesh dimension or UNSHARDED, got {shown(spec)} "
                    f"for axis {axis}; the mesh is {self.mesh.mesh.dims_text or '()'}"
                )
            if spec in self.mesh.dim_names and spec in self.specs[:axis]:
                raise LayoutError(f"Mesh dimension {spec} was repeated in {list(self.specs)}")

    @classmethod
    def of(cls, layout: CoreLayout, rank: int, mesh: Any = None) -> Layout:
        """Return a :class:`mpimesh.Layout` of an array of `rank` axes in this spelling.

        Raises:
            LayoutError: If it cannot be said: summands, sizes, or two dims that split one axis.
        """
        check_kind(layout, CoreLayout, "layout", LayoutError, wanted="a mpimesh.Layout")
        specs = [UNSHARDED] * _rank(rank)
        for name, spec in zip(layout.mesh.dim_names, layout.placement, strict=True):
            if isinstance(spec, Replicate):
                continue
            if not isinstance(spec, Shard) or spec.sizes or specs[spec.axis] != UNSHARDED:
                raise LayoutError(f"sharding specs cannot say {layout}")
            specs[spec.axis] = name
        return cls(specs, layout.mesh if mesh is None else mesh)

    @classmethod
    def replicated(cls, mesh: Any, rank: int) -> Layout:
        """Return the layout of `rank` axes of which none is split."""
        return cls([UNSHARDED] * _rank(rank), mesh)

    @classmethod
    def batch_sharded(cls, mesh: Any, batch_dim: str, rank: int, axis: int = 0) -> Layout:
        """Return the layout of `rank` axes of which `axis` is split; LayoutError without one."""
        if not 0 <= as_int(axis, "axis", LayoutError) < _rank(rank):
            raise LayoutError(f"there is no axis {axis} among {rank}")
        return cls([UNSHARDED] * axis + [batch_dim] + [UNSHARDED] * (rank - axis - 1), mesh)

    @classmethod
    def inner_sharded(cls, mesh: Any, inner_dim: str, rank: int) -> Layout:
        """Return the layout of `rank` axes of which the last one is split."""
        return cls.batch_sharded(mesh, inner_dim, rank, max(_rank(rank) - 1, 0))

    @classmethod
    def from_single_device_mesh(cls, mesh: Mesh, rank: int = 0) -> Layout:
        """Return the layout on a mesh of one device; MeshError for another."""
        mesh = Mesh.of(mesh)
        return cls.replicated(mesh if mesh.single_device else None, rank)

    @classmethod
    def from_device(cls, device: str, rank: int = 0) -> Layout:
        """Return the layout on the mesh that is one device."""
        return cls.from_single_device_mesh(Mesh.from_device(device), rank)

    def delete(self, axes: Iterable[int]) -> Layout:
        """Return the layout without `axes`."""
        gone = {*axes}
        return Layout([spec for k, spec in enumerate(self.specs) if k not in gone], self.mesh)

    def to_parted(self) -> NoReturn:
        """Refuse: blocks whose shapes follow from no global shape are no array."""
        raise LayoutError("no array is parted: for uneven blocks use mm.Shard(axis, sizes=...)")

    @property
    def placement(self) -> Placement:
        """One spec for each dim of the mesh; LayoutError if an axis is to match."""
        if MATCH in self.specs:
            raise LayoutError(f"{list(self.specs)} says 'match', which only relayout can")
        names = self.mesh.dim_names
        specs = self.specs
        return Placement([Shard(specs.index(n)) if n in specs else Replicate() for n in names])

    @property
    def sharding_specs(self) -> list[str]:
        """The specs of the axes."""
        return list(self.specs)

    @property
    def rank(self) -> int:
        """The number of axes."""
        return len(self.specs)

    @property
    def shape(self) -> list[int]:
        """The number of shards along each axis."""
        return [self.num_shards(axis) for axis in range(self.rank)]

    @property
    def type(self) -> str:
        """``"STATIC"``, or ``"SINGLE_DEVICE"``."""
        return "SINGLE_DEVICE" if self.is_single_device() else "STATIC"

    def num_shards(self, idx: int) -> int:
        """Return into how many shards an axis is split; -1 for MATCH."""
        if not 0 <= idx < self.rank:
            raise LayoutError(f"there is no axis {idx} among {self.rank}")
        spec = self.specs[idx]
        return {UNSHARDED: 1, MATCH: -1}.get(spec) or self.mesh.dim_size(spec)

    def is_fully_replicated(self) -> bool:
        """Tell whether no axis has several shards."""
        return all(n == 1 for n in self.shape)

    def is_batch_parallel(self) -> bool:
        """Tell whether no axis but the first has."""
        return all(n == 1 for n in self.shape[1:])

    def is_single_device(self) -> bool:
        """Tell whether the mesh is one device."""
        return self.mesh.is_single_device()

    def offset_to_shard(self) -> list[tuple[int, ...]]:
        """Return the index of the shard of each offset of the mesh."""
        places = self.mesh.unravel_index().values()
        return [tuple(at.get(spec, 0) for spec in self.specs) for at in places]

    def offset_tuple_to_global_index(self, offset_tuple: Sequence[int]) -> int:
        """Return the row-major number of a shard; LayoutError without such a one."""
        try:
            return int(np.ravel_multi_index(tuple(offset_tuple), self.shape))
        except ValueError:
            raise LayoutError(f"no shard {tuple(offset_tuple)} among {self.shape}") from None

    def unravel(self, unpacked_tensors: Sequence[Any]) -> HostArray:
        """Arrange a block for each offset as the array of shards."""
        if len(unpacked_tensors) != self.mesh.size:
            raise LayoutError(f"{len(unpacked_tensors)} blocks for {self.mesh.size} devices")
        shards: HostArray = np.empty(self.shape, object)
        for block, place in zip(unpacked_tensors, self.offset_to_shard(), strict=True):
            shards[place] = block
        return shards

    def global_shape_from_local_shape(self, local_shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the array whose blocks have `local_shape`."""
        self._check_rank(local_shape)
        return tuple(n * k for n, k in zip(local_shape, self.shape, strict=True))

    def local_shape_from_global_shape(self, global_shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the blocks; LayoutError if an axis is not divisible."""
        self._check_rank(global_shape)
        for axis, (length, shards) in enumerate(zip(global_shape, self.shape, strict=True)):
            if shards > 0 and length % shards:
                raise LayoutError(
                    f"{list(self.specs)} requires dimension {axis} to be divisible by sharding "
                    f"specified: {length} by {shards}"
                )
        return tuple(n // max(k, 1) for n, k in zip(global_shape, self.shape, strict=True))

    def _check_rank(self, shape: Sequence[int]) -> None:
        if len(shape) != self.rank:
            raise LayoutError(f"a layout of {self.rank} axes, and shape {tuple(shape)}")

    def to_string(self) -> str:
        """Write ``sharding_specs:x,unsharded, mesh:<mesh>``."""
        return f"sharding_specs:{''.join(f'{s},' for s in self.specs)} mesh:{self.mesh.to_string()}"

    @classmethod
    def from_string(cls, text: str) -> Layout:
        """Read what :meth:`to_string` writes."""
        pattern = r"sharding_specs:((?:[^,\s]+,)*) mesh:(.*)"
        found = re.fullmatch(pattern, text) if isinstance(text, str) else None
        if found is None:
            raise LayoutError(
                f"a layout is written 'sharding_specs:x, mesh:<mesh>', got {shown(text)}"
            )
        return cls(found[1].split(",")[:-1], Mesh.from_string(found[2]))

    as_proto, from_proto = to_string, from_string

    def __repr__(self) -> str:
        return f"<Layout {self.to_string()}>"


def _rank(rank: object) -> int:
    return as_int(rank, "rank", LayoutError, least=0)
