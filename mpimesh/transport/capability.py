"""Capabilities of each transport here, and their proofs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mpimesh.transport.answer import Answer

__all__ = ["Capability", "capability_table"]

_ON_DEVICES = ("mpi_cuda", "nccl", "cuda_ipc", "staged")


@dataclass(frozen=True, slots=True)
class Capability:
    """Whether one transport may be used for one operation on one kind of memory.

    Attributes:
        transport: Who moves the bytes, such as ``"mpi_cuda"``.
        operation: A collective, ``"messages"``, or ``"*"`` for all.
        memory: ``"host"``, ``"shared"`` or ``"device"``.
        usable: Whether it may be used.
        proof: How that is known.
    """

    transport: str
    operation: str
    memory: str
    usable: bool
    proof: str


def capability_table(
    *,
    mpi: Answer,
    large_counts: bool,
    node_shared: Answer,
    device: Answer,
    mpi_cuda: Mapping[str, Answer],
    nccl: Answer,
    cuda_ipc: Answer,
) -> tuple[Capability, ...]:
    """Return the table; where there is no device, nothing on devices can be used.

    Args:
        mpi: Whether there is an MPI that has made the world.
        large_counts: Whether one call of it moves more than 2^31 elements.
        node_shared: Whether ranks of one node can read each other's memory.
        device: Whether there is a device, and an array library for it.
        mpi_cuda: The answers about CUDA-aware MPI, by operation.
        nccl: Whether NCCL can be used.
        cuda_ipc: Whether ranks of one node can read each other's device memory.
    """
    counts = Answer(
        mpi.usable,
        "in one call" if large_counts else "in pieces: this MPI is older than 4",
    )
    threads = Answer(True, "threads of one process (run_virtual), without MPI")
    rows = [
        ("mpi", "*", "host", mpi),
        ("mpi", "counts above 2^31", "host", counts),
        ("node_shared", "*", "host", node_shared),
        ("node_shared", "*", "shared", node_shared),
        ("virtual", "*", "host", threads),
    ]
    if device.usable:
        staged = Answer(mpi.usable, f"copied through host memory, with any MPI; {device.reason}")
        rows += [
            ("mpi_cuda", operation, "device", answer) for operation, answer in mpi_cuda.items()
        ]
        rows += [
            ("nccl", "*", "device", nccl),
            ("cuda_ipc", "*", "device", cuda_ipc),
            ("staged", "*", "device", staged),
        ]
    else:
        rows += [
            (name, "*", "device", device) for name in ("mpi_cuda", "nccl", "cuda_ipc", "staged")
        ]
    return tuple(
        Capability(transport, operation, memory, answer.usable, answer.reason)
        for transport, operation, memory, answer in rows
    )
