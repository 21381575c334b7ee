"""V-Min: a third of 1F1B's activations, on a V of stages (Qi et al., 2024, arXiv 2405.15362)."""

from __future__ import annotations

from mpimesh.schedule.building_block import BuildingBlock, repeat
from mpimesh.schedule.placement import vee_ranks
from mpimesh.schedule.schedule import Schedule

__all__ = ["vmin"]


def vmin(num_stages: int, num_microbatches: int, *, num_ranks: int | None = None) -> Schedule:
    """Make the schedule V-Min: rank r holds stage r and its mirror.

    On p ranks a rank keeps at most the activations of ``(p + 4) // 3`` microbatches on both its
    stages, where 1F1B keeps p. With equal stages and F = I = W it is idle between its first action
    and its last for at most ``4 * p - 5`` units of one stage, two thirds as long as under 1F1B.
    Where F, I and W differ, ranks wait for each other in every microbatch: then take V-Half.

    Args:
        num_stages: Number of stages, twice that of the ranks.
        num_microbatches: Number of microbatches.
        num_ranks: Number of ranks, if it is to be checked.

    Raises:
        ScheduleError: If a number is less than 1, or there are not two stages for each rank.
    """
    num_ranks = vee_ranks("vmin", num_stages, num_microbatches, num_ranks)
    # As fast as can be, on every way. For multiples of 3 the ways meet without the gaps.
    block = BuildingBlock((1, 1, 1, 1), (0, 0, 0) if num_ranks % 3 else (2, 0, 2))
    return repeat("vmin", block, num_ranks, num_microbatches, cap=2 * ((num_ranks + 4) // 3))
