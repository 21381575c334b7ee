"""Add to a schedule what an executor needs beside the computations: messages and reductions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from mpimesh.schedule.action import Action, ActionKind
from mpimesh.schedule.schedule import Schedule

__all__ = ["lower"]


def lower(schedule: Schedule, *, reduce_grad: bool = False, step: bool = False) -> Schedule:
    """Return `schedule` with a SEND after each action whose result another rank needs.

    The RECV stands directly before the action that uses the message: as late as can be, for
    a rank waits there. Posting it early is the executor's business, which may post any
    number of receives ahead of this place. A schedule that has messages already keeps them as
    they are.

    Stages on one rank hand over without a message.

    Args:
        schedule: What to lower.
        reduce_grad: Also add a REDUCE_GRAD to each stage, after its last backward and the message
            of that: from there on nothing comes to the stage's gradients. A stage that has one,
            and a schedule without any backward, is left as it is.
        step: Also add these and a STEP of each stage, at the end of each rank's list in the
            order of their REDUCE_GRAD, so that the sums have time while the rank computes.

    Example:
        >>> print(lower(make_schedule("1f1b", 2, 1), step=True))
        # 1f1b stages=2 microbatches=1 placement=0,1
        0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0STEP
        1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD,1STEP
    """
    ranks = schedule.ranks
    if not schedule.is_lowered:
        # For each stage whether the one before it, and the one after it, lies on another rank.
        crosses = [one != other for one, other in pairwise(schedule.placement)]
        before, after = [False, *crosses], [*crosses, False]
        ranks = tuple(tuple(_with_messages(actions, before, after)) for actions in ranks)
    if (reduce_grad or step) and schedule.trains:
        ranks = tuple(tuple(_with_reductions(actions)) for actions in ranks)
    if step:
        ranks = tuple((*actions, *_steps(actions)) for actions in ranks)
    return schedule if ranks is schedule.ranks else replace(schedule, ranks=ranks)


def _with_messages(
    actions: Sequence[Action], before: Sequence[bool], after: Sequence[bool]
) -> list[Action]:
    """Put around each action the receive that it waits for and the send of its result."""
    lowered: list[Action] = []
    for action in actions:
        kind, stage, microbatch = action.kind, action.stage, action.microbatch
        if stage >= len(before):
            lowered.append(action)
        elif kind is ActionKind.F:
            if before[stage]:
                lowered.append(Action(stage, ActionKind.RECV_F, microbatch))
            lowered.append(action)
            if after[stage]:
                lowered.append(Action(stage, ActionKind.SEND_F, microbatch))
        elif kind is ActionKind.B or kind is ActionKind.I:
            if after[stage]:
                lowered.append(Action(stage, ActionKind.RECV_B, microbatch))
            lowered.append(action)
            if before[stage]:
                lowered.append(Action(stage, ActionKind.SEND_B, microbatch))
        else:
            lowered.append(action)
    return lowered


_BACKWARD = (ActionKind.B, ActionKind.I, ActionKind.W, ActionKind.SEND_B)


def _with_reductions(actions: Sequence[Action]) -> Iterator[Action]:
    """Put a REDUCE_GRAD after the last backward of each stage that has none."""
    last = {action.stage: step for step, action in enumerate(actions) if action.kind in _BACKWARD}
    have = {action.stage for action in actions if action.kind is ActionKind.REDUCE_GRAD}
    for step, action in enumerate(actions):
        yield action
        if last.get(action.stage) == step and action.stage not in have:
            yield Action(action.stage, ActionKind.REDUCE_GRAD, 0)


def _steps(actions: Sequence[Action]) -> Iterator[Action]:
    """Give a STEP for each REDUCE_GRAD whose stage has none."""
    have = {action.stage for action in actions if action.kind is ActionKind.STEP}
    for action in actions:
        if action.kind is ActionKind.REDUCE_GRAD and action.stage not in have:
            yield Action(action.stage, ActionKind.STEP, 0)
