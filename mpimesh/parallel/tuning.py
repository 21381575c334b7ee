"""Buckets cut by what was measured: when gradients come, and how fast they are reduced."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from types import ModuleType

import numpy as np

from mpimesh.arrays import Array, namespace
from mpimesh.errors import ModuleStateError, on_all_ranks
from mpimesh.parallel.bucket_plan import merge_buckets, reduced_s
from mpimesh.parallel.engine import Engine
from mpimesh.parallel.shard import shard_sizes
from mpimesh.runtime import DeviceMesh, ProcessGroup
from mpimesh.runtime.agreement import exchange

__all__ = ["BucketTuning", "tune_buckets"]

_LEAST_BYTES = 1 << 14
_MOST_BYTES = 1 << 24
_REPEATS = 7


@dataclass(frozen=True, slots=True)
class BucketTuning:
    """What a tuning of buckets has found, the same on every replica.

    Attributes:
        latency_s: What a reduction takes beside its bytes.
        bytes_per_s: How fast its bytes pass.
        buckets: How many buckets there are now.
        before: How many there were.
        end_s: When the last is reduced now, as predicted, counted from the first gradient.
        before_end_s: When the last would have been with the buckets before.
        last_ready_s: When the last gradient was there: no cut ends earlier.
    """

    latency_s: float
    bytes_per_s: float
    buckets: int
    before: int
    end_s: float
    before_end_s: float
    last_ready_s: float

    def __str__(self) -> str:
        return (
            f"{self.buckets} buckets in place of {self.before}: gradients summed after "
            f"{1e3 * self.end_s:.3g} ms in place of {1e3 * self.before_end_s:.3g} ms, the last one "
            f"there after {1e3 * self.last_ready_s:.3g} ms, by reductions of "
            f"{1e6 * self.latency_s:.3g} us and {self.bytes_per_s / 1e9:.3g} GB/s"
        )


def tune_buckets(engine: Engine) -> BucketTuning | None:
    """Cut the buckets over the replicas anew, by times that are measured. Collective.

    Every replica gets the same cut, each stage its own. Gradients that are there are dropped.

    Returns:
        What was found; None where there are no buckets over replicas.

    Raises:
        ModuleStateError: On every rank, if on any no training step was done with these buckets.

    Cost:
        Some exchanges of small texts, of a number for each parameter at most; 16 reductions of up
        to 16 MiB; new memory for the buckets.
    """
    group, buckets = engine.data, engine.buckets
    entries = buckets.entries
    scope = engine.scope
    times_s = [entry.ready_s for entry in entries]
    trained = not times_s or any(times_s)
    everyone = exchange(scope.progress, scope.communicator, trained, what="the tuning of buckets")
    if not all(everyone):
        raise on_all_ranks(
            ModuleStateError(
                "gradients are timed in a training step, and no buckets can be tuned before the "
                "first one: call train_step(), then tune_buckets()"
            )
        )
    plan = found = None
    if entries and group.size > 1:
        # One that no backward touched is known to be complete at the end.
        times_s = [one_s or max(times_s) for one_s in times_s]
        mine_s = [one_s - min(times_s) for one_s in times_s]
        everyone_s = exchange(group.progress, group.communicator, mine_s, what="gradient times")
        # A reduction waits for the last of the ranks.
        ready_s = [max(times) for times in zip(*everyone_s, strict=True)]
        sizes_bytes = [int(entry.parameter.value().nbytes) for entry in entries]
        dtypes = [entry.parameter.dtype for entry in entries]
        divided = any(bucket.shard is not None for bucket in buckets.buckets)
        latency_s, bytes_per_s = measure_reduction(
            engine.mesh,
            group,
            min(max(sum(sizes_bytes), _LEAST_BYTES * 2), _MOST_BYTES),
            xp=namespace(entries[0].parameter.value()),
            divided=divided,
        )
        link = {"latency_s": latency_s, "bytes_per_s": bytes_per_s}
        plan = merge_buckets(ready_s, sizes_bytes, dtypes, **link)
        numbers = {id(entry.parameter): number for number, entry in enumerate(entries)}
        before = [
            [numbers[id(parameter)] for parameter in bucket.parameters]
            for bucket in buckets.buckets
            if bucket.group is group
        ]
        found = BucketTuning(
            latency_s,
            bytes_per_s,
            len(plan),
            len(before),
            reduced_s(plan, ready_s, sizes_bytes, **link),
            reduced_s(before, ready_s, sizes_bytes, **link),
            max(ready_s),
        )
    engine.rebuild_buckets(plan)
    return found


def measure_reduction(
    mesh: DeviceMesh, group: ProcessGroup, nbytes: int, *, xp: ModuleType, divided: bool
) -> tuple[float, float]:
    """Time the sums of gradients of two sizes. Collective over `group`.

    Args:
        mesh: Gives memory as buckets have it.
        group: The replicas.
        nbytes: The larger size.
        xp: Whose arrays.
        divided: Whether each rank gets the sums of its part only.

    Returns:
        The seconds of a reduction of no bytes, and the bytes that pass in a second: medians of
        the ranks' fastest, the same on each.
    """
    sizes_bytes = (_LEAST_BYTES, nbytes)
    mine = [_reduction_s(mesh, group, size, xp, divided) for size in sizes_bytes]
    everyone = exchange(group.progress, group.communicator, mine, what="the times of reductions")
    small_s, large_s = map(median, zip(*everyone, strict=True))
    longer_s = large_s - small_s
    bytes_per_s = (sizes_bytes[1] - sizes_bytes[0]) / longer_s if longer_s > 0 else math.inf
    return max(0.0, small_s - sizes_bytes[0] / bytes_per_s), bytes_per_s


def _reduction_s(
    mesh: DeviceMesh, group: ProcessGroup, nbytes: int, xp: ModuleType, divided: bool
) -> float:
    size = nbytes // 4
    empty = mesh.shared_empty if xp is np else xp.empty
    flat = empty(size, np.float32)
    flat[...] = 0
    sizes = shard_sizes(size, 4, group.size)
    part = empty(sizes[group.rank or 0], np.float32)

    def reduce() -> Array:
        if divided:
            return group.reduce_scatter(flat, sizes=sizes, out=part, label="tuning").resolve()
        return group.all_reduce(flat, out=flat, label="tuning").resolve()

    return min(_timed_s(reduce, group) for _ in range(1 + _REPEATS))


def _timed_s(work: Callable[[], Array], group: ProcessGroup) -> float:
    group.barrier(label="tuning")
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s
