"""Buckets under reduction: started strictly in their order, which is the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence

from mpimesh.arrays import ReduceOp
from mpimesh.parallel.gradients.bucket import Bucket
from mpimesh.trace import Tracer

__all__ = ["Reductions"]


class Reductions:
    """The all-reduces of one cycle; reduce-scatters of buckets that the ranks divide.

    Args:
        buckets: What is reduced, in order, each over its group.
        op: Sum or mean.
        tracer: Records the time of each reduction.

    Attributes:
        buckets: What is reduced, in order.
        started: How many reductions this rank has started in this cycle.
    """

    def __init__(self, buckets: Sequence[Bucket], op: ReduceOp, tracer: Tracer) -> None:
        self.buckets = tuple(buckets)
        self.started = 0
        self._moving = 0  # the first started bucket that is not known to be done
        self._op = op
        self._tracer = tracer

    def start_complete(self) -> None:
        """Start what is complete, up to the first bucket that is not."""
        while self.started < len(self.buckets) and not self.buckets[self.started].incomplete:
            self._start_next()

    def start_all(self) -> None:
        """Start all that are left."""
        while self.started < len(self.buckets):
            self._start_next()

    def move_along(self) -> None:
        """Ask the oldest reduction under way whether it is done: asking is what moves it."""
        if self._moving < self.started:
            handle = self.buckets[self._moving].handle
            if handle is None or handle.done():
                self._moving += 1

    def finish(self) -> None:
        """Wait for all that are started, and be ready for the next cycle."""
        for bucket in self.buckets[: self.started]:
            if bucket.handle is None:
                continue
            try:
                bucket.handle.resolve()
            finally:
                bucket.handle = None
            if self._tracer.enabled:
                kind = "all_reduce" if bucket.shard is None else "reduce_scatter"
                self._tracer.record(
                    f"{kind} {bucket.name}",
                    "collective",
                    start_s=bucket.start_s,
                    duration_s=self._tracer.clock() - bucket.start_s,
                    nbytes=bucket.nbytes,
                )
        self.started = self._moving = 0

    def _start_next(self) -> None:
        bucket = self.buckets[self.started]
        bucket.start_s = self._tracer.clock()
        label = f"gradient {bucket.name}"
        bucket.write_zeros()
        flat, shard = bucket.flat, bucket.shard
        bucket.handle = (
            bucket.group.all_reduce(flat, self._op, out=flat, label=label)
            if shard is None
            else shard.reduce(flat, self._op, label)
        )
        self.started += 1
