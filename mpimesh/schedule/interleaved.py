"""Interleaved 1F1B: several stages on a rank (Narayanan et al., 2021, arXiv 2104.04473)."""

from __future__ import annotations

from itertools import pairwise

from mpimesh.schedule.action import Action, ActionKind
from mpimesh.schedule.placement import check_sizes, looped_ranks
from mpimesh.schedule.schedule import Schedule

__all__ = ["interleaved"]


def interleaved(
    num_stages: int, num_microbatches: int, *, num_ranks: int | None = None
) -> Schedule:
    """Make the interleaved 1F1B schedule; stage s lies on rank ``s % num_ranks``.

    Microbatches go round the ranks in groups of p or a few more: each stage of a rank takes a
    whole group before the next stage does, so that the first of the group is back when its
    last has left. Any number of microbatches is dealt to groups as evenly as goes.

    With v equal stages on each of p ranks, of which all of a rank together take F and B, and
    at least p microbatches, a rank is idle for ``(p - 1) * (F + B) / v``. The first rank
    keeps most: for groups of g microbatches ``(v - 1) * g + 2 * p - 1`` activations
    of one stage, which for g = p is ``1 + (p - 1) / (p * v)`` times what 1F1B keeps.

    Args:
        num_stages: Number of stages, a multiple of the ranks.
        num_microbatches: Number of microbatches; fewer than ranks are one group.
        num_ranks: Number of ranks; half the stages if not given.

    Raises:
        ScheduleError: If a number is less than 1, or the ranks do not get as many stages each.
    """
    check_sizes("interleaved", num_stages, num_microbatches)
    num_ranks = looped_ranks("interleaved", num_stages, num_ranks)
    groups = _groups(num_microbatches, max(1, num_microbatches // num_ranks))
    ranks = tuple(
        _rank_actions(rank, range(rank, num_stages, num_ranks), groups, num_ranks)
        for rank in range(num_ranks)
    )
    return Schedule("interleaved", num_stages, num_microbatches, ranks)


def _groups(count: int, num_groups: int) -> list[range]:
    """Deal microbatches to groups in order, whose sizes differ by one at most.

    The larger come first: the forwards stay ahead of the backwards by as much as the
    first group took, which is then enough for every later one.
    """
    ends = [-(-count * number // num_groups) for number in range(num_groups + 1)]
    return [range(first, last) for first, last in pairwise(ends)]


def _rank_actions(
    rank: int, stages: range, groups: list[range], num_ranks: int
) -> tuple[Action, ...]:
    forwards = [Action(s, ActionKind.F, m) for group in groups for s in stages for m in group]
    backwards = [
        Action(s, ActionKind.B, m) for group in groups for s in reversed(stages) for m in group
    ]
    # The first backward is that of the last stage here. Before it the rank takes the first group
    # through its other stages, and what comes while the way to the end and back is under way.
    warm_up = min((len(stages) - 1) * len(groups[0]) + 2 * (num_ranks - rank - 1), len(forwards))
    actions = forwards[:warm_up]
    for number, backward in enumerate(backwards):
        actions += forwards[warm_up + number : warm_up + number + 1]
        actions.append(backward)
    return tuple(actions)
