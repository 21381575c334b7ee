"""Ways to make a `Mesh` in the words of TensorFlow DTensor and TVM."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from mpimesh.arguments import as_int, as_items
from mpimesh.errors import MeshError, RankError, WorldSizeError
from mpimesh.mesh.dims import MAX_RANKS, DimsLike, MeshDimension, advice, parse_dims
from mpimesh.mesh.mesh import Mesh, check_even
from mpimesh.mesh.spec import DeviceSpec, check_device_type, common_type, job_name

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["create_distributed_mesh", "create_mesh", "device_mesh", "mesh_from_device_ids"]

DEFAULT_DIM = "x"


def device_mesh(shape: Sequence[int], device_ids: Sequence[int] | npt.NDArray[np.integer]) -> Mesh:
    """Make a mesh in TVM's form; the same as :meth:`Mesh.from_ids`."""
    return Mesh.from_ids(shape, device_ids)


def create_mesh(
    mesh_dims: DimsLike | None = None,
    *,
    mesh_name: str = "",
    devices: Sequence[str | DeviceSpec] | None = None,
    device_type: str | None = None,
    num_devices: int | None = None,
) -> Mesh:
    """Make a mesh whose devices all belong to this process.

    Args:
        mesh_dims: As for :class:`Mesh`; one dim ``x`` over all devices if None.
            One size may be -1 where `devices` or `num_devices` are given.
        mesh_name: Name of the mesh.
        devices: The devices to use, in mesh order.
        device_type: ``"CPU"`` or ``"GPU"``; must be the type of `devices`. CPU if None.
        num_devices: Instead of `devices`: devices 0 to `num_devices` - 1 of `device_type`.
            If both are None, as many as the mesh has places.

    Raises:
        MeshError: If the number of devices is not known, or types differ.
        WorldSizeError: If the mesh has not as many places as there are devices.
    """
    kind = None if device_type is None else check_device_type(device_type)
    if devices is not None:
        specs = _specs(devices, kind, "localhost", 0)
        if num_devices is not None and as_int(num_devices, "num_devices") != len(specs):
            raise MeshError(f"num_devices is {num_devices}, but {len(specs)} devices are named")
    else:
        count = _count(mesh_dims, num_devices)
        specs = [DeviceSpec(device_type=kind or "CPU", index=k) for k in range(count)]
    if not specs:
        raise MeshError("Empty list of devices not allowed")
    dims = _fitted(mesh_dims, len(specs), f"length of devices ({len(specs)})")
    return Mesh(dims, name=mesh_name, local_ids=range(len(specs)), local_devices=specs)


def create_distributed_mesh(
    mesh_dims: DimsLike | None = None,
    *,
    client_id: int,
    num_clients: int,
    local_devices: Sequence[str | DeviceSpec] | None = None,
    num_local_devices: int = 1,
    device_type: str | None = None,
    mesh_name: str = "",
) -> Mesh:
    """Make a mesh over the devices of several processes, as process `client_id` sees it.

    Every process has the same number n of devices; process c owns the ids
    ``c * n .. (c + 1) * n - 1``. Pure: the caller knows its place among the others.

    Args:
        mesh_dims: As for :class:`Mesh`; one dim ``x`` over all devices if None.
            One size may be -1.
        client_id: This process, ``0 <= client_id < num_clients``: its rank.
        num_clients: Number of processes.
        local_devices: This process's devices. A name without job and task is taken to
            be of this process.
        num_local_devices: Instead of `local_devices`: their number.
        device_type: ``"CPU"`` or ``"GPU"``; must be the type of `local_devices`.
        mesh_name: Name of the mesh.

    Raises:
        MeshError: If a value breaks a rule.
        RankError: If `client_id` is out of range.
        WorldSizeError: If the mesh has not as many places as there are devices.
    """
    if as_int(num_clients, "num_clients") < 1:
        raise MeshError(f"num_clients must be at least 1, got {num_clients}")
    if not 0 <= as_int(client_id, "client_id") < num_clients:
        raise RankError(f"client_id {client_id} is outside of {num_clients} clients")
    kind = None if device_type is None else check_device_type(device_type)
    job = job_name(num_clients)
    if local_devices is None:
        local_devices = [
            f"{kind or 'CPU'}:{k}" for k in range(_number(num_local_devices, "num_local_devices"))
        ]
    specs = _specs(local_devices, kind, job, client_id)
    count = len(specs)
    if not count:
        raise MeshError("Empty list of devices not allowed")
    total = count * num_clients
    what = f"Global number of devices ({count} per client * {num_clients} clients = {total})"
    return Mesh(
        _fitted(mesh_dims, total, what),
        name=mesh_name,
        local_ids=range(client_id * count, (client_id + 1) * count),
        local_devices=specs,
    )


def mesh_from_device_ids(
    dim_names: Sequence[str],
    global_device_ids: npt.NDArray[np.integer],
    local_device_ids: list[int],
    local_devices: list[str],
    mesh_name: str = "",
    global_devices: list[str] | None = None,
    *,
    use_xla_spmd: bool = False,
) -> Mesh:
    """Make a mesh as TensorFlow's constructor does, with its checks.

    Args:
        dim_names: Name of each dim.
        global_device_ids: Ids that increase by one in row-major order; the array's
            shape is the mesh's shape.
        local_device_ids: Those of them that this process owns.
        local_devices: A device name for each.
        mesh_name: Name of the mesh.
        global_devices: A device name for each id.
        use_xla_spmd: Must be False.

    Raises:
        MeshError: For each rule of TensorFlow's, and for repeated or reserved names,
            local ids that are repeated or not in the mesh, and a number of local ids
            that does not divide the number of devices.
    """
    if not isinstance(global_device_ids, np.ndarray):
        raise MeshError(f"global_device_ids must be an ndarray, got {type(global_device_ids)}")
    flat = global_device_ids.reshape(-1)
    if flat.size == 0:
        raise MeshError("global_device_ids must not be empty")
    if not np.array_equal(flat, np.arange(flat[0], flat[0] + flat.size)):
        raise MeshError(f"global_device_ids must sequentially increase, got {flat}")
    if len(dim_names) != global_device_ids.ndim:
        raise MeshError(
            f"the number of dim_names, {len(dim_names)}, must be the number of dims of "
            f"global_device_ids, {global_device_ids.ndim}"
        )
    for option, value in (("local_device_ids", local_device_ids), ("local_devices", local_devices)):
        if not isinstance(value, list):
            raise MeshError(f"{option} must be a list, got {type(value).__name__}")
    if not local_devices and not global_devices:
        raise MeshError("Empty list of devices not allowed")
    if len(local_device_ids) > flat.size:
        raise MeshError(f"{len(local_device_ids)} local devices in a mesh of {flat.size}")
    if use_xla_spmd:
        raise MeshError("use_xla_spmd is not supported: mpimesh has no XLA")
    check_even(flat.size, len(local_device_ids))
    return Mesh(
        list(zip(dim_names, global_device_ids.shape, strict=True)),
        global_device_ids,
        name=mesh_name,
        local_ids=local_device_ids,
        local_devices=local_devices,
        global_devices=global_devices or (),
    )


def _specs(
    devices: Sequence[str | DeviceSpec], kind: str | None, job: str, task: int
) -> list[DeviceSpec]:
    specs = [
        device if isinstance(device, DeviceSpec) else DeviceSpec.parse(device, job=job, task=task)
        for device in as_items(devices, "devices")
    ]
    found = common_type([str(spec) for spec in specs])
    if kind is not None and found not in (kind, None):
        raise MeshError(f"device_type is {kind}, but the devices are of type {found}")
    return specs


def _count(mesh_dims: DimsLike | None, num_devices: int | None) -> int:
    if num_devices is not None:
        return _number(num_devices, "num_devices")
    sizes = [] if mesh_dims is None else [size for _, size in parse_dims(mesh_dims)]
    if mesh_dims is None or -1 in sizes:
        raise MeshError("a mesh over all devices needs to know them: give devices or num_devices")
    return prod(sizes)


def _number(value: object, what: str) -> int:
    """Return a number of devices; a mesh has no more than `MAX_RANKS`."""
    number = as_int(value, what)
    if not 0 <= number <= MAX_RANKS:
        raise MeshError(f"{what} must be in 0..{MAX_RANKS}, got {number}")
    return number


def _fitted(mesh_dims: DimsLike | None, total: int, what: str) -> tuple[MeshDimension, ...]:
    dims = parse_dims([(DEFAULT_DIM, -1)] if mesh_dims is None else mesh_dims)
    fixed = prod(size for _, size in dims if size != -1)
    fitted = tuple(MeshDimension(n, total // fixed if size == -1 else size) for n, size in dims)
    if prod(size for _, size in fitted) != total:
        raise WorldSizeError(
            f"{what} must be equal to total size of the mesh of shape "
            f"{[size for _, size in dims]}; {advice(dims, total)}"
        )
    return fitted
