"""What must have happened on a rank before it may do an action."""

from __future__ import annotations

from collections.abc import Iterator

from mpimesh.schedule.action import Action, ActionKind
from mpimesh.schedule.schedule import Schedule

__all__ = ["Rules"]

# B is I and W in one, so B excludes them.
_TWINS = {
    ActionKind.B: (ActionKind.I, ActionKind.W),
    ActionKind.I: (ActionKind.B,),
    ActionKind.W: (ActionKind.B,),
}


class Rules:
    """The rules of one schedule, applied to its actions in the order of each rank's list.

    Only the rank's own list counts here. What comes from another rank is stood for by its
    receive in a lowered schedule, and is not looked at in one that is not lowered.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._lowered = schedule.is_lowered
        self._done: set[Action] = set()

    def why_wrong(self, rank: int, action: Action) -> str | None:
        """Return why `rank` may not do `action` now; None, and note it as done, if it may."""
        reason = (
            self._why_no_action(rank, action)
            or self._why_again(action)
            or self._why_too_early(action)
        )
        if reason is None:
            self._done.add(action)
        return reason

    def _why_no_action(self, rank: int, action: Action) -> str | None:
        schedule = self._schedule
        if action.stage >= schedule.num_stages:
            return f"{action} is for a stage that does not exist; there are {schedule.num_stages}"
        if action.microbatch >= schedule.num_microbatches:
            return (
                f"{action} is for a microbatch that does not exist; "
                f"there are {schedule.num_microbatches}"
            )
        holder = schedule.placement[action.stage]
        if holder != rank:
            return f"{action} is for a stage that lies on rank {holder}"
        if not action.kind.is_message:
            return None
        other = action.stage + (1 if action.kind in (ActionKind.SEND_F, ActionKind.RECV_B) else -1)
        if not 0 <= other < schedule.num_stages:
            return f"{action} has no other end: there is no stage {other}"
        if schedule.placement[other] == rank:
            return f"{action} is no message: stage {other} lies on the same rank"
        return None

    def _why_again(self, action: Action) -> str | None:
        if action in self._done:
            return f"{action} is done a second time"
        for kind in _TWINS.get(action.kind, ()):
            twin = Action(action.stage, kind, action.microbatch)
            if twin in self._done:
                return f"{action} does again what {twin} did"
        return None

    def _why_too_early(self, action: Action) -> str | None:
        for needed in self._needs(action):
            if not any(one in self._done for one in needed):
                return f"{action} comes before {' or '.join(map(str, needed))}, which it needs"
        return None

    def _needs(self, action: Action) -> Iterator[tuple[Action, ...]]:
        """Give what `action` needs on its own rank, each as the actions of which one will do."""
        stage, microbatch = action.stage, action.microbatch

        def one_of(stage: int, *kinds: ActionKind) -> tuple[Action, ...]:
            return tuple(Action(stage, kind, microbatch) for kind in kinds)

        if action.kind is ActionKind.F and stage > 0:
            if self._is_local(stage, stage - 1):
                yield one_of(stage - 1, ActionKind.F)
            elif self._lowered:
                yield one_of(stage, ActionKind.RECV_F)
        elif action.kind in (ActionKind.B, ActionKind.I):
            yield one_of(stage, ActionKind.F)
            if stage < self._schedule.num_stages - 1:
                if self._is_local(stage, stage + 1):
                    yield one_of(stage + 1, ActionKind.B, ActionKind.I)
                elif self._lowered:
                    yield one_of(stage, ActionKind.RECV_B)
        elif action.kind is ActionKind.W:
            yield one_of(stage, ActionKind.I)
        elif action.kind is ActionKind.SEND_F:
            yield one_of(stage, ActionKind.F)
        elif action.kind is ActionKind.SEND_B:
            yield one_of(stage, ActionKind.B, ActionKind.I)

    def _is_local(self, stage: int, other: int) -> bool:
        return self._schedule.placement[stage] == self._schedule.placement[other]
