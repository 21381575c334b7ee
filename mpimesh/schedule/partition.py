"""Layers of unequal times cut into stages, so that the slowest stage is as fast as can be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import lcm
from numbers import Integral, Rational, Real
from typing import Any, TypeVar

from mpimesh.arguments import as_int, as_items, shape_of
from mpimesh.errors import ScheduleError
from mpimesh.schedule.cuts import Row
from mpimesh.schedule.timetable import Seconds
from mpimesh.trace import svg

__all__ = ["Partition", "check_num_stages", "partition"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Partition:
    """Layers cut into stages: stage s has the layers ``bounds[s]`` to ``bounds[s + 1] - 1``.

    Attributes:
        bounds: Where the stages begin, and the number of layers at the end.
        stage_s: Seconds of each stage for a microbatch, with what it pays for messages.
    """

    bounds: tuple[int, ...]
    stage_s: tuple[Seconds, ...]

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.stage_s)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of layers of each stage."""
        return tuple(end - start for start, end in pairwise(self.bounds))

    @property
    def slowest_s(self) -> Seconds:
        """Seconds of the slowest stage, which the whole pipeline keeps step with."""
        return max(self.stage_s)

    @property
    def imbalance(self) -> float:
        """The slowest stage's time over the mean of all: 1 if they are equal."""
        total_s = sum(self.stage_s)
        return float(self.num_stages * self.slowest_s / total_s) if total_s else 1.0

    def split(self, layers: Sequence[T]) -> list[list[T]]:
        """Deal `layers`, as many as there are, to the stages."""
        return [list(layers[start:end]) for start, end in pairwise(self.bounds)]

    def __str__(self) -> str:
        sizes = ", ".join(map(str, self.sizes))
        times = ", ".join(svg.duration(float(one_s)) for one_s in self.stage_s)
        return (
            f"{self.num_stages} stages of {sizes} layers take {times}: the slowest "
            f"{self.imbalance:.2f} times the mean"
        )


def partition(
    layer_s: Iterable[Seconds], num_stages: int, *, message_s: Seconds | Iterable[Seconds] = 0
) -> Partition:
    """Cut layers into stages of one layer at least; the slowest stage is as fast as possible.

    A stage takes the time of its layers, and pays for the two messages that it receives: the
    activation over the boundary before it, and the gradient, which is as large as the activation
    was, over the boundary after it. The first stage and the last have one such boundary. Sends
    cost the sender nothing, as in :func:`simulate`. Where messages pass while a stage computes,
    this is more than they cost; it keeps cuts away from boundaries that are wide.

    Among cuts that are equally good the one with the least messages in all is taken, then
    the one whose first cut is earliest, then the second, and so on. Times are compared exactly,
    also floats, so the same numbers give the same cut everywhere.

    Args:
        layer_s: Seconds of each layer for a microbatch, forward and backward.
        num_stages: Number of stages. Where ranks have several, cut into as many as they have
            together: the times of a rank's stages add up, and each is at most the slowest.
        message_s: Seconds of a message over a boundary between two layers, in one direction: one
            number, or one for each, ``len(layer_s) - 1`` of them.

    Raises:
        ScheduleError: If there are fewer layers than stages, no stages, not one message for each
            boundary, or a time that is negative or not finite.

    Cost:
        About ``layers * layers * stages / 64`` machine operations for each of some 20 limits that
        are tried: half a second for 1,000 layers and 64 stages.

    Example:
        >>> partition([1, 1, 1, 3], 2).bounds
        (0, 3, 4)
        >>> partition([1, 1, 1, 3], 2, message_s=[0, 0, 9]).bounds
        (0, 2, 4)
    """
    wanted = "one number for each layer"
    layers = list(as_items(layer_s, "layer_s", ScheduleError, wanted=wanted))
    check_num_stages(num_stages, len(layers))
    boundaries = len(layers) - 1
    given: Any = message_s
    single = not isinstance(given, Iterable) or shape_of(given) == ()
    messages: list[Any] = [given] * boundaries if single else list(given)
    if len(messages) != boundaries:
        raise ScheduleError(
            f"message_s must be one number, or one for each of the {boundaries} boundaries between "
            f"{len(layers)} layers, got {len(messages)}"
        )
    exact_layers, exact_messages = _exact("layer_s", layers), _exact("message_s", messages)
    scale = lcm(*(one.denominator for one in (*exact_layers, *exact_messages)))
    row = Row(_scaled(exact_layers, scale), _scaled(exact_messages, scale))
    bounds = row.best_cut(num_stages, row.least_limit(num_stages))
    stage_s = tuple(Fraction(row.stage(start, end), scale) for start, end in pairwise(bounds))
    if all(isinstance(one, Rational) for one in (*layers, *messages)):
        return Partition(bounds, stage_s)
    return Partition(bounds, tuple(map(float, stage_s)))


def check_num_stages(num_stages: int, num_layers: int) -> None:
    """Refuse a number of stages into which so many layers cannot be cut.

    Raises:
        ScheduleError: If it is refused.
    """
    as_int(num_stages, "num_stages", ScheduleError, least=1)
    if num_stages > num_layers:
        raise ScheduleError(
            f"each stage has a layer at least, got {num_layers} layers for num_stages {num_stages}"
        )


def _exact(name: str, times: Iterable[Seconds]) -> list[Fraction]:
    exact = []
    for place, one in enumerate(times):
        if not isinstance(one, Real) or not 0 <= one < float("inf"):
            raise ScheduleError(
                f"{name} must be numbers of at least 0 and finite, got {one!r} at place {place}"
            )
        # NumPy's numbers are not all numbers to `Fraction`.
        exact.append(
            one
            if isinstance(one, Fraction)
            else Fraction(int(one) if isinstance(one, Integral) else float(one))
        )
    return exact


def _scaled(times: Iterable[Fraction], scale: int) -> list[int]:
    return [int(one * scale) for one in times]
