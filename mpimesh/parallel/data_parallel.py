"""A model repeated on every rank of one dim, each trained on its share of the rows."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, overload

import numpy as np

from mpimesh.arrays import DTypeLike
from mpimesh.errors import ModuleError, TraceError
from mpimesh.mesh import WORLD
from mpimesh.nn import Loss, SupportsLayer
from mpimesh.nn.containers import is_plain
from mpimesh.nn.protocol import set_training
from mpimesh.parallel.batch import Batch, Rows, SupportsStep, check_loss
from mpimesh.parallel.buckets import BUCKET_BYTES
from mpimesh.parallel.microbatch import Tree
from mpimesh.parallel.model import ParallelModel
from mpimesh.parallel.plans import Options
from mpimesh.parallel.replicas import live_mesh, no_dim
from mpimesh.parallel.split_layers import tensor_groups
from mpimesh.parallel.stage import PipelineStage
from mpimesh.parallel.step import Step, last_step
from mpimesh.parallel.training_engine import TrainingEngine
from mpimesh.runtime import DeviceMesh, ProcessGroup
from mpimesh.runtime.agreement import agree
from mpimesh.runtime.call import Call
from mpimesh.runtime.events import gather_events
from mpimesh.trace import Tracer, timeline_svg

__all__ = ["DataParallel", "fully_shard"]


class DataParallel(ParallelModel):
    """Replicas of a model along one dim of a mesh.

    Making it, :meth:`train_step` and :meth:`forward` are collective over the ranks along `dim`;
    along other dims of the mesh there may be other models. The batch is the *global* one, given on
    every rank; the rows are dealt to the replicas in order, uneven ones and fewer rows than
    replicas too, and the loss is the mean over all. Or each rank gives its own rows, as split
    arrays or with ``rows="local"``, see :meth:`PipelineParallel.train_step`: the result is that of
    the rows of all ranks, one after the other. An exception on one replica ends the step on all of
    them with the same :class:`StageError`.

    Layers of the model may be split over the ranks of another dim, such as a
    :class:`ColumnParallelLinear`. Then all of these calls are collective over the mesh.

    Args:
        module: The model, the same on every rank. Layers without memory are materialised.
        mesh: The mesh.
        dim: The dim of the replicas. Of a model that is split over the ranks of another dim, a
            mesh without ``"dp"`` has one replica.
        loss: The loss of :meth:`train_step`, unless it is given there.
        num_microbatches: Parts in which a replica computes its rows, one after the other, to
            save memory.
        seed: Seed of first values and dropout.
        dtype: Dtype of parameters that have no memory yet.
        grad_dtype: The dtype in which gradients are added up over microbatches and replicas, where
            it is wider than the parameter's own: ``"float32"`` keeps the sums of a float16 model
            from losing digits, for twice the memory and traffic of its gradients. That of the
            parameters if None; a narrower one has no effect, as no gradient loses digits by it.
        xp: `numpy` or `cupy`.
        bucket_bytes: Most bytes of a gradient bucket, see :class:`GradientBuckets`;
            :meth:`tune_buckets` finds a cut by measured times.
        overlap: Whether buckets are reduced while backward still runs, if there are several.
        broadcast: Whether all replicas start with the values of the first. Else different values
            are an error.
        tracer: Records what this rank does.

    Raises:
        UnknownNameError: If there is no such dim.
        MismatchError: On every rank, if the replicas differ in structure or values.

    Example:
        >>> model = DataParallel(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
        ...                      mesh, loss=nn.cross_entropy)
        >>> optimizer = optim.Adam(model.parameters(), lr=1e-3)
        >>> loss = model.train_step(x, target)
        >>> optimizer.step()
    """

    def __init__(
        self,
        module: SupportsLayer,
        mesh: DeviceMesh,
        dim: str = "dp",
        *,
        loss: Loss | None = None,
        num_microbatches: int = 1,
        seed: int = 0,
        dtype: DTypeLike = np.float32,
        grad_dtype: DTypeLike | None = None,
        xp: ModuleType = np,
        bucket_bytes: int = BUCKET_BYTES,
        overlap: bool = True,
        broadcast: bool = False,
        tracer: Tracer | None = None,
    ) -> None:
        self._module = module
        self._loss = loss
        self._input_grad = getattr(module, "input_grad", True)
        stage = PipelineStage(0)
        # A Sequential's layers keep their names and numbers.
        for layer in module.layers if is_plain(module) else [module]:
            stage.add_layer(layer)
        live_mesh(mesh)
        check_loss(loss)
        is_split = bool(tensor_groups(stage))
        group = self._replicas(mesh, dim, is_split=is_split)
        others = set(mesh.dim_names) - {dim}
        self._engine = TrainingEngine(
            [stage],
            mesh,
            scope=mesh.group() if is_split else group,
            pipe=group.alone(),
            data=group,
            counts_loss=not is_split or not any(mesh.coord(other) for other in others),
            options=Options(
                num_microbatches=num_microbatches,
                schedule="1f1b",
                seed=seed,
                dtype=dtype,
                grad_dtype=grad_dtype,
                xp=xp,
                bucket_bytes=bucket_bytes,
                overlap=overlap,
                broadcast=broadcast,
                tracer=tracer,
            ),
        )

    @staticmethod
    def _replicas(mesh: DeviceMesh, dim: str, *, is_split: bool) -> ProcessGroup:
        """Return the replicas of this rank's model; of one that is split there may be no other."""
        group = mesh.get_group(dim) if isinstance(dim, str) else None
        if group is None and is_split and dim == "dp":
            return mesh.group().alone()
        if group is None:
            raise no_dim(mesh, dim, "dim")
        return group

    def train_step(
        self,
        x: Tree | None,
        target: Tree | None,
        *,
        loss: Loss | None = None,
        denominator: float | None = None,
        optimizer: SupportsStep | None = None,
        rows: Rows = "whole",
    ) -> float:
        """Compute loss and gradients of a batch; see :meth:`PipelineParallel.train_step`.

        Collective along the dim of the replicas.

        Args:
            x: The global batch, on every rank: an array, or a tuple or dict of arrays. Or
                :class:`DTensor` split by rows over the replicas, ``"dp=S0"``.
            target: Its targets, in the same way.
            loss: The loss; that given to the constructor if None.
            denominator: What to divide the loss by instead of what this batch counts.
            optimizer: Changes the parameters, if the step went well on every rank: one of
                :mod:`mpimesh.optim`, or the model's :class:`ParallelOptimizer`, which divides the
                optimizer's state among the replicas.
            rows: ``"local"`` if plain arrays hold this rank's own rows, any number of them, instead
                of the same global batch on every rank.

        Raises:
            ModuleError: On every rank, if there is no loss, or an optimizer under :meth:`no_sync`.
            StageError: On every rank, if any failed.
            BudgetError: On every rank, if any received more than :meth:`DeviceMesh.budget` allows.
        """
        loss = self._loss if loss is None else loss
        return Step(
            self._engine,
            Batch(
                training=True,
                x=x,
                target=target,
                loss=loss,
                denominator=denominator,
                optimizer=optimizer,
                rows=rows,
            ),
        ).run()

    def evaluate(
        self,
        x: Tree | None,
        target: Tree | None,
        *,
        loss: Loss | None = None,
        denominator: float | None = None,
        rows: Rows = "whole",
    ) -> float:
        """Compute the loss of a batch alone; see :meth:`PipelineParallel.evaluate`.

        Collective along the dim of the replicas. Dropout is the identity.

        Args:
            x: The global batch or a DTensor of it, as in :meth:`train_step`.
            target: Its targets, in the same way.
            loss: The loss; that given to the constructor if None.
            denominator: What to divide the loss by instead of what this batch counts.
            rows: ``"local"`` if plain arrays hold this rank's own rows.

        Returns:
            The mean loss over the global batch, the same on every rank.

        Raises:
            ModuleError: On every rank, if there is no loss.
            StageError: On every rank, if any failed.
        """
        return Step(
            self._engine,
            Batch(
                training=False,
                evaluating=True,
                x=x,
                target=target,
                loss=self._loss if loss is None else loss,
                denominator=denominator,
                rows=rows,
            ),
        ).run()

    def forward(self, x: Tree, *, rows: Rows = "whole") -> Tree:
        """Compute the outputs of a batch, each rank those of its rows.

        Collective along the dim of the replicas. Nothing is saved for a backward.

        Shapes:
            x: (rows, ...), the global batch, on every rank; or this rank's rows.
            result: (rows, ...), in the order of the rows, on every rank.

        Args:
            x: The global batch or a DTensor of it, as in :meth:`train_step`.
            rows: ``"local"`` if plain arrays hold this rank's own rows.

        Returns:
            The outputs of the global batch. For this rank's own rows theirs alone; for a DTensor a
            DTensor with as many rows on each rank, or this rank's block if the model is not over
            the whole mesh.

        Cost:
            One all-gather of the outputs; none where each rank gave its own rows.
        """
        return self._forward(x, everywhere=True, rows=rows)

    def __call__(self, x: Tree) -> Tree:
        """Run :meth:`forward`."""
        return self.forward(x)

    @property
    def inner(self) -> SupportsLayer:
        """The model; what is done to it by itself is this rank's affair only."""
        return self._module

    @property
    def module(self) -> SupportsLayer:
        """The model, by PyTorch's name for :attr:`inner`."""
        return self._module

    def into_inner(self) -> SupportsLayer:
        """Give the model back, free of buckets. Local; at stage 3 collective over the replicas.

        Each rank has values of its own then. Whatever this object is asked to do afterwards, it
        refuses: it would train this rank's copy alone.
        """
        if not self._engine.is_given_back:
            self._engine.give_back()
            if hasattr(self._module, "input_grad"):
                self._module.input_grad = self._input_grad
        return self._module

    @property
    def num_replicas(self) -> int:
        """Number of ranks that share the rows."""
        return self._engine.data.size

    def set_training(self, training: bool) -> None:
        """Choose training or evaluation."""
        super().set_training(training)
        set_training(self._module, training)

    def step_picture(self, path: str | os.PathLike[str]) -> None:
        """Draw what each rank did in the last :meth:`train_step`. Collective over the mesh.

        The first rank of the mesh writes an SVG: a row for each rank, in which forwards, backwards
        and waiting are boxes, and the reductions of buckets run beside them.

        Args:
            path: The file, which ends in .svg.

        Raises:
            TraceError: On every rank, if the tracers do not hold a whole step, or `path` does not
                end in .svg.
            OSError: On the first rank, if the file cannot be written.

        Cost:
            As of :meth:`PipelineParallel.step_report`.
        """
        if Path(path).suffix.lower() != ".svg":
            raise TraceError(f"the picture of a step is an SVG: {path} must end in .svg")
        engine, mesh = self._engine, self._engine.mesh
        events, problem = last_step(gather_events(mesh, engine.tracer)), None
        starts = {one.rank: one.start_s for one in events[::-1] if one.category == "forward"}
        events = [one for one in events if one.start_s >= starts.get(one.rank, float("inf"))]
        if mesh.rank == 0 and not events:
            problem = TraceError(
                "there is no whole step of training in the tracers: make the model with "
                "tracer=mm.Tracer() on every rank, and draw after train_step"
            )
        agree(mesh.group(), Call("step picture", WORLD), problem=problem)
        if mesh.rank == 0:
            title = f"Training step {engine.step} on {mesh.dims_text}"
            Path(path).write_text(timeline_svg(events, title=title), encoding="utf-8")

    def __repr__(self) -> str:
        stage = f", stage {self._engine.stage}" if self._engine.stage else ""
        return f"<DataParallel of {self.num_replicas} replicas of {self._module!r}{stage}>"


# -- sharded training -----------------------------------------------------------------------------


M = TypeVar("M", bound=ParallelModel)


@overload
def fully_shard(
    model: SupportsLayer,
    mesh: DeviceMesh,
    dim: str | None = ...,
    stage: int = ...,
    *,
    hybrid: bool = ...,
    **options: Any,
) -> DataParallel: ...


@overload
def fully_shard(
    model: M, mesh: DeviceMesh, dim: str | None = ..., stage: int = ..., *, hybrid: bool = ...
) -> M: ...


def fully_shard(
    model: SupportsLayer | ParallelModel,
    mesh: DeviceMesh,
    dim: str | None = None,
    stage: int = 3,
    *,
    hybrid: bool = False,
    **options: Any,
) -> ParallelModel:
    """Divide a model's parameters, gradients and optimizer state among its replicas. Collective.

    Each lies in flat memory, of which every replica has one part, as in PyTorch's ``fully_shard``
    and ZeRO (Rajbhandari et al. 2020):

    ====== ===================== =========================== =======================
    stage  optimizer state       gradients                   parameters
    ====== ===================== =========================== =======================
    0      all                   all                         all
    1      its part              all                         all
    2      its part              its part                    all
    3      its part              its part                    its part
    ====== ===================== =========================== =======================

    At stages 2 and 3 the gradients of a bucket are whole from when backward makes them to when they
    are reduced: those of at most three buckets, the first step's and those added up over several
    microbatches or under :meth:`ParallelModel.no_sync` aside. At stage 3 the ranks of one node have
    the parameters once, each rank its part, and read those of the others in place: nothing is
    gathered. Over several nodes, and on devices, each rank has its part, and the parameters of a
    layer are gathered while the layer before it runs, forward and backward, and let go after it;
    a replica that has fewer rows than others runs microbatches of no rows with them. With `hybrid`
    each node, and each device, has all parameters once, and new values are gathered after a step,
    as in PyTorch's hybrid sharding. So it is for parameters that several stages share and those of
    PyTorch's modules, and for frozen ones, which are not divided over nodes.

    The model must be trained by a :class:`ParallelOptimizer`, which takes the stage over; it is
    called once, for the whole model, not layer by layer. All else is as without, with the same
    result up to the order of sums; pipelines, tensor and sequence parallelism,
    tied and frozen parameters, accumulation, clipping and loss scaling work; states are whole, and
    load at any stage on any mesh. ``parameter.grad`` is None between steps, and ``parameter.data``
    at stage 3 is memory that all ranks of the node see: what one of them writes, all have. It is
    given back by :meth:`DataParallel.into_inner`, or when the mesh is closed. Where parameters are
    gathered, ``parameter.data`` is None outside of their layer's turn:
    :meth:`ParallelModel.gathered` has all of them for a moment, and with the mesh they are gone, so
    take states or the layers out before it is closed. Layers of one's own then also get
    microbatches of no rows, on replicas that have fewer than others.

    Args:
        model: A layer, of which a :class:`DataParallel` is made; or such a model, or a
            :class:`PipelineParallel`, which is divided as it is.
        mesh: The mesh.
        dim: The dim of the replicas; None is ``"dp"`` for a layer, and that of a model.
        stage: What is divided.
        hybrid: Whether each node has all parameters at stage 3. Else they are let go after each
            forward, too (PyTorch's ``reshard_after_forward``).
        options: Those of :class:`DataParallel`, for a layer.

    Returns:
        The model.

    Raises:
        ModuleError: On every rank, if `stage` is none, or less than that of the model; if the model
            is on another mesh, has its replicas along another dim, or an optimizer already.
        ModuleStateError: On every rank, if gradients are being added up.
        MismatchError: On every rank, if the ranks name different stages.

    Example:
        >>> model = mm.fully_shard(net, mesh, loss=nn.cross_entropy)
        >>> optimizer = mm.ParallelOptimizer(optim.AdamW(model.parameters(), lr=3e-4), model)
        >>> for x, target in batches:
        ...     loss = model.train_step(x, target, optimizer=optimizer)
    """
    if "reshard_after_forward" in options:
        raise ModuleError(
            "fully_shard: reshard_after_forward is hybrid here: parameters are let go after each "
            "forward and backward, but with hybrid=True each node keeps them"
        )
    if not isinstance(model, ParallelModel):
        model = DataParallel(model, mesh, "dp" if dim is None else dim, **options)
    elif options:
        raise ModuleError(
            f"fully_shard: the options {sorted(options)} are for a layer, of which a DataParallel "
            f"is made; this is a {type(model).__name__}, which has its own"
        )
    model._engine.shard(stage, mesh, dim, hybrid)
    return model
