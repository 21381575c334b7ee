"""Add to a schedule the messages between stages that lie on different ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from mpimesh.schedule.action import Action, ActionKind
from mpimesh.schedule.schedule import Schedule

__all__ = ["lower"]


def lower(schedule: Schedule) -> Schedule:
    """Return `schedule` with a SEND after each action whose result another rank needs.

    The RECV stands directly before the action that uses the message: as late as can be, for
    a rank waits there. Posting it early is the executor's business, which may post any
    number of receives ahead of this place. A schedule that has messages already is
    returned as it is.

    Stages on one rank hand over without a message.
    """
    if schedule.is_lowered:
        return schedule
    # For each stage whether the one before it, and the one after it, lies on another rank.
    crosses = [one != other for one, other in pairwise(schedule.placement)]
    before, after = [False, *crosses], [*crosses, False]
    ranks = tuple(tuple(_with_messages(actions, before, after)) for actions in schedule.ranks)
    return replace(schedule, ranks=ranks)


def _with_messages(
    actions: Sequence[Action], before: Sequence[bool], after: Sequence[bool]
) -> list[Action]:
    """Put around each action the receive that it waits for and the send of its result."""
    lowered: list[Action] = []
    for action in actions:
        kind, stage, microbatch = action.kind, action.stage, action.microbatch
        if stage >= len(before) or kind is ActionKind.W:
            lowered.append(action)
        elif kind is ActionKind.F:
            if before[stage]:
                lowered.append(Action(stage, ActionKind.RECV_F, microbatch))
            lowered.append(action)
            if after[stage]:
                lowered.append(Action(stage, ActionKind.SEND_F, microbatch))
        else:
            if after[stage]:
                lowered.append(Action(stage, ActionKind.RECV_B, microbatch))
            lowered.append(action)
            if before[stage]:
                lowered.append(Action(stage, ActionKind.SEND_B, microbatch))
    return lowered
