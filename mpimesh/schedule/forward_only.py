"""Forward only: microbatches stream through the stages, for inference."""

from __future__ import annotations

from mpimesh.schedule.action import Action, ActionKind
from mpimesh.schedule.placement import check_sizes
from mpimesh.schedule.schedule import Schedule

__all__ = ["forward_only"]


def forward_only(num_stages: int, num_microbatches: int) -> Schedule:
    """Make the forward-only schedule, one stage on each rank.

    For equal stages a rank is idle for ``(num_stages - 1) * F``. Nothing is kept.

    Raises:
        ScheduleError: If a number is less than 1.
    """
    check_sizes("forward", num_stages, num_microbatches)
    ranks = tuple(
        tuple(Action(stage, ActionKind.F, microbatch) for microbatch in range(num_microbatches))
        for stage in range(num_stages)
    )
    return Schedule("forward", num_stages, num_microbatches, ranks)
