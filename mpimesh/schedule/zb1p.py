"""ZB1P, the zero-bubble paper's ZB-H1 (Qi et al., 2023, arXiv 2401.10241)."""

from __future__ import annotations

from mpimesh.schedule.schedule import Schedule
from mpimesh.schedule.zero_bubble import zero_bubble

__all__ = ["zb1p"]


def zb1p(num_stages: int, num_microbatches: int) -> Schedule:
    """Make the schedule ZB-H1: 1F1B in its memory, with W put where ranks would wait.

    For equal stages, with W no longer than F and than I, and as many microbatches as stages, a
    rank is idle for ``(num_stages - 1) * (F + I - W)``, a third of what it is under 1F1B
    if all three take as long. Every rank keeps the activations of ``num_stages`` microbatches.

    Raises:
        ScheduleError: If a number is less than 1.
    """
    return zero_bubble("zb1p", num_stages, num_microbatches, depth=1)
