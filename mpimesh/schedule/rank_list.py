"""Write down one rank's list, microbatch after microbatch."""

from __future__ import annotations

from collections import Counter, deque

from mpimesh.schedule.action import Action, ActionKind

__all__ = ["RankList"]


class RankList:
    """The list of one rank in the making.

    Each stage takes the microbatches in order, so an action is told by its stage
    and kind. A schedule that takes its shape from a fixed number of microbatches is
    written for that many, and those from `num_microbatches` on are left out: what is left of a
    correct schedule without some of its microbatches is correct, and takes no longer.

    Args:
        num_microbatches: Microbatches that there really are.
    """

    def __init__(self, num_microbatches: int) -> None:
        self._num_microbatches = num_microbatches
        self._actions: list[Action] = []
        self._done: Counter[tuple[ActionKind, int]] = Counter()
        self._weights: deque[Action] = deque()

    @property
    def actions(self) -> tuple[Action, ...]:
        """The actions written so far."""
        return tuple(self._actions)

    def forward(self, stage: int) -> None:
        """Add the next F of `stage`."""
        self._add(ActionKind.F, stage)

    def backward(self, stage: int) -> None:
        """Add the next B of `stage`."""
        self._add(ActionKind.B, stage)

    def backward_input(self, stage: int) -> None:
        """Add the next I of `stage`; its W is then the last one open."""
        microbatch = self._add(ActionKind.I, stage)
        self._weights.append(Action(stage, ActionKind.W, microbatch))

    def backward_weight(self) -> None:
        """Add the oldest W that is open."""
        action = self._weights.popleft()
        if action.microbatch < self._num_microbatches:
            self._actions.append(action)

    def finish(self) -> tuple[Action, ...]:
        """Add every W that is open; return the list."""
        while self._weights:
            self.backward_weight()
        return self.actions

    def _add(self, kind: ActionKind, stage: int) -> int:
        """Add the next `kind` of `stage`, counting B and I together; return its microbatch."""
        counted = ActionKind.F if kind is ActionKind.F else ActionKind.B
        microbatch = self._done[counted, stage]
        self._done[counted, stage] += 1
        if microbatch < self._num_microbatches:
            self._actions.append(Action(stage, kind, microbatch))
        return microbatch
