"""ZB-V: no bubble in the memory of 1F1B, on a V of stages (Qi et al., arXiv 2405.15362)."""

from __future__ import annotations

from mpimesh.schedule.action import Action
from mpimesh.schedule.placement import vee_placement, vee_ranks
from mpimesh.schedule.rank_list import RankList
from mpimesh.schedule.schedule import Schedule

__all__ = ["zbv"]


def zbv(num_stages: int, num_microbatches: int, *, num_ranks: int | None = None) -> Schedule:
    """Make the schedule ZB-V: rank r holds stage r and its mirror.

    On p ranks with equal stages and at least ``2 * p - 1`` microbatches, no rank is idle between
    its first action and its last if F, I and W take as long. Ranks start one F after
    another, and end so. Every rank keeps ``2 * p`` activations of one stage: those of p
    microbatches on all of the rank, as the first rank under 1F1B.

    Args:
        num_stages: Number of stages, twice that of the ranks.
        num_microbatches: Number of microbatches.
        num_ranks: Number of ranks, if it is to be checked.

    Raises:
        ScheduleError: If a number is less than 1, or there are not two stages for each rank.
    """
    num_ranks = vee_ranks("zbv", num_stages, num_microbatches, num_ranks)
    ranks = tuple(_rank_actions(rank, num_ranks, num_microbatches) for rank in range(num_ranks))
    return Schedule("zbv", num_stages, num_microbatches, ranks, vee_placement(num_ranks))


def _rank_actions(rank: int, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
    down, up = rank, 2 * num_ranks - 1 - rank
    after = num_ranks - rank  # this rank and those further down
    # The shape below needs as many microbatches; those that there are not are left out.
    count = max(num_microbatches, 2 * num_ranks - 1)
    written = RankList(num_microbatches)

    def backward(stage: int) -> None:
        written.backward_input(stage)
        written.backward_weight()

    # Fill, until the first microbatch is back on its way up.
    for _ in range(2 * after - 1):
        written.forward(down)
    for _ in range(rank):
        written.forward(up)
        written.forward(down)
    # It has been at the end and is back: backward begins, on the way up first.
    for _ in range(after):
        written.forward(up)
        backward(up)
    # Both ways in turn. The way down runs out of forwards before the way up does.
    for microbatch in range(num_ranks, count):
        if microbatch < count - after + 1:
            written.forward(down)
        backward(down)
        written.forward(up)
        backward(up)
    # Gradients of the last microbatches pass; weights wait for the time in which none comes.
    for _ in range(rank):
        written.backward_input(down)
        written.backward_input(up)
    for _ in range(after):
        written.backward_input(down)
        written.backward_weight()
    return written.finish()
