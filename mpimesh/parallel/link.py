"""Speed of messages between the ranks of a pipeline."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from statistics import median
from types import ModuleType

import numpy as np

from mpimesh.arrays import Array
from mpimesh.runtime import DeviceMesh, ProcessGroup
from mpimesh.runtime.agreement import exchange

__all__ = ["Link", "measure_link"]

_LEAST_BYTES = 1 << 16  # of a message that tells the rate: less is all latency
_MOST_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Link:
    """The cost of messages between two ranks.

    Attributes:
        latency_s: Seconds of the smallest message.
        bytes_per_s: Bytes that pass in a second.
    """

    latency_s: float
    bytes_per_s: float

    def message_s(self, nbytes: int) -> float:
        """Return the seconds of a message."""
        return self.latency_s + nbytes / self.bytes_per_s


def measure_link(
    mesh: DeviceMesh, pipe: ProcessGroup, nbytes: int, *, xp: ModuleType, repeats: int
) -> Link:
    """Time messages around a ring of `pipe`, all pipelines of the mesh at once. Collective.

    Returns:
        The median of `repeats` over all ranks of the mesh, the same on each.

    Cost:
        ``2 * (1 + repeats)`` messages of each rank, half of them of `nbytes`, but of between 64 KiB
        and 16 MiB.
    """
    sizes = (1, min(max(nbytes, _LEAST_BYTES), _MOST_BYTES))
    mine = [_shift_s(_message(mesh, xp, size), pipe, repeats) for size in sizes]
    scope = mesh.group()
    everyone = exchange(
        scope._core.progress, scope.communicator, mine, what="the times of messages"
    )
    small_s, large_s = map(median, zip(*everyone, strict=True))
    longer_s = large_s - small_s
    return Link(small_s, (sizes[1] - sizes[0]) / longer_s if longer_s > 0 else math.inf)


def _message(mesh: DeviceMesh, xp: ModuleType, nbytes: int) -> Array:
    if xp is not np:
        return xp.zeros(nbytes, np.uint8)
    message = mesh.shared_empty(nbytes, np.uint8)
    message[...] = 0  # so that its pages are there
    return message


def _shift_s(message: Array, pipe: ProcessGroup, repeats: int) -> float:
    times = []
    for _ in range(1 + repeats):
        pipe.barrier(label="measure messages")
        start_s = time.perf_counter()
        pipe.shift(message, wrap=True, label="measure messages").resolve()
        times.append(time.perf_counter() - start_s)
    return median(times[1:])
