"""ZB2P, the zero-bubble paper's ZB-H2 (Qi et al., 2023, arXiv 2401.10241)."""

from __future__ import annotations

from mpimesh.schedule.schedule import Schedule
from mpimesh.schedule.zero_bubble import zero_bubble

__all__ = ["zb2p"]


def zb2p(num_stages: int, num_microbatches: int) -> Schedule:
    """Make the schedule ZB-H2: no bubble, for about twice the activations of 1F1B.

    For equal stages, with W no longer than F and than I, and ``2 * num_stages - 1`` microbatches,
    a rank is idle between its first action and its last for
    ``(num_stages - 1) * (F + I - 2 * W)``, which is nothing if all three take as long. Ranks start
    one F after another, and end so. Every rank keeps the activations of
    ``2 * num_stages - 1`` microbatches.

    Raises:
        ScheduleError: If a number is less than 1.
    """
    return zero_bubble("zb2p", num_stages, num_microbatches, depth=2)
