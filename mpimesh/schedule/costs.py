"""What the parts of a step cost, stage by stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpimesh.errors import ScheduleError
from mpimesh.schedule.action import ActionKind
from mpimesh.schedule.timetable import Seconds

__all__ = ["Costs"]


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of each stage's F, I and W, and of a message between neighbour stages.

    Attributes:
        forward_s: Seconds of F, one number for each stage.
        backward_input_s: Seconds of I, likewise.
        backward_weight_s: Seconds of W, likewise.
        message_s: Seconds of a message between a stage and the next, in both directions; one
            number less than stages.
    """

    forward_s: tuple[Seconds, ...]
    backward_input_s: tuple[Seconds, ...]
    backward_weight_s: tuple[Seconds, ...]
    message_s: tuple[Seconds, ...]

    @classmethod
    def of(
        cls,
        num_stages: int,
        *,
        forward_s: Seconds | Sequence[Seconds] = 1,
        backward_input_s: Seconds | Sequence[Seconds] = 1,
        backward_weight_s: Seconds | Sequence[Seconds] = 1,
        message_s: Seconds | Sequence[Seconds] = 0,
    ) -> Costs:
        """Make costs from one number for all stages, or one for each.

        Raises:
            ScheduleError: If a number is negative or not finite, or there is not one for each.
        """
        return cls(
            _spread("forward_s", forward_s, num_stages),
            _spread("backward_input_s", backward_input_s, num_stages),
            _spread("backward_weight_s", backward_weight_s, num_stages),
            _spread("message_s", message_s, num_stages - 1),
        )

    def of_kind(self, kind: ActionKind) -> tuple[Seconds, ...]:
        """Return the seconds of F, I or W of each stage."""
        return {
            ActionKind.F: self.forward_s,
            ActionKind.I: self.backward_input_s,
            ActionKind.W: self.backward_weight_s,
        }[kind]


def _spread(name: str, given: Seconds | Sequence[Seconds], count: int) -> tuple[Seconds, ...]:
    durations = tuple(given) if isinstance(given, Sequence) else (given,) * count
    if len(durations) != count:
        raise ScheduleError(f"{name} must be one number or {count} of them, got {len(durations)}")
    if not all(0 <= duration < float("inf") for duration in durations):
        raise ScheduleError(f"{name} must be at least 0 and finite, got {given}")
    return durations
