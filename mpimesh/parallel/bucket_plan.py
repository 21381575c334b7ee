"""Which gradients share a bucket, as pure functions of their sizes, dtypes and times."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import pairwise

import numpy as np

from mpimesh.errors import ModuleError

__all__ = ["merge_buckets", "plan_buckets", "reduced_s"]


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
    if bucket_bytes < 1:
        raise ModuleError(f"bucket_bytes must be at least 1, got {bucket_bytes!r}")
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


def merge_buckets(
    ready_s: Sequence[float],
    sizes_bytes: Sequence[int],
    kinds: Sequence[Hashable],
    *,
    latency_s: float,
    bytes_per_s: float,
) -> tuple[tuple[int, ...], ...]:
    """Put parameters into the buckets that are all reduced earliest.

    The optimal merge of Shi, Chu and Li (2019): larger buckets spare latencies, smaller
    ones begin earlier. Buckets are reduced one after the other, each from when its last gradient is
    there, and a reduction takes ``latency_s + nbytes / bytes_per_s``. A bucket holds gradients of
    one kind that come one after the other.

    The end of the first k gradients is the earliest over where their last bucket begins, and an
    earlier end of those before it never hurts. So the best of each k follows from those before,
    and the result is the best of all cuts.

    Args:
        ready_s: When each parameter's gradient is complete, on any clock.
        sizes_bytes: Bytes of each gradient.
        kinds: What only equals may share a bucket, such as dtypes.
        latency_s: What a reduction takes beside its bytes.
        bytes_per_s: How fast its bytes pass; may be infinite.

    Returns:
        For each bucket the numbers of its parameters, in the order in which their gradients come.
        Where several cuts are equally good, one with large last buckets.

    Cost:
        Time in the square of the number of parameters.
    """
    order = sorted(range(len(ready_s)), key=lambda number: (ready_s[number], -number))
    starts = np.cumsum([0.0, *(sizes_bytes[number] for number in order)])
    ends_s = np.full(len(order) + 1, ready_s[order[0]] if order else 0.0)
    before = [0] * (len(order) + 1)  # where the last bucket of the first k gradients begins
    first = 0  # of the gradients of one kind that end with this one
    for count, number in enumerate(order, 1):
        if count > 1 and kinds[number] != kinds[order[count - 2]]:
            first = count - 1
        begun_s = np.maximum(ends_s[first:count], ready_s[number])
        done_s = begun_s + (starts[count] - starts[first:count]) / bytes_per_s
        best = int(np.argmin(done_s))
        ends_s[count] = done_s[best] + latency_s
        before[count] = first + best
    cuts = [len(order)]
    while cuts[-1]:
        cuts.append(before[cuts[-1]])
    cuts.reverse()
    return tuple(tuple(order[start:end]) for start, end in pairwise(cuts))


def reduced_s(
    plan: Sequence[Sequence[int]],
    ready_s: Sequence[float],
    sizes_bytes: Sequence[int],
    *,
    latency_s: float,
    bytes_per_s: float,
) -> float:
    """Return when the last bucket of a plan is reduced, on the clock of `ready_s`."""
    end_s = min(ready_s, default=0.0)
    for members in plan:
        begun_s = max(end_s, *(ready_s[number] for number in members))
        nbytes = sum(sizes_bytes[number] for number in members)
        end_s = begun_s + nbytes / bytes_per_s + latency_s
    return end_s
