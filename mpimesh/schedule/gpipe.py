"""GPipe: all forwards, then all backwards (Huang et al., 2019, arXiv 1811.06965)."""

from __future__ import annotations

from mpimesh.schedule.action import Action, ActionKind
from mpimesh.schedule.placement import check_sizes
from mpimesh.schedule.schedule import Schedule

__all__ = ["gpipe"]


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """Make the GPipe schedule, one stage on each rank.

    For equal stages a rank is idle for ``(num_stages - 1) * (F + B)`` and keeps the
    activations of all microbatches. Backwards run in the order of the forwards, as those
    of :func:`~mpimesh.schedule.one_f_one_b` do, so both add up gradients in one order.

    Raises:
        ScheduleError: If a number is less than 1.
    """
    check_sizes("gpipe", num_stages, num_microbatches)
    ranks = tuple(
        tuple(
            Action(stage, kind, microbatch)
            for kind in (ActionKind.F, ActionKind.B)
            for microbatch in range(num_microbatches)
        )
        for stage in range(num_stages)
    )
    return Schedule("gpipe", num_stages, num_microbatches, ranks)
