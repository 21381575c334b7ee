"""Costs of the parts of a step, stage by stage or layer by layer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise
from numbers import Real
from typing import Any

from mpimesh.arguments import as_int, as_items, is_real, shape_of, shown
from mpimesh.errors import ScheduleError
from mpimesh.schedule.action import ActionKind
from mpimesh.schedule.placement import MOST_FORWARDS
from mpimesh.schedule.timetable import Seconds

__all__ = ["Costs", "spread"]


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of each stage's F, I and W, and of a message between neighbour stages.

    The costs of single layers are those of stages of one layer each; :meth:`joined` gives those of
    stages of several.

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
        as_int(num_stages, "num_stages", ScheduleError, least=1, most=MOST_FORWARDS)
        return cls(
            spread("forward_s", forward_s, num_stages),
            spread("backward_input_s", backward_input_s, num_stages),
            spread("backward_weight_s", backward_weight_s, num_stages),
            spread("message_s", message_s, num_stages - 1),
        )

    @property
    def total_s(self) -> tuple[Seconds, ...]:
        """Seconds of F, I and W together, of each stage."""
        parts = zip(self.forward_s, self.backward_input_s, self.backward_weight_s, strict=True)
        return tuple(map(sum, parts))

    def joined(self, sizes: Iterable[int]) -> Costs:
        """Return the costs of larger stages.

        Args:
            sizes: How many of these stages, or layers, each of the larger ones has, in order.

        Raises:
            ScheduleError: If a size is less than 1, or they do not add up.

        Example:
            >>> layers = Costs.of(3, forward_s=[1, 2, 3], message_s=[7, 8])
            >>> layers.joined([1, 2]).forward_s, layers.joined([1, 2]).message_s
            ((1, 5), (7,))
        """
        wanted = "numbers of stages, in order"
        sizes = as_items(sizes, "sizes", ScheduleError, wanted=wanted)
        sizes = tuple(as_int(size, "each of sizes", ScheduleError, least=0) for size in sizes)
        bounds = list(accumulate(sizes, initial=0))
        if min(sizes, default=0) < 1 or bounds[-1] != len(self.forward_s):
            raise ScheduleError(
                f"sizes must be at least 1 each and {len(self.forward_s)} together, got {sizes}"
            )

        def sums(times: Sequence[Seconds]) -> tuple[Seconds, ...]:
            return tuple(sum(times[start:end]) for start, end in pairwise(bounds))

        return Costs(
            sums(self.forward_s),
            sums(self.backward_input_s),
            sums(self.backward_weight_s),
            tuple(self.message_s[end - 1] for end in bounds[1:-1]),
        )

    def as_arguments(self) -> dict[str, Any]:
        """Return the costs as keyword arguments of :func:`simulate` and :func:`auto`."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def of_kind(self, kind: ActionKind) -> tuple[Seconds, ...]:
        """Return the seconds of F, I or W of each stage."""
        return {
            ActionKind.F: self.forward_s,
            ActionKind.I: self.backward_input_s,
            ActionKind.W: self.backward_weight_s,
        }[kind]


def spread(name: str, given: Seconds | Sequence[Seconds], count: int) -> tuple[Seconds, ...]:
    """Return times: one number for all, or one for each.

    Args:
        name: What messages call them.
        given: The number, or the numbers.
        count: How many there are to be.

    Raises:
        ScheduleError: If a number is negative or not finite, or there is not one for each.
    """
    single = isinstance(given, Real) or (hasattr(given, "shape") and not given.shape)
    wanted = f"one number or {count} of them"
    times: tuple[Any, ...] = (
        (given,) * count if single else as_items(given, name, ScheduleError, wanted=wanted)
    )
    if len(times) != count:
        raise ScheduleError(f"{name} must be {wanted}, got {len(times)}")
    numbers = all(isinstance(one, Real) or (is_real(one) and shape_of(one) == ()) for one in times)
    if not numbers or not all(0 <= one < math.inf for one in times):
        raise ScheduleError(f"{name} must be numbers of at least 0 and finite, got {shown(given)}")
    return times
