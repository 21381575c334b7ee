"""Which ranks compute on the same GPU, and what to say about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpimesh.mesh.device import Device
from mpimesh.mesh.stats import DeviceTable

__all__ = ["SharedGpu", "shared_gpus", "sharing_text"]

_SHOWN = 4


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
