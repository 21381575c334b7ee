"""Which gradients share a bucket, by when they come and how fast they are summed: pure functions.

The optimal merge of Shi, Chu and Li (2019): larger buckets spare latencies, smaller ones begin
earlier. Theirs assumes that sums run beside the backward and cost it nothing. Between ranks that
share memory, or an MPI that moves only while it is called, a good part of a sum is work of the very
core that computes gradients; so here a share of each reduction, *busy*, delays all gradients that
are still to come. With a share of 0 it is theirs; with 1 nothing can be gained by beginning early,
and one bucket is best.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

__all__ = ["Reduction", "merge_buckets", "reduced_s"]

_MOST_BUCKETS = 64
_MOST_UNITS = 1024


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
