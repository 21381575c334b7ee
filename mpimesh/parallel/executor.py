"""Run one rank's list of actions. Any schedule, by one small interpreter.

How results get from stage to stage is the affair of :mod:`mpimesh.parallel.flow`. What a microbatch
leaves behind for its backward is in its own context, so the order of the actions is the schedule's
affair alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType

import numpy as np

from mpimesh.errors import ModuleStateError
from mpimesh.nn import Context, Loss
from mpimesh.nn.context import Room
from mpimesh.parallel.flow import Flow
from mpimesh.parallel.inbox import Inbox
from mpimesh.parallel.interface import check_output
from mpimesh.parallel.known import Known
from mpimesh.parallel.outbox import Outbox
from mpimesh.parallel.stage import PipelineStage
from mpimesh.parallel.tree import Tree
from mpimesh.schedule import Action, ActionKind, Edges
from mpimesh.trace import Category, Span, Tracer

__all__ = ["Executor", "Task"]


@dataclass(frozen=True, slots=True)
class Task:
    """The input of a step, as one rank sees it.

    Attributes:
        count: Number of microbatches.
        x: Each microbatch's input; None on ranks without the first stage.
        inputs: Each microbatch's further inputs, by name, where a stage here takes them.
        target: Their targets; None on ranks without the last stage, and where there is no loss.
        loss: The loss; None where the outputs are wanted instead.
        denominator: What the loss is divided by.
        step: Number of the training step.
    """

    count: int
    x: Sequence[Tree] | None = None
    inputs: Mapping[str, Sequence[Tree]] = field(default_factory=dict)
    target: Sequence[Tree] | None = None
    loss: Loss | None = None
    denominator: float = 1.0
    step: int = 0


_Key = tuple[int, int]  # stage, microbatch


class Executor:
    """One step on one rank.

    Args:
        stages: The stages of this rank, by number.
        edges: The edges between all stages of the pipeline.
        first_trained: The first stage with anything to train; none before has a backward.
        task: What to work on.
        training: With backward, or forward only.
        inbox: What comes from other ranks.
        outbox: What goes to them.
        known: The interfaces of stages, completed here, and the rows of microbatches.
        reduce_grad: Called with a stage to whose gradients nothing more will come.
        look: Called before each action; raises if the step is to be left.
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
        first_trained: int,
        task: Task,
        *,
        training: bool,
        inbox: Inbox,
        outbox: Outbox,
        known: Known,
        reduce_grad: Callable[[int], None],
        look: Callable[[], None],
        tracer: Tracer,
        xp: ModuleType,
    ) -> None:
        self.current: Action | None = None
        self.loss = 0.0
        self.outputs: dict[int, Tree] = {}
        self._stages = stages
        self._last = edges.num_stages - 1
        self._first_trained = first_trained
        self._task = task
        self._training = training
        self._outbox = outbox
        self._known = known
        self._look = look
        self._tracer = tracer
        self._xp = xp
        self._flow = Flow(
            stages,
            edges,
            first_trained,
            known=known,
            inbox=inbox,
            outbox=outbox,
            xp=xp,
        )
        # For each stage the layer that makes what crosses to its neighbour, and room for that.
        self._room_for_output = {
            number: (stage.last_layer, self._room_at(number + 1))
            for number, stage in stages.items()
        }
        self._room_for_gradient = {
            number: (stage.first_layer, self._room_at(number - 1))
            for number, stage in stages.items()
        }
        self._loss_gradients: dict[int, Tree] = {}
        self._contexts: dict[_Key, Context] = {}
        self._reduce_grad = reduce_grad

    def run(self, actions: Sequence[Action]) -> None:
        """Do all `actions` in order.

        Raises:
            Exception: What a stage, the loss or a message raised, with `current` as it was.
        """
        # Not kept: with its own methods the executor, and the batch with it, would go round in a
        # circle that only the collector finds.
        do: dict[ActionKind, Callable[[Action], None]] = {
            ActionKind.F: self._forward,
            ActionKind.B: self._backward,
            ActionKind.I: self._backward_input,
            ActionKind.W: self._backward_weight,
            ActionKind.SEND_F: self._flow.send,
            ActionKind.SEND_B: self._flow.send,
            ActionKind.RECV_F: self._flow.receive,
            ActionKind.RECV_B: self._flow.receive,
            ActionKind.REDUCE_GRAD: lambda action: self._reduce_grad(action.stage),
        }
        for action in actions:
            self._look()
            self.current = action
            do[action.kind](action)
        self.current = None

    # -- computing ----------------------------------------------------------------------------

    def _forward(self, action: Action) -> None:
        key = stage, microbatch = action.stage, action.microbatch
        x = self._input(key)
        context = self._context(key)
        with self._span(action, "forward"):
            if context is not None:
                context.offer(*self._room_for_output[stage])
            y = self._stages[stage].forward(x, context)
            if stage < self._last:
                self._flow.hand_on(stage, microbatch, y)
            else:
                self._end_forward(key, y)
        if context is not None and stage < self._first_trained:
            del self._contexts[key]

    def _input(self, key: _Key) -> Tree:
        stage, microbatch = key
        if stage > 0:
            entries = self._flow.arrived(stage, microbatch)
        elif self._task.x is None:
            raise ModuleStateError("the first stage got no input")
        else:
            entries = [self._task.x[microbatch]]
        named = self._stages[stage].inputs
        entries += [self._task.inputs[name][microbatch] for name in named]
        return entries[0] if len(entries) == 1 else tuple(entries)

    def _context(self, key: _Key) -> Context | None:
        if not self._training:
            return None
        context = Context(
            step=self._task.step,
            first_row=self._known.span(key[1]).start,
            training=self._stages[key[0]].is_training(),
        )
        self._contexts[key] = context
        return context

    def _room_at(self, other: int) -> Room | None:
        """Return what gives memory for what goes to stage `other`, if that lies elsewhere."""
        crosses = 0 <= other <= self._last and other not in self._stages
        return self._outbox.room_for(other) if crosses and self._xp is np else None

    def _end_forward(self, key: _Key, y: Tree) -> None:
        """Keep an output, or compute its loss; in training keep the gradient for its backward."""
        rows = self._known.rows(key[1])
        if getattr(y, "shape", ())[:1] != (rows,):
            leaves, interface = check_output(y, stage=key[0], rows=rows, interface=None)
            y = interface.structure.unflatten(leaves)
        task = self._task
        if not self._training and task.loss is None:
            self.outputs[key[1]] = y
            return
        if task.loss is None or task.target is None:
            raise ModuleStateError("the last stage got no loss or no target")
        value, gradient = task.loss.value_and_grad(
            y, task.target[key[1]], denominator=task.denominator
        )
        self.loss += float(value)
        if self._training and key[0] >= self._first_trained:
            self._loss_gradients[key[1]] = gradient

    def _gradient(self, key: _Key) -> Tree:
        """Give up the gradient of a stage's output."""
        stage, microbatch = key
        if stage == self._last:
            return self._loss_gradients.pop(microbatch)
        return self._flow.gradient(stage, microbatch)

    def _backward(self, action: Action) -> None:
        key = action.stage, action.microbatch
        with self._span(action, "backward"):
            context = self._contexts.pop(key)
            context.offer(*self._room_for_gradient[action.stage])
            dx = self._stages[action.stage].backward(self._gradient(key), context)
        self._hand_back(key, dx)

    def _backward_input(self, action: Action) -> None:
        key = action.stage, action.microbatch
        with self._span(action, "backward_input"):
            context = self._contexts[key]
            context.offer(*self._room_for_gradient[action.stage])
            dx = self._stages[action.stage].backward_input(self._gradient(key), context)
        self._hand_back(key, dx)

    def _backward_weight(self, action: Action) -> None:
        with self._span(action, "backward_weight"):
            context = self._contexts.pop((action.stage, action.microbatch))
            self._stages[action.stage].backward_weight(context)

    def _span(self, action: Action, category: Category) -> Span:
        return self._tracer.span(
            str(action), category, stage=action.stage, microbatch=action.microbatch
        )

    def _hand_back(self, key: _Key, dx: Tree | None) -> None:
        self._flow.hand_back(*key, dx, len(self._stages[key[0]].inputs))
