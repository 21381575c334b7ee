"""1F1B with the backward cut in two: the frame of ZB-H1 and ZB-H2."""

from __future__ import annotations

from mpimesh.schedule.action import Action
from mpimesh.schedule.placement import check_sizes
from mpimesh.schedule.rank_list import RankList
from mpimesh.schedule.schedule import Schedule

__all__ = ["zero_bubble"]


def zero_bubble(name: str, num_stages: int, num_microbatches: int, *, depth: int) -> Schedule:
    """Make a schedule of one forward, one I and one W in turn, on one stage for each rank.

    Stage s of p begins with ``depth * (p - 1 - s)`` forwards, and lets its W stay behind its I by
    ``depth * s`` microbatches: what the late stages save in activations by starting later they
    spend on weight gradients, which then fill the time in which the gradients of the last
    microbatches pass.

    Raises:
        ScheduleError: If a number is less than 1.
    """
    check_sizes(name, num_stages, num_microbatches)
    ranks = tuple(
        _stage_actions(stage, depth * (num_stages - 1 - stage), depth * stage, num_microbatches)
        for stage in range(num_stages)
    )
    return Schedule(name, num_stages, num_microbatches, ranks)


def _stage_actions(stage: int, warm_up: int, lag: int, num_microbatches: int) -> tuple[Action, ...]:
    written = RankList(num_microbatches)
    for _ in range(warm_up):
        written.forward(stage)
    for microbatch in range(num_microbatches):
        written.forward(stage)
        written.backward_input(stage)
        if microbatch >= lag:
            written.backward_weight()
    return written.finish()
