"""`Device`, a record of the hardware one rank computes on, and the table of all ranks' devices."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, overload

from mpimesh.arguments import as_int, rank_names, ranks_of, ranks_text, shown
from mpimesh.errors import MeshError, RankError
from mpimesh.mesh.topology import GroupSpec

__all__ = [
    "Device",
    "DeviceBackend",
    "DeviceTable",
    "SharedGpu",
    "cpus_of_text",
    "cpus_text",
    "pick_device",
    "shared_gpus",
    "sharing_text",
]

_KNOWN = ("cpu", "cuda", "metal", "rocm", "directml", "opencl", "vulkan", "webgpu", "oneapi")


@dataclass(frozen=True, slots=True)
class DeviceBackend:
    """The driver of a device: one of nine known names, or any other text.

    Known names are lowercase and read in any case; another text is kept as it is,
    so that it comes back from a record unchanged and equals only itself.

    Attributes:
        name: The text form.
    """

    name: str

    CPU: ClassVar[DeviceBackend]
    CUDA: ClassVar[DeviceBackend]
    METAL: ClassVar[DeviceBackend]
    ROCM: ClassVar[DeviceBackend]
    DIRECTML: ClassVar[DeviceBackend]
    OPENCL: ClassVar[DeviceBackend]
    VULKAN: ClassVar[DeviceBackend]
    WEBGPU: ClassVar[DeviceBackend]
    ONEAPI: ClassVar[DeviceBackend]

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise MeshError(f"a device backend must be a text like 'cuda', got {self.name!r}")
        if self.name.lower() in _KNOWN:
            object.__setattr__(self, "name", self.name.lower())

    @property
    def is_custom(self) -> bool:
        """Whether it is none of the known ones."""
        return self.name not in _KNOWN

    @property
    def is_gpu(self) -> bool:
        """Whether it is a known backend other than ``cpu``."""
        return self.name != "cpu" and not self.is_custom

    def __str__(self) -> str:
        return self.name


for _name in _KNOWN:
    setattr(DeviceBackend, _name.upper(), DeviceBackend(_name))


@dataclass(frozen=True, slots=True)
class Device:
    """The hardware one rank computes on, as a record that can be written as JSON.

    Attributes:
        id: Number of the device among those of its process, as the driver counts.
        name: What the vendor calls it.
        backend: What drives it.
        memory_mb: Memory in MiB (2**20 bytes).
        compute_units: Streaming multiprocessors of a GPU, cores of a CPU; 0 if not known.
        pci_bus_id: Place on the host's PCI bus, like ``0000:3b:00.0``.
        partition_id: What is used of the hardware: UUID of a GPU or of a MIG instance,
            ``cpus:0-3`` for the cores a process may use.
        driver_version: As the driver says.
        cuda_version: The newest CUDA that the driver supports, like ``12.4``.
        compute_capability: Like ``9.0``.
        utilization_gpu_pct: Share of the last moments in which the GPU was busy.
        temperature_c: In degrees Celsius.
        supports_fp16: Whether it computes in float16.
        supports_int8: Whether it multiplies int8.
    """

    id: int
    name: str
    backend: DeviceBackend
    memory_mb: int = 0
    compute_units: int = 0
    pci_bus_id: str | None = None
    partition_id: str | None = None
    driver_version: str | None = None
    cuda_version: str | None = None
    compute_capability: str | None = None
    utilization_gpu_pct: int | None = None
    temperature_c: int | None = None
    supports_fp16: bool = False
    supports_int8: bool = False

    def __post_init__(self) -> None:
        for field, kind in _KINDS.items():
            _check(field, kind, getattr(self, field))

    @property
    def is_mig(self) -> bool:
        """Whether it is an instance of a GPU in MIG mode."""
        return (self.partition_id or "").upper().startswith("MIG-")

    @property
    def identity(self) -> str | None:
        """Text that tells it from every other device of its node; None if the record has none.

        CuPy writes the UUID of a MIG instance as that of a GPU, so what stands before the digits
        does not count.
        """
        text = (self.partition_id or self.pci_bus_id or "").lower()
        return text.removeprefix("mig-").removeprefix("gpu-") or None

    def to_record(self) -> dict[str, Any]:
        """Write the record in JSON's types."""
        return {**asdict(self), "backend": str(self.backend)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Device:
        """Read the record that :meth:`to_record` writes.

        Raises:
            MeshError: If a field is missing, unknown or malformed.
        """
        names = [field.name for field in fields(cls)]
        if not isinstance(record, Mapping) or set(record) != set(names):
            raise MeshError(f"a device record has the fields {', '.join(names)}; got {record!r}")
        return cls(**{**record, "backend": DeviceBackend(record["backend"])})

    def to_json(self) -> str:
        """Write the record as JSON."""
        return json.dumps(self.to_record())

    @classmethod
    def from_json(cls, text: str | bytes) -> Device:
        """Read what :meth:`to_json` writes.

        Raises:
            MeshError: If `text` is no JSON or no such record.
        """
        try:
            record = json.loads(text)
        except (ValueError, TypeError) as error:
            raise MeshError(f"a device must be a JSON record: {error}") from None
        return cls.from_record(record)


def pick_device(devices: Sequence[Device], local_rank: int) -> Device:
    """Choose the device of the process with rank `local_rank` on its node.

    A launcher that gives each process one device shows it only that one: it is
    taken. Otherwise processes take devices in turn, so with more processes than
    devices some share one. Where MIG instances are visible, CUDA shows a process only the first
    of them, and no GPU beside it: that one is taken.

    Raises:
        MeshError: If there is no device or `local_rank` is negative.
    """
    if as_int(local_rank, "local_rank") < 0 or not devices:
        raise MeshError(f"cannot pick one of {len(devices)} devices for local rank {local_rank}")
    instance = next((device for device in devices if device.is_mig), None)
    return devices[local_rank % len(devices)] if instance is None else instance


# By `typing.get_type_hints` it would take a tenth of the time that importing NumPy does.
_TYPES = {
    "int": int,
    "str": str,
    "bool": bool,
    "int | None": (int, type(None)),
    "str | None": (str, type(None)),
    "DeviceBackend": DeviceBackend,
}
_KINDS = {field.name: _TYPES[str(field.type)] for field in fields(Device)}
_CPUS = "cpus:"


def _check(field: str, kind: Any, value: object) -> None:
    wrong = not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)
    least = None if field == "temperature_c" else 0
    if wrong or (least is not None and isinstance(value, int) and value < least):
        raise MeshError(f"{field} of a device cannot be {value!r}")


def cpus_text(cpus: Iterable[int]) -> str:
    """Write CPU numbers as ``cpus:0-3,8``."""
    return _CPUS + ranks_text(sorted(cpus))


def cpus_of_text(text: str | None) -> frozenset[int] | None:
    """Read what :func:`cpus_text` writes; None for a text that names none."""
    if text is None or not text.startswith(_CPUS):
        return None
    return frozenset(ranks_of(text.removeprefix(_CPUS))) or None


# -- the devices of all ranks ----------------------------------------------------------------------

_SHOWN = 4
"""Most shared GPUs that are named one by one."""


@dataclass(frozen=True, slots=True)
class DeviceTable(Sequence[Device]):
    """The device of each rank, in rank order.

    In the totals a GPU that several ranks share, the same `partition_id` or, without
    one, the same `pci_bus_id` on the same host, counts once. So do CPU cores: of the
    ranks of one host each core counts once, and the host's memory once. A record
    that says neither where nor what it is counts for each rank.

    Attributes:
        devices: One for each rank.
        hosts: Name of the host of each rank; empty if all are on one host.

    Raises:
        MeshError: If there are hosts, but not one for each device.
    """

    devices: tuple[Device, ...]
    hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", tuple(self.devices))
        object.__setattr__(self, "hosts", tuple(self.hosts))
        if self.hosts and len(self.hosts) != len(self.devices):
            raise MeshError(f"{len(self.devices)} devices, but {len(self.hosts)} hosts")

    def __len__(self) -> int:
        return len(self.devices)

    @overload
    def __getitem__(self, rank: int) -> Device: ...
    @overload
    def __getitem__(self, rank: slice) -> tuple[Device, ...]: ...
    def __getitem__(self, rank: int | slice) -> Device | tuple[Device, ...]:
        return self.devices[rank]

    def get(self, rank: int) -> Device | None:
        """Return the device of `rank`, None if there is no such rank."""
        rank = as_int(rank, "rank", RankError)
        return self.devices[rank] if 0 <= rank < len(self.devices) else None

    def by_backend(self, backend: DeviceBackend | str) -> list[Device]:
        """Return the devices of exactly this backend; custom ones are told apart by name."""
        if not isinstance(backend, str | DeviceBackend):
            raise MeshError(f"backend must be a DeviceBackend or its name, got {shown(backend)}")
        wanted = DeviceBackend(str(backend))
        return [device for device in self.devices if device.backend == wanted]

    def in_group(self, group: GroupSpec) -> list[Device]:
        """Return the devices of a group's ranks, in group order.

        Raises:
            RankError: If a rank of the group has no device here.
        """
        group.check_in_world(len(self.devices))
        return [self.devices[rank] for rank in group.ranks]

    @property
    def total_memory_mb(self) -> int:
        """Memory of all devices in MiB."""
        return sum(memory for memory, _ in self._shares())

    @property
    def total_compute_units(self) -> int:
        """Multiprocessors and cores of all devices."""
        return sum(units for _, units in self._shares())

    def _shares(self) -> Iterator[tuple[int, int]]:
        """Yield (memory in MiB, compute units) of each piece of hardware."""
        seen: set[tuple[str, str]] = set()
        cores: dict[str, set[int]] = {}
        memory: dict[str, int] = {}
        for device, host in zip(self.devices, self.hosts or ("",) * len(self), strict=True):
            cpus = cpus_of_text(device.partition_id)
            if device.backend == DeviceBackend.CPU and cpus is not None:
                cores.setdefault(host, set()).update(cpus)
                memory[host] = max(memory.get(host, 0), device.memory_mb)
                continue
            identity = device.identity
            if identity is None or (host, identity) not in seen:
                yield device.memory_mb, device.compute_units
            seen.add((host, identity or ""))
        yield from ((memory[host], len(cores[host])) for host in cores)


@dataclass(frozen=True, slots=True)
class SharedGpu:
    """One GPU that several ranks have.

    Attributes:
        host: Its node.
        device: Its record, as the first of the ranks has it.
        ranks: The ranks, in order.
    """

    host: str
    device: Device
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        place = self.device.partition_id or self.device.pci_bus_id
        gpu = f"GPU {self.device.id} of node {self.host}, {self.device.name}, {place}"
        return f"{rank_names(self.ranks)}: {gpu}"


def shared_gpus(table: DeviceTable) -> list[SharedGpu]:
    """Return the GPUs that more than one rank has, in the order of their first ranks.

    A GPU is known by its node and :attr:`Device.identity`: the number that a process calls it by
    says nothing, since each process may see others. What has no identity is not compared.
    """
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, device in enumerate(table.devices):
        identity = device.identity
        if device.backend.is_gpu and identity is not None:
            host = table.hosts[rank] if table.hosts else ""
            ranks.setdefault((host, identity), []).append(rank)
    return [
        SharedGpu(host, table.devices[who[0]], tuple(who))
        for (host, _), who in ranks.items()
        if len(who) > 1
    ]


def sharing_text(shared: Sequence[SharedGpu]) -> str:
    """Say which ranks share GPUs, what that costs, and what to do."""
    rows = [f"  {one}" for one in shared[:_SHOWN]]
    if len(shared) > _SHOWN:
        rows.append(f"  and {len(shared) - _SHOWN} more")
    if any(one.device.is_mig for one in shared):
        cure = (
            "CUDA shows a process one MIG instance, the first of those it may see: give each rank "
            "its own (srun --gpus-per-task=1, or CUDA_VISIBLE_DEVICES=MIG-... set for each rank)"
        )
    else:
        cure = (
            "start one rank for each GPU, and let each see its own or all of them (mpiexec -n, "
            "srun --gpus-per-task=1; CUDA_VISIBLE_DEVICES must not name one GPU for all)"
        )
    return "\n".join(
        [
            "ranks share GPUs: they compute in turns, share the memory, and NCCL does not work:",
            *rows,
            f"{cure}. If it is meant to be so: "
            'warnings.filterwarnings("ignore", category=mm.errors.SharedGpuWarning)',
        ]
    )
