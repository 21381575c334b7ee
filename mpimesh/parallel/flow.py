"""Values between stages in one step: outputs on their way, and the gradients coming back.

Between two stages on one rank values are handed over in memory, between ranks by the inbox and the
outbox. An output may go to several stages, to the next one and along skips. The gradients that come
back for it are added up in one order, whatever the placement: first that of the next stage,
then those of skips, in rising order of their ends.
"""

from __future__ import annotations

from collections.abc import Container
from types import ModuleType

import numpy as np

from mpimesh.arrays import Array
from mpimesh.errors import ShapeError
from mpimesh.parallel.inbox import Inbox
from mpimesh.parallel.interface import check_gradient, check_output, first_gradient
from mpimesh.parallel.known import Known
from mpimesh.parallel.outbox import Outbox
from mpimesh.parallel.tree import Tree
from mpimesh.schedule import Action, ActionKind, Edges

__all__ = ["Flow"]

_Way = tuple[int, int, int]  # from a stage, to another, microbatch


class Flow:
    """The values of one rank that are between two stages.

    Args:
        stages: The stages of this rank.
        edges: The edges between all stages.
        first_trained: The first stage with anything to train; no gradient goes to stages before.
        known: The interfaces of stages, completed here, and the rows of microbatches.
        inbox: What comes from other ranks.
        outbox: What goes to them.
        xp: The array library of the stages.
    """

    def __init__(
        self,
        stages: Container[int],
        edges: Edges,
        first_trained: int,
        *,
        known: Known,
        inbox: Inbox,
        outbox: Outbox,
        xp: ModuleType,
    ) -> None:
        self._stages = stages
        # What each stage's input comes from, and where its output goes, neighbours first.
        self._sources = [[stage - 1, *edges.sources(stage)] for stage in range(edges.num_stages)]
        self._consumers = [
            [stage + 1, *edges.destinations(stage)] for stage in range(edges.num_stages)
        ]
        self._first_trained = first_trained
        self._known = known
        self._inbox = inbox
        self._outbox = outbox
        self._xp = xp
        self._outputs: dict[_Way, Tree] = {}
        self._gradients: dict[_Way, list[Array]] = {}
        self._outgoing: dict[tuple[ActionKind, _Way], list[Array]] = {}

    # -- forward ------------------------------------------------------------------------------

    def hand_on(self, stage: int, microbatch: int, y: Tree) -> None:
        """Take the output of a stage that is not the last, for all that are to get it.

        Raises:
            ModuleError: If it is no tree of arrays.
            ShapeError: If it does not keep to the stage's interface.
        """
        known = self._known.interface(stage, microbatch)
        rows = self._known.rows(microbatch)
        leaves, interface = check_output(y, stage=stage, rows=rows, interface=known)
        if known is None:
            self._known.learn(stage, microbatch, interface)
            self._inbox.expect(stage)
        # As it would arrive on another rank: dicts in the order of their keys.
        tree = interface.structure.unflatten(leaves)
        for to in self._consumers[stage]:
            way = (stage, to, microbatch)
            if to in self._stages:
                self._outputs[way] = tree
            else:
                self._outgoing[ActionKind.SEND_F, way] = leaves

    def arrived(self, stage: int, microbatch: int) -> list[Tree]:
        """Give up what came for a stage: from the one before it, and along skips."""
        return [self._outputs.pop((source, stage, microbatch)) for source in self._sources[stage]]

    # -- backward ------------------------------------------------------------------------------

    def hand_back(self, stage: int, microbatch: int, dx: Tree | None, num_inputs: int) -> None:
        """Take what the backward of a stage returned, for all stages that wait for it.

        Args:
            stage: The stage.
            microbatch: The microbatch.
            dx: One gradient for each thing that the stage was given, or for those from other stages
                only; or, if only one came from another stage, that gradient itself.
            num_inputs: How many named inputs the stage was given.

        Raises:
            ModuleStateError: If a gradient is missing.
            ShapeError: If one does not fit what it is of.
        """
        if stage <= self._first_trained:
            return
        sources = self._sources[stage]
        gradients = self._by_source(stage, microbatch, dx, num_inputs)
        rows = self._known.rows(microbatch)
        for source, gradient in zip(sources, gradients, strict=True):
            if source < self._first_trained:
                continue
            interface = self._known.told(source, microbatch)
            checked = check_gradient(
                gradient, stage=stage, source=source, rows=rows, interface=interface
            )
            if source in self._stages:
                self._gradients[source, stage, microbatch] = checked
            else:
                self._outgoing[ActionKind.SEND_B, (stage, source, microbatch)] = checked

    def gradient(self, stage: int, microbatch: int) -> Tree:
        """Give up the gradient of a stage's output, added up over all that got it."""
        total, *others = [
            self._gradients.pop((stage, to, microbatch)) for to in self._consumers[stage]
        ]
        for other in others:
            total = [one + more for one, more in zip(total, other, strict=True)]
        return self._known.told(stage, microbatch).gradient_tree(total)

    # -- messages -----------------------------------------------------------------------------

    def send(self, action: Action) -> None:
        """Do a SEND."""
        way = (action.stage, action.far_stage, action.microbatch)
        self._outbox.send(action, self._outgoing.pop((action.kind, way)))

    def receive(self, action: Action) -> None:
        """Do a RECV."""
        self._outbox.reap()
        leaves = self._inbox.receive(action)
        if self._xp is not np:
            leaves = [self._xp.asarray(leaf) for leaf in leaves]
        stage, far, microbatch = action.stage, action.far_stage, action.microbatch
        if action.kind is ActionKind.RECV_F:
            structure = self._known.told(far, microbatch).structure
            self._outputs[far, stage, microbatch] = structure.unflatten(leaves)
        else:
            self._gradients[stage, far, microbatch] = leaves

    # -- helpers -----------------------------------------------------------------------------

    def _by_source(
        self, stage: int, microbatch: int, dx: Tree | None, num_inputs: int
    ) -> list[Tree | None]:
        """Return the gradient of what came from each source."""
        count = len(self._sources[stage])
        if count == 1 or dx is None:
            structure = self._known.told(stage - 1, microbatch).structure
            return [first_gradient(dx, structure, 1 + num_inputs)] + [None] * (count - 1)
        if not isinstance(dx, tuple) or len(dx) not in (count, count + num_inputs):
            got = f"a tuple of {len(dx)}" if isinstance(dx, tuple) else type(dx).__name__
            raise ShapeError(
                f"stage {stage} was given the outputs of the stages {self._sources[stage]}, so its "
                f"backward must return a tuple of {count} gradients in this order, got {got}"
            )
        return list(dx[:count])
