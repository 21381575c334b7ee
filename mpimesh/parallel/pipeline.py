"""A model cut into stages over the ranks of one dim, and repeated along another."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import numpy as np

from mpimesh.arguments import as_flag, as_int
from mpimesh.arrays import DTypeLike
from mpimesh.errors import MpimeshError, ScheduleError, TraceError
from mpimesh.nn import Loss, Sequential, SupportsLayer
from mpimesh.parallel.batch import Batch, Rows, SupportsStep, check_loss
from mpimesh.parallel.buckets import BUCKET_BYTES
from mpimesh.parallel.layer_costs import REPEATS, partition_layers
from mpimesh.parallel.microbatch import Tree, check_microbatches
from mpimesh.parallel.model import ParallelModel
from mpimesh.parallel.plans import Options, ScheduleLike
from mpimesh.parallel.replicas import group_along, live_mesh
from mpimesh.parallel.stage import PipelineStage
from mpimesh.parallel.step import Step, last_step
from mpimesh.parallel.training_engine import TrainingEngine
from mpimesh.runtime import DeviceMesh
from mpimesh.runtime.agreement import agree
from mpimesh.runtime.call import Call
from mpimesh.runtime.events import gather_events
from mpimesh.schedule import (
    Costs,
    Schedule,
    Timetable,
    action_overhead_s,
    measured_step,
    predicted_step,
    schedule_svg,
)
from mpimesh.trace import Event, Tracer, svg

__all__ = ["PipelineParallel", "StepReport"]


class PipelineParallel(ParallelModel):
    """A pipeline of stages over the ranks along `dim`, and replicas of it along `data_dim`.

    Making it, :meth:`train_step`, :meth:`forward` and :meth:`clip_grad_norm` are collective over
    the mesh. The batch is the *global* one, the same on every rank that is given it: the rows
    are dealt to the replicas, and each replica's rows to microbatches, by the rules of
    :mod:`mpimesh.parallel.microbatch`; or each rank gives its replica's rows. The loss is divided
    by what the global batch counts, so that any mesh, any number of microbatches and any schedule
    give the same loss and the same gradients, up to rounding.

    The schedule says how many stages a rank has, how long it is idle, and what it keeps.
    With ``num_microbatches`` M and S stages of equal time, one on each rank, ``"gpipe"`` and
    ``"1f1b"`` keep a rank idle for ``(S - 1) / (M + S - 1)`` of a step. Stage s keeps the
    activations of M microbatches with the first and of ``min(M, S - s)`` with the second. The
    others are idle for less or keep less, as the functions of :mod:`mpimesh.schedule` tell.

    One :class:`~mpimesh.nn.Parameter` may stand in several layers, of whatever stages: an output
    layer that has the weight of the embedding. It has one name, and the first values, of its first
    place in the model. Each rank that needs it has a copy, and with each step all copies get the
    same gradient, bit for bit: the sum over all its uses. It counts once in a norm and in a state,
    and optimizers keep the copies equal. The price is one all-reduce of the gradient over the
    ranks that hold it and their replicas, in place of that over the replicas; it begins when
    the backward of all ranks has ended. For each set of such ranks the mesh gets a group, called
    ``"tied ..."``. Freeze it on all ranks or on none.

    Layers may be split over the ranks of one dim more, see :func:`tensor_parallel`. For each set of
    ranks that have the same part of a parameter, such as a norm's on a split sequence, the mesh
    gets a group called ``"shared by ..."``; and if that dim is the whole mesh, a group
    ``"layers of ..."`` for what its layers move.

    Args:
        stages: All stages in order, on every rank. A rank gives memory to its own only.
        num_microbatches: Most microbatches of a replica's rows.
        mesh: The mesh. Ranks along its other dims repeat each other's work, or share it, where
            layers are split over them, such as a :class:`ColumnParallelLinear`.
        dim: The dim of the stages. A mesh without it is a pipeline of one rank.
        data_dim: The dim of the replicas; None is ``"dp"``, where the mesh has that and its ranks
            do not hold the stages. A mesh without it has one replica.
        loss: The loss to train by, unless a step is given another; only the last stage computes it.
        schedule: The name of one, see :func:`~mpimesh.schedule.make_schedule`: ``"1f1b"``,
            ``"gpipe"``, ``"zb1p"`` or ``"zb2p"`` with one stage for each rank; ``"interleaved"`` or
            ``"looped_bfs"`` with several; ``"zbv"``, ``"vhalf"``, ``"vmin"`` or ``"dualpipev"``
            with two; or ``"auto"``. Or a function of the numbers of stages and microbatches that
            gives a :class:`~mpimesh.schedule.Schedule`, such as
            :func:`~mpimesh.schedule.auto` with measured times. Or a schedule, for one number of
            microbatches.
        seed: Seed of first values and dropout; the values are those of one
            :class:`~mpimesh.nn.Sequential` of all layers. A layer whose parameters all have
            memory already is left as it is, and so is a parameter with memory that stands in
            several layers.
        dtype: Dtype of the parameters.
        grad_dtype: The dtype in which gradients are added up over microbatches and replicas, where
            it is wider than the parameter's own: ``"float32"`` keeps the sums of a float16 model
            from losing digits, for twice the memory and traffic of its gradients. That of the
            parameters if None; a narrower one has no effect, as no gradient loses digits by it.
        xp: `numpy` or `cupy`.
        bucket_bytes: Most bytes of a gradient bucket, see :class:`GradientBuckets`;
            :meth:`tune_buckets` finds a cut by measured times.
        overlap: Whether buckets are reduced while backward still runs.
        broadcast: Whether all replicas start with the values of the first. Else different values
            are an error.
        tracer: Records every action, wait and message of this rank.

    Raises:
        ScheduleError: If the stages are not numbered in order, or do not fit the mesh and
            schedule; or `num_microbatches` is less than 1.
        UnknownNameError: If there is no such dim or schedule.
        MeshError: If two of stages, replicas and split layers lie along one dim.
        MismatchError: On every rank, if the ranks make different pipelines, or replicas hold
            different values, or the copies of one parameter do.

    Example:
        >>> stages = [PipelineStage(0).add_layer(nn.Linear(64, 32)).add_layer(nn.ReLU()),
        ...           PipelineStage(1).add_layer(nn.Linear(32, 10))]
        >>> pipe = PipelineParallel(stages, 8, mesh=mesh)
        >>> optimizer = optim.SGD(pipe.parameters(), lr=0.1)
        >>> loss = pipe.train_step(x, target, loss=nn.cross_entropy)
        >>> optimizer.step()
    """

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        num_microbatches: int,
        *,
        mesh: DeviceMesh,
        dim: str = "pp",
        data_dim: str | None = None,
        loss: Loss | None = None,
        schedule: ScheduleLike = "1f1b",
        seed: int = 0,
        dtype: DTypeLike = np.float32,
        grad_dtype: DTypeLike | None = None,
        xp: ModuleType = np,
        bucket_bytes: int = BUCKET_BYTES,
        overlap: bool = True,
        broadcast: bool = False,
        tracer: Tracer | None = None,
    ) -> None:
        pipe = group_along(mesh, dim, "pp")
        if data_dim is None and dim == "dp":
            data = pipe.alone()
        else:
            data_dim = "dp" if data_dim is None else data_dim
            data = group_along(mesh, data_dim, "dp")
        check_loss(loss)
        self._loss = loss
        others = set(mesh.dim_names) - {dim, data_dim}
        advice = (
            ""
            if mesh.contains_dim(dim)
            else f"; the mesh {mesh.dims_text} has no dim {dim!r}, so that all stages lie on one "
            "rank: name the dim of the stages by dim=, or make the mesh with one, as in 'pp=2'"
        )
        self._engine = TrainingEngine(
            stages,
            mesh,
            scope=mesh.group(),
            pipe=pipe,
            data=data,
            counts_loss=not any(mesh.coord(other) for other in others),
            options=Options(
                num_microbatches=num_microbatches,
                schedule=schedule,
                seed=seed,
                dtype=dtype,
                grad_dtype=grad_dtype,
                xp=xp,
                bucket_bytes=bucket_bytes,
                overlap=overlap,
                broadcast=broadcast,
                tracer=tracer,
                advice=advice,
            ),
        )

    @staticmethod
    def partition(
        layers: Sequential | Sequence[SupportsLayer],
        num_stages: int,
        *,
        mesh: DeviceMesh,
        dim: str = "pp",
        times: Costs | Sequence[float] | None = None,
        x: Tree | None = None,
        dtype: DTypeLike = np.float32,
        xp: ModuleType = np,
        bytes_per_s: float | None = None,
        latency_s: float | None = None,
        repeats: int = REPEATS,
    ) -> list[PipelineStage]:
        """Cut layers into stages that take about equally long. Collective over the mesh.

        The slowest stage, which sets the pace of all, is as fast as any cut can make it; see
        :func:`mpimesh.schedule.partition` for what a stage takes. Its time is known from `times`,
        or measured with a microbatch `x`. All ranks get the same cut. The layers themselves go
        into the stages, and stay as they are: without memory, if they have none.

        Args:
            layers: All layers of the model in order, on every rank. A Sequential among them stays
                whole.
            num_stages: Number of stages: that of the ranks along `dim`, or for schedules with
                several stages on a rank a multiple of it.
            mesh: The mesh.
            dim: The dim of the stages, over whose ranks messages are timed.
            times: Seconds of each layer for a microbatch, forward and backward, and messages cost
                nothing; or what :func:`~mpimesh.parallel.measure_layers` has measured.
            x: A microbatch to measure with, instead of `times`; on every rank. An array, or a
                tuple or a dict of arrays, which the first layer gets; stages with ``inputs`` or
                ``skips`` are cut by hand.
            dtype: As in :func:`~mpimesh.parallel.measure_layers`, and so are all that follow.
            xp: `numpy` or `cupy`.
            bytes_per_s: How fast messages pass; None to measure it.
            latency_s: What a message takes beside that; None to measure it.
            repeats: How often each layer is run.

        Raises:
            ScheduleError: On every rank, if there are fewer layers than stages, `times` does not
                hold one for each layer, or there are both `times` and `x`, or neither.
            MismatchError: On every rank, if the ranks give different layers or options, or times
                that ask for different cuts.
            MpimeshError: On every rank, if measuring fails on any.

        Cost:
            One all-reduce of 40 bytes, and what measuring costs.

        Example:
            >>> layers = [nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 32), nn.Linear(32, 10)]
            >>> stages = PipelineParallel.partition(layers, 2, mesh=mesh, x=batch[:8])
            >>> pipe = PipelineParallel(stages, 8, mesh=mesh)
        """
        return partition_layers(
            layers,
            num_stages,
            times=times,
            x=x,
            mesh=live_mesh(mesh),
            dim=dim,
            dtype=dtype,
            xp=xp,
            bytes_per_s=bytes_per_s,
            latency_s=latency_s,
            repeats=repeats,
        )

    def train_step(
        self,
        x: Tree | None,
        target: Tree | None,
        *,
        loss: Loss | None = None,
        inputs: Mapping[str, Tree] | None = None,
        denominator: float | None = None,
        optimizer: SupportsStep | None = None,
        rows: Rows = "whole",
    ) -> float:
        """Compute loss and gradients of a batch. Collective.

        Afterwards the gradients are those of this step, or, after steps under
        :meth:`no_sync`, the sums with theirs. The optimizer's step is the caller's, unless
        `optimizer` is given: then it is done, too, which is the same bit for bit.

        Instead of an array, x, the target, an input, and what a stage makes, may be a tuple,
        or a dict with text keys, of arrays, nested: all with the same rows. Or the batch is given
        cut, as :class:`Microbatches` of any shapes, such as sequences of different lengths.

        Ranks that read their own rows, as with PyTorch's ``DistributedSampler``, give them as split
        arrays, ``mm.DTensor.from_local(x, mesh, "dp=S0")``, or as plain ones with
        ``rows="local"``. The step is then that of the rows of all replicas, one after the other, in
        loss, gradients and dropout; a replica may have any number of rows, or none. All ranks of a
        replica give the same rows.

        Shapes:
            x: (rows, ...), the global batch. May be None on ranks without the first stage.
            target: (rows, ...). May be None on ranks without the last stage.
            inputs[name]: (rows, ...). May be left out on ranks without a stage that takes it.

        Args:
            x: The inputs. May have fewer rows than replicas times microbatches; Microbatches may
                be as many as replicas times `num_microbatches`. DTensors are split by rows along
                the dim of the replicas, evenly or not, and lie whole along the others.
            target: What the loss compares the outputs with.
            loss: Such as ``nn.cross_entropy``; that given to the constructor if None. It gets what
                the last stage made, and the target. Ranks without the last stage need none.
            inputs: Inputs that enter at stages with those names, ``PipelineStage(i, inputs=...)``.
            denominator: What to divide the loss by instead of what this batch counts: give the
                rows of k batches together to accumulate over k steps.
            optimizer: That of this rank's parameters, of :mod:`mpimesh.optim`, or the model's
                :class:`ParallelOptimizer`; on every rank or on none. Its ``step()``
                is called once it is known that the step went well on every rank, and the
                gradients are summed: if a stage, the loss or a message failed anywhere, no
                parameter has changed. An error of ``step()`` itself is raised on its rank alone.
            rows: ``"local"`` if plain arrays hold the rows of this rank's replica, instead of the
                global batch.

        Returns:
            The mean loss over the global batch, the same on every rank; 0 for a batch of which the
            loss counts nothing, such as padding alone, whose gradients are 0.

        Raises:
            StageError: On every rank, if a stage, the loss or a message failed on any: with its
                rank, stage, microbatch and traceback. A :class:`StageShapeError` if an array had
                a wrong shape. The parameters are as before, the gradients are 0, and the next
                step works.
            ShapeError: On every rank, if a batch or an input is missing, or has no rows, or their
                rows differ.
            ScheduleError: On every rank, if there are more Microbatches than that.
            UnknownNameError: On every rank, if no stage takes an input of that name.
            MismatchError: On every rank, if the ranks were given different options or batches:
                their rows, shapes and dtypes are always compared, values of host arrays in the
                first step, and in each with ``MPIMESH_CHECKS`` on. Of own rows those of the ranks
                of a replica are compared.
            BudgetError: On every rank, if any received more than :meth:`DeviceMesh.budget` allows.
            ModuleError: On every rank, if there is no loss, if a DTensor lies otherwise, or an
                optimizer is given under :meth:`no_sync`. What the optimizer's own ``step()`` raises
                is raised on that rank alone.

        Cost:
            Each microbatch's activations and gradients once between neighbouring stages, but no
            gradients of arrays that are not floating; one all-reduce of the gradients over the
            replicas, for parameters that several ranks of a pipeline hold over all who do; and
            two all-reduces over all ranks, of 112 bytes and 32 for each named input at most. Of own
            rows one more, of 64 bytes and 16 for each named input for each replica. With
            ``MPIMESH_CHECKS`` on, each rank also reads its batch as a whole.
        """
        return Step(
            self._engine,
            Batch(
                training=True,
                x=x,
                target=target,
                inputs=inputs,
                loss=self._loss if loss is None else loss,
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
        inputs: Mapping[str, Tree] | None = None,
        denominator: float | None = None,
        rows: Rows = "whole",
    ) -> float:
        """Compute the loss of a batch, and nothing else. Collective over the mesh.

        As :meth:`forward`, nothing is saved for a backward, and dropout is the identity; gradients
        that are being added up stay as they are. The loss is computed where the outputs are, which
        no rank sends to another: with a :class:`VocabParallelCrossEntropy` nor within a layer.

        Shapes:
            x: (rows, ...), the global batch. May be None on ranks without the first stage.
            target: (rows, ...). May be None on ranks without the last stage.
            inputs[name]: (rows, ...). May be left out on ranks without a stage that takes it.

        Args:
            x: The inputs; an array, a tuple, a dict or Microbatches, as in :meth:`train_step`.
            target: What the loss compares the outputs with.
            loss: As in :meth:`train_step`.
            inputs: Inputs that enter at stages with those names.
            denominator: What to divide the loss by instead of what this batch counts: the rows of
                k batches together to add up the losses of k calls.
            rows: ``"local"`` if plain arrays hold the rows of this rank's replica.

        Returns:
            The mean loss over the global batch, the same on every rank.

        Raises:
            StageError: On every rank, as in :meth:`train_step`, and so do all errors.

        Cost:
            The activations once between neighbouring stages, and two all-reduces over all ranks of
            112 bytes and 32 for each named input at most. The loss's gradient is computed, too, for
            a loss has no other way to divide by a number; it is dropped at once.

        Example:
            >>> held_out = pipe.evaluate(x, target, loss=nn.cross_entropy)
        """
        return Step(
            self._engine,
            Batch(
                training=False,
                evaluating=True,
                x=x,
                target=target,
                inputs=inputs,
                loss=self._loss if loss is None else loss,
                denominator=denominator,
                rows=rows,
            ),
        ).run()

    def forward(
        self,
        x: Tree | None,
        *,
        inputs: Mapping[str, Tree] | None = None,
        everywhere: bool = False,
        rows: Rows = "whole",
    ) -> Tree:
        """Compute the outputs of a batch, microbatches streaming through the stages.

        Collective over the mesh. Nothing is saved for a backward, and dropout is the identity.

        Shapes:
            x: (rows, ...), the global batch. May be None on ranks without the first stage.
            inputs[name]: (rows, ...). May be left out on ranks without a stage that takes it.
            result: (rows, ...), in the order of the rows.

        Args:
            x: The inputs; an array, a tuple, a dict or Microbatches, as in :meth:`train_step`.
            inputs: Inputs that enter at stages with those names.
            everywhere: Give the result to every rank, not only to those of the last stage.
            rows: ``"local"`` if plain arrays hold the rows of this rank's replica.

        Returns:
            The outputs, built as the last stage makes them, on ranks of the last stage or
            everywhere; else None. For Microbatches those of each, as Microbatches. Where each
            replica has its own rows, those of this rank's replica alone; on a rank that gave
            a DTensor, as DTensors that are split in the same way if all ranks get the result.

        Raises:
            StageError: On every rank, as in :meth:`train_step`.

        Cost:
            The activations once between neighbouring stages; for each array of the output one
            all-gather over the replicas, if they were given the global batch, and with `everywhere`
            one broadcast over the stages.
        """
        return self._forward(x, inputs=inputs, everywhere=everywhere, rows=rows)

    def __call__(self, x: Tree | None) -> Tree:
        """Run :meth:`forward`."""
        return self.forward(x)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self._engine.stages)

    def stage(self, number: int) -> PipelineStage | None:
        """Return a stage, None if there is none of that number. It may have no memory here."""
        number = as_int(number, "number", ScheduleError)
        return self._engine.stages[number] if 0 <= number < self.num_stages else None

    @property
    def local_stages(self) -> tuple[PipelineStage, ...]:
        """The stages that this rank runs."""
        return tuple(self._engine.local.values())

    def schedule(self, num_microbatches: int | None = None, *, training: bool = True) -> Schedule:
        """Return what all ranks do in a step, of `training` or without backwards; no messages."""
        count = self.num_microbatches if num_microbatches is None else num_microbatches
        training = as_flag(training, "training", ScheduleError)
        return self._engine.plans.schedule(check_microbatches(count), training=training)

    def step_report(self) -> StepReport | None:
        """Compare the last :meth:`train_step` with what its schedule lets expect. Collective.

        The pipeline must have been made with a tracer on every rank. Of several replicas, that of
        the mesh's first rank is shown.

        Returns:
            On the first rank of the mesh when each rank computed what, and the same schedule
            simulated with the mean of the times that were measured; else None.

        Raises:
            TraceError: On every rank, if the tracers do not hold the whole step.

        Cost:
            One gather of about 60 bytes for each event in the tracers; clear them now and then.

        Example:
            >>> pipe.train_step(x, target, loss=nn.cross_entropy)
            >>> report = pipe.step_report()
            >>> if report is not None:
            ...     print(report)
        """
        engine = self._engine
        mesh = engine.mesh
        events = gather_events(mesh, engine.tracer)
        report, problem = None, None
        if mesh.rank == 0:
            try:
                report = self._report(events)
            except MpimeshError as error:
                problem = TraceError(
                    f"there is no whole step of training in the tracers: {error}; make the "
                    "pipeline with tracer=Tracer(mesh.rank) on every rank, and report after "
                    "train_step"
                )
        agree(engine.scope, Call("step report", engine.scope.name), problem=problem)
        return report

    def _report(self, events: Sequence[Event]) -> StepReport:
        """Return the report of the last step in the events of all ranks."""
        engine = self._engine
        everyone = list(engine.mesh.group().ranks)
        places = {everyone.index(rank): place for place, rank in enumerate(engine.pipe.ranks)}
        mine = [
            replace(event, rank=places[event.rank])
            for event in last_step(events)
            if event.rank in places
        ]
        count = len({event.microbatch for event in mine if event.category == "forward"})
        if not count:
            raise TraceError("no forward was recorded")
        schedule = engine.plans.schedule(count, training=True)
        measured = measured_step(schedule, mine, skips=engine.plans.edges.skips)
        return StepReport(engine.step, measured, predicted_step(measured))

    def step_picture(self, path: str | os.PathLike[str]) -> StepReport | None:
        """Draw what :meth:`step_report` returns, and return it. Collective.

        The first rank of the mesh writes an SVG: the step that was measured, and below it on the
        same time axis the predicted one.

        Raises:
            TraceError: On every rank, if the tracers do not hold the whole step, or `path` does not
                end in .svg.
            OSError: On the first rank, if the file cannot be written.
        """
        if Path(path).suffix.lower() != ".svg":
            raise TraceError(f"the picture of a step is an SVG: {path} must end in .svg")
        report = self.step_report()
        if report is not None:
            Path(path).write_text(report.to_svg(), encoding="utf-8")
        return report

    def __repr__(self) -> str:
        engine = self._engine
        return (
            f"<PipelineParallel of {self.num_stages} stages, {engine.plans.name}, "
            f"{self.num_microbatches} microbatches, {engine.data.size} replicas, here stages "
            f"{list(engine.local)}>"
        )


@dataclass(frozen=True, slots=True)
class StepReport:
    """A step of training as it was measured, and as its schedule predicts it.

    Attributes:
        step: Number of the step.
        measured: What the ranks of one pipeline did when, from the first computation to the last.
        predicted: The same schedule, simulated with the mean times that were measured; see
            :func:`~mpimesh.schedule.predicted_step`.
    """

    step: int
    measured: Timetable
    predicted: Timetable

    @property
    def overhead_s(self) -> float:
        """Seconds that a rank spent on an action beside computing and waiting, in the mean."""
        return action_overhead_s(self.measured)

    def to_svg(self) -> str:
        """Draw both below each other on one time axis."""
        schedule = self.measured.schedule
        title = (
            f"Training step {self.step}: {schedule.name}, {schedule.num_stages} stages, "
            f"{schedule.num_microbatches} microbatches"
        )
        tables = {"measured": self.measured, "predicted": self.predicted}
        return schedule_svg(tables, title=title)

    def __str__(self) -> str:
        lines = [
            f"step {self.step} {what} {svg.duration(float(one.step_s))}, of which a rank is idle "
            f"for {svg.duration(float(one.mean_bubble_s))}, {100 * one.bubble_fraction:.1f} %: "
            f"{one.mean_idle()}"
            for what, one in (("measured", self.measured), ("predicted", self.predicted))
        ]
        lines.append(f"each action cost {svg.duration(self.overhead_s)} beside its computation")
        return "\n".join(lines)
