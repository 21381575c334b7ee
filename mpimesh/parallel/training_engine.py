"""The state that a model cut over ranks keeps between its steps."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Protocol
from weakref import ReferenceType

import numpy as np

from mpimesh.arguments import as_flag, as_int, shown
from mpimesh.arrays import Array, HostArray, to_numpy
from mpimesh.arrays.memory import ArrayPool
from mpimesh.errors import (
    MismatchError,
    ModuleError,
    ModuleStateError,
    MpimeshError,
    ScheduleError,
)
from mpimesh.nn import Parameter
from mpimesh.nn.containers import is_plain
from mpimesh.nn.parameter import Buffer
from mpimesh.optim import LossScaler
from mpimesh.parallel.bucket import STAGES, SharedValues, share_frozen
from mpimesh.parallel.bucket_plan import Plan
from mpimesh.parallel.buckets import GradientBuckets
from mpimesh.parallel.checked import CHECKED, Trainer, agree_options
from mpimesh.parallel.executor import Executor
from mpimesh.parallel.header import StepExchanges, fingerprint
from mpimesh.parallel.links import Links
from mpimesh.parallel.microbatch import check_microbatches
from mpimesh.parallel.plans import Options, Plans
from mpimesh.parallel.replicas import (
    agree_together,
    agree_values,
    check_dims,
    digest,
    group_along,
)
from mpimesh.parallel.split_layers import LayerValues, TensorModel, who_holds
from mpimesh.parallel.stage import (
    PipelineStage,
    Ties,
    agree_on_trained,
    check_stages,
    find_ties,
    give_values,
    is_used_again,
    named_buffers,
    named_places,
    uses_of,
)
from mpimesh.parallel.task import Interface, Task, input_title
from mpimesh.parallel.whole_model import WholeModel
from mpimesh.runtime import DeviceMesh, ProcessGroup
from mpimesh.runtime.agreement import agree, agree_alike
from mpimesh.runtime.call import Call
from mpimesh.trace import NULL_TRACER, Tracer

__all__ = ["TrainingEngine"]

_NO_BUCKETS = (
    "the gradient buckets could not be made anew, and this rank has none by which it would stay "
    "equal to its replicas: end the job, or close the mesh on all ranks and make mesh and model "
    "anew"
)

_GIVEN_BACK = (
    "into_inner() has given the model back, which this object can train no more: make a new "
    "DataParallel of it on all ranks"
)

_FIRST_VALUES = (
    "give broadcast=True to start with the values of the first replica, or make the layers with "
    "the same values on all ranks: PyTorch's after torch.manual_seed(...) with one seed"
)


class ModelOptimizer(Protocol):
    """The part of a :class:`~mpimesh.ParallelOptimizer` that the model which it trains uses."""

    @property
    def scaler(self) -> LossScaler | None:
        """The scaler of the losses."""

    @property
    def loss_scale(self) -> float:
        """The factor that losses are multiplied by now."""

    def step(self) -> object:
        """Change the parameters. Collective."""

    def check_step(self) -> None:
        """Return if this rank can step by the sums that are to come, else raise. Local."""

    def step_together(self) -> None:
        """Change the parameters, as all ranks can. Collective."""

    def clip_grad_norm(self, max_norm: float) -> float:
        """Have the next step clip the gradients. Collective."""

    def release(self) -> Callable[[], None]:
        """Return what goes on with new buckets, collectively, once they are made. Local."""


class TrainingEngine:
    """A model's stages, replicas and buckets on one rank.

    Making it is collective over `scope`.

    Args:
        stages: All stages, on every rank.
        mesh: The mesh.
        scope: The ranks that step together, and fail together.
        pipe: The ranks of this rank's pipeline, in `scope`.
        data: The replicas of this rank's stages, in `scope`.
        counts_loss: Whether the loss of this rank's pipeline counts. Along other dims of the mesh
            the ranks repeat each other, and one of them counts.
        options: The rest.

    Attributes:
        step: Number of training steps done; what dropout draws depends on it.
        is_step_known: Whether `step` was set, or a step was done.
        checked_optimizer: The optimizer whose parameters were looked at last.
        first_values: Whether no step has compared the parameters with those of other replicas since
            they were made or loaded.
        first_forward: Whether no step without training has compared the values of its batch.
        loss_share: What a step's loss is multiplied by, which is one of several.
        checks: Whether ranks compare what they need not.
        trainer, loaded: For that: its optimizer, and a digest of the states that were loaded.
        adder: The object whose steps are being taken, if one adds up gradients of several; None
            for the model by itself.
        added_by: The adder of the gradients that are being added up.
        why_no_step: Why this rank may start nothing collective; empty if it may.
        is_given_back: Whether the model has been taken out of here.
        interfaces: What stages give to each other, by kind of input.
        tasks: What steps were planned, by the signature of their batch.
        input_names: The names of all inputs that enter at stages of their own.
        library: Whose arrays travel between ranks: CuPy if that of all ranks is CuPy and can stay
            on the devices, else NumPy.
        links: The links to the stages of other ranks.
        executor: Runs this rank's part of a step.
        ties: The parameters that several ranks of a pipeline hold.
        stage: How much of gradients and values each replica has, 0 to 3.
        is_stage_chosen: Whether it was chosen, be it 0.
        optimizer: What the model is trained by, if that needs to know how it is cut.
        tensor: The layers that are split over a group of ranks.
        layer_values: The values that are here only while their layers run.
        frozen_values: Those of frozen parameters that other ranks of the node read, too.
        titles: The names of all inputs in messages: ``x``, and those that enter at stages.
        exchanges: What the ranks tell each other at the start and the end of each step.
    """

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        mesh: DeviceMesh,
        *,
        scope: ProcessGroup,
        pipe: ProcessGroup,
        data: ProcessGroup,
        counts_loss: bool,
        options: Options,
    ) -> None:
        self.mesh = mesh
        self.scope = scope
        self.pipe = pipe
        self.data = data
        self.counts_loss = counts_loss
        self.checks = bool(mesh._core.context.settings.checks)
        self.tracer: Tracer = NULL_TRACER
        if isinstance(options.tracer, Tracer):  # any other is refused below
            self.tracer = options.tracer
            self.tracer.join(mesh.rank)
        self.step = 0
        self.is_step_known = False
        self.checked_optimizer: object = None
        self.first_values = self.first_forward = True
        self.loss_share = 1.0
        self.trainer, self.loaded = Trainer(), ""
        self.adder: ReferenceType[object] | None = None
        self.added_by: ReferenceType[object] | None = None
        self.optimizer: ModelOptimizer | None = None
        self.frozen_values: list[SharedValues] = []
        self._is_hybrid = self.is_given_back = False
        self.layer_values = LayerValues()
        self.why_no_step = ""
        self.interfaces: dict[tuple[bool, tuple[int, ...]], dict[int, Interface]] = {}
        self.tasks: dict[Hashable, Task] = {}
        self.pool = ArrayPool(lambda nbytes: mesh.shared_empty(nbytes, np.uint8))
        self._in_backward: set[int] = set()  # local stages to whose gradients more may come
        problem: MpimeshError | None = None
        try:
            rule = self._plan(stages, options)
        except MpimeshError as error:
            # Its text may be of this rank.
            problem, rule = error, f"refused with a {type(error).__name__}"
        try:
            with scope._core.progress.keeping(problem):
                agree(scope, Call("pipeline", scope.name, rule=rule))
        except MismatchError as error:
            raise error from problem
        if problem is not None:
            raise problem
        if self.checks:
            agree_options(self.stages, scope)
        ties = find_ties(self.stages, self.plans.placement)
        self.xp = options.xp
        self.links = Links(
            pipe,
            self.plans.placement,
            self.plans.edges,
            pool=self.pool,
            traffic=mesh.traffic(),
            tracer=self.tracer,
        )
        self.library = self._join_links()
        self.executor: Executor | WholeModel
        reduce_grad, tracer, xp = self.reduce_gradients, self.tracer, self.xp
        if len(self.stages) == 1:
            self.executor = WholeModel(self.stages[0], reduce_grad, tracer=tracer, xp=xp)
        else:
            self.executor = Executor(
                self.local,
                self.plans.edges,
                links=self.links,
                reduce_grad=reduce_grad,
                tracer=tracer,
                xp=xp,
            )
        self.ties = Ties(ties, mesh=mesh, pipe=pipe, data=data)
        everything = [parameter for _, parameter, _ in self._named]
        self.tensor.make_groups(mesh, scope, data, everything, [tie.parameter for tie in ties])
        if not is_used_again(self.stages):
            # Nobody reads the gradient of the model's input.
            self.stages[0].input_grad = False
        give_values(self.stages, self.local, seed=options.seed, dtype=options.dtype, xp=options.xp)
        if options.broadcast:
            self._broadcast()
        self.ties.agree(values=True, rule=f", bucket_bytes {options.bucket_bytes}")
        self.titles = ["x", *map(input_title, self.input_names)]
        inputs, more = len(self.titles), len(CHECKED) if self.checks else 0
        self.exchanges = StepExchanges(
            scope, inputs, self.places, data.size, more, codes=pipe.size == 1
        )
        self.stage = options.stage
        self.is_stage_chosen = False
        self._new_buckets = partial(self._buckets_of, options)
        self.buckets = self._new_buckets(None)
        try:
            agree_together(scope, self._questions_of_values(self._buffers(), _FIRST_VALUES))
        except MismatchError:
            self.buckets.close()
            raise

    # -- what is where: local -------------------------------------------------------------

    @property
    def is_first(self) -> bool:
        """Whether this rank holds the first stage."""
        return 0 in self.local

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the last stage."""
        return len(self.stages) - 1 in self.local

    @property
    def loss_scale(self) -> float:
        """Factor of losses, and so of gradients."""
        return 1.0 if self.optimizer is None else self.optimizer.loss_scale

    @property
    def scales_losses(self) -> bool:
        """Whether there is a loss scale, of whatever size now."""
        return self.optimizer is not None and self.optimizer.scaler is not None

    @property
    def shares_values(self) -> bool:
        """True if replicas have values of parameters in memory that others of them see, too."""
        return self.stage == 3 and self.data.size > 1

    @property
    def why_no_optimizer(self) -> str:
        """Why the optimizer that steps this model must be a ParallelOptimizer; empty if not."""
        if self.optimizer is not None or not self.stage or self.data.size == 1:
            return ""
        divided = ("the state of the optimizer", "gradients", "gradients and parameters")
        return (
            f"the replicas divide {divided[self.stage - 1]}, so that only a ParallelOptimizer can "
            "train them: mm.ParallelOptimizer(optimizer, model), made before the first step"
        )

    @property
    def replicas_are_all(self) -> bool:
        """Whether sums over the replicas go among the ranks that agree on steps."""
        return 1 < self.data.size == self.scope.size

    @property
    def waiting(self) -> list[TensorModel | LayerValues]:
        """Those whose layers wait for other ranks within a step. Alike on all ranks."""
        return [
            *([] if self.tensor.group is None else [self.tensor]),
            *([self.layer_values] if self.layer_values.meets else []),
        ]

    @property
    def meets_at_end(self) -> bool:
        """True if the ranks need nothing of each other before the end of a step.

        Then its status can compare what they were given. Alike on all of them, whatever that is.
        """
        return (
            self.pipe.size == 1
            and not self.checks
            and not self.tensor.is_split
            and not self.layer_values.meets
            and not self.buckets.overlaps
        )

    @property
    def first_trained(self) -> int:
        """The first stage with a parameter that is not frozen; their number if there is none."""
        for _, parameter, numbers in self._named:  # in the order of the stages
            if parameter.requires_grad:
                return numbers[0]
        return len(self.stages)

    def named_parameters(self, *, everywhere: bool = False) -> list[tuple[str, Parameter]]:
        """Return parameters, each once, named as in one Sequential of all layers.

        Args:
            everywhere: Also those of stages that have no memory here.
        """
        return [
            (name, parameter)
            for name, parameter, numbers in self._named
            if everywhere or not self.local.keys().isdisjoint(numbers)
        ]

    def named_buffers(self, *, everywhere: bool = False) -> list[tuple[str, Buffer]]:
        """Return buffers as :meth:`named_parameters` does parameters."""
        return [
            (name, buffer)
            for name, buffer, numbers in named_buffers(self.stages)
            if everywhere or not self.local.keys().isdisjoint(numbers)
        ]

    @property
    def names(self) -> dict[int, str]:
        """The names of this rank's parameters, by their ids."""
        return {id(parameter): name for name, parameter in self.named_parameters()}

    def everywhere(self, part: Array | None, label: str) -> HostArray:
        """Return an array that one rank of the pipeline has, to each of them. Collective."""
        whole: HostArray = to_numpy(self.pipe.broadcast(part, root=None, label=label).resolve())
        return whole

    def parameters_to_give(self) -> dict[str, Parameter]:
        """Return this rank's parameters, but for those that an earlier rank has, too. Local."""
        copies = {id(parameter) for parameter in self.ties.copies}
        return {name: one for name, one in self.named_parameters() if id(one) not in copies}

    def set_step(self, step: object) -> None:
        """Go on counting training steps from `step`. Local.

        Raises:
            ModuleError: If it is no whole number of at least 0.
        """
        self.step = as_int(step, "step", ModuleError, least=0)
        self.is_step_known = True

    @property
    def places(self) -> int:
        """Number of parts of the model on the ranks that step together."""
        split = self.tensor.group
        return self.pipe.size * (1 if split is None else split.size)

    @property
    def place(self) -> int:
        """The parts of these that this rank holds."""
        split, mine = self.tensor.group, self.pipe.rank or 0
        return mine if split is None else mine * split.size + (split.rank or 0)

    def digests(self) -> dict[str, str]:
        """Return what tells the values of this rank's parameters from others. Reads them once.

        But for those of which each replica has its part.
        """
        if self.data.size == 1:
            return {}
        named = self.named_parameters()
        return {name: digest(parameter) for name, parameter in named if parameter.data is not None}

    def check_ready(self) -> None:
        """Return if this rank may do something with the others. Local; all that is collective asks.

        Raises:
            ModuleStateError: On this rank, if a step is under way, or was left by this rank alone:
                what it sends would meet the rest of that step. Or if the model was given back.
        """
        why = _GIVEN_BACK if self.is_given_back else self.why_no_step
        if why:
            raise ModuleStateError(f"rank {self.mesh.rank}: {why}")

    def give_back(self) -> None:
        """Let go of the parameters, and refuse everything from now on.

        Local, but where ranks have the values once: there each gets them for itself, collectively.
        """
        shared = self._shared_values()
        if self.layer_values.shards and self.mesh.closed:
            raise ModuleStateError(
                f"rank {self.mesh.rank}: the replicas divide the values of the model, and cannot "
                "gather them any more: call into_inner() before the mesh is closed"
            )
        if self.shares_values:
            barrier = partial(self.scope.barrier, label="values that are given back")
            if not self.mesh.closed:
                barrier()  # no rank writes any more
            self.layer_values.restore()
            for _, parameter in self.named_parameters():
                parameter.data = parameter.data.copy()
            if not self.mesh.closed:
                barrier()  # no rank reads any more
        self.buckets.close()
        _release(shared)
        self.is_given_back = True

    def _shared_values(self) -> list[tuple[ProcessGroup, Array]]:
        """Return the arrays of values that ranks of a node have once, each with its group."""
        shards = [
            (bucket.group, bucket.shard.values)
            for bucket in self.buckets.buckets
            if bucket.shard is not None and self.stage == 3 and bucket.shard.values is not None
        ]
        return [*shards, *((self.data, shared.memory) for shared in self.frozen_values)]

    # -- in a step --------------------------------------------------------------------------

    def begin_gradients(
        self, num_microbatches: int, check_abort: Callable[[], None], *, holds: bool
    ) -> None:
        """Announce the backwards of a step, which `check_abort` raises to leave. Local.

        With `holds` no sum starts before the step's status.

        Raises:
            ModuleStateError: If gradients of another adder wait, which would be mixed with these.
        """
        if self.buckets.begun and self.adder is not self.added_by:
            theirs, mine = (
                "an Accumulation" if adder else "the model under no_sync()"
                for adder in (self.added_by, self.adder)
            )
            raise ModuleStateError(
                f"gradients of steps of {theirs} were being added up, {self.buckets.begun} by now, "
                f"and a step of {mine} would mix its own with them: before it take the steps that "
                "are missing, or flush(), or give them up by zero_grad(), as this error did"
            )
        self.added_by = self.adder
        self.buckets.begin(num_microbatches, check_abort=check_abort, holds=holds)
        self._in_backward = set(self.local)

    def reduce_gradients(self, stage: int) -> None:
        """Start to sum the gradients of a local stage, to which nothing more comes from it. Local.

        A parameter that stands in other local stages, too, waits for the last of them. On every
        replica the buckets start in their own order, whatever the order of the stages.
        """
        left = self._in_backward
        left.discard(stage)
        self.buckets.complete(
            parameter
            for parameter, numbers in self._parameters_of[stage]
            if left.isdisjoint(numbers)
        )

    # -- between steps ----------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add up gradients without reducing them, in the buckets that there are on entry. Local."""
        with self.buckets.no_sync():
            yield

    def shard(self, stage: object, mesh: object, dim: object, hybrid: object) -> None:
        """Divide the model among its replicas, before it has an optimizer. Collective.

        Raises:
            ModuleError: On every rank, if it cannot be on any.
            MismatchError: On every rank, if the ranks name different stages.
        """
        self.check_ready()
        number, self._is_hybrid = agree_alike(
            self.scope,
            "fully_shard",
            lambda: self._checked_stage(stage, mesh, dim, hybrid),
        )
        self.buckets.agree_on_closed(self.scope)
        self.divide(number)
        self.is_stage_chosen = True

    def _checked_stage(
        self, stage: object, mesh: object, dim: object, hybrid: object
    ) -> tuple[int, bool]:
        number = as_int(stage, "stage", ModuleError, least=0)
        if number not in STAGES:
            raise ModuleError(f"stage must be one of ZeRO's, 0 to 3, got {number}")
        if number < self.stage:
            raise ModuleError(
                f"stage {number} is less than that of the model, {self.stage}, whose parts stay "
                "divided: make another model"
            )
        if mesh is not self.mesh:
            raise ModuleError(
                f"the model was made on one mesh, {self.mesh.dims_text}, and is to be divided on "
                f"another, {getattr(mesh, 'dims_text', shown(mesh))}: give it the first"
            )
        if dim is not None:
            along = group_along(self.mesh, dim, "dp", "dim")
            if tuple(along.ranks) != tuple(self.data.ranks):
                raise ModuleError(
                    f"a model is divided among its replicas, and along {dim!r} there are others "
                    f"({self.mesh.dims_text}): leave dim= out"
                )
        if self.optimizer is not None:
            raise ModuleError(
                "the model has a ParallelOptimizer, which knows how it is divided: call "
                "fully_shard() before that is made, or give it zero="
            )
        is_hybrid = as_flag(hybrid, "hybrid", ModuleError)
        if is_hybrid and number < 3:
            raise ModuleError(f"hybrid=True is for stage 3, which divides values, got {number}")
        return number, is_hybrid

    def divide(self, stage: int) -> None:
        """Divide gradients and values of the replicas from now on. Collective; between steps.

        Args:
            stage: 0 to 3, not less than before; see :mod:`mpimesh.parallel.bucket`.
        """
        if stage:
            self.layer_values.restore()
            # A stage with a forward of its own says nothing of what it runs.
            by_layer = not self._is_hybrid and all(map(is_plain, self.stages))
            self.buckets.divide(stage, by_layer=by_layer)
        self.stage = stage
        if stage == 3:
            parameters = [parameter for _, parameter in self.named_parameters()]
            self.frozen_values = share_frozen(parameters, self.data)
            self.layer_values.bring(
                self.local.values(), self.buckets.buckets, self.scope, self.mesh, self.data.name
            )

    def rebuild_buckets(self, plan: Plan | None = None) -> None:
        """Make the buckets anew, after parameters were frozen or unfrozen or by a plan. Collective.

        Without a plan those over the replicas are planned by size.

        Raises:
            MismatchError: On every rank, with the buckets as before, if ranks that hold the same
                parameters do not train the same of them.
            ModuleStateError: On every rank, with the buckets as before, if on any gradients are
                being added up. On this rank, if a step was left, or such a rebuilding.
        """
        self.check_ready()
        self.buckets.agree_on_closed(self.scope)
        self.ties.agree(values=False)
        agree_on_trained(self._named, self.local, self.scope)
        resume = None if self.optimizer is None else self.optimizer.release()
        self.why_no_step = _NO_BUCKETS
        shared = self._shared_values()
        self.layer_values.restore()
        self.buckets.close()
        self.buckets = self._new_buckets(plan)
        if self.shares_values:
            # What has moved no rank reads any more; what has not, such as values frozen before, has
            # moved with the frozen ones.
            self.scope.barrier(label="new values of parameters")
            _release(shared)
        if resume is not None:
            resume()
        self.why_no_step = ""

    def check_values(self, cure: str = "") -> None:
        """Return if all ranks that hold the same values hold the same bits. Collective.

        Raises:
            MismatchError: On every rank, naming a parameter that differs.
        """
        with self.layer_values.whole():
            ties = partial(self.ties.agree, values=True)
            agree_together(self.scope, [ties, *self._questions_of_values(cure=cure)])

    # -- helpers ----------------------------------------------------------------------------

    def _plan(self, stages: Sequence[PipelineStage], options: Options) -> str:
        """Take in what was given; return what must be alike on all ranks. Local."""
        self.stages = check_stages(stages)
        options.check()
        self.num_microbatches = check_microbatches(options.num_microbatches)
        try:
            self.plans = Plans(
                options.schedule,
                len(self.stages),
                self.num_microbatches,
                num_ranks=self.pipe.size,
                rank=self.pipe.rank or 0,
                skips=[(source, stage.stage_id) for stage in self.stages for source in stage.skips],
            )
        except ScheduleError as error:
            raise ScheduleError(f"{error}{options.advice}") from None
        self.input_names = sorted({name for stage in self.stages for name in stage.inputs})
        self.local = {number: self.stages[number] for number in self.plans.stages}
        self._named = named_places(self.stages)
        self._parameters_of = {
            number: [(parameter, into) for _, parameter, into in self._named if number in into]
            for number in self.local
        }
        self.tensor = TensorModel(self.stages)
        check_dims(self.mesh, stages=self.pipe, replicas=self.data, parts=self.tensor.group)
        return self._rule(options)

    def _questions_of_values(
        self, beside: Sequence[tuple[str, Array]] = (), cure: str = ""
    ) -> list[Callable[[], None]]:
        named = self.named_parameters()
        return [
            partial(agree_values, [*named, *beside], self.data, cure=cure),
            partial(self.tensor.agree_values, named),
        ]

    def _join_links(self) -> ModuleType:
        """Collective: tell where rows of loans begin, and whether this rank moves device memory.

        Returns:
            Whose arrays travel between the ranks of all pipelines.
        """
        scope = self.scope
        on_device = self.xp is not np and self.pipe._core.moves_device_memory
        mine = {"on_device": on_device, "rows": self.links.lend()}
        everyone = agree(scope, Call("pipeline", scope.name), mine)
        library = self.xp if all(one["on_device"] for one in everyone) else np
        place_of = {rank: place for place, rank in enumerate(self.pipe.ranks)}
        rows = {
            place_of[rank]: one["rows"]
            for rank, one in zip(scope.ranks, everyone, strict=True)
            if rank in place_of
        }
        self.links.borrow(rows, library)
        if library is not np and self.pipe.size > 1:
            self.pipe._core.side(library).prepare()  # a pipe may have no collective that does it
        return library

    def _rule(self, options: Options) -> str:
        layers = " | ".join(
            ", ".join([*(type(layer).__name__ for layer in stage.layers), *map(repr, stage.inputs)])
            for stage in self.stages
        )
        shapes = [
            (name, who_holds(parameter), parameter.requires_grad, numbers)
            for name, parameter, numbers in self._named
        ]
        return (
            f"stages {layers}; {len(shapes)} parameters, digest {fingerprint(str(shapes)):x}; "
            f"schedule {self.plans.name} of {self.num_microbatches} microbatches on ranks "
            f"{self.plans.placement}, skips {list(self.plans.edges.skips)}; "
            f"seed {options.seed}, {np.dtype(options.dtype)}, gradients {options.grad_dtype}"
        )

    def _broadcast(self) -> None:
        for name, parameter in self.named_parameters():
            values = parameter.value()
            self.data.broadcast(values, out=values, label=f"parameter {name}").resolve()
        for name, values in self._buffers():
            values[...] = self.data.broadcast(values, label=name).resolve()

    def _buffers(self) -> list[tuple[str, Array]]:
        named = [(f"buffer {name}", one) for name, one in self.named_buffers()]
        return [(name, one.value()) for name, one in named if not one.problem()]

    def _buckets_of(self, options: Options, plan: Plan | None) -> GradientBuckets:
        named = self.named_parameters()
        buckets = GradientBuckets(
            [parameter for _, parameter in named],
            self.data,
            mesh=self.mesh,
            bucket_bytes=options.bucket_bytes,
            names=[name for name, _ in named],
            groups=[
                self.tensor.group_of(parameter) or self.ties.group(parameter)
                for _, parameter in named
            ],
            overlap=options.overlap,
            tracer=self.tracer,
            plan=plan,
            grad_dtype=options.grad_dtype,
            uses=uses_of(self.local.values()),
        )
        if self.stage:
            self.buckets = buckets
            self.divide(self.stage)
        return buckets


def _release(shared: list[tuple[ProcessGroup, Array]]) -> None:
    for group, values in shared:  # which no rank of the group reads any more
        group._core.node_release(values)
