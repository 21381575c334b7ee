"""DualPipeV: forwards and backwards in pairs, on a V of stages (DeepSeek's DualPipe)."""

from __future__ import annotations

from mpimesh.schedule.action import Action
from mpimesh.schedule.placement import vee_placement, vee_ranks
from mpimesh.schedule.rank_list import RankList
from mpimesh.schedule.schedule import Schedule

__all__ = ["dualpipev"]


def dualpipev(num_stages: int, num_microbatches: int, *, num_ranks: int | None = None) -> Schedule:
    """Make the schedule DualPipeV: rank r holds stage r and its mirror.

    In the steady state a rank takes a forward and the backward of another microbatch together, so
    that the messages of one pass while it computes the other. Only the backwards at either
    end are cut in two.

    On p ranks with equal stages and at least ``2 * p`` microbatches every rank keeps ``2 * p + 1``
    activations of one stage, and is idle for at most ``(p - 1) * (X + B - 3 * W)``, as DeepSeek
    gives it, where X is a forward and a backward taken together. Here they take turns,
    X = F + B. If F, I and W take as long, it is idle for ``(p - 1) * F``.

    Args:
        num_stages: Number of stages, twice that of the ranks.
        num_microbatches: Number of microbatches.
        num_ranks: Number of ranks, if it is to be checked.

    Raises:
        ScheduleError: If a number is less than 1, or there are not two stages for each rank.
    """
    num_ranks = vee_ranks("dualpipev", num_stages, num_microbatches, num_ranks)
    ranks = tuple(_rank_actions(rank, num_ranks, num_microbatches) for rank in range(num_ranks))
    return Schedule("dualpipev", num_stages, num_microbatches, ranks, vee_placement(num_ranks))


def _rank_actions(rank: int, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
    down, up = rank, 2 * num_ranks - 1 - rank
    below = num_ranks - 1 - rank
    # The shape below needs as many microbatches; those that there are not are left out.
    count = max(num_microbatches, 2 * num_ranks)
    written = RankList(num_microbatches)

    def pair(forward: int, backward: int) -> None:
        written.forward(forward)
        written.backward(backward)

    # Fill the way down, then both ways.
    for _ in range(2 * below):
        written.forward(down)
    for _ in range(rank + 1):
        written.forward(down)
        written.forward(up)
    # The first gradients come up; ranks above wait for them, so weights come second.
    for _ in range(below):
        written.backward_input(up)
        written.backward_weight()
        written.forward(up)
    # Pairs, of one microbatch down and one up.
    for _ in range(count - num_ranks - below):
        pair(down, up)
        pair(up, down)
    # No forward is left on the way down, and then none at all.
    for _ in range(below):
        written.backward(up)
        pair(up, down)
    for number in range(2 * (rank + 1)):
        stage = down if number % 2 else up
        if number <= rank:
            written.backward(stage)
        else:
            written.backward_input(stage)
    # Gradients of the last microbatches pass; weights fill the time in which none comes.
    for _ in range(below):
        written.backward_weight()
        written.backward_input(down)
    return written.finish()
