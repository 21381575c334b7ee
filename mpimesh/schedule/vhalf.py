"""V-Half: half of 1F1B's activations, on a V of stages (Qi et al., 2024, arXiv 2405.15362)."""

from __future__ import annotations

from mpimesh.schedule.building_block import BuildingBlock, repeat
from mpimesh.schedule.costs import Costs
from mpimesh.schedule.placement import vee_ranks
from mpimesh.schedule.schedule import Schedule

__all__ = ["vhalf"]


def vhalf(num_stages: int, num_microbatches: int, *, num_ranks: int | None = None) -> Schedule:
    """Make the schedule V-Half: rank r holds stage r and its mirror.

    On p ranks a rank keeps at most the activations of ``(p + 2) // 2`` microbatches on both its
    stages, where 1F1B keeps p. With equal stages and F = I = W it is idle between its first action
    and its last for at most ``3 * p`` units of one stage, about half as long as under 1F1B.
    Other times leave a steady state without bubble as long as W + 2I is at least 2F, and
    W + 2F at least 2I.

    Args:
        num_stages: Number of stages, twice that of the ranks.
        num_microbatches: Number of microbatches.
        num_ranks: Number of ranks, if it is to be checked.

    Raises:
        ScheduleError: If a number is less than 1, or there are not two stages for each rank.
    """
    num_ranks = vee_ranks("vhalf", num_stages, num_microbatches, num_ranks)
    # Down at half speed, up at full speed, so that I finds the places that F leaves.
    block = BuildingBlock((2, 1, 2, 1), (1, 0 if num_ranks % 2 else 3, 0))
    # With an F a little longer than the rest no W is put where a longer F would have to wait for it
    # in every microbatch.
    costs = Costs.of(num_stages, forward_s=5, backward_input_s=4, backward_weight_s=4)
    cap = 2 * ((num_ranks + 2) // 2)
    return repeat("vhalf", block, num_ranks, num_microbatches, cap=cap, costs=costs)
