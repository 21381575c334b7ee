"""TensorFlow's ``tf.experimental.dtensor``: meshes, layouts, arrays, checkpoints, data, heartbeat.

A rank is one client with one device. What moves data needs a live mesh: that of
:func:`create_distributed_mesh`, a :class:`mpimesh.DeviceMesh`, or that of :func:`default_mesh`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn
from weakref import WeakKeyDictionary

import numpy as np

from mpimesh import dtensor, runtime
from mpimesh.arguments import (
    as_flag,
    as_function,
    as_int,
    as_items,
    as_real,
    check_kind,
    digest_text,
    shown,
)
from mpimesh.arrays import HostArray
from mpimesh.compat.tensorflow_layout import (
    MATCH,
    UNSHARDED,
    Layout,
    Mesh,
    as_kind,
    check_spmd,
    create_mesh,
    full_name,
    kind_of,
    shape_for,
)
from mpimesh.compat.tensorflow_training import (
    DTensorCheckpoint,
    DTensorDataset,
    Heartbeat,
    enable_save_as_bf16,
    heartbeat_enabled,
    name_based_restore,
    name_based_save,
    sharded_save,
)
from mpimesh.dtensor import DTensor, default_layout, distribute
from mpimesh.dtensor.defaults import current_mesh
from mpimesh.errors import (
    LayoutError,
    MeshError,
    MismatchError,
    RankError,
    ShapeError,
    on_all_ranks,
)
from mpimesh.layout import Layout as CoreLayout, Placement, PlacementLike, Replicate, Shard
from mpimesh.mesh import DimsLike
from mpimesh.mesh.dims import parse_dims
from mpimesh.runtime.agreement import agree, agree_alike
from mpimesh.runtime.world import current_world

__all__ = [
    "MATCH",
    "UNSHARDED",
    "DTensorCheckpoint",
    "DTensorDataset",
    "DVariable",
    "Heartbeat",
    "Layout",
    "Mesh",
    "barrier",
    "call_with_layout",
    "check_layout",
    "client_id",
    "copy_to_mesh",
    "create_distributed_mesh",
    "create_mesh",
    "create_tpu_mesh",
    "default_mesh",
    "device_name",
    "enable_save_as_bf16",
    "fetch_layout",
    "full_job_name",
    "get_default_mesh",
    "heartbeat_enabled",
    "initialize_accelerator_system",
    "initialize_multi_client",
    "initialize_tpu_system",
    "is_dtensor",
    "job_name",
    "jobs",
    "local_devices",
    "name_based_restore",
    "name_based_save",
    "num_clients",
    "num_global_devices",
    "num_local_devices",
    "pack",
    "preferred_device_type",
    "relayout",
    "relayout_like",
    "run_on",
    "sharded_save",
    "shutdown_accelerator_system",
    "shutdown_tpu_system",
    "to_numpy",
    "unpack",
    "unpacked",
    "unpacked_to_numpy",
]

# -- clients --------------------------------------------------------------------------------------


class _Client(NamedTuple):
    """This process among the others, each of which has one device."""

    number: int
    hosts: tuple[str, ...]
    device_type: str


_CLIENTS: WeakKeyDictionary[Any, _Client] = WeakKeyDictionary()
"""Of each world that is initialized, this process."""


def _client() -> _Client:
    found = _CLIENTS.get(current_world())
    if found is None:
        raise MeshError(
            "the accelerator system is not initialized; call initialize_accelerator_system first"
        )
    return found


def client_id() -> int:
    """Return the number of this client: its rank.

    As all questions about clients, it is local, and raises a MeshError before
    :func:`initialize_accelerator_system`.
    """
    return _client().number


def num_clients() -> int:
    """Return the number of clients: of ranks."""
    return len(_client().hosts)


def jobs() -> list[str]:
    """Return the host of each client."""
    return [*_client().hosts]


def job_name() -> str:
    """Return ``localhost`` for one client, else ``worker``."""
    return "localhost" if num_clients() == 1 else "worker"


def full_job_name(task_id: int | None = None) -> str:
    """Return the name of a client, this one if `task_id` is None.

    Raises:
        RankError: If there is no such client.
    """
    task = client_id() if task_id is None else as_int(task_id, "task_id", RankError)
    if not 0 <= task < num_clients():
        raise RankError(f"task_id {task} is outside of {num_clients()} clients")
    return f"{job_name()}/replica:0/task:{task}"


def preferred_device_type() -> str:
    """Return the type of device that the system was initialized with."""
    return _client().device_type


def local_devices(device_type: str | None = None, for_client_id: int | None = None) -> list[str]:
    """Return the names of a client's devices, of which it has one.

    Args:
        device_type: ``"CPU"`` or ``"GPU"``; the preferred one if None.
        for_client_id: The client; this one if None.

    Raises:
        MeshError: If `device_type` is no type of device, or one that the clients do not have.
        RankError: If there is no such client.
    """
    task = full_job_name(for_client_id).rpartition(":")[2]
    kind = as_kind(device_type, preferred_device_type())
    if kind not in (preferred_device_type(), "CPU"):
        raise MeshError(
            f"device_type {kind} is asked for, but the clients have {preferred_device_type()}; "
            "initialize_accelerator_system says which they have"
        )
    return [full_name(f"{kind}:0", job_name(), int(task))]


def num_local_devices(device_type: str | None = None) -> int:
    """Return the number of this client's devices; see :func:`local_devices`."""
    return len(local_devices(device_type))


def num_global_devices(device_type: str | None = None) -> int:
    """Return the number of devices of all clients; see :func:`local_devices`."""
    return num_local_devices(device_type) * num_clients()


def initialize_accelerator_system(device_type: str | None = None) -> str:
    """Start MPI, find the devices of all ranks, and return the type of device to use. Collective.

    Raises:
        MeshError: On every rank, if it was called before, or not all have such a device.
    """
    world = current_world()
    if world in _CLIENTS:
        raise MeshError("the accelerator system is initialized; shutdown_accelerator_system first")
    with runtime.DeviceMesh("clients=-1") as mesh:
        found = kind_of(mesh)

        def chosen() -> str:
            kind = as_kind(device_type, found)
            if kind not in (found, "CPU"):
                raise MeshError(
                    f"device_type {kind} is asked for, but the ranks have {found}; call "
                    f"initialize_accelerator_system({found!r})"
                )
            return kind

        kind = agree_alike(mesh.group(), "initialize_accelerator_system", chosen)
        _CLIENTS[world] = _Client(mesh.rank, mesh.hosts, kind)
    return kind


def shutdown_accelerator_system() -> None:
    """Undo :func:`initialize_accelerator_system`; MPI goes on. MeshError if it is not. Local."""
    _client()
    del _CLIENTS[current_world()]


# TensorFlow's older names of the two.
initialize_multi_client = initialize_accelerator_system
shutdown_tpu_system = shutdown_accelerator_system


def initialize_tpu_system() -> str:
    """Initialize the accelerator system for TPUs, which no rank has. Collective.

    Raises:
        MeshError: On every rank; call :func:`initialize_accelerator_system`.
    """
    return initialize_accelerator_system("TPU")


def create_distributed_mesh(
    mesh_dims: DimsLike | None = None,
    mesh_name: str = "",
    local_devices: Sequence[str] | None = None,
    device_type: str | None = None,
    use_xla_spmd: bool = False,
) -> Mesh:
    """Return a live mesh of all clients, whose ids and dims all have alike. Collective.

    Close its :attr:`Mesh.live` at the end.

    Args:
        mesh_dims: The dims; one of all clients, ``x``, if None.
        mesh_name: A name.
        local_devices: This client's device, as a list of one; None is the same.
        device_type: The type that the clients have; None is the same.
        use_xla_spmd: Must be False: there is no XLA.

    Raises:
        MeshError: On every rank, if the accelerator system is not initialized, the mesh does not
            have as many places as there are clients, or an argument is wrong.
        MismatchError: On every rank, if the ranks' dims differ, or only some have such an error.

    Cost:
        That of two meshes: all ranks compare their arguments on the first.
    """

    def checked() -> list[tuple[str, int]]:
        kind = preferred_device_type()
        check_spmd(use_xla_spmd)
        if as_kind(device_type, kind) != kind:
            raise MeshError(f"device_type is {device_type}, but the clients have a {kind} each")
        if local_devices is not None:
            devices = as_items(local_devices, "local_devices")
            job, mine = job_name(), client_id()
            if [full_name(one, job, mine) for one in devices] != [
                full_name(f"{kind}:0", job, mine)
            ]:
                raise MeshError(
                    f"local_devices must be None or the one device of this client, ['{kind}:0'], "
                    f"got {shown(local_devices)}"
                )
        dims, clients = parse_dims({"x": -1} if mesh_dims is None else mesh_dims), num_clients()
        what = f"Global number of devices (1 per client * {clients} clients = {clients})"
        shape = shape_for(dims, clients, what)
        return [(dim.name, size) for dim, size in zip(dims, shape, strict=True)]

    with runtime.DeviceMesh("clients=-1") as mesh:
        pairs = agree_alike(mesh.group(), "create_distributed_mesh", checked)
    return Mesh.of(runtime.DeviceMesh(pairs, name=mesh_name))


def create_tpu_mesh(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuse: there are no TPUs here; see :func:`create_distributed_mesh`."""
    raise MeshError("there are no TPUs here: create_distributed_mesh makes a mesh of all ranks")


# -- arrays ---------------------------------------------------------------------------------------


def _live(layout: Any, mesh: Any = None) -> runtime.DeviceMesh:
    """Return the live mesh that is meant."""
    for one in (mesh, getattr(layout, "mesh", None), current_mesh()):
        live: runtime.DeviceMesh | None = _of_live(one)
        if live is not None:
            return live
    raise LayoutError(
        "a layout says on which ranks, and a live mesh moves data between them: give mesh=, or "
        "work within `with default_mesh(mesh):`"
    )


def _checked(layout: object) -> Layout:
    return check_kind(layout, Layout, "layout", LayoutError, wanted="a Layout of this module")


def _of_live(mesh: Any) -> Any:
    return mesh if isinstance(mesh, runtime.DeviceMesh) else getattr(mesh, "live", None)


def _placed(layout: PlacementLike, shape: Sequence[int], source: DTensor | None = None) -> Any:
    """Return placements, for an array of `shape`; "match" as the source has it."""
    if not isinstance(layout, Layout):
        return layout
    layout.local_shape_from_global_shape(shape)
    if source is None or MATCH not in layout.specs:
        return layout.placement
    specs = [spec if isinstance(spec, Shard) else None for spec in source.placement]
    known = {
        n: s for n, s in zip(source.layout.mesh.dim_names, specs, strict=True) if s is not None
    }
    kept = {n: s for n, s in known.items() if layout.specs[s.axis] == MATCH}
    names = layout.mesh.dim_names
    for name, spec in kept.items():
        if name in layout.specs or name not in names:
            raise LayoutError(f"{layout.sharding_specs} cannot match axis {spec.axis} by {name}")
    found = {n: Shard(layout.specs.index(n)) for n in names if n in layout.specs} | kept
    return Placement([found.get(name, Replicate()) for name in names])


def _tensor(x: Any, what: str) -> DTensor:
    x = x.value() if isinstance(x, dtensor.DVariable) else x
    if not isinstance(x, DTensor):
        raise LayoutError(f"{what} takes a DTensor, got {type(x).__name__}, which has no layout")
    return x


def pack(
    tensors: Sequence[Any], layout: Layout, *, mesh: Any = None, check_replicas: bool = False
) -> DTensor:
    """Return the array of which each rank gives its component. Collective; only facts move.

    Args:
        tensors: This rank's component, as a list of one.
        layout: The layout.
        mesh: The live mesh, where `layout` has none.
        check_replicas: Whether copies of one part are compared, by a digest of 64 bits. Without
            it copies that differ stay different.

    Raises:
        ShapeError: On every rank, if a rank does not give one component that fits.
        MismatchError: On every rank, if components differ in shape, dtype or layout, or copies do.
    """
    live = _live(layout, mesh)
    _checked(layout)

    def shape() -> tuple[Any, ...]:
        checks = as_flag(check_replicas, "check_replicas", ShapeError)
        if not isinstance(tensors, list | tuple) or len(tensors) != 1:
            count = len(tensors) if isinstance(tensors, list | tuple) else "no list"
            raise ShapeError(f"expected 1 inputs to DTensorPack, but got {count}: one for a rank")
        block = np.asarray(tensors[0])
        whole = layout.global_shape_from_local_shape(block.shape)
        return whole, block.dtype.name, layout.specs, f"check_replicas={checks}"

    found, *_ = agree_alike(live.group(), "pack", shape)
    block = np.asarray(tensors[0])
    packed = DTensor.from_local(block, live, layout.placement, shape=found)
    if check_replicas:
        digest = digest_text(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data)
        first: dict[Any, tuple[int, str]] = {}
        for place, other in enumerate(agree(live.group(), "pack: its copies", digest)):
            rank = live.group().ranks[place]
            box = packed.layout.box(found, rank)
            before, expected = first.setdefault(box, (rank, other))
            if other != expected:
                index = ", ".join(f"{start}:{stop}" for start, stop in box)
                raise on_all_ranks(
                    MismatchError(
                        f"ranks {before} and {rank} give different components to pack, but as "
                        f"{packed.layout} both have the same part, [{index}]"
                    )
                )
    return packed


def unpack(tensor: DTensor) -> list[Any]:
    """Return the list of this rank's components. Local."""
    return [_tensor(tensor, "unpack").local]


def copy_to_mesh(tensor: Any, layout: PlacementLike, *, mesh: Any = None) -> DTensor:
    """Put an array that every rank has on a mesh; each keeps its shard. Nothing moves."""
    if isinstance(tensor, DTensor):
        return relayout(tensor, layout, mesh=mesh)
    whole = np.asarray(tensor)
    return distribute(whole, _live(layout, mesh), _placed(layout, whole.shape))


def relayout(tensor: DTensor, layout: PlacementLike, *, mesh: Any = None) -> DTensor:
    """Return the same array in another layout; MATCH keeps how an axis is split. Collective."""
    x = _tensor(tensor, "relayout")
    there = _of_live(mesh) or _of_live(getattr(layout, "mesh", None)) or x.mesh
    return x.redistribute(_placed(layout, x.shape, x), mesh=there)


def relayout_like(tensor: DTensor, layout_tensor: DTensor) -> DTensor:
    """Return an array in the layout and on the mesh of another. Collective."""
    other = _tensor(layout_tensor, "relayout_like")
    return _tensor(tensor, "relayout_like").redistribute(other.placement, mesh=other.mesh)


def fetch_layout(tensor: Any) -> Layout:
    """Return the layout of an array; LayoutError if one spec an axis cannot say it. Local."""
    x = _tensor(tensor, "fetch_layout")
    return Layout.of(x.layout, x.ndim, x.mesh)


def check_layout(tensor: DTensor, layout: PlacementLike) -> None:
    """Raise LayoutError, with both layouts, if the array has another one. Local."""
    x = _tensor(tensor, "check_layout")
    expected = CoreLayout(getattr(layout, "mesh", x.layout.mesh), layout)
    if not x.layout.agrees_with(expected):
        raise LayoutError(
            f"Layout of tensor: {x.layout}, did not match expected layout: {expected}"
        )


def is_dtensor(tensor: Any) -> bool:
    """Tell whether it is a split array. Local."""
    return isinstance(tensor, DTensor)


def call_with_layout(
    fn: Callable[..., Any], layout: PlacementLike | None, *args: Any, **kwargs: Any
) -> Any:
    """Call a function, and lay its result out; None leaves it as it is."""
    found = as_function(fn, "fn", LayoutError)(*args, **kwargs)
    return found if layout is None else copy_to_mesh(found, layout)


class DVariable(dtensor.DVariable):
    """A split array that can be assigned anew; see :class:`mpimesh.dtensor.DVariable`.

    Args:
        initial_value: The values: a DTensor, a whole array, or a function that gives one.
        layout: Where they are to be.
        dtype: The dtype; that of the values if None.
        name: A name.
        save_as_bf16: Whether float32 is saved as bfloat16.
        mesh: The live mesh, where `layout` has none.
    """

    __slots__ = ()

    def __init__(
        self,
        initial_value: Any,
        layout: PlacementLike | None = None,
        dtype: Any = None,
        name: str = "",
        save_as_bf16: bool = False,
        *,
        mesh: Any = None,
    ) -> None:
        found = initial_value() if callable(initial_value) else initial_value
        live = None if isinstance(found, DTensor | dtensor.DVariable) else _live(layout, mesh)
        placed = None if layout is None else _placed(layout, np.shape(found))
        super().__init__(
            found, layout=placed, mesh=live, dtype=dtype, name=name, save_as_bf16=save_as_bf16
        )


@contextmanager
def default_mesh(mesh: Any) -> Iterator[Any]:
    """Let layouts without a live mesh mean this one, within the block. Local."""
    live = _of_live(mesh)
    if live is None:
        raise LayoutError(f"the default mesh must be a live one, got {shown(mesh)}")
    with default_layout(live):
        yield mesh


run_on = default_mesh


def get_default_mesh() -> runtime.DeviceMesh | None:
    """Return the mesh of the innermost block around here; None without. Local."""
    return current_mesh()


def device_name(mesh: Any = None) -> str:
    """Return the name of this rank's device. Local."""
    return Mesh.of(_live(None, mesh)).local_devices()[0]


def barrier(mesh: Any, barrier_name: str | None = None, timeout_in_ms: int | None = None) -> None:
    """Wait for what has started, and then for all ranks; a timeout names those that miss."""
    limit_s = None
    if timeout_in_ms is not None:
        limit_s = as_real(timeout_in_ms, "timeout_in_ms", MeshError, least=0) / 1000
    _live(None, mesh).barrier(barrier_name, timeout_s=limit_s)


def to_numpy(tensor: DTensor, *, root: int | None = None) -> Any:
    """Return the whole array on every rank, or on rank `root` only, None elsewhere. Collective."""
    return _tensor(tensor, "to_numpy").full(root=root)


def unpacked(value: Any, layout: Layout) -> list[HostArray]:
    """Return the blocks of a whole array for all devices; TensorFlow's `numpy_util.unpack`. Local.

    ``pack_numpy`` is :func:`copy_to_mesh`.
    """
    whole = np.asarray(value)
    sizes = _checked(layout).local_shape_from_global_shape(whole.shape)
    return [
        whole[tuple(slice(k * n, (k + 1) * n) for k, n in zip(place, sizes, strict=True))]
        for place in layout.offset_to_shard()
    ]


def unpacked_to_numpy(unpacked: Sequence[Any], layout: Layout) -> HostArray:
    """Return the whole array of the blocks of all devices; the inverse of :func:`unpacked`. Local.

    It is TensorFlow's `numpy_util.unpacked_to_numpy`.
    """
    whole: HostArray = np.block(_checked(layout).unravel(unpacked).tolist())
    return whole
