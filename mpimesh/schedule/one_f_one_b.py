"""1F1B: a backward as soon as there is one (PipeDream-Flush, arXiv 2006.09503)."""

from __future__ import annotations

from mpimesh.schedule.action import Action, ActionKind
from mpimesh.schedule.placement import check_sizes
from mpimesh.schedule.schedule import Schedule

__all__ = ["one_f_one_b"]


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """Make the 1F1B schedule, one stage on each rank.

    Stage s runs ``num_stages - s - 1`` forwards to fill the pipeline (fewer where there are
    fewer microbatches), then one forward and one backward in turn, then the backwards that
    are left. For equal stages a rank is idle for ``(num_stages - 1) * (F + B)``, as with
    GPipe, but keeps the activations of ``min(num_stages - s, num_microbatches)`` microbatches.

    Raises:
        ScheduleError: If a number is less than 1.
    """
    check_sizes("1f1b", num_stages, num_microbatches)
    ranks = tuple(
        _stage_actions(stage, min(num_stages - stage - 1, num_microbatches), num_microbatches)
        for stage in range(num_stages)
    )
    return Schedule("1f1b", num_stages, num_microbatches, ranks)


def _stage_actions(stage: int, warm_up: int, num_microbatches: int) -> tuple[Action, ...]:
    actions = [Action(stage, ActionKind.F, microbatch) for microbatch in range(warm_up)]
    for microbatch in range(num_microbatches):
        if warm_up + microbatch < num_microbatches:
            actions.append(Action(stage, ActionKind.F, warm_up + microbatch))
        actions.append(Action(stage, ActionKind.B, microbatch))
    return tuple(actions)
