"""An optimizer for a model that is cut over ranks: state divided among replicas, scaled losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from typing import Any

from mpimesh.arguments import as_int, shape_of, shown
from mpimesh.arrays import Array
from mpimesh.errors import ModuleError, ModuleStateError, MpimeshError, tell_elsewhere
from mpimesh.optim import LossScaler, Optimizer
from mpimesh.optim.factors import sum_of_squares
from mpimesh.optim.optimizer import TORCH_ATTRIBUTES
from mpimesh.parallel.model import ParallelModel, agreed_squares, problem_with_norm
from mpimesh.parallel.optimizer_shards import (
    Layouts,
    LentOptimizer,
    OptimizerShards,
    State,
)
from mpimesh.parallel.states import (
    agree_optimizers,
    agree_states,
    full_state,
    is_finite,
    optimizers_parts,
    optimizers_target,
    problem_with,
    why_no_step,
    why_not_written,
)
from mpimesh.runtime import DeviceMesh, ProcessGroup
from mpimesh.runtime.agreement import PlannedMax, agree, agree_alike
from mpimesh.store.modules import STEP
from mpimesh.store.parts import Parts, Saved, Value

__all__ = ["ParallelOptimizer"]

# What the ranks find before a step; the largest counts.
_OVERFLOWED = 1
_REFUSED = 2

_HALF_DONE = (
    "an update has raised, so that some parameters have done the last step, with their state, and "
    "others have not: load a state of both, by load_state_dict() of the model and then of this "
    "optimizer, on all ranks"
)


class ParallelOptimizer:
    """An optimizer of a :class:`DataParallel` or :class:`PipelineParallel` model.

    With ``zero=1``, the default, the replicas divide the optimizer's state among them: stage 1 of
    ZeRO (Rajbhandari et al. 2020), in PyTorch ``ZeroRedundancyOptimizer``. Each rank gets the sums
    of its part of each gradient bucket, changes that part of the parameters, and gives the
    new values to all; while those of one bucket are on their way, the next is changed. On each rank
    the state takes ``1 / replicas`` of its memory; beside it there is a copy of so large a
    part of the parameters, for what is on its way. The same bytes move as without. What comes out
    is the same up to the order in which the transport adds up: bit for bit on virtual ranks,
    and on one node mostly. ``zero=2`` divides gradients, too, and ``zero=3`` parameters, see
    :func:`mpimesh.fully_shard`.

    With a `scaler`, losses are scaled while gradients are computed, so that those of a float16
    model do not vanish, and a step is left out, on all ranks together, if a gradient overflowed on
    any. ``train_step`` returns the loss without the scale. Parameters of fewer than 32 bits have
    float32 master values in the state of every optimizer, scaler or not.

    Making it is collective over the ranks that step together. Afterwards

    - the optimizers that were given are this object's: set ``lr`` on them as ever, but leave
      steps, which they refuse, and states to it;
    - the values of the parameters live in other memory: ``parameter.data`` is a new array;
    - from ``zero=1`` on, with several replicas, there are no whole gradients: ``parameter.grad`` is
      None between steps. :meth:`ParallelModel.clip_grad_norm` works;
    - gradients that stay in memory, without `zero`, are scaled.

    Args:
        optimizer: Optimizers of :mod:`mpimesh.optim`, one or several; together they have each
            parameter of this rank once, or not at all. Several serve parameters that are to be
            changed differently, such as those without decay.
        model: The model.
        zero: 1 to divide the state, 2 also gradients, 3 also parameters; 0 to have all of it on
            every replica. None is what :func:`mpimesh.fully_shard` has divided, or else 1.
        scaler: Scales losses; None does not.
        group: The ranks that leave out a step together, which only a scaler asks for. None is
            right for stages, replicas and split layers of mpimesh: all ranks of their mesh step
            together. Only a :class:`DataParallel` of layers that you split yourself over another
            dim needs ``mesh.group()``: a gradient may overflow on one part alone.

    Raises:
        ModuleError: On every rank, if an optimizer has other parameters, or one twice, or changes
            elements not each by itself; if `zero` is no stage, or less than the model's; or if the
            model has such an optimizer.
        ModuleStateError: If gradients are being added up under :meth:`ParallelModel.no_sync`.
        MismatchError: On every rank, if the ranks have different ones; and if replicas, or ranks
            that split layers, differ in their numbers or in which parameters decay.

    Example:
        >>> model = mm.DataParallel(net, mesh, loss=nn.cross_entropy, dtype="float16")
        >>> adam = optim.Adam(model.parameters(), lr=1e-3)
        >>> optimizer = mm.ParallelOptimizer(adam, model, scaler=optim.LossScaler())
        >>> for x, target in batches:
        ...     loss = model.train_step(x, target)
        ...     model.clip_grad_norm(1.0)
        ...     optimizer.step()

        A batch in four parts, that is of the gradients of four steps:

        >>> with model.no_sync():
        ...     for x, target in parts[:3]:
        ...         model.train_step(x, target, denominator=rows_of_all_parts)
        >>> model.train_step(*parts[3], denominator=rows_of_all_parts, optimizer=optimizer)
    """

    def __init__(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        model: ParallelModel,
        *,
        zero: int | None = None,
        scaler: LossScaler | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        if not isinstance(model, ParallelModel):
            raise ModuleError(
                f"model must be a DataParallel or a PipelineParallel, got {shown(model)}"
            )
        self._engine = engine = model._engine
        engine.check_ready()
        optimizers: Any = optimizer  # what is none is refused below, on all ranks
        self._single = not isinstance(optimizers, Iterable) or shape_of(optimizers) == ()
        self._optimizers: tuple[Optimizer, ...] = (
            (optimizers,) if self._single else tuple(optimizers)
        )
        # What is no stage is refused below, too.
        self._zero: Any = (engine.stage if engine.is_stage_chosen else 1) if zero is None else zero
        self._scaler = scaler
        self._agreeing = engine.scope if group is None else group
        self._is_half_done = False
        self._clipped: tuple[int | None, float] | None
        scope = engine.scope
        agree_alike(scope, "ParallelOptimizer", self._checked_rule)
        agree_optimizers(self._optimizers, engine)
        self._lent = [
            LentOptimizer(one, tuple(one.params), tuple(one.decays)) for one in self._optimizers
        ]
        self._clipped = None
        what = "start of the step" if scaler is None else "overflow of gradients"
        self._together = scope if scaler is None else self._agreeing
        self._begin = PlannedMax(self._together.all_reduce_init, what)
        self._end = PlannedMax(scope.all_reduce_init, "end of the step")
        if engine.stage != self._zero:
            engine.divide(self._zero)
        self._cut([one.live_state() for one in self._optimizers], {})
        self._pieces.agree()
        engine.optimizer = self

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of the model."""
        return self._engine.mesh

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The optimizers that were given."""
        return self._optimizers

    @property
    def scaler(self) -> LossScaler | None:
        """The scaler of the losses."""
        return self._scaler

    @property
    def loss_scale(self) -> float:
        """The factor that losses are multiplied by now."""
        return 1.0 if self._scaler is None else self._scaler.scale

    @property
    def skipped_steps(self) -> int:
        """Number of steps that were left out because a gradient had overflowed."""
        return 0 if self._scaler is None else self._scaler.skipped_steps

    @property
    def steps(self) -> int:
        """The largest number of steps of any parameter on this rank."""
        return max(one.steps for one in self._optimizers)

    @property
    def lr(self) -> float:
        """The learning rate, where there is one optimizer; of several, set that of each."""
        return self._one().lr

    @lr.setter
    def lr(self, value: float) -> None:
        self._one().lr = value

    # -- collective --------------------------------------------------------------------------

    def step(self) -> None:
        """Change the parameters by the gradients of the last ``train_step``. Collective.

        Over the ranks that step together, and with a scaler over all that leave one out together.
        ``train_step(..., optimizer=this)`` does it, too.

        Raises:
            Exception: On every rank, that of the first rank on which an update itself raised. That
                rank's parts of the parameters that were to follow keep their values, on all
                replicas; until a state is loaded, steps and states are refused.
            ModuleStateError: On every rank, and nothing is changed, if on any there are no sums of
                gradients to step by, or another array was put in the place of a
                parameter's values.
            BudgetError: After the step, on its rank alone, if a rank received more than
                :meth:`DeviceMesh.budget` allows.

        Cost:
            Two all-reduces of a byte, one as the end of ``train_step(..., optimizer=this)`` without
            a scaler: that has asked before whether all can step. With `zero`, one all-gather of the
            values of each bucket, but of those that the ranks of a node have once.
        """
        self._check_ready()
        self._step(is_ready=False)

    def _step(self, *, is_ready: bool) -> None:
        buckets = self._engine.buckets
        sums = buckets.sums
        # A rank that refused to take part in the middle would be missed.
        with self._engine.mesh.traffic().deferred() as over_budget:
            overflowed = not (is_ready and self._scaler is None) and self._agreed_overflow()
            buckets.sums = None
            if not overflowed:
                self._update(self._clip_factor(sums) / self.loss_scale)
            if self._scaler is not None:
                self._scaler.update(overflowed)
        over_budget.check()

    def clip_grad_norm(self, max_norm: float) -> float:
        """Have the next step clip the gradients to a norm over the whole model. Collective.

        That of the model calls this. Gradients in memory stay as they are: they are multiplied when
        the step reads them.

        Returns:
            The norm, without the scale of the loss. Where it is infinite or NaN, nothing is
            clipped; with a scaler the step is left out.

        Raises:
            ModuleError: On every rank, if on any `max_norm` is not a number above 0.
            ModuleStateError: On every rank, if on any there are no sums of gradients.

        Cost:
            One all-reduce of 24 bytes, if the mesh has no other dims than those of the model.
        """
        engine = self._engine
        engine.check_ready()
        sums = engine.buckets.sums
        problem: MpimeshError | None = problem_with_norm(max_norm)
        if problem is None and sums is None:
            problem = ModuleStateError(
                "there are no sums of gradients to clip: call train_step() before "
                "clip_grad_norm(), and step() after it"
            )
        zero = bool(self._zero)
        mine = [parameter for _, parameter in engine.named_parameters()]
        copies = {id(one) for one in engine.tensor.copies(mine, divided=zero)}
        if not zero:
            copies |= {id(one) for one in engine.ties.copies}
        squares = math.fsum(float(sum_of_squares(one)) for one in self._gradients(copies))
        # Of a parameter that several stages hold each has a part of its own, so all add up.
        divided, repeats = ((engine.data,), ()) if zero else ((), (engine.data,))
        squares = agreed_squares(
            squares,
            problem,
            (engine.tensor.group, engine.pipe, *divided),
            repeats=repeats,
            scope=engine.scope,
            limit=max_norm if engine.mesh._core.context.settings.checks else None,
        )
        norm = math.sqrt(squares) / self.loss_scale if squares >= 0 else math.nan
        self._clipped = (sums, max_norm / norm if max_norm < norm < math.inf else 1.0)
        return norm

    def state_dict(self) -> Any:
        """Return the state of this rank's whole parameters. Collective over the replicas.

        The same as that of the optimizers without this object, so either loads the other's, on
        any number of replicas; :meth:`full_state_dict` fits other stages and splits, too, and has
        the model's count of steps. The scaler has a state of its own.

        Returns:
            The state of the optimizer; a list of states if a list of them was given. Copies, on
            any number of replicas: later steps leave them as they are.

        Cost:
            One all-gather for each bucket and array of the state; the whole state has room on
            every rank.
        """
        self._check_ready()
        states = self._pieces.whole_states()
        for state in states:
            for slot in state["params"]:
                for name in slot.keys() - {"steps"}:  # one by one: few have room twice
                    slot[name] = slot[name].copy()
        return states[0] if self._single else states

    def full_state_dict(self) -> dict[str, Any]:
        """Return the state of the whole model's parameters, on every rank. Collective.

        Over all ranks that hold parts of the model. It fits the model on any mesh: other replicas,
        stages and splits of layers, `zero` or not.

        Returns:
            One flat dict of host arrays, numbers and a text, which ``np.savez`` writes without
            pickle and ``np.load`` reads: ``"step"``, the model's count of steps; ``"optimizer"``,
            the name of its class, and its numbers; and for each parameter, by its name in the
            whole model, ``"params/NAME/steps"`` and arrays of its whole shape such as
            ``"params/NAME/mean"``. Where a list of optimizers was given, all but ``"step"``
            begin with the number of the optimizer, as ``"0/lr"``.

        Example:
            >>> np.savez("optimizer.npz", **optimizer.full_state_dict())
            >>> with np.load("optimizer.npz") as state:
            ...     optimizer.load_state_dict(state)

        Cost:
            That of :meth:`state_dict`; then two broadcasts for each array, over the stages, and an
            all-gather of each that is split. The state of the whole model has room on every rank.
        """
        self._check_ready()
        whole = self._pieces.whole_states()
        return full_state(self._engine, self._lent, whole, single=self._single)

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Take over a state; all of it or, on an error on any rank, nothing. Collective.

        Over the ranks that step together. What :meth:`state_dict` gave fits any number of replicas,
        which all load the same; what :meth:`full_state_dict` gave fits any mesh, and may come from
        ``np.load``. The model's count of steps is taken over, too, if it is in the state.

        Raises:
            ModuleError: On every rank, if a state is of other optimizers, or lacks something, or
                has something that is no number or array.
            DTypeError: On its rank, if an array is not of floating point; ModuleError on others.
            ShapeError: So, if an array has another shape than its parameter.
            MismatchError: On every rank, if replicas load different states.

        Cost:
            Three exchanges of small texts; with replicas, reading the whole state once.
        """
        states, step = agree_states(self._engine, self._lent, state)
        self._cut(states, {})
        self._is_half_done = False
        if step is not None:
            self._engine.set_step(step)

    # -- local -------------------------------------------------------------------------------

    def _stored_parts(self) -> Mapping[str, Parts | Value]:
        """Return what this rank has of the state; see `Storable`."""
        self._check_ready()
        return optimizers_parts(
            self._engine,
            self._lent,
            self._pieces.states(),
            self._pieces.layouts,
            single=self._single,
            scaler=self._scaler,
        )

    def _restored_parts(
        self, saved: Mapping[str, Saved | Value], *, strict: bool
    ) -> tuple[Mapping[str, Parts], Callable[[], None]]:
        """Return where the state is read to: new memory for this rank's part; see `Storable`.

        The model's count of steps, and the state of the scaler, are taken over if they were saved.
        """
        engine, pieces = self._engine, self._pieces
        engine.check_ready()
        layouts = pieces.layouts
        wanted, states, scaling = optimizers_target(
            engine, self._lent, pieces.states(), layouts, saved, strict=strict
        )
        if self._scaler is not None and scaling:
            copy(self._scaler).load_state_dict(scaling)  # raises if it does not fit
        step = as_int(saved[STEP], STEP, ModuleError, least=0) if STEP in saved else None

        def take() -> None:
            self._cut(states, layouts)
            self._is_half_done = False
            if self._scaler is not None and scaling:
                self._scaler.load_state_dict(scaling)
            if step is not None:
                engine.set_step(step)

        return wanted, take

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """Forget the gradients; those of steps under ``no_sync``, too. Local.

        Args:
            set_to_none: Without effect; for programs that name it, as PyTorch's may.
        """
        self._engine.check_ready()
        self._engine.buckets.forget()

    def __repr__(self) -> str:
        inside = ", ".join(map(repr, self._optimizers))
        scaler = "" if self._scaler is None else f", scaler={self._scaler!r}"
        return f"<ParallelOptimizer of {inside}, zero={self._zero}{scaler}>"

    # -- for the model -----------------------------------------------------------------------

    def check_step(self) -> None:
        """Return if this rank can step by the sums that are to come. Local.

        Raises:
            ModuleStateError: If it cannot.
        """
        problem = _HALF_DONE if self._is_half_done else why_not_written(self._engine.buckets)
        if problem:
            raise ModuleStateError(f"rank {self._engine.mesh.rank}: {problem}")

    def step_together(self) -> None:
        """Do what :meth:`step` does, where all ranks know that :meth:`check_step` refuses none."""
        self._step(is_ready=True)

    def release(self) -> Callable[[], None]:
        """Return what goes on with the model's new buckets, once they are made. Local.

        Calling that is collective.
        """
        self._check_ready()
        states, layouts = self._pieces.states(), self._pieces.layouts

        def resume() -> None:
            self._clipped = None  # by sums of other buckets
            self._cut(states, layouts)
            self._pieces.agree()

        return resume

    # -- helpers -----------------------------------------------------------------------------

    def _cut(self, states: Sequence[State], layouts: Layouts) -> None:
        """Go on with the pieces of the model's buckets, and these states, which lie so."""
        self._pieces = OptimizerShards(self._lent, self._engine.buckets.buckets, states, layouts)

    def _gradients(self, without: set[int]) -> list[Array]:
        """Return all sums of gradients of this rank: of its parts, or whole."""
        return self._pieces.sums(without) + [
            parameter.grad
            for parameter in self._engine.buckets.parameters
            if parameter.grad is not None and id(parameter) not in without
        ]

    def _check_ready(self) -> None:
        """Return if this rank may do something with the others, and its state is whole. Local.

        Raises:
            ModuleStateError: As :meth:`TrainingEngine.check_ready`; on every rank after a failed
                update.
        """
        self._engine.check_ready()
        if self._is_half_done:
            raise ModuleStateError(f"rank {self._engine.mesh.rank}: {_HALF_DONE}")

    def _agreed_overflow(self) -> bool:
        """Tell whether a gradient is infinite or NaN on any rank. Collective.

        Raises:
            ModuleStateError: On every rank, if any cannot step.
        """
        problem = why_no_step(self._engine.buckets)
        verdict = _REFUSED if problem else 0
        if self._scaler is not None and not problem:
            verdict = 0 if all(map(is_finite, self._gradients(set()))) else _OVERFLOWED
        verdict = self._begin.largest(verdict)
        if verdict == _REFUSED:
            error = ModuleStateError(problem) if problem else None
            agree(self._together, "refused steps", problem=error)
        return verdict == _OVERFLOWED

    def _update(self, factor: float) -> None:
        """Step the pieces, and see whether all ranks could. Collective.

        Until every rank has said so, others may still write values that this one reads in place.

        Raises:
            Exception: On every rank, if an update raised on any.
        """
        problem, moving = self._pieces.step(factor)
        with self._engine.scope._core.progress.keeping(problem):
            for handle in moving:
                handle.resolve()
            failed = self._end.largest(problem is not None)
        if not failed:
            return
        self._is_half_done = True
        error = problem
        if error is not None and not isinstance(error, Exception):
            error = ModuleStateError(f"{type(error).__name__} has ended the update")
        try:
            agree(self._engine.scope, "update of parameters", problem=error)
        finally:
            if error is not problem and problem is not None:
                raise problem

    def _one(self) -> Optimizer:
        if len(self._optimizers) != 1:
            raise ModuleError(
                f"there are {len(self._optimizers)} optimizers, each with a learning rate: see "
                "ParallelOptimizer.optimizers"
            )
        return self._optimizers[0]

    def _clip_factor(self, sums: int | None) -> float:
        """Return what gradients are multiplied by, if these were clipped."""
        clipped, self._clipped = self._clipped, None
        return 1.0 if clipped is None or clipped[0] != sums else clipped[1]

    def _checked_rule(self) -> str:
        """Return what must be alike on all ranks, if all is well."""
        problem = problem_with(
            self._optimizers, self._engine, self._zero, self._scaler, self._agreeing
        )
        if problem:
            raise ModuleError(f"ParallelOptimizer: {problem}")
        kinds = ", ".join(type(one).__name__ for one in self._optimizers)
        scale = "" if self._scaler is None else f", {self._scaler!r}"
        return f"{kinds}, zero={self._zero}{scale}, group {self._agreeing.name!r}"


tell_elsewhere(ParallelOptimizer, TORCH_ATTRIBUTES)
