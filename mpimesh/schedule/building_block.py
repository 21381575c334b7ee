"""Schedules on a V of stages, made by repeating one microbatch's way at a fixed interval.

When a microbatch's F and I on each rank begin is its *building block*. Repeated every 6
units, which is what a microbatch takes of a rank if each of the F, I and W of its two stages takes
one, it must never need a rank twice at a time. How long a block keeps a rank's
activations, over the interval, is how many the rank keeps: short ways keep few.
(Qi et al., 2024, "Pipeline Parallelism with Controllable Memory", arXiv 2405.15362.)
"""

from __future__ import annotations

from dataclasses import dataclass

from mpimesh.errors import ScheduleError
from mpimesh.schedule.action import Action, ActionKind
from mpimesh.schedule.costs import Costs
from mpimesh.schedule.list_schedule import list_schedule
from mpimesh.schedule.placement import vee_placement
from mpimesh.schedule.schedule import Schedule

__all__ = ["BuildingBlock", "repeat"]

_INTERVAL = 6


@dataclass(frozen=True, slots=True)
class BuildingBlock:
    """The way of one microbatch down the V and up, and back.

    Attributes:
        strides: Units from a rank to the next on each of the four ways: F down, F up, I
            down, I up.
        gaps: Units of rest at each of the three turns between them.
    """

    strides: tuple[int, int, int, int]
    gaps: tuple[int, int, int] = (0, 0, 0)

    def starts(self, rank: int, num_ranks: int) -> tuple[int, int, int, int]:
        """Return when F down, F up, I down and I up begin on `rank`."""
        below, last = num_ranks - 1 - rank, num_ranks - 1
        first, second, third, fourth = self.strides
        turn = first * last + 1 + self.gaps[0]
        back = turn + second * last + 1 + self.gaps[1]
        end = back + third * last + 1 + self.gaps[2]
        return first * rank, turn + second * below, back + third * rank, end + fourth * below


def repeat(
    name: str,
    block: BuildingBlock,
    num_ranks: int,
    num_microbatches: int,
    *,
    cap: int,
    costs: Costs | None = None,
) -> Schedule:
    """Repeat `block` for each microbatch, and put W where a rank would wait or has no room.

    Args:
        name: The name of the schedule.
        block: What to repeat.
        num_ranks: Number of ranks, each with two stages.
        num_microbatches: Number of microbatches.
        cap: Most activations of one stage that a rank may keep.
        costs: Under which times it would wait; all times are equal if not given.

    Raises:
        ScheduleError: If two of the block's four starts on a rank meet every 6 units, or it does
            not fit the cap.
    """
    for rank in range(num_ranks):
        starts = block.starts(rank, num_ranks)
        if len({start % _INTERVAL for start in starts}) < len(starts):
            raise ScheduleError(
                f"the building block of schedule {name} needs rank {rank} of {num_ranks} twice at "
                f"a time: it starts there at {starts}, and again every {_INTERVAL} units; change "
                "its strides or gaps"
            )
    schedule = list_schedule(
        name,
        vee_placement(num_ranks),
        num_microbatches,
        costs or Costs.of(2 * num_ranks),
        caps=[cap] * num_ranks,
        orders=[
            _order(block.starts(rank, num_ranks), rank, 2 * num_ranks - 1 - rank, num_microbatches)
            for rank in range(num_ranks)
        ],
    )
    if schedule is None:
        raise ScheduleError(
            f"the building block of schedule {name} keeps more than {cap} activations on one of "
            f"{num_ranks} ranks; raise the cap, or make its ways shorter"
        )
    return schedule


def _order(
    starts: tuple[int, int, int, int], down: int, up: int, num_microbatches: int
) -> list[Action]:
    """Return the F and I of a rank in the order in which the repeated block has them."""
    ways = (
        (down, ActionKind.F),
        (up, ActionKind.F),
        (up, ActionKind.I),
        (down, ActionKind.I),
    )
    timed = [
        (start + _INTERVAL * microbatch, Action(stage, kind, microbatch))
        for start, (stage, kind) in zip(starts, ways, strict=True)
        for microbatch in range(num_microbatches)
    ]
    return [action for _, action in sorted(timed, key=lambda pair: pair[0])]
