"""Looped, breadth first: GPipe with several stages on a rank (Lamy-Poirier, arXiv 2211.05953)."""

from __future__ import annotations

from mpimesh.schedule.action import Action, ActionKind
from mpimesh.schedule.placement import check_sizes, looped_ranks
from mpimesh.schedule.schedule import Schedule

__all__ = ["looped_bfs"]


def looped_bfs(num_stages: int, num_microbatches: int, *, num_ranks: int | None = None) -> Schedule:
    """Make the looped schedule that takes each stage through all microbatches before the next.

    Stage s lies on rank ``s % num_ranks``. With v equal stages on each of p ranks, of which all of
    a rank together take F and B, and at least p microbatches, a rank is idle for
    ``(p - 1) * (F + B) / v``. It keeps the activations of all microbatches, and the gradients of
    a stage are ready, and can be reduced, while the others still compute.

    Args:
        num_stages: Number of stages, a multiple of the ranks.
        num_microbatches: Number of microbatches.
        num_ranks: Number of ranks; half the stages if not given.

    Raises:
        ScheduleError: If a number is less than 1, or the ranks do not get as many stages each.
    """
    check_sizes("looped_bfs", num_stages, num_microbatches)
    num_ranks = looped_ranks("looped_bfs", num_stages, num_ranks)
    microbatches = range(num_microbatches)
    ranks = tuple(
        (
            *(Action(s, ActionKind.F, m) for s in stages for m in microbatches),
            *(Action(s, ActionKind.B, m) for s in reversed(stages) for m in microbatches),
        )
        for stages in (range(rank, num_stages, num_ranks) for rank in range(num_ranks))
    )
    return Schedule("looped_bfs", num_stages, num_microbatches, ranks)
