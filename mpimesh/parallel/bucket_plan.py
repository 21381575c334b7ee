"""Parameters put into buckets: by size, or by when gradients come and how fast they are reduced.

The merge by measured times is the optimal one of Shi, Chu and Li (2019): larger buckets spare
latencies, smaller ones begin earlier. Theirs assumes that sums run beside the backward and cost it
nothing. Between ranks that share memory, or an MPI that moves only while it is called, a good part
of a sum is work of the very core that computes gradients; so here a share of each reduction,
*busy*, delays all gradients that are still to come. With a share of 0 it is theirs; with 1 nothing
can be gained by beginning early, and one bucket is best.
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from types import ModuleType

import numpy as np

from mpimesh.arguments import as_real, counted
from mpimesh.errors import ModuleError
from mpimesh.parallel.bucket import shard_sizes
from mpimesh.runtime import DeviceMesh, ProcessGroup
from mpimesh.runtime.agreement import agree

__all__ = [
    "BucketTuning",
    "Plan",
    "Reduction",
    "measure_reduction",
    "merge_buckets",
    "plan_buckets",
    "reduced_s",
    "tuned_plan",
]

Plan = Sequence[Sequence[int]]
"""For each bucket the numbers of its parameters."""

_MOST_BUCKETS = 64
_MOST_UNITS = 1024
_MOST_BYTES = 1 << 24  # of a sum that is timed
_LEAST_BYTES = 1 << 14
_REPEATS = 7
_SLICES = 8
_SIDE = 96  # of the matrices whose product is computed meanwhile


def plan_buckets(
    sizes_bytes: Sequence[int], kinds: Sequence[Hashable], bucket_bytes: int
) -> tuple[tuple[int, ...], ...]:
    """Put parameters into buckets in the order in which backward makes their gradients.

    Backward goes through a model from its end, so the last parameter comes first. A bucket
    holds parameters of one kind and at most `bucket_bytes`, except that a larger parameter
    has a bucket of its own; it takes what comes next of its kind as long as that fits.
    Buckets stand in the order in which their last gradients come.

    Args:
        sizes_bytes: Bytes of each parameter's gradient, in the order of the parameters.
        kinds: What only equals may share a bucket, such as dtypes.
        bucket_bytes: Most bytes of a bucket, at least 1.

    Returns:
        For each bucket the numbers of its parameters, falling. Each parameter is in one.

    Raises:
        ModuleError: If `bucket_bytes` is less than 1.
    """
    as_real(bucket_bytes, "bucket_bytes", ModuleError, least=1, finite=False)
    done: list[list[int]] = []
    filling: dict[Hashable, list[int]] = {}
    filled_bytes: dict[Hashable, int] = {}
    for number in reversed(range(len(sizes_bytes))):
        kind, size = kinds[number], sizes_bytes[number]
        if kind not in filling or filled_bytes[kind] + size > bucket_bytes:
            filling[kind] = []
            filled_bytes[kind] = 0
            done.append(filling[kind])
        filling[kind].append(number)
        filled_bytes[kind] += size
    done.sort(key=lambda members: -members[-1])
    return tuple(map(tuple, done))


@dataclass(frozen=True, slots=True)
class Reduction:
    """The cost of summing a bucket.

    Attributes:
        latency_s: Seconds beside its bytes.
        bytes_per_s: How fast its bytes pass; may be infinite.
        busy: The share of its time in which the rank computes nothing else, from 0 to 1.
    """

    latency_s: float
    bytes_per_s: float
    busy: float = 0.0

    def seconds(self, nbytes: float) -> float:
        """Return the seconds of so many bytes."""
        return self.latency_s + nbytes / self.bytes_per_s


def merge_buckets(
    ready_s: Sequence[float],
    sizes_bytes: Sequence[int],
    kinds: Sequence[Hashable],
    reduction: Reduction,
) -> tuple[tuple[int, ...], ...]:
    """Put parameters into the buckets that are all summed earliest.

    Buckets are summed one after the other, each from when its last gradient is there, and hold
    gradients of one kind that come one after the other.

    On a clock that stands still while a rank is busy with sums, gradients come when they would
    without any, and a sum takes the rest of its time. On it, the earliest end of the first k
    gradients in m buckets follows from those of fewer gradients in m - 1: an earlier end of what is
    before never hurts. The last bucket ends later by the busy time, which hangs on m alone. So the
    result is the best of all cuts into at most 64 buckets.

    Args:
        ready_s: When each parameter's gradient is complete, on any clock.
        sizes_bytes: Bytes of each gradient.
        kinds: What only equals may share a bucket, such as dtypes.
        reduction: What sums take.

    Returns:
        For each bucket the numbers of its parameters, in the order in which their gradients come.
        Of equally good cuts one with the fewest buckets.

    Cost:
        Time in the square of the number of parameters. Of more than 1024, neighbours of less
        than a thousandth of all bytes count as one.
    """
    units = _units(ready_s, sizes_bytes, kinds)
    if not units:
        return ()
    starts = np.cumsum([0.0, *(sum(sizes_bytes[number] for number in unit) for unit in units)])
    same = [kinds[one[0]] == kinds[other[0]] for one, other in pairwise(units)]
    most = min(len(units), max(_MOST_BUCKETS, 1 + same.count(False)))
    rest = 1.0 - reduction.busy
    # ends_s[k, m]: the earliest end of the first k units in m buckets.
    ends_s = np.full((len(units) + 1, most + 1), np.inf)
    ends_s[0, 0] = min(ready_s)
    before = np.zeros((len(units) + 1, most + 1), np.int64)
    first = 0  # of the units of one kind that end with this one
    for count, unit in enumerate(units, 1):
        if count > 1 and not same[count - 2]:
            first = count - 1
        nbytes = starts[count] - starts[first:count]
        sums_s = rest * (reduction.latency_s + nbytes / reduction.bytes_per_s)
        done_s = np.maximum(ends_s[first:count, :-1], ready_s[unit[-1]]) + sums_s[:, None]
        best = done_s.argmin(axis=0)
        ends_s[count, 1:] = done_s[best, np.arange(most)]
        before[count, 1:] = first + best
    busy_s = reduction.busy * reduction.latency_s * np.arange(most + 1)
    buckets = int(np.argmin(ends_s[-1] + busy_s))
    cuts = [len(units)]
    for left in range(buckets, 0, -1):
        cuts.append(int(before[cuts[-1], left]))
    return tuple(
        tuple(number for unit in units[start:end] for number in unit)
        for start, end in pairwise(reversed(cuts))
    )


def reduced_s(
    plan: Sequence[Sequence[int]],
    ready_s: Sequence[float],
    sizes_bytes: Sequence[int],
    reduction: Reduction,
) -> float:
    """Return when the last bucket of a plan is summed, on the clock of `ready_s`."""
    end_s = min(ready_s, default=0.0)
    delay_s = 0.0
    for members in plan:
        takes_s = reduction.seconds(sum(sizes_bytes[number] for number in members))
        end_s = max(end_s, *(ready_s[number] + delay_s for number in members)) + takes_s
        delay_s += reduction.busy * takes_s
    return end_s


def _units(
    ready_s: Sequence[float], sizes_bytes: Sequence[int], kinds: Sequence[Hashable]
) -> list[list[int]]:
    """Put gradients into the order in which they come, and many small ones together."""
    order = sorted(range(len(ready_s)), key=lambda number: (ready_s[number], -number))
    least_bytes = sum(sizes_bytes) / _MOST_UNITS if len(order) > _MOST_UNITS else 0
    units: list[list[int]] = []
    filled_bytes = 0
    for number in order:
        if not units or filled_bytes >= least_bytes or kinds[number] != kinds[units[-1][0]]:
            units.append([])
            filled_bytes = 0
        units[-1].append(number)
        filled_bytes += sizes_bytes[number]
    return units


# -- measured times of sums -----------------------------------------------------------------------


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
    everyone = agree(group, "the times of sums", mine)
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
        flat = empty(size, np.float32)
        flat[...] = 0
        self._matrix = xp.zeros((_SIDE, _SIDE), np.float32)
        label = "timed sums"
        if divided:
            sizes = shard_sizes(size, 4, group.size)
            part = empty(sizes[group.rank or 0], np.float32)
            self._sum = group.reduce_scatter_init(flat, sizes=sizes, out=part, label=label)
        else:
            self._sum = group.all_reduce_init(flat, out=flat, label=label)

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
        handle = self._sum.start()
        if work:
            for _ in range(_SLICES):
                self._work(work)
                handle.done()  # as buckets do in a backward
        handle.resolve()
        return time.perf_counter() - start_s

    def _work(self, count: int) -> None:
        for _ in range(count):
            self._matrix @ self._matrix


# -- tuning ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BucketTuning:
    """The outcome of a tuning of buckets, the same on every replica.

    Attributes:
        reduction: What it takes to sum a bucket.
        buckets: How many buckets there are now.
        before: How many there were.
        end_s: When the last is reduced now, as predicted, counted from the first gradient.
        before_end_s: When the last would have been with the buckets before.
        last_ready_s: When the last gradient was there: no cut ends earlier.
    """

    reduction: Reduction
    buckets: int
    before: int
    end_s: float
    before_end_s: float
    last_ready_s: float

    def __str__(self) -> str:
        reduction = self.reduction
        # What the sums of the longer size take no longer for has no rate that could be told.
        rate = ", whatever its size"
        if math.isfinite(reduction.bytes_per_s):
            rate = f" and its bytes at {reduction.bytes_per_s / 1e9:.3g} GB/s"
        hidden = 1.0 - reduction.busy
        return (
            f"{counted(self.buckets, 'bucket')}, before {counted(self.before, 'bucket')}: "
            f"gradients are summed {1e3 * self.end_s:.3g} ms after the first one came, before "
            f"{1e3 * self.before_end_s:.3g} ms; the last one came after "
            f"{1e3 * self.last_ready_s:.3g} ms. A sum takes "
            f"{1e6 * reduction.latency_s:.3g} us{rate}; computing "
            f"hides {f'{hidden:.0%}' if hidden >= 0.005 else 'none'} of it"
        )


def tuned_plan(
    mesh: DeviceMesh,
    group: ProcessGroup,
    *,
    ready_s: Sequence[float],
    sizes_bytes: Sequence[int],
    dtypes: Sequence[Hashable],
    before: Plan,
    xp: ModuleType,
    divided: bool,
) -> tuple[Plan, BucketTuning]:
    """Return the best cut of gradients, and what it gains over the one before. Collective."""
    nbytes = min(max(sum(sizes_bytes), _LEAST_BYTES * 2), _MOST_BYTES)
    reduction = measure_reduction(mesh, group, nbytes, xp=xp, divided=divided)
    plan = merge_buckets(ready_s, sizes_bytes, dtypes, reduction)
    end_s, before_end_s = (
        reduced_s(cut, ready_s, sizes_bytes, reduction) for cut in (plan, before)
    )
    return plan, BucketTuning(reduction, len(plan), len(before), end_s, before_end_s, max(ready_s))
