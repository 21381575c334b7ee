"""The numbers of training, step by step, for loggers and pictures."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TypeAlias

from mpimesh.arguments import as_function, as_int, as_real, check_kind
from mpimesh.errors import MeshError
from mpimesh.runtime import DeviceMesh
from mpimesh.trace.tracer import log

__all__ = ["MetricsCallback", "TrainingMetrics"]

MetricsCallback: TypeAlias = Callable[[int, Mapping[str, float]], object]
"""``callback(step, numbers)``, such as one that writes to TensorBoard."""


class TrainingMetrics:
    """Means of what each step gives, passed on by rank 0 every few steps.

    `train_step` returns the same loss on every rank, so nothing is sent: the other ranks do
    nothing. They also stand in the log: in records of the logger ``mpimesh``, at level INFO.

    Args:
        mesh: The mesh that trains.
        callbacks: Each is called with the number of the step and a mapping of numbers: the mean
            of each of those that :meth:`step` got since the last call, and ``samples_per_s`` if it
            got ``samples``.
        every: After how many steps.
        first: The number of steps that were done before, by a run that this one resumes.

    Raises:
        MeshError: If an argument will not do.

    Example:
        >>> metrics = TrainingMetrics(mesh, lambda step, numbers: print(step, numbers["loss"]))
        >>> for x, target in batches:
        ...     loss = model.train_step(x, target, optimizer=optimizer)
        ...     metrics.step(loss=loss, samples=len(x))
    """

    def __init__(
        self, mesh: DeviceMesh, *callbacks: MetricsCallback, every: int = 1, first: int = 0
    ) -> None:
        self._rank = check_kind(
            mesh, DeviceMesh, "mesh", MeshError, wanted="a live DeviceMesh"
        ).rank
        self._callbacks = [as_function(each, "callback", MeshError) for each in callbacks]
        self._every = as_int(every, "every", MeshError, least=1)
        self._steps = as_int(first, "first", MeshError, least=0)
        self._sums: dict[str, list[float]] = {}
        self._samples = 0.0
        self._since_s = time.perf_counter()

    def step(self, *, samples: float | None = None, **numbers: float) -> None:
        """Take the numbers of one more step. Local.

        Args:
            samples: How many samples it had, over all ranks.
            numbers: What it gave, such as ``loss`` and ``grad_norm``.

        Raises:
            MeshError: If one of them is no number.
        """
        values = {
            name: as_real(value, name, MeshError, finite=False, nan=True)
            for name, value in numbers.items()
        }
        self._samples += 0.0 if samples is None else as_real(samples, "samples", MeshError, least=0)
        self._steps += 1
        for name, value in values.items():
            self._sums.setdefault(name, []).append(value)
        if self._steps % self._every:
            return
        now_s = time.perf_counter()
        means = {name: sum(values) / len(values) for name, values in self._sums.items()}
        if self._samples:
            means["samples_per_s"] = self._samples / (now_s - self._since_s)
        self._sums, self._samples, self._since_s = {}, 0.0, now_s
        if self._rank:
            return
        text = ", ".join(f"{name} {value:.6g}" for name, value in means.items())
        log(logging.INFO, 0, "step %d: %s", self._steps, text)
        for callback in self._callbacks:
            callback(self._steps, means)
