"""Buckets cut by what was measured: when gradients come, and how fast they are reduced."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mpimesh.arrays import namespace
from mpimesh.errors import ModuleStateError, on_all_ranks
from mpimesh.parallel.engine import Engine
from mpimesh.parallel.gradients.bucket_merge import Reduction, merge_buckets, reduced_s
from mpimesh.parallel.gradients.reduction_times import measure_reduction
from mpimesh.runtime.agreement import exchange

__all__ = ["BucketTuning", "tune_buckets"]

_LEAST_BYTES = 1 << 14
_MOST_BYTES = 1 << 24


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
            f"{_counted(self.buckets)}, before {_counted(self.before)}: gradients are summed "
            f"{1e3 * self.end_s:.3g} ms after the first one came, before "
            f"{1e3 * self.before_end_s:.3g} ms; the last one came after "
            f"{1e3 * self.last_ready_s:.3g} ms. A sum takes "
            f"{1e6 * reduction.latency_s:.3g} us{rate}; computing "
            f"hides {f'{hidden:.0%}' if hidden >= 0.005 else 'none'} of it"
        )


def _counted(buckets: int) -> str:
    return f"{buckets} bucket{'s' if buckets != 1 else ''}"


def tune_buckets(engine: Engine) -> BucketTuning | None:
    """Cut the buckets over the replicas anew, by times that are measured. Collective.

    Every replica gets the same cut, each stage its own. The sums that are there are dropped.

    Returns:
        What was found; None where there are no buckets over replicas.

    Raises:
        ModuleStateError: On every rank, if on any no training step was done with these buckets, or
            gradients are being added up under no_sync().

    Cost:
        Some exchanges of small texts, of a number for each parameter at most; 32 reductions of up
        to 16 MiB; new memory for the buckets.
    """
    engine.check_ready()
    engine.agree_on_closed()
    group, buckets = engine.data, engine.buckets
    entries = buckets.entries
    scope = engine.scope
    everyone = exchange(
        scope._core.progress, scope.communicator, buckets.cycles, what="the tuning of buckets"
    )
    if not all(everyone):
        raise on_all_ranks(
            ModuleStateError(
                "gradients are timed in a training step, and no buckets can be tuned before the "
                "first one: call train_step(), then tune_buckets()"
            )
        )
    plan = found = None
    if entries and group.size > 1:
        mine_s = _ready_s([entry.ready_s for entry in entries])
        everyone_s = exchange(
            group._core.progress, group.communicator, mine_s, what="gradient times"
        )
        # A reduction waits for the last of the ranks.
        ready_s = [max(times) for times in zip(*everyone_s, strict=True)]
        sizes_bytes = [entry.nbytes for entry in entries]
        dtypes = [entry.parameter.dtype for entry in entries]
        divided = any(bucket.shard is not None for bucket in buckets.buckets)
        reduction = measure_reduction(
            engine.mesh,
            group,
            min(max(sum(sizes_bytes), _LEAST_BYTES * 2), _MOST_BYTES),
            xp=namespace(entries[0].parameter.value()),
            divided=divided,
        )
        plan = merge_buckets(ready_s, sizes_bytes, dtypes, reduction)
        numbers = {id(entry.parameter): number for number, entry in enumerate(entries)}
        before = [
            [numbers[id(parameter)] for parameter in bucket.parameters]
            for bucket in buckets.buckets
            if bucket.group is group
        ]
        found = BucketTuning(
            reduction,
            len(plan),
            len(before),
            reduced_s(plan, ready_s, sizes_bytes, reduction),
            reduced_s(before, ready_s, sizes_bytes, reduction),
            max(ready_s),
        )
    engine.rebuild_buckets(plan)
    return found


def _ready_s(times_s: list[float]) -> list[float]:
    """Return when gradients are complete, counted from the first of them.

    One that no backward touched is known to be complete at the end. A replica that never had rows
    waits for nothing, and leaves it to the others to say.
    """
    first_s = min((one_s for one_s in times_s if one_s), default=0.0)
    last_s = max(times_s)
    return [(one_s or last_s) - first_s for one_s in times_s]
