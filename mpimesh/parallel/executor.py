"""Run one rank's list of actions. Any schedule, by one small interpreter.

What a microbatch leaves behind for its backward is in its own context, so the order of the actions
is the schedule's affair alone. Between two stages on one rank values are handed over in memory,
between ranks by links (:mod:`mpimesh.parallel.links`). An output may go to several stages, to the
next one and along skips. The gradients that come back for it are added up in one order, whatever
the placement: first that of the next stage, then those of skips, in rising order of their ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from time import perf_counter
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from mpimesh.arrays import Array, DType
from mpimesh.arrays.memory import ArrayPool
from mpimesh.errors import ModuleStateError, ShapeError
from mpimesh.nn import Context
from mpimesh.nn.protocol import Allocate
from mpimesh.parallel.links import Links, RecvLink, SendLink
from mpimesh.parallel.microbatch import Tree
from mpimesh.parallel.stage import PipelineStage
from mpimesh.parallel.task import NO_TASK, Task, check_gradient, check_output, first_gradient
from mpimesh.schedule import Action, ActionKind, Edges
from mpimesh.trace import Category, Tracer

__all__ = ["LOOK_EVERY_S", "Executor", "loss_or_output", "result_memory"]


_POOLED_FROM_BYTES = 1 << 18

LOOK_EVERY_S = 500e-6
"""Between small actions: a check for the abort signal polls MPI, too, and costs as much."""

_Key = tuple[int, int]  # stage, microbatch
_Way = tuple[int, int, int]  # from a stage, to another, microbatch


class Executor:
    """The steps of one rank, one after the other.

    Args:
        stages: The stages of this rank, by number.
        edges: The edges between all stages of the pipeline.
        links: What comes from other ranks, and goes to them.
        reduce_grad: Called with a stage to whose gradients nothing more will come.
        tracer: Records each action.
        xp: The array library of the stages.

    Attributes:
        current: The action under way; None outside of them.
        loss: The loss of the microbatches so far, on the rank of the last stage.
        outputs: Where there is no loss, the outputs of the last stage, by microbatch.
    """

    def __init__(
        self,
        stages: Mapping[int, PipelineStage],
        edges: Edges,
        *,
        links: Links,
        reduce_grad: Callable[[int], None],
        tracer: Tracer,
        xp: ModuleType,
    ) -> None:
        self._stages = stages
        self._last = edges.num_stages - 1
        self._links = links
        self._reduce_grad = reduce_grad
        self._tracer = tracer
        self._xp = xp
        self._results = ArrayPool()
        self._memory = partial(result_memory, self._results) if xp is np else None
        # What each stage's input comes from, and where its output goes, neighbours first.
        self._sources = {stage: [stage - 1, *edges.sources(stage)] for stage in stages}
        self._consumers = {stage: [stage + 1, *edges.destinations(stage)] for stage in stages}
        # For each stage the layer that makes what crosses to its neighbour, and room for that.
        self._room_for_output = {
            number: (stage.last_layer, self._room_at(number, number + 1))
            for number, stage in stages.items()
        }
        self._room_for_gradient = {
            number: (stage.first_layer, self._room_at(number, number - 1))
            for number, stage in stages.items()
        }
        self.end()

    def end(self) -> None:
        """Let go of a step and all its arrays. Local."""
        self._results.end_step()
        self.current: Action | None = None
        self.loss = 0.0
        self.outputs: dict[int, Tree] = {}
        self._task = NO_TASK
        self._contexts: dict[_Key, Context] = {}
        self._loss_gradients: dict[int, Tree] = {}
        self._outputs: dict[_Way, Tree] = {}
        self._gradients: dict[_Way, list[Array]] = {}
        self._outgoing: dict[_Way, list[Array]] = {}

    def bind(self, actions: Sequence[Action]) -> list[Bound]:
        """Return what to call for each of the `actions` of a step, and with what."""
        return [self._bound(action) for action in actions]

    def _bound(self, action: Action) -> Bound:
        kind, stage = action.kind, action.stage
        if kind is ActionKind.REDUCE_GRAD:
            return action, True, Executor._reduce, (stage,)
        if kind.computes:
            do = _COMPUTING[kind]
            return action, True, do, (action, stage, action.microbatch)
        way = stage, action.far_stage, action.microbatch
        if kind.is_send:
            link = self._links.sending[way[:2]]
            return action, False, Executor._send, (action, link, way)
        return action, False, Executor._receive, (action, self._links.receiving[way[:2]], way)

    def run(self, task: Task, *, check_abort: Callable[[], None]) -> None:
        """Do all actions of a step in order; :meth:`end` ends it, however it went.

        Args:
            task: What to work on; the interfaces of stages are completed here.
            check_abort: Called before actions that compute; raises if the step is to be left.

        Raises:
            Exception: What a stage, the loss or a message raised, with `current` as it was.
        """
        self._task = task
        next_look_s = 0.0
        for action, looks, do, arguments in task.actions:
            if looks and perf_counter() >= next_look_s:
                check_abort()
                next_look_s = perf_counter() + LOOK_EVERY_S
            self.current = action
            do(self, *arguments)
        self.current = None

    def _reduce(self, stage: int) -> None:
        self._reduce_grad(stage)

    # -- computing ----------------------------------------------------------------------------

    def _forward(self, action: Action, stage: int, microbatch: int) -> None:
        task, module = self._task, self._stages[stage]
        x = self._input(module, stage, microbatch)
        context = None
        if task.training:
            context = self._contexts[stage, microbatch] = Context(
                step=task.step,
                first_row=task.span(microbatch).start,
                training=module.is_training(),
                memory=self._memory,
            )
            context.offer(*self._room_for_output[stage])
        with self._span(action, "forward"):
            y = module.forward(x, context)
            if stage < self._last:
                self._hand_on(stage, microbatch, y)
            else:
                self._end_forward(stage, microbatch, y)
        if context is not None and stage < task.first_trained:
            del self._contexts[stage, microbatch]

    def _input(self, module: PipelineStage, stage: int, microbatch: int) -> Tree:
        """Return what a stage gets: of the one before it, along skips, and what enters there."""
        if stage > 0:
            take = self._outputs.pop
            entries = [take((source, stage, microbatch)) for source in self._sources[stage]]
        elif self._task.x is None:
            raise ModuleStateError("the first stage got no input")
        else:
            entries = [self._task.x[microbatch]]
        if module.inputs:
            entries += [self._task.inputs[name][microbatch] for name in module.inputs]
        return entries[0] if len(entries) == 1 else tuple(entries)

    def _room_at(self, stage: int, other: int) -> Allocate | None:
        """Return what gives memory for what goes to stage `other`, if that is on another rank."""
        link = self._links.sending.get((stage, other))
        return None if link is None or link.row is None or self._xp is not np else link.room

    def _hand_on(self, stage: int, microbatch: int, y: Tree) -> None:
        """Take the output of a stage that is not the last, for all that are to get it.

        Raises:
            ModuleError: If it is no tree of arrays.
            ShapeError: If it does not keep to the stage's interface.
        """
        task = self._task
        known = task.interface(stage, microbatch)
        rows = task.num_rows(microbatch)
        leaves, interface = check_output(y, stage=stage, rows=rows, interface=known)
        if known is None:
            task.learn(stage, microbatch, interface)
            self._links.expect(stage)
        for to in self._consumers[stage]:
            if to in self._stages:
                # As it would arrive on another rank: dicts in the order of their keys.
                tree = interface.structure.unflatten(leaves)
                self._outputs[stage, to, microbatch] = tree
            else:
                self._outgoing[stage, to, microbatch] = leaves

    def _end_forward(self, stage: int, microbatch: int, y: Tree) -> None:
        """Keep an output, or compute its loss; in training keep the gradient for its backward."""
        task = self._task
        loss, gradient = loss_or_output(task, stage, microbatch, y, self.outputs)
        self.loss += loss
        if task.training and stage >= task.first_trained:
            self._loss_gradients[microbatch] = gradient

    def _backward(self, action: Action, stage: int, microbatch: int) -> None:
        with self._span(action, "backward"):
            context = self._contexts.pop((stage, microbatch))
            context.offer(*self._room_for_gradient[stage])
            dx = self._stages[stage].backward(self._gradient(stage, microbatch), context)
        self._hand_back(stage, microbatch, dx)

    def _backward_input(self, action: Action, stage: int, microbatch: int) -> None:
        with self._span(action, "backward_input"):
            context = self._contexts[stage, microbatch]
            context.offer(*self._room_for_gradient[stage])
            dx = self._stages[stage].backward_input(self._gradient(stage, microbatch), context)
        self._hand_back(stage, microbatch, dx)

    def _backward_weight(self, action: Action, stage: int, microbatch: int) -> None:
        with self._span(action, "backward_weight"):
            context = self._contexts.pop((stage, microbatch))
            self._stages[stage].backward_weight(context)

    def _gradient(self, stage: int, microbatch: int) -> Tree:
        """Give up the gradient of a stage's output, added up over all that got it."""
        if stage == self._last:
            return self._loss_gradients.pop(microbatch)
        total, *others = [
            self._gradients.pop((stage, to, microbatch)) for to in self._consumers[stage]
        ]
        for other in others:
            total = [one + more for one, more in zip(total, other, strict=True)]
        return self._task.known(stage, microbatch).gradient_tree(total)

    def _hand_back(self, stage: int, microbatch: int, dx: Tree | None) -> None:
        """Take what the backward of a stage returned, for all stages that wait for it.

        It is one gradient for each thing that the stage was given, or for those from other stages
        only; or, if only one came from another stage, that gradient itself.

        Raises:
            ModuleStateError: If a gradient is missing.
            ShapeError: If one does not fit what it is of.
        """
        if stage <= self._task.first_trained:
            return
        gradients = self._by_source(stage, microbatch, dx)
        rows = self._task.num_rows(microbatch)
        for source, gradient in zip(self._sources[stage], gradients, strict=True):
            if source < self._task.first_trained:
                continue
            interface = self._task.known(source, microbatch)
            checked = check_gradient(
                gradient, stage=stage, source=source, rows=rows, interface=interface
            )
            if source in self._stages:
                self._gradients[source, stage, microbatch] = checked
            else:
                self._outgoing[stage, source, microbatch] = checked

    def _by_source(self, stage: int, microbatch: int, dx: Tree | None) -> list[Tree | None]:
        """Return the gradient of what came from each source."""
        sources, num_inputs = self._sources[stage], len(self._stages[stage].inputs)
        count = len(sources)
        if count == 1 or dx is None:
            structure = self._task.known(stage - 1, microbatch).structure
            return [first_gradient(dx, structure, 1 + num_inputs)] + [None] * (count - 1)
        if not isinstance(dx, tuple) or len(dx) not in (count, count + num_inputs):
            got = f"a tuple of {len(dx)}" if isinstance(dx, tuple) else type(dx).__name__
            raise ShapeError(
                f"stage {stage} was given the outputs of the stages {sources}, so its "
                f"backward must return a tuple of {count} gradients in this order, got {got}"
            )
        return list(dx[:count])

    def _span(self, action: Action, category: Category) -> AbstractContextManager[object]:
        tracer = self._tracer
        if not tracer.enabled:
            return _NO_SPAN
        return tracer.span(str(action), category, stage=action.stage, microbatch=action.microbatch)

    # -- other ranks --------------------------------------------------------------------------

    def _send(self, action: Action, link: SendLink, way: _Way) -> None:
        """Do a SEND."""
        link.send(action, self._outgoing.pop(way))

    def _receive(self, action: Action, link: RecvLink, way: _Way) -> None:
        """Do a RECV."""
        if self._links.unfinished:
            self._links.reap()
        leaves = link.receive(action)
        if self._xp is not np:
            leaves = [self._xp.asarray(leaf) for leaf in leaves]
        stage, far, microbatch = way
        if far < stage:
            structure = self._task.known(far, microbatch).structure
            self._outputs[far, stage, microbatch] = structure.unflatten(leaves)
        else:
            self._gradients[way] = leaves


def loss_or_output(
    task: Task, stage: int, microbatch: int, y: Tree, outputs: dict[int, Tree]
) -> tuple[float, Any]:
    """Return the loss of what the last stage gave, and its gradient; or keep it in `outputs`."""
    rows = task.num_rows(microbatch)
    if getattr(y, "shape", ())[:1] != (rows,):
        leaves, interface = check_output(y, stage=stage, rows=rows, interface=None)
        y = interface.structure.unflatten(leaves)
    if not task.training and task.loss is None:
        outputs[microbatch] = y
        return 0.0, None
    if task.loss is None or task.target is None:
        raise ModuleStateError("the last stage got no loss or no target")
    value, gradient = task.loss.value_and_grad(
        y, task.target[microbatch], denominator=task.denominator
    )
    return float(value), gradient


def result_memory(pool: ArrayPool, shape: tuple[int, ...], dtype: DType) -> Array | None:
    """Return memory for a large result of a layer, of which later steps have the same.

    The system would give it anew in each step, and zero it page by page: a quarter of the time of a
    layer of some hundred features.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    return pool.take(shape, dtype) if nbytes >= _POOLED_FROM_BYTES else None


Bound: TypeAlias = tuple[Action, bool, Callable[..., None], tuple[Any, ...]]
"""An action; whether to look before it if the step is to be left; the method of the executor, of
no executor, so that none refers to itself; and its arguments."""

_COMPUTING: dict[ActionKind, Callable[..., None]] = {
    ActionKind.F: Executor._forward,
    ActionKind.B: Executor._backward,
    ActionKind.I: Executor._backward_input,
    ActionKind.W: Executor._backward_weight,
}
_NO_SPAN = nullcontext()
