"""Help for training loops: steps that are added up, gradients by name, numbers for loggers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, TypeAlias
from weakref import ref

import numpy as np

from mpimesh.arguments import as_function, as_int, as_real, check_kind, shown
from mpimesh.arrays import Array, namespace
from mpimesh.arrays.dtypes import dtype_from_json, dtype_to_json
from mpimesh.errors import MeshError, MismatchError, ModuleError, ModuleStateError, on_all_ranks
from mpimesh.nn.losses import LossValue
from mpimesh.nn.protocol import has_gradient
from mpimesh.parallel.batch import SupportsStep
from mpimesh.parallel.buckets import GROUP
from mpimesh.parallel.microbatch import Tree
from mpimesh.parallel.model import ParallelModel
from mpimesh.runtime import DeviceMesh, ProcessGroup
from mpimesh.runtime.agreement import agree
from mpimesh.runtime.call import Call
from mpimesh.trace.log import log

__all__ = ["Accumulation", "MetricsCallback", "TrainingMetrics", "reduce_gradients"]


class Accumulation:
    """Training steps of which several make one step of the optimizer, by the mean of their losses.

    Each loss is the mean over its batch, and each counts alike, as in a loop that divides them by
    their number; gradients are reduced over the ranks once, with the last. So batches of as many
    rows are one large batch. Where rows differ and each is to count alike, give ``denominator=`` to
    :meth:`~mpimesh.PipelineParallel.train_step` under :meth:`~mpimesh.PipelineParallel.no_sync`.

    Args:
        model: A :class:`DataParallel` or :class:`PipelineParallel`.
        steps: How many steps belong together.
        optimizer: What then changes the parameters, as in `train_step`.
        max_norm: The norm that gradients are clipped to before that; None does not clip.

    Raises:
        ModuleError: If one is none of these.

    Example:
        >>> accumulation = mm.parallel.Accumulation(model, 4, optimizer=optimizer)
        >>> for x, target in batches:
        ...     loss = accumulation.train_step(x, target)  # None but for each fourth
        >>> loss = accumulation.flush()  # of the one, two or three that are left
    """

    def __init__(
        self,
        model: ParallelModel,
        steps: int,
        *,
        optimizer: SupportsStep,
        max_norm: float | None = None,
    ) -> None:
        if not isinstance(model, ParallelModel):
            raise ModuleError(
                f"model must be a DataParallel or a PipelineParallel, got {shown(model)}"
            )
        if not callable(getattr(optimizer, "step", None)):
            raise ModuleError(f"optimizer= needs an object with a method step(), got {optimizer!r}")
        own = model._engine.optimizer
        if own is not None and optimizer is not own:
            raise ModuleError(
                "the model has a ParallelOptimizer, which alone knows what its gradients are; give "
                f"that as optimizer=, got {optimizer!r}"
            )
        self._model = model
        self._engine = model._engine
        self._optimizer = optimizer
        self._max_norm = max_norm
        self._loss = 0.0
        self.steps = as_int(steps, "steps", ModuleError, least=1)

    @property
    def pending(self) -> int:
        """Number of steps that wait for the optimizer's. After one that failed there is none."""
        engine = self._engine
        return engine.buckets.begun if engine.added_by == ref(self) else 0

    def train_step(self, x: Tree | None, target: Tree | None, **options: Any) -> float | None:
        """Add the gradients of a batch to those that wait. Collective, as the model's `train_step`.

        Args:
            x: As in the model's `train_step`.
            target: So, too.
            options: Further arguments of that, but for `optimizer`.

        Returns:
            The mean of the losses with the last of the steps, when the optimizer has changed the
            parameters; else None. The same on every rank.

        Raises:
            StageError: On every rank, as in the model's `train_step`. What had been added up is
                dropped, and the next step is the first.
            ModuleStateError: On every rank, if steps that were not taken here are being added up;
                so does a step of the model while steps of this wait. What had been added up is
                dropped. On this rank, under :meth:`~mpimesh.PipelineParallel.no_sync`.
        """
        engine, model = self._engine, self._model
        engine.check_ready()
        if engine.buckets.accumulating:
            raise ModuleStateError(
                f"rank {engine.mesh.rank}: an Accumulation chooses by itself which of its steps "
                "reduce gradients: call its train_step() outside of no_sync()"
            )
        if not self.pending:
            self._loss = 0.0
        is_last = self.pending + 1 == self.steps
        inside = is_last and self._max_norm is None
        engine.loss_share, engine.adder = 1 / self.steps, ref(self)
        try:
            if is_last:
                optimizer = self._optimizer if inside else None
                self._loss += model.train_step(x, target, optimizer=optimizer, **options)
            else:
                with model.no_sync():
                    self._loss += model.train_step(x, target, **options)
        finally:
            engine.loss_share, engine.adder = 1.0, None
        if not is_last:
            return None
        if not inside:
            self._change()
        return LossValue(self._loss)

    def flush(self) -> float | None:
        """Take the optimizer's step with those that wait, by the mean of their losses. Collective.

        Over the ranks that step together.

        Returns:
            The mean of their losses, the same on every rank; None if there are none.

        Raises:
            MismatchError: On every rank, if other numbers of steps wait on some.
        """
        engine = self._engine
        engine.check_ready()
        count = self.pending
        rule = f"{count} of {self.steps} steps"
        agree(engine.scope, Call("flush", engine.scope.name, rule=rule))
        if not count:
            return None
        # They were divided by the number of steps that were to come.
        factor = self.steps / count
        for parameter in self._model.parameters():
            if parameter.requires_grad and parameter.grad is not None:
                parameter.grad[...] *= factor
        engine.buckets.start()
        engine.buckets.synchronize()
        self._change()
        return LossValue(self._loss * factor)

    def _change(self) -> None:
        if self._max_norm is not None:
            self._model.clip_grad_norm(self._max_norm)
        self._optimizer.step()

    def __repr__(self) -> str:
        return f"<Accumulation of {self.steps} steps, {self.pending} pending, of {self._model!r}>"


def reduce_gradients(
    gradients: Mapping[str, Array | None], group: ProcessGroup, *, divisor: float | None = None
) -> dict[str, Array]:
    """Sum gradients over the ranks of a group by their names, and divide the sums. Collective.

    For a loop of one's own; :class:`DataParallel` needs none of it. A rank that has no gradient of
    a name, because its rows did not come by that layer, takes part with zeros.

    Shapes:
        gradients[name]: any, the same on all ranks that have one.
        result[name]: the same.

    Args:
        gradients: This rank's gradients; None, or no entry, where it has none.
        group: The ranks.
        divisor: What each sum is divided by: the number of ranks of the group if None, also those
            without a gradient, so that the result is the gradient of the mean of their losses; 1
            for sums.

    Returns:
        The gradients by name, those that any rank has, in the order of their names, on every rank.

    Raises:
        MismatchError: On every rank, if those of one name differ in shape or dtype, or divisors do.
        ModuleError: On every rank, if one is no array of floats, or `divisor` is 0 or no number.

    Cost:
        One exchange of names and shapes, and one all-reduce for each dtype.
    """
    check_kind(group, ProcessGroup, "group", ModuleError, wanted=GROUP)
    problem: ModuleError | None = None
    mine: dict[str, Any] = {}
    by = 1.0
    try:
        by = as_real(group.size if divisor is None else divisor, "divisor", ModuleError)
        if not by:
            raise ModuleError("divisor must not be 0")
        if not isinstance(gradients, Mapping):
            raise ModuleError(f"gradients must be a dict of arrays by name, got {shown(gradients)}")
        for name, one in gradients.items():
            if one is not None and not hasattr(one, "dtype"):
                raise ModuleError(f"the gradient of {name!r} must be an array, got {shown(one)}")
            if one is not None and not has_gradient(one.dtype):
                raise ModuleError(f"the gradient of {name!r} must be of floats, got {one.dtype}")
            if one is not None:
                mine[str(name)] = [list(one.shape), dtype_to_json(np.dtype(one.dtype))]
    except ModuleError as error:
        problem = error
    everyone = agree(group, Call("reduce_gradients", group.name), [by, mine], problem=problem)
    divisors = [one for one, _ in everyone]
    if len(set(divisors)) > 1:
        raise on_all_ranks(
            MismatchError(
                f"all ranks of group {group.name!r} must give one divisor, got {divisors}"
            )
        )
    kinds = _agreed_kinds([one for _, one in everyone], group)
    library = namespace(next((one for one in gradients.values() if one is not None), np.empty(0)))
    reduced: dict[str, Array] = {}
    for dtype in dict.fromkeys(dtype for _, dtype in kinds.values()):
        names = [name for name, (_, other) in kinds.items() if other == dtype]
        sizes = [prod(kinds[name][0]) for name in names]
        flat = library.zeros(sum(sizes), dtype_from_json(dtype))
        ends = np.cumsum(sizes).tolist()
        for name, size, end in zip(names, sizes, ends, strict=True):
            one = gradients.get(name)
            if one is not None:
                flat[end - size : end] = one.reshape(-1)
        flat = group.all_reduce(flat, out=flat, label="gradients by name").resolve()
        flat /= by
        for name, size, end in zip(names, sizes, ends, strict=True):
            reduced[name] = flat[end - size : end].reshape(kinds[name][0])
    return dict(sorted(reduced.items()))


def _agreed_kinds(everyone: list[dict[str, Any]], group: ProcessGroup) -> dict[str, Any]:
    """Return shape and dtype of each gradient that any rank has, by name.

    Raises:
        MismatchError: On every rank, if ranks differ in one.
    """
    kinds: dict[str, Any] = {}
    for name in sorted({name for one in everyone for name in one}):
        found = {rank: one[name] for rank, one in enumerate(everyone) if name in one}
        kinds[name] = (first, dtype) = next(iter(found.values()))
        if any(kind != [first, dtype] for kind in found.values()):
            rows = "\n".join(
                f"  rank {rank}: {tuple(shape)} {dtype_from_json(kind)}"
                for rank, (shape, kind) in found.items()
            )
            raise on_all_ranks(
                MismatchError(
                    f"the gradients of {name!r} must be of one shape and dtype on all ranks of "
                    f"group {group.name!r} that have one, but are\n{rows}"
                )
            )
    return kinds


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
