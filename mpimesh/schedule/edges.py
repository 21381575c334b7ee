"""The ways between the stages of a pipeline, numbered: from each stage to the next, and skips."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

from mpimesh.arguments import as_int, as_items, shown
from mpimesh.errors import ScheduleError
from mpimesh.schedule.action import Action
from mpimesh.schedule.schedule import Schedule, check_schedule

__all__ = ["Edges", "pairs"]


def pairs(skips: object) -> tuple[tuple[int, int], ...]:
    """Return skips in a tuple.

    Raises:
        ScheduleError: If they are no pairs of whole numbers.
    """
    found: list[tuple[int, int]] = []
    wanted = "pairs of stages, the source of each skip and its destination"
    for pair in as_items(skips, "skips", ScheduleError, wanted=wanted):
        ends = as_items(pair, "each of skips", ScheduleError, wanted="a pair of stages")
        if len(ends) != 2:
            raise ScheduleError(f"each of skips must be a pair of stages, got {shown(pair)}")
        source, destination = (
            as_int(end, "a stage in skips", ScheduleError, least=0) for end in ends
        )
        found.append((source, destination))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Edges:
    """The edges of a pipeline. Along each goes an output, and its gradient comes back.

    Edge s goes from stage s to stage s + 1. Skips, which take the output of a stage to one further
    on than the next, have the numbers after these, in rising order of source and destination.

    Attributes:
        num_stages: Number of stages.
        skips: For each skip its source and its destination, in rising order.

    Raises:
        ScheduleError: If a skip stands twice, or does not go from a stage to one beyond the next.

    Example:
        >>> edges = Edges(4, ((1, 3), (0, 2)))
        >>> edges.skips
        ((0, 2), (1, 3))
        >>> edges.number(Action.from_string("3SEND_B0>1"))
        4
    """

    num_stages: int
    skips: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        as_int(self.num_stages, "num_stages", ScheduleError, least=0)
        skips = sorted(pairs(self.skips))
        for source, destination in skips:
            if not 0 <= source < destination - 1 < self.num_stages - 1:
                raise ScheduleError(
                    "a skip goes from a stage to one beyond the next, and the stages are 0 to "
                    f"{self.num_stages - 1}; got a skip from {source} to {destination}"
                )
        twice = [one for one, other in pairwise(skips) if one == other]
        if twice:
            raise ScheduleError(f"skip {twice[0]} is given twice; give each skip once")
        object.__setattr__(self, "skips", tuple(skips))

    @classmethod
    def of(cls, schedule: Schedule, skips: Iterable[tuple[int, int]] = ()) -> Self:
        """Return the edges of a schedule: with `skips`, and those that have messages in it."""
        check_schedule(schedule)
        found = {
            (min(action.stage, action.other), max(action.stage, action.other))
            for action in schedule.actions()
            if action.other is not None and max(action.stage, action.other) < schedule.num_stages
        }
        return cls(
            schedule.num_stages, tuple({*cls(schedule.num_stages, pairs(skips)).skips, *found})
        )

    def __len__(self) -> int:
        return max(self.num_stages - 1, 0) + len(self.skips)

    def number(self, message: Action) -> int:
        """Return the number of the edge along which a SEND or RECV goes, either way.

        Raises:
            ScheduleError: If the action moves no message, or along none of these edges.
        """
        try:
            return self.between(message.stage, message.far_stage)
        except LookupError:
            raise ScheduleError(
                f"{message} goes along no edge of this pipeline of {self.num_stages} stages and "
                f"the skips {list(self.skips)}"
            ) from None

    def between(self, one: int, other: int) -> int:
        """Return the number of the edge between two stages.

        Raises:
            LookupError: If there is none.
        """
        ends = min(one, other), max(one, other)
        if ends[1] - ends[0] == 1 and 0 <= ends[0] < self.num_stages - 1:
            return ends[0]
        place = bisect_left(self.skips, ends)
        if self.skips[place : place + 1] != (ends,):
            raise LookupError(f"there is no edge between stages {one} and {other}")
        return self.num_stages - 1 + place

    def sources(self, stage: int) -> tuple[int, ...]:
        """Return the stages from which skips come to `stage`, in rising order."""
        return tuple(source for source, destination in self.skips if destination == stage)

    def destinations(self, stage: int) -> tuple[int, ...]:
        """Return the stages to which skips go from `stage`, in rising order."""
        return tuple(destination for source, destination in self.skips if source == stage)
