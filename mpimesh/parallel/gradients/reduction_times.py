"""Times of the sums of gradients, and how much of them is hidden behind computing."""

from __future__ import annotations

import math
import time
from statistics import median
from types import ModuleType

import numpy as np

from mpimesh.parallel.gradients.bucket_merge import Reduction
from mpimesh.parallel.gradients.shard import shard_sizes
from mpimesh.runtime import CollectiveTensor, DeviceMesh, ProcessGroup
from mpimesh.runtime.agreement import exchange

__all__ = ["measure_reduction"]

_LEAST_BYTES = 1 << 14
_REPEATS = 7
_SLICES = 8
_SIDE = 96  # of the matrices whose product is computed meanwhile


def measure_reduction(
    mesh: DeviceMesh, group: ProcessGroup, nbytes: int, *, xp: ModuleType, divided: bool
) -> Reduction:
    """Time the sums of gradients of two sizes. Collective over `group`.

    Args:
        mesh: Gives memory as buckets have it.
        group: The replicas.
        nbytes: The larger size, more than 16 KiB.
        xp: Whose arrays.
        divided: Whether each rank gets the sums of its part only.

    Returns:
        What they take: medians of the ranks' fastest of 8, the same on each.
    """
    small, large = (_Sum(mesh, group, size, xp, divided) for size in (_LEAST_BYTES, nbytes))
    small_s, large_s = small.fastest_s(0), large.fastest_s(0)
    # As much work as hides the sum, if anything can.
    work = math.ceil(large_s / max(large.work_s(1), 1e-9) / _SLICES)
    alone_s = large.work_s(_SLICES * work)
    mine = [small_s, large_s, max(0.0, large.fastest_s(work) - alone_s) / large_s]
    everyone = exchange(group._core.progress, group.communicator, mine, what="the times of sums")
    small_s, large_s, busy = map(median, zip(*everyone, strict=True))
    longer_s = large_s - small_s
    bytes_per_s = (nbytes - _LEAST_BYTES) / longer_s if longer_s > 0 else math.inf
    latency_s = max(0.0, small_s - _LEAST_BYTES / bytes_per_s)
    return Reduction(latency_s, bytes_per_s, min(1.0, busy))


class _Sum:
    """A sum that can be timed again and again."""

    def __init__(
        self, mesh: DeviceMesh, group: ProcessGroup, nbytes: int, xp: ModuleType, divided: bool
    ) -> None:
        size = nbytes // 4
        empty = mesh.shared_empty if xp is np else xp.empty
        self._group = group
        self._divided = divided
        self._sizes = shard_sizes(size, 4, group.size)
        self._flat = empty(size, np.float32)
        self._flat[...] = 0
        self._part = empty(self._sizes[group.rank or 0], np.float32)
        self._matrix = xp.zeros((_SIDE, _SIDE), np.float32)

    def fastest_s(self, work: int) -> float:
        """Return the least seconds of some sums, with so much work in each of 8 slices beside."""
        return min(self._timed_s(work) for _ in range(1 + _REPEATS))

    def work_s(self, count: int) -> float:
        """Return the least seconds of the work alone."""
        times = []
        for _ in range(1 + _REPEATS):
            start_s = time.perf_counter()
            self._work(count)
            times.append(time.perf_counter() - start_s)
        return min(times)

    def _timed_s(self, work: int) -> float:
        self._group.barrier(label="timed sums")
        start_s = time.perf_counter()
        handle = self._start()
        if work:
            for _ in range(_SLICES):
                self._work(work)
                handle.done()  # as buckets do in a backward
        handle.resolve()
        return time.perf_counter() - start_s

    def _start(self) -> CollectiveTensor:
        if self._divided:
            return self._group.reduce_scatter(
                self._flat, sizes=self._sizes, out=self._part, label="timed sums"
            )
        return self._group.all_reduce(self._flat, out=self._flat, label="timed sums")

    def _work(self, count: int) -> None:
        for _ in range(count):
            self._matrix @ self._matrix
