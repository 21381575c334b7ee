"""Run one rank's list of actions. Any schedule, by one small interpreter.

Between two stages on one rank results are handed over in memory, between ranks by the
inbox and the outbox. What a microbatch leaves behind for its backward is in
its own context, so the order of the actions is the schedule's affair alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType

import numpy as np

from mpimesh.arrays import Array
from mpimesh.errors import ModuleStateError
from mpimesh.nn import Context, Loss
from mpimesh.parallel.inbox import Inbox
from mpimesh.parallel.interface import Interface, check_gradient, check_output, first_gradient
from mpimesh.parallel.known import Known
from mpimesh.parallel.outbox import Outbox
from mpimesh.parallel.stage import PipelineStage
from mpimesh.parallel.tree import Tree
from mpimesh.schedule import Action, ActionKind
from mpimesh.trace import Category, Span, Tracer

__all__ = ["Executor", "Task"]


@dataclass(frozen=True, slots=True)
class Task:
    """What a step is to work on, as one rank sees it.

    Attributes:
        count: Number of microbatches.
        x: Each microbatch's input; None on ranks without the first stage.
        inputs: Each microbatch's further inputs, by name, where a stage here takes them.
        target: Their targets; None on ranks without the last stage, and in inference.
        loss: The loss to train by; None in inference.
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
        num_stages: Stages of the pipeline.
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
        outputs: In inference, the outputs of the last stage, by microbatch.
    """

    def __init__(
        self,
        stages: Mapping[int, PipelineStage],
        num_stages: int,
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
        self._last = num_stages - 1
        self._first_trained = first_trained
        self._task = task
        self._training = training
        self._inbox = inbox
        self._outbox = outbox
        self._known = known
        self._look = look
        self._tracer = tracer
        self._xp = xp
        # Arrays on their way, by the stage that they go to (inputs, gradients) or come from.
        self._inputs: dict[_Key, Tree] = {}
        self._gradients: dict[_Key, Tree] = {}
        self._outgoing: dict[tuple[ActionKind, _Key], list[Array]] = {}
        self._contexts: dict[_Key, Context] = {}
        self._do: dict[ActionKind, Callable[[Action], None]] = {
            ActionKind.F: self._forward,
            ActionKind.B: self._backward,
            ActionKind.I: self._backward_input,
            ActionKind.W: self._backward_weight,
            ActionKind.SEND_F: self._send,
            ActionKind.SEND_B: self._send,
            ActionKind.RECV_F: self._receive,
            ActionKind.RECV_B: self._receive,
            ActionKind.REDUCE_GRAD: lambda action: reduce_grad(action.stage),
        }

    def run(self, actions: Sequence[Action]) -> None:
        """Do all `actions` in order.

        Raises:
            Exception: What a stage, the loss or a message raised, with `current` as it was.
        """
        for action in actions:
            self._look()
            self.current = action
            self._do[action.kind](action)
        self.current = None

    # -- computing ----------------------------------------------------------------------------

    def _forward(self, action: Action) -> None:
        key = stage, microbatch = action.stage, action.microbatch
        x = self._input(key)
        context = self._context(key)
        with self._span(action, "forward"):
            self._offer(context, self._stages[stage].last_layer, stage, stage + 1)
            y = self._stages[stage].forward(x, context)
            known = self._known.interface(stage, microbatch) if stage < self._last else None
            rows = self._known.rows(microbatch)
            leaves, interface = check_output(y, stage=stage, rows=rows, interface=known)
            if stage < self._last:
                self._hand_on(key, leaves, interface, known)
            elif not self._training:
                self.outputs[microbatch] = y
            else:
                self._end_forward(key, y)
        if context is not None and stage < self._first_trained:
            del self._contexts[key]

    def _input(self, key: _Key) -> Tree:
        stage, microbatch = key
        if stage > 0:
            x = self._inputs.pop(key)
        elif self._task.x is None:
            raise ModuleStateError("the first stage got no input")
        else:
            x = self._task.x[microbatch]
        named = self._stages[stage].inputs
        return (x, *(self._task.inputs[name][microbatch] for name in named)) if named else x

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

    def _offer(self, context: Context | None, layer: object, stage: int, other: int) -> None:
        """Let `layer`, which makes what `stage` gives to `other`, write it where that reads it."""
        crosses = 0 <= other <= self._last and other not in self._stages
        if context is not None and self._xp is np:
            context.offer(layer, self._outbox.room_for(other) if crosses else None)

    def _hand_on(
        self, key: _Key, leaves: list[Array], interface: Interface, known: Interface | None
    ) -> None:
        stage, microbatch = key
        if known is None:
            self._known.learn(stage, microbatch, interface)
            self._inbox.expect(stage)
        if stage + 1 in self._stages:
            # As it would arrive on another rank: dicts in the order of their keys.
            self._inputs[stage + 1, microbatch] = interface.structure.unflatten(leaves)
        else:
            self._outgoing[ActionKind.SEND_F, key] = leaves

    def _end_forward(self, key: _Key, y: Tree) -> None:
        """Compute the loss of a microbatch, and the gradient that its backward begins with."""
        task = self._task
        if task.loss is None or task.target is None:
            raise ModuleStateError("the last stage got no loss or no target")
        value, gradient = task.loss.value_and_grad(
            y, task.target[key[1]], denominator=task.denominator
        )
        self.loss += float(value)
        if key[0] >= self._first_trained:
            self._gradients[key] = gradient

    def _backward(self, action: Action) -> None:
        key = action.stage, action.microbatch
        with self._span(action, "backward"):
            context = self._contexts.pop(key)
            self._offer(context, self._stages[key[0]].first_layer, key[0], key[0] - 1)
            dx = self._stages[action.stage].backward(self._gradients.pop(key), context)
        self._hand_back(key, dx)

    def _backward_input(self, action: Action) -> None:
        key = action.stage, action.microbatch
        with self._span(action, "backward_input"):
            context = self._contexts[key]
            self._offer(context, self._stages[key[0]].first_layer, key[0], key[0] - 1)
            dx = self._stages[action.stage].backward_input(self._gradients.pop(key), context)
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
        stage, microbatch = key
        if stage <= self._first_trained:
            return
        source = stage - 1
        interface = self._interface(source, microbatch)
        rows = self._known.rows(microbatch)
        dx = first_gradient(dx, interface.structure, 1 + len(self._stages[stage].inputs))
        gradients = check_gradient(dx, stage=stage, source=source, rows=rows, interface=interface)
        if source in self._stages:
            self._gradients[source, microbatch] = interface.gradient_tree(gradients)
        else:
            self._outgoing[ActionKind.SEND_B, key] = gradients

    def _interface(self, stage: int, microbatch: int) -> Interface:
        interface = self._known.interface(stage, microbatch)
        if interface is None:
            raise ModuleStateError(f"nothing is known of the output of stage {stage}")
        return interface

    # -- messages -----------------------------------------------------------------------------

    def _send(self, action: Action) -> None:
        key = action.stage, action.microbatch
        self._outbox.send(action, self._outgoing.pop((action.kind, key)))

    def _receive(self, action: Action) -> None:
        self._outbox.reap()
        leaves = self._inbox.receive(action)
        if self._xp is not np:
            leaves = [self._xp.asarray(leaf) for leaf in leaves]
        key = action.stage, action.microbatch
        if action.kind is ActionKind.RECV_F:
            structure = self._interface(action.stage - 1, action.microbatch).structure
            self._inputs[key] = structure.unflatten(leaves)
        else:
            self._gradients[key] = self._interface(*key).gradient_tree(leaves)
