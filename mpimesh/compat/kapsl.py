"""kapsl's mesh of devices, its routes, and its operations on the arrays of a mesh.

The operations are blocking, in place, and count ranks in the mesh. Devices and topologies are
:class:`mpimesh.mesh.Device` and :class:`mpimesh.MeshTopology`; ranks in one process are those of
:func:`mpimesh.run_virtual`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import wraps
from typing import Any, Concatenate, Literal, ParamSpec, Self, TypeVar

import numpy as np

from mpimesh import runtime
from mpimesh.arguments import as_int, as_items, check_kind, rank_names, shown
from mpimesh.arrays import Array, OpLike
from mpimesh.errors import DTypeError, MeshError, RankError, ShapeError, WorldSizeError
from mpimesh.mesh import (
    WORLD,
    Device,
    DeviceBackend,
    DeviceTable,
    Mesh,
    MeshTopology,
    cpu_device,
)
from mpimesh.mesh.probe import find_devices, probe_devices
from mpimesh.runtime import ProcessGroup, run_virtual
from mpimesh.runtime.agreement import agree_alike

__all__ = [
    "DeviceInfo",
    "DeviceMesh",
    "DistributedOps",
    "GpuPreference",
    "GroupBackend",
    "MeshRouter",
    "MeshStats",
    "MockComm",
    "RoutingStrategy",
    "dist_ops",
]

P = ParamSpec("P")
R = TypeVar("R")


class GroupBackend(Enum):
    """The mover of a group's bytes, by mpimesh's names; what a mesh has not is refused."""

    Nccl = "nccl"
    Gloo = "gloo"
    MPI = "mpi"
    Mock = "virtual"


@dataclass(frozen=True, slots=True)
class MeshStats:
    """Totals over all ranks of a mesh.

    Attributes:
        world_size: Number of ranks.
        total_memory_mb: Memory of all devices in MiB.
        total_compute_units: Their multiprocessors and cores.
        backend_distribution: Number of ranks for each backend.
        group_count: Number of groups, ``world`` among them.
    """

    world_size: int
    total_memory_mb: int
    total_compute_units: int
    backend_distribution: Mapping[str, int] = field(hash=False)
    group_count: int


class DeviceMesh(runtime.DeviceMesh):
    """A :class:`mpimesh.DeviceMesh` with kapsl's constructors, all of them collective.

    A list of devices, where kapsl takes one, has the device of each rank, the same on all ranks;
    without it, each rank has the one that it found. The group ``"dp"`` of a data-parallel
    topology is ``"world"`` by another name, and not counted among the groups.

    Example:
        >>> with mm.compat.kapsl.DeviceMesh.new() as mesh:
        ...     mesh.group_names[0]
        'world'
    """

    @classmethod
    def new(cls, devices: Sequence[Device] | None = None) -> Self:
        """Return a data-parallel mesh of all ranks.

        Raises:
            WorldSizeError: On every rank, if there is not one device for each.
            MeshError: On every rank, if one of `devices` is none.
            MismatchError: On every rank, if `devices` differ.
        """
        return cls.with_topology(devices, MeshTopology.data_parallel())

    @classmethod
    def with_topology(cls, devices: Sequence[Device] | None, topology: MeshTopology) -> Self:
        """Return a mesh with the groups of a topology.

        Raises:
            WorldSizeError: On every rank, if the topology does not fit the ranks, or there is not
                one device for each.
            MeshError: On every rank, if one of `devices` is none.
            MismatchError: On every rank, if `devices` differ.
        """
        mesh = cls(topology)
        found = mesh.all_devices()

        def table() -> DeviceTable:
            if devices is None:
                return found
            every = as_items(devices, "devices", wanted="a list of devices, or None")
            if len(every) != mesh.world_size:
                raise WorldSizeError(
                    f"a mesh of {mesh.world_size} ranks has one device for each, got {len(every)}"
                )
            for one in every:
                check_kind(one, Device, "each of devices", MeshError, wanted="a mesh.Device")
            return DeviceTable(tuple(every), found.hosts)

        try:
            devices_of = agree_alike(
                mesh.group(), "with_topology", table, lambda it: "" if it is found else repr(it)
            )
        except Exception:
            mesh.close()
            raise
        mesh._core.devices.table = devices_of
        return mesh

    @property
    def group_names(self) -> list[str]:
        """Names of all groups, in the order of their making, the same on every rank."""
        names, topology = super().group_names, self.topology
        if topology != MeshTopology.data_parallel():
            return names
        same = {*self.dim_names, *(name for name, _ in topology.group_plan(self.world_size))}
        return [name for name in names if name not in same]

    @classmethod
    def new_with_mock_comm(cls, devices: Sequence[Device] | None, rank: int) -> Self:
        """Return a mesh of ranks in one process, within :meth:`MockComm.run`.

        Raises:
            RankError: If `rank` is not the rank that calls.
        """
        mesh = cls.new(devices)
        mesh.set_rank(rank)
        return mesh

    @classmethod
    def new_with_nccl(cls, devices: Sequence[Device] | None, rank: int) -> Self:
        """Return a mesh with a group ``"nccl"`` of all ranks, whose id mpimesh hands out.

        Raises:
            GroupError: On every rank, if the ranks have no NCCL.
            RankError: If `rank` is not the rank that calls.
        """
        mesh = cls.new(devices)
        mesh.set_rank(rank)
        try:
            mesh.add_group("nccl", range(mesh.world_size), GroupBackend.Nccl)
        except Exception:
            mesh.close()
            raise
        return mesh

    def add_group(
        self,
        name: str,
        ranks: Sequence[int] | None = None,
        backend: GroupBackend | runtime.Backend | None = None,
        **options: Any,
    ) -> ProcessGroup:
        """Make a group; see :meth:`mpimesh.DeviceMesh.add_group`. Collective."""
        chosen: Any = backend.value if isinstance(backend, GroupBackend) else backend
        return super().add_group(name, ranks, backend=chosen, **options)

    def stats(self) -> MeshStats:
        """Return totals over all ranks, and the number of groups. Local."""
        return _stats(self)


def _stats(mesh: runtime.DeviceMesh) -> MeshStats:
    return MeshStats(
        mesh.world_size,
        mesh.total_memory_mb,
        mesh.total_compute_units,
        dict(Counter(str(device.backend) for device in mesh.all_devices())),
        len(mesh.group_names),
    )


class MockComm:
    """kapsl's ranks in one process, which here are threads that wait for each other."""

    run = staticmethod(run_virtual)


class RoutingStrategy(Enum):
    """The order in which a router takes the workers."""

    RoundRobin = "round-robin"
    SessionAffinity = "session-affinity"
    TensorParallel = "tensor-parallel"
    PipelineParallel = "pipeline-parallel"


class MeshRouter:
    """The ranks of a mesh to which requests go. Local; a function of the requests before.

    Args:
        mesh: A mesh; its dims ``tp`` and ``pp`` are looked at.
        strategy: The order.

    Raises:
        MeshError: If `mesh` is no mesh.
    """

    def __init__(
        self,
        mesh: runtime.DeviceMesh | Mesh,
        strategy: RoutingStrategy = RoutingStrategy.RoundRobin,
    ) -> None:
        kinds = (runtime.DeviceMesh, Mesh)
        check_kind(mesh, kinds, "mesh", MeshError, wanted="a DeviceMesh or a Mesh")
        self.mesh = mesh
        self.strategy = RoutingStrategy(strategy)
        self._routed = 0

    def route(self, session: int = 0, tp_group_hint: int | None = None) -> int:
        """Return the rank for a request: the next one, or always the same for a session.

        With tensor parallelism it is the first rank of a group, with a pipeline one of the first
        stage.
        """
        ranks = [*self._first_ranks()]
        if tp_group_hint is not None:
            return ranks[as_int(tp_group_hint, "tp_group_hint") % len(ranks)]
        if self.strategy is RoutingStrategy.SessionAffinity:
            return ranks[as_int(session, "session") % len(ranks)]
        self._routed += 1
        return ranks[(self._routed - 1) % len(ranks)]

    def get_tp_group(self, rank: int) -> int | None:
        """Return the number of the tensor-parallel group of a rank; None without such groups."""
        return self.mesh.group_index(rank, "tp") if self.mesh.contains_dim("tp") else None

    def get_tp_group_workers(self, group: int) -> list[int]:
        """Return the ranks of a tensor-parallel group; MeshError if there is no such one."""
        groups = self.mesh.groups("tp")
        if not 0 <= as_int(group, "group") < len(groups):
            raise MeshError(f"tensor-parallel groups are numbered 0 to {len(groups) - 1}: {group}")
        return list(groups[group].tolist())

    def mesh_stats(self) -> MeshStats:
        """Return the totals of the mesh.

        Raises:
            MeshError: If it is a plain :class:`~mpimesh.Mesh`, which knows no devices.
        """
        wanted = f"a DeviceMesh to have devices and groups: mm.DeviceMesh({self.mesh.dims_text!r})"
        return _stats(check_kind(self.mesh, runtime.DeviceMesh, "mesh", MeshError, wanted=wanted))

    def _first_ranks(self) -> Sequence[int]:
        dims = {RoutingStrategy.TensorParallel: "tp", RoutingStrategy.PipelineParallel: "pp"}
        dim = dims.get(self.strategy)
        if dim is None:
            return list(self.mesh.ids.tolist())
        return list(self.mesh.groups(dim)[:, 0].tolist())


def _only(
    dtype: type[np.generic], method: Callable[Concatenate[DistributedOps, P], R]
) -> Callable[Concatenate[DistributedOps, P], R]:
    """Return `method` for first arrays of one dtype: that of the others follows from them."""
    wanted = np.dtype(dtype)

    @wraps(method)
    def typed(ops: DistributedOps, /, *arguments: P.args, **options: P.kwargs) -> R:
        for x in [*arguments, *options.values()][:1]:
            if x is not None and getattr(x, "dtype", None) != wanted:
                raise DTypeError(
                    f"the {wanted} form of {method.__name__} takes an array of {wanted}, got "
                    f"{getattr(x, 'dtype', shown(x))}; {method.__name__} takes any dtype"
                )
        return method(ops, *arguments, **options)

    return typed


class DistributedOps:
    """Operations of any dtype on the ranks of a mesh. Each waits until it is done.

    Results go into the caller's arrays, and are returned, too. `group` is a name, such as
    ``"world"`` or a dim's, or a :class:`~mpimesh.ProcessGroup`; a root, a destination and a source
    are ranks of the mesh, as kapsl has them, also where the group counts its own.

    kapsl's names with a dtype, `all_reduce_f32`, `all_reduce_i32`, `broadcast_f32` and so on, are
    there, too, and refuse arrays of another one.

    Args:
        mesh: The mesh. A plain :class:`~mpimesh.Mesh` will do to make it, but has no ranks that
            could talk: each operation raises.

    Raises:
        MeshError: If `mesh` is no mesh. From each operation, if there is no communicator.

    Example:
        >>> with mm.DeviceMesh("dp=-1") as mesh:
        ...     ops = mm.compat.kapsl.dist_ops(mesh)
        ...     data = np.ones(3, "float32")
        ...     ops.all_reduce_f32(data, "sum", "world") / mesh.size
        array([1., 1., 1.], dtype=float32)
    """

    def __init__(self, mesh: runtime.DeviceMesh | Mesh) -> None:
        kinds = (runtime.DeviceMesh, Mesh)
        check_kind(mesh, kinds, "mesh", MeshError, wanted="a DeviceMesh or a Mesh")
        self.mesh = mesh

    def all_reduce(
        self, data: Array, op: OpLike = "sum", group: str | ProcessGroup = WORLD
    ) -> Array:
        """Reduce `data` over the group, in place. Collective; see `ProcessGroup.all_reduce`."""
        return self._group(group).all_reduce(data, op, out=data).resolve()

    def broadcast(self, data: Array, root_rank: int, group: str | ProcessGroup = WORLD) -> Array:
        """Give every rank the array of `root_rank`, in place. Collective.

        Raises:
            RankError: If `root_rank` is not in the group.
        """
        members = self._group(group)
        root = _place(members, root_rank, "root_rank")
        return members.broadcast(data, root=root, out=data).resolve()

    def all_gather(self, local: Array, output: Array, group: str | ProcessGroup = WORLD) -> Array:
        """Join the arrays of all ranks along axis 0 into `output`. Collective.

        Raises:
            ShapeError: If `output` is not as long as that: nothing is cut.
        """
        return self._group(group).all_gather(local, out=output).resolve()

    def scatter(
        self,
        data: Array | None,
        chunk: Array,
        root_rank: int,
        group: str | ProcessGroup = WORLD,
    ) -> Array:
        """Cut `data` of `root_rank` along axis 0; each rank's part goes to `chunk`. Collective.

        Each rank receives its own part and no more.

        Args:
            data: On the root, the array; not looked at elsewhere, where None will do.
            chunk: This rank's part.
            root_rank: The sender, a rank of the mesh.
            group: The ranks.

        Raises:
            RankError: If `root_rank` is not in the group.
            ShapeError: On every rank, if `data` does not fall into equal parts; on a rank whose
                `chunk` does not fit.
        """
        members = self._group(group)
        root = _place(members, root_rank, "root_rank")
        return members.scatter(data, root=root, out=chunk).resolve()

    def gather(
        self,
        local: Array,
        output: Array | None,
        root_rank: int,
        group: str | ProcessGroup = WORLD,
    ) -> Array | None:
        """Join the arrays of all ranks along axis 0 into `output` of `root_rank`. Collective.

        Args:
            local: This rank's array, of one shape on all ranks.
            output: On the root, the array for all; not looked at elsewhere, where None will do.
            root_rank: The receiver, a rank of the mesh.
            group: The ranks.

        Returns:
            `output` on the root, None elsewhere.

        Raises:
            RankError: If `root_rank` is not in the group.
            ShapeError: On the root, if `output` does not fit; it has taken part then.
            DTypeError: On the root, if `output` is of another dtype than `local`, as above.
        """
        members = self._group(group)
        root = _place(members, root_rank, "root_rank")
        try:
            return members.gather(local, root=root, out=output).resolve()
        except (DTypeError, ShapeError):
            # Where it is the root's `output`, the others wait for the root to take part.
            members.gather(local, root=root).resolve()
            raise

    def reduce_scatter(
        self,
        data: Array,
        output: Array,
        op: OpLike = "sum",
        group: str | ProcessGroup = WORLD,
    ) -> Array:
        """Reduce `data` over the group, and put each rank's part into `output`. Collective.

        Raises:
            ShapeError: If `data` does not fall into equal parts along axis 0, or `output` does not
                fit.
        """
        return self._group(group).reduce_scatter(data, op, out=output).resolve()

    def barrier(self, group: str | ProcessGroup = WORLD) -> None:
        """Wait until all ranks of the group have come. Collective."""
        self._group(group).barrier()

    def send(self, data: Array, dest_rank: int) -> None:
        """Send `data` to a rank of the mesh, and wait until it may be written again.

        Two ranks that both send first may wait for each other, as in MPI.

        Raises:
            RankError: If `dest_rank` is no other rank of the mesh.
        """
        world = self._group(WORLD)
        world.send(data, _place(world, dest_rank, "dest_rank")).resolve()

    def recv(self, data: Array, src_rank: int) -> Array:
        """Receive into `data` what a rank of the mesh sends.

        Raises:
            RankError: If `src_rank` is no other rank of the mesh.
            ShapeError: If an array of another shape came: nothing is cut.
            DTypeError: If one of another dtype came.
        """
        world = self._group(WORLD)
        return world.recv(_place(world, src_rank, "src_rank"), out=data).resolve()

    all_reduce_f32 = _only(np.float32, all_reduce)
    all_reduce_i32 = _only(np.int32, all_reduce)
    broadcast_f32 = _only(np.float32, broadcast)
    all_gather_f32 = _only(np.float32, all_gather)
    scatter_f32 = _only(np.float32, scatter)
    gather_f32 = _only(np.float32, gather)
    reduce_scatter_f32 = _only(np.float32, reduce_scatter)
    send_f32 = _only(np.float32, send)
    recv_f32 = _only(np.float32, recv)

    def _group(self, group: Any) -> ProcessGroup:
        if not isinstance(self.mesh, runtime.DeviceMesh):
            raise MeshError(
                f"No communication backend configured: {self.mesh!r} is a plain Mesh, without "
                "ranks that could talk; take the operations of "
                f"mm.DeviceMesh({self.mesh.dims_text!r})"
            )
        return group if isinstance(group, ProcessGroup) else self.mesh.group(group)


def _place(group: ProcessGroup, rank: int, what: str) -> int:
    """Return the place in `group` of a rank of the mesh."""
    place = group.group_rank_of(rank)
    if place is None:
        raise RankError(
            f"{what} {rank} is not in group {group.name!r}, which has {rank_names(group.ranks)} of "
            "the mesh; give one of these"
        )
    return place


dist_ops = DistributedOps


# -- devices ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GpuPreference:
    """The GPU that a caller asks for.

    | text | kind | takes |
    |---|---|---|
    | ``mig:<id>``, ``partition:<id>`` | partition | the partition whose id starts so |
    | ``cuda:1`` | backend_id | the device of that backend and number |
    | ``0000:3b:00.0`` | pci | the device at that place; the domain may be left out |
    | anything else | name | a device whose name contains it, in any case |

    Attributes:
        kind: As in the table.
        value: What to look for.
        backend: Backend of kind ``backend_id``.
    """

    kind: Literal["partition", "backend_id", "pci", "name"]
    value: str
    backend: DeviceBackend | None = None

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Read a preference; None if `text` is empty."""
        text = text.strip()
        if not text:
            return None
        head, colon, rest = text.partition(":")
        if colon and head.lower() in ("mig", "partition") and rest.strip():
            return cls("partition", rest.strip())
        if head and rest.strip().isdecimal():
            return cls("backend_id", str(int(rest)), DeviceBackend(head))
        if colon and "." in text:
            return cls("pci", text.lower())
        return cls("name", text)

    def matches(self, device: Device) -> bool:
        """Tell whether `device` is what is asked for."""
        if self.kind == "partition":
            found = (device.partition_id or "").lower()
            return found.removeprefix("mig-").startswith(self.value.lower().removeprefix("mig-"))
        if self.kind == "backend_id":
            return device.backend == self.backend and str(device.id) == self.value
        if self.kind == "pci":
            place = (device.pci_bus_id or "").lower()
            return bool(place) and self.value in (place, place.partition(":")[2])
        return self.value.lower() in device.name.lower()

    def __str__(self) -> str:
        if self.kind == "partition":
            return f"partition:{self.value}"
        return f"{self.backend}:{self.value}" if self.kind == "backend_id" else self.value


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """The resources that this process may use.

    Attributes:
        cpu_cores: Cores this process may run on.
        total_memory: Memory it may have, in bytes.
        os_type: Like ``Linux``.
        os_release: Of the operating system's kernel.
        has_cuda: Whether there is such a device; so for the next three.
        has_metal: Always False: NumPy and CuPy do not compute there.
        has_rocm: See `has_cuda`.
        has_directml: Always False, as `has_metal`.
        devices: The GPUs, or where there are none one record of the CPU.
    """

    cpu_cores: int
    total_memory: int
    os_type: str
    os_release: str
    has_cuda: bool
    has_metal: bool
    has_rocm: bool
    has_directml: bool
    devices: tuple[Device, ...]

    @classmethod
    def probe(cls) -> Self:
        """Look for devices; where that fails, there is the CPU. Raises nothing.

        Takes up to 0.8 s where ``nvidia-smi`` is asked, and keeps nothing: call it once.
        """
        return cls._of(find_devices())

    @classmethod
    def try_probe(cls) -> Self:
        """Look for devices.

        Raises:
            MeshError: If CuPy or ``nvidia-smi`` is there but fails. Having neither is no failure.
        """
        return cls._of(probe_devices())

    @classmethod
    def try_probe_with_timeout(
        cls, timeout_s: float, *, environment: Mapping[str, str] | None = None
    ) -> Self:
        """Look for devices for at most `timeout_s` seconds.

        CuPy is asked if it is already imported, else ``nvidia-smi`` if it is installed.

        Args:
            timeout_s: Limit for all programs that are started.
            environment: Where ``CUDA_VISIBLE_DEVICES`` is looked up; the process's own if None.

        Raises:
            MeshError: As for :meth:`try_probe`, or if `timeout_s` is not above 0.
        """
        return cls._of(probe_devices(timeout_s, environment=environment))

    @classmethod
    def _of(cls, devices: tuple[Device, ...]) -> Self:
        cpu, system = cpu_device(), os.uname()
        backends = {device.backend for device in devices}
        return cls(
            cpu_cores=cpu.compute_units,
            total_memory=cpu.memory_mb << 20,
            os_type=system.sysname,
            os_release=system.release,
            has_cuda=DeviceBackend.CUDA in backends,
            has_metal=False,
            has_rocm=DeviceBackend.ROCM in backends,
            has_directml=False,
            devices=devices,
        )

    def best_gpu(self) -> Device | None:
        """Return the GPU with the most memory, of equal ones the newest; None without a GPU."""
        return self.best_gpu_with_preference(None)

    def best_gpu_with_preference(self, preference: GpuPreference | None) -> Device | None:
        """Return the best GPU among those that `preference` matches; None if none does."""
        fitting = [
            device
            for device in self.devices
            if device.backend.is_gpu and (preference is None or preference.matches(device))
        ]
        return max(fitting, key=_strength, default=None)

    def cuda_devices(self) -> tuple[Device, ...]:
        """Return the CUDA devices."""
        return tuple(device for device in self.devices if device.backend == DeviceBackend.CUDA)

    def get_best_provider(self) -> str:
        """Return the backend to compute on: cuda, metal, rocm, oneapi, directml or cpu."""
        names = ("cuda", "metal", "rocm", "oneapi", "directml", "cpu")
        return next(name for name in names if self.has_provider(name))

    def has_provider(self, name: str) -> bool:
        """Tell whether backend `name` can be used; ``cpu`` always can."""
        backend = DeviceBackend(name)
        return backend == DeviceBackend.CPU or any(d.backend == backend for d in self.devices)


def _strength(device: Device) -> tuple[int, tuple[int, ...], int]:
    capability = tuple(int(part) for part in (device.compute_capability or "0").split("."))
    return device.memory_mb, capability, -device.id
