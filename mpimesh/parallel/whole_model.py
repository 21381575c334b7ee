"""Run a model of one stage on a rank that has all of it: no links, nothing handed on.

Its schedule says in which order the microbatches go; :mod:`mpimesh.parallel.executor` runs those of
pipelines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from time import perf_counter
from types import ModuleType

import numpy as np

from mpimesh.arrays.memory import ArrayPool
from mpimesh.errors import ModuleStateError
from mpimesh.nn import Context
from mpimesh.parallel.executor import LOOK_EVERY_S, loss_or_output, result_memory
from mpimesh.parallel.microbatch import Tree
from mpimesh.parallel.stage import PipelineStage
from mpimesh.parallel.task import Task
from mpimesh.schedule import Action, ActionKind
from mpimesh.trace import Category, Tracer

__all__ = ["WholeModel"]

_CATEGORIES: dict[ActionKind, Category] = {
    ActionKind.I: "backward_input",
    ActionKind.W: "backward_weight",
}
_NO_SPAN: AbstractContextManager[object] = nullcontext()


class WholeModel:
    """The steps of one rank, one after the other.

    Args:
        stage: The model.
        reduce_grad: Called when nothing more will come to its gradients.
        tracer: Records each action.
        xp: Its array library.

    Attributes:
        current: The action under way; None outside of them.
        loss: The loss of the microbatches so far.
        outputs: Where there is no loss, the outputs by microbatch.
    """

    def __init__(
        self,
        stage: PipelineStage,
        reduce_grad: Callable[[int], None],
        *,
        tracer: Tracer,
        xp: ModuleType,
    ) -> None:
        self._stage = stage
        self._reduce_grad = reduce_grad
        self._tracer = tracer
        self._results = ArrayPool()
        self._memory = partial(result_memory, self._results) if xp is np else None
        self.end()

    def end(self) -> None:
        """Let go of a step and all its arrays. Local."""
        self._results.end_step()
        self.current: Action | None = None
        self.loss = 0.0
        self.outputs: dict[int, Tree] = {}
        self._contexts: dict[int, Context] = {}
        self._gradients: dict[int, Tree] = {}

    def bind(self, actions: Sequence[Action]) -> Sequence[Action]:
        """Return what :meth:`run` goes through for the `actions` of a step."""
        return actions

    def run(self, task: Task, *, check_abort: Callable[[], None]) -> None:
        """Do all actions of a step in order; see :meth:`Executor.run`."""
        next_look_s = perf_counter() + LOOK_EVERY_S
        for action in task.actions:
            if perf_counter() >= next_look_s:
                check_abort()
                next_look_s = perf_counter() + LOOK_EVERY_S
            self.current = action
            if action.kind is ActionKind.F:
                self._forward(task, action)
            elif action.kind is ActionKind.REDUCE_GRAD:
                self._reduce_grad(0)
            else:
                self._backward(action)
        self.current = None

    def _forward(self, task: Task, action: Action) -> None:
        stage, microbatch, tracer = self._stage, action.microbatch, self._tracer
        if task.x is None:
            raise ModuleStateError("the first stage got no input")
        x = task.x[microbatch]
        if stage.inputs:
            x = (x, *(task.inputs[name][microbatch] for name in stage.inputs))
        rows = task.span(microbatch)
        context = None
        if task.training:
            is_training = stage.is_training()
            context = Context(
                step=task.step, first_row=rows.start, training=is_training, memory=self._memory
            )
            if not task.first_trained:
                self._contexts[microbatch] = context
        with (
            tracer.span(str(action), "forward", stage=0, microbatch=microbatch)
            if tracer.enabled
            else _NO_SPAN
        ):
            y = stage.forward(x, context)
            loss, gradient = loss_or_output(task, 0, microbatch, y, self.outputs)
            self.loss += loss
            if context is not None and not task.first_trained:
                self._gradients[microbatch] = gradient

    def _backward(self, action: Action) -> None:
        stage, microbatch, kind, tracer = self._stage, action.microbatch, action.kind, self._tracer
        category: Category = _CATEGORIES.get(kind, "backward")
        with (
            tracer.span(str(action), category, stage=0, microbatch=microbatch)
            if tracer.enabled
            else _NO_SPAN
        ):
            if kind is ActionKind.W:
                stage.backward_weight(self._contexts.pop(microbatch))
            elif kind is ActionKind.I:
                gradient = self._gradients.pop(microbatch)
                stage.backward_input(gradient, self._contexts[microbatch])
            else:
                gradient = self._gradients.pop(microbatch)
                stage.backward(gradient, self._contexts.pop(microbatch))
