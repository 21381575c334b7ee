"""The devices of all ranks of a mesh: totals, and the GPUs that ranks share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import overload

from mpimesh.arguments import as_int, shown
from mpimesh.errors import MeshError, RankError
from mpimesh.mesh.device import Device, DeviceBackend
from mpimesh.mesh.probe import cpus_of_text
from mpimesh.mesh.topology import GroupSpec

__all__ = ["DeviceTable", "SharedGpu", "shared_gpus", "sharing_text"]

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
    hosts: tuple[str, ...] = field(default=())

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
        ranks = ", ".join(map(str, self.ranks[:-1])) + f" and {self.ranks[-1]}"
        place = self.device.partition_id or self.device.pci_bus_id
        return (
            f"ranks {ranks}: GPU {self.device.id} of node {self.host}, {self.device.name}, {place}"
        )


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
            f"{cure}. If it is meant to be so, set MPIMESH_SHARED_GPU=allow",
        ]
    )
