"""Speeds of moving bytes here: within a rank, a node, between nodes, and to a device.

Short measurements, to find what is far off, such as TCP where there is a fabric.
They tell the order of magnitude, not the last tenth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpimesh.comm.node import Node
from mpimesh.errors import TransportError
from mpimesh.runtime.link_speeds import best_s, ping_pong

__all__ = ["SHARED_MEMORY", "Measurement", "measure", "measure_device"]

SHARED_MEMORY = "shared memory, in place"

_LARGE_BYTES = 16 << 20
_TAG = 7


@dataclass(frozen=True, slots=True)
class Measurement:
    """The speed of bytes from one place to another.

    Attributes:
        level: Between what.
        how: Who moves them.
        ranks: The two ranks, or the one.
        latency_s: Of 8 bytes one way; 0 if not measured.
        bytes_per_s: Of 16 MiB one way; 0 if it cannot be done.
        problem: Why it cannot be done.
    """

    level: str
    how: str
    ranks: tuple[int, ...]
    latency_s: float = 0.0
    bytes_per_s: float = 0.0
    problem: str = ""


def measure(comm: Any, nodes: Sequence[Sequence[int]]) -> tuple[Measurement, ...]:
    """Collective over `comm`: measure between rank 0 and another one of each level.

    Args:
        comm: An mpi4py communicator.
        nodes: The ranks of each node; rank 0 is in the first.

    Returns:
        What was measured, on rank 0; on others, what they have taken part in.
    """
    found = []
    if comm.rank == 0:
        found.append(_copy())
    neighbour = next((rank for rank in nodes[0] if rank != 0), None)
    if neighbour is not None:
        found.append(_messages(comm, neighbour, "within a node"))
        found.append(_shared_memory(comm, neighbour))
    if len(nodes) > 1:
        found.append(_messages(comm, nodes[1][0], "between nodes"))
    return tuple(found)


def _copy() -> Measurement:
    source, target = np.ones(_LARGE_BYTES, np.uint8), np.empty(_LARGE_BYTES, np.uint8)
    seconds = best_s(lambda: np.copyto(target, source))
    return Measurement("within a rank", "copy by NumPy", (0,), bytes_per_s=_LARGE_BYTES / seconds)


def _messages(comm: Any, other: int, level: str) -> Measurement:
    """Send to `other` and back; ranks that are neither go on at once."""
    if comm.rank not in (0, other):
        return Measurement(level, "MPI messages", (0, other))
    peer = other if comm.rank == 0 else 0
    latency_s, bytes_per_s = ping_pong(
        lambda buffer: comm.Send(buffer, peer, _TAG),
        lambda buffer: comm.Recv(buffer, peer, _TAG),
        first=comm.rank == 0,
        large_bytes=_LARGE_BYTES,
    )
    return Measurement(
        level,
        "MPI messages",
        (0, other),
        latency_s=latency_s,
        bytes_per_s=bytes_per_s,
    )


def _shared_memory(comm: Any, other: int) -> Measurement:
    """Let rank 0 read an array of `other` in place."""
    level, how = "within a node", SHARED_MEMORY
    if comm.rank not in (0, other):
        return Measurement(level, how, (0, other))
    node = Node()
    if comm.rank == other:
        array = None if node.arena is None else node.arena.empty(_LARGE_BYTES)
        at = -1
        if node.arena is not None and array is not None:
            array[...] = 1
            at = node.arena.find(array)
        comm.Send(np.array([*node.address, at], np.int64), 0, _TAG)
        comm.Recv(np.empty(1, np.uint8), 0, _TAG)  # until then the other one reads
        return Measurement(level, how, (0, other))
    message = np.empty(len(node.address) + 1, np.int64)
    comm.Recv(message, other, _TAG)
    *address, at = message.tolist()
    try:
        if at < 0:
            raise TransportError(node.why_not or f"rank {other} has no memory for others")
        theirs = node.open(tuple(address))[at : at + _LARGE_BYTES]
        mine = np.empty(_LARGE_BYTES, np.uint8)
        seconds = best_s(lambda: np.copyto(mine, theirs))
        if not mine.all():
            raise TransportError(f"rank 0 does not read what rank {other} has written")
        return Measurement(level, how, (0, other), bytes_per_s=_LARGE_BYTES / seconds)
    except TransportError as error:
        return Measurement(level, how, (0, other), problem=str(error))
    finally:
        comm.Send(np.zeros(1, np.uint8), other, _TAG)


def measure_device() -> tuple[Measurement, ...]:
    """Measure copies of this process's GPU, if CuPy and a GPU are there. Local."""
    with suppress(Exception):  # the capability table says what is wrong with CUDA
        return tuple(_device_copies())
    return ()


def _device_copies() -> list[Measurement]:
    import cupy
    import cupyx

    host = cupyx.empty_pinned(_LARGE_BYTES, np.uint8)
    first, second = (cupy.zeros(_LARGE_BYTES, np.uint8) for _ in range(2))
    stream = cupy.cuda.get_current_stream()
    copies: dict[str, Callable[[], object]] = {
        "to the GPU": lambda: first.set(host),
        "from the GPU": lambda: first.get(out=host),
        "within the GPU": lambda: cupy.copyto(second, first),
    }

    def finished(copy: Callable[[], object]) -> Callable[[], object]:
        def step() -> None:
            copy()
            stream.synchronize()

        return step

    return [
        Measurement(level, "copy by CUDA", (0,), bytes_per_s=_LARGE_BYTES / best_s(finished(copy)))
        for level, copy in copies.items()
    ]
