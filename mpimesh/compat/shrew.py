"""shrew's ``shrew::distributed``: pipelines, replicas, and trainers around them.

Stages and pipelines are :class:`mpimesh.PipelineStage` and :class:`mpimesh.PipelineParallel`, whose
schedule is 1F1B, and layers are those of :mod:`mpimesh.nn`. Where shrew has all stages and replicas
in one thread, here each rank has its own, so that a `mesh` says where they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from mpimesh import parallel, runtime
from mpimesh.arguments import as_int, as_items, check_kind, shown
from mpimesh.arrays import Array
from mpimesh.arrays.dtypes import as_dtype
from mpimesh.errors import ModuleError
from mpimesh.nn import SupportsLayer
from mpimesh.optim import LossScaler, Optimizer
from mpimesh.parallel import PipelineParallel, PipelineStage
from mpimesh.runtime import ProcessGroup
from mpimesh.runtime.agreement import agree_alike

__all__ = [
    "AllReduceOp",
    "DataParallel",
    "LossScaleConfig",
    "MixedPrecisionMetrics",
    "MixedPrecisionTrainer",
    "ParallelTrainer",
    "PipelineParallel",
    "PipelineStage",
    "reduce_gradients",
]


class AllReduceOp(Enum):
    """The operation that reduces the gradients of a parameter."""

    Sum = "sum"
    Average = "average"


class DataParallel(parallel.DataParallel):
    """A module whose batches are divided among workers; see :class:`mpimesh.DataParallel`.

    Args:
        module: The module, on every rank.
        num_workers: The number of ranks along `dim`.
        mesh: The mesh.
        dim: The dim of the replicas.
        **options: As of :class:`mpimesh.DataParallel`.

    Raises:
        ModuleError: If there are not `num_workers` ranks along `dim`.
    """

    def __init__(
        self,
        module: SupportsLayer,
        num_workers: int,
        *,
        mesh: runtime.DeviceMesh,
        dim: str = "dp",
        **options: Any,
    ) -> None:
        check_kind(mesh, runtime.DeviceMesh, "mesh", ModuleError, wanted="a live DeviceMesh")
        if as_int(num_workers, "num_workers", ModuleError, least=1) != mesh.dim_size(dim):
            raise ModuleError(
                f"num_workers is {num_workers}, but mesh {mesh.dims_text} has "
                f"{mesh.dim_size(dim)} ranks along {dim!r}"
            )
        super().__init__(module, mesh, dim, **options)

    @property
    def num_workers(self) -> int:
        """The number of replicas."""
        return self.num_replicas


def reduce_gradients(
    store: Mapping[str, Array | None],
    params: Sequence[str],
    op: AllReduceOp = AllReduceOp.Average,
    *,
    group: ProcessGroup,
) -> dict[str, Array]:
    """Reduce gradients over the ranks of a group by the names of their parameters. Collective.

    shrew's average divides by the number of ranks that have the gradient;
    :func:`mpimesh.parallel.reduce_gradients` divides by that of all ranks.

    Args:
        store: This rank's gradients by name; None, or no entry, where it has none.
        params: The names to reduce; what no rank has is left out.
        op: ``AllReduceOp.Sum`` or ``AllReduceOp.Average``.
        group: The ranks.

    Raises:
        MismatchError: On every rank, if gradients of one name differ in shape or dtype, operations
            differ, or only some ranks have an argument that will not do.
        ModuleError: On every rank, if one is no array of floats, or an argument will not do.
    """
    check_kind(group, ProcessGroup, "group", ModuleError, wanted="a group of ranks")

    def checked() -> tuple[AllReduceOp, dict[str, Array | None]]:
        check_kind(store, Mapping, "store", ModuleError, wanted="a mapping of gradients by name")
        names = as_items(params, "params", ModuleError)
        for name in names:
            check_kind(name, str, "a name of params", ModuleError, wanted="a text")
        return _as_op(op), {name: store.get(name) for name in names}

    op, mine = agree_alike(group, "reduce_gradients", checked, lambda made: str(made[0]))
    sums = parallel.reduce_gradients(mine, group, divisor=1)
    if op is AllReduceOp.Average:
        here = {name: np.ones(()) for name, one in mine.items() if one is not None}
        for name, count in parallel.reduce_gradients(here, group, divisor=1).items():
            sums[name] /= sums[name].dtype.type(float(count))
    return sums


def _as_op(op: object) -> AllReduceOp:
    try:
        return AllReduceOp(op)
    except ValueError:
        raise ModuleError(
            f"op must be AllReduceOp.Sum or AllReduceOp.Average, got {shown(op)}"
        ) from None


@dataclass(frozen=True, slots=True)
class LossScaleConfig:
    """The course of a dynamic loss scale.

    Attributes:
        init_scale: The first scale.
        scale_growth_factor: What it is multiplied by after `growth_interval` good steps.
        scale_backoff_factor: What it is divided by after an overflow.
        growth_interval: Good steps in a row before it grows.
    """

    init_scale: float = 65536.0
    scale_growth_factor: float = 2.0
    scale_backoff_factor: float = 2.0
    growth_interval: int = 2000

    def scaler(self) -> LossScaler:
        """Return the scaler of :mod:`mpimesh.optim` that follows it."""
        return LossScaler(
            self.init_scale,
            growth=self.scale_growth_factor,
            backoff=1 / self.scale_backoff_factor,
            growth_interval=self.growth_interval,
        )


@dataclass(frozen=True, slots=True)
class MixedPrecisionMetrics:
    """The results of a step.

    Attributes:
        loss: The loss, without the scale.
        skipped: Whether the step was left out because a gradient overflowed.
        loss_scale: The scale after the step.
        total_skipped: The number of steps left out so far.
        compute_dtype: The dtype of the parameters.
    """

    loss: float
    skipped: bool
    loss_scale: float
    total_skipped: int
    compute_dtype: np.dtype[Any]


class MixedPrecisionTrainer:
    """Training steps with a loss scale; all ranks leave out a step together.

    Making it is collective over the ranks of the model, see :class:`mpimesh.ParallelOptimizer`,
    which holds float32 master values of half parameters.

    Args:
        model: A model whose parameters are of `compute_dtype`.
        optimizer: An optimizer of :mod:`mpimesh.optim` of its parameters.
        compute_dtype: The dtype to compute in.
        config: The course of the loss scale.

    Raises:
        DTypeError: If `compute_dtype` is none.
        ModuleError: If a parameter is of another dtype, or `model` is no parallel model.

    Attributes:
        model: The model; shrew's ``model_mut``, too.
        optimizer: The :class:`mpimesh.ParallelOptimizer`.
        compute_dtype: The dtype.
    """

    def __init__(
        self,
        model: parallel.DataParallel | parallel.PipelineParallel,
        optimizer: Optimizer,
        compute_dtype: Any = np.float16,
        config: LossScaleConfig | None = None,
    ) -> None:
        self.compute_dtype = as_dtype(compute_dtype)
        kinds = parallel.DataParallel, parallel.PipelineParallel
        check_kind(model, kinds, "model", ModuleError, wanted="a parallel model")
        for name, one in model.named_parameters():
            if one.data is not None and one.data.dtype != self.compute_dtype:
                raise ModuleError(
                    f"parameter {name!r} is of {one.data.dtype}, and compute_dtype is "
                    f"{self.compute_dtype}: make the model with dtype={str(self.compute_dtype)!r}"
                )
        scaler = (LossScaleConfig() if config is None else config).scaler()
        self.model = model
        self.optimizer = parallel.ParallelOptimizer(optimizer, model, scaler=scaler)

    @property
    def loss_scale(self) -> float:
        """The scale now."""
        return self.optimizer.loss_scale

    @property
    def skipped_steps(self) -> int:
        """The number of steps left out so far."""
        return self.optimizer.skipped_steps

    def train_step(self, input: Any, target: Any, loss_fn: Any) -> MixedPrecisionMetrics:  # noqa: A002
        """Take a step and return its results. Collective, as the model's `train_step`."""
        before = self.skipped_steps
        loss = self.model.train_step(input, target, loss=loss_fn, optimizer=self.optimizer)
        now = self.skipped_steps
        return MixedPrecisionMetrics(
            float(loss), now > before, self.loss_scale, now, self.compute_dtype
        )


class ParallelTrainer:
    """Steps of the optimizer by the gradients of several batches; see `parallel.Accumulation`.

    Args:
        model: The model.
        optimizer: What changes its parameters.
        accumulation_steps: Batches of a step.

    Raises:
        ModuleError: If one is none of these.

    Attributes:
        model: The model.
    """

    def __init__(
        self,
        model: parallel.DataParallel | parallel.PipelineParallel,
        optimizer: Any,
        accumulation_steps: int,
    ) -> None:
        self.model = model
        self._accumulation = parallel.Accumulation(model, accumulation_steps, optimizer=optimizer)

    def accumulate_step(self, input: Any, target: Any, loss_fn: Any) -> float | None:  # noqa: A002
        """Add the gradients of a batch; return the mean loss if it was the last of a step, or None.

        Collective, as the model's `train_step`.
        """
        return self._accumulation.train_step(input, target, loss=loss_fn)

    def flush(self) -> float | None:
        """Take a step by the batches that wait, and return their mean loss; None without any.

        Collective.
        """
        return self._accumulation.flush()
