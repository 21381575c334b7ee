"""Times of layers and stages, and the cut of layers into stages of equal time."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import reduce
from itertools import accumulate, compress, pairwise
from numbers import Integral, Rational, Real
from operator import or_
from typing import Any, TypeVar

from mpimesh.arguments import as_int, as_items, is_real, shape_of, shown
from mpimesh.errors import ScheduleError
from mpimesh.schedule.schedule import MOST_FORWARDS
from mpimesh.trace import svg

__all__ = ["Costs", "Partition", "Seconds", "check_num_stages", "partition", "spread"]


# Sums and comparisons only, so integers and fractions stay exact.
Seconds = float | Fraction


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
        """Make costs of `num_stages` stages from one number for all of them, or one for each.

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


def spread(name: str, times: Seconds | Iterable[Seconds], count: int) -> tuple[Seconds, ...]:
    """Return times: one number for all, or one for each.

    Args:
        name: What messages call them.
        times: The number, or the numbers.
        count: How many there are to be.

    Raises:
        ScheduleError: If a number is negative or not finite, or there is not one for each.
    """
    single = isinstance(times, Real) or (hasattr(times, "shape") and not times.shape)
    wanted = f"one number or {count} of them"
    listed: tuple[Any, ...] = (
        (times,) * count if single else as_items(times, name, ScheduleError, wanted=wanted)
    )
    if len(listed) != count:
        raise ScheduleError(f"{name} must be {wanted}, got {len(listed)}")
    for index, item in enumerate(listed):
        is_number = isinstance(item, Real) or (is_real(item) and shape_of(item) == ())
        if not (is_number and 0 <= item < math.inf):
            at = "" if single else f" at index {index}"
            raise ScheduleError(
                f"{name} must be numbers of at least 0 and finite, got {shown(item)}{at}"
            )
    return listed


_IS_MEMBER = bytes.maketrans(b"01", b"\x00\x01")


class _LayerRow:
    """Layers in a row, with the messages between them, in whole numbers; their best cut, exactly.

    Layers i to j - 1 can be a stage within a limit if ``up[j] - down[i]`` is within it, with
    ``up[j]`` the time of all layers before j plus that of the message there, and ``down[i]`` the
    time of all before i minus that of the message there. Two steps:

    1. The least limit within which a cut into so many stages exists. From which layers one stage
       leads to the end, from which two do, and so on, follows from the end back. A greater limit
       allows all that a smaller one does, so bisection finds the least. (To let each stage take as
       many layers as fit, as is right where messages cost nothing, is wrong here: the message one
       layer earlier may cost less.)
    2. Among the cuts within it, a table for each number of stages: the least messages from a
       layer to the end. It is filled from the end back, and read forward, where each cut is the
       earliest that loses nothing.

    Sets of starts or ends of stages are the bits of a number, so that one operation takes 64 of
    them at once.

    Args:
        layers: The time of each layer.
        messages: The time of a message between each and the next.
    """

    def __init__(self, layers: Sequence[int], messages: Sequence[int]) -> None:
        self.size = len(layers)
        self.longest = max(layers)
        self.messages = [0, *messages, 0]
        before = list(accumulate(layers, initial=0))
        self.up = [time + message for time, message in zip(before, self.messages, strict=True)]
        self.down = [time - message for time, message in zip(before, self.messages, strict=True)]
        starts = sorted(range(self.size), key=self.down.__getitem__)
        self._sorted_down = [self.down[start] for start in starts]
        sets = accumulate((1 << start for start in reversed(starts)), or_, initial=0)
        self._starts_from = list(sets)[::-1]
        """At place p the starts from the p-th on, in the order of their `down`."""

    def stage(self, start: int, end: int) -> int:
        """Return the time of a stage."""
        return self.up[end] - self.down[start]

    def least_limit(self, num_stages: int) -> int:
        """Return the least time that the slowest of so many stages can have."""
        total = self.up[-1]
        too_low = max(self.longest, -(-total // num_stages)) - 1
        enough = total + 2 * max(self.messages)
        while enough - too_low > 1:
            limit = (too_low + enough) // 2
            places = self._places(limit)
            # Between two differences of an `up` and a `down` all limits allow the same.
            ups_places = zip(self.up[1:], places, strict=True)
            if self._can_be_cut(num_stages, self._starts(places)):
                within = [up - self._sorted_down[p] for up, p in ups_places if p < self.size]
                enough = max(within)
            else:
                above = [up - self._sorted_down[p - 1] for up, p in ups_places if p]
                too_low = min(above) - 1
        return enough

    def best_cut(self, num_stages: int, limit: int) -> tuple[int, ...]:
        """Return the bounds of stages within `limit`: least messages, then earliest."""
        starts = self._starts(self._places(limit))
        # For each number of stages from a start to the end: the least messages on the way.
        tables: list[dict[int, int]] = [{self.size: 0}]
        for stages_before in reversed(range(num_stages)):
            table = self._with_a_stage_before(tables[-1], starts)
            tables.append(
                {start: least for start, least in table.items() if start >= stages_before}
            )
        bounds = [0]
        for stages_left in reversed(range(num_stages)):
            start, after = bounds[-1], tables[stages_left]
            least = tables[stages_left + 1][start]
            bounds.append(
                next(
                    end
                    for end in sorted(after)
                    if starts[end] >> start & 1 and self.messages[end] + after[end] == least
                )
            )
        return tuple(bounds)

    def _with_a_stage_before(self, after: dict[int, int], starts: Sequence[int]) -> dict[int, int]:
        table: dict[int, int] = {}
        reached = 0
        # The first end, from the least messages on, that a start reaches is its best.
        for least, end in sorted((self.messages[end] + least, end) for end, least in after.items()):
            new = starts[end] & ~reached
            if new:
                reached |= new
                table.update(dict.fromkeys(_members(new), least))
        return table

    def _can_be_cut(self, num_stages: int, starts: Sequence[int]) -> bool:
        reached = 1 << self.size
        for stages_before in reversed(range(num_stages)):
            reached = reduce(or_, compress(starts, _bits(reached)), 0)
            # Each stage before has a layer.
            reached = reached >> stages_before << stages_before
        return bool(reached & 1)

    def _places(self, limit: int) -> list[int]:
        """Return for each end but 0 where the starts begin, by `down`, that may go with it."""
        return [bisect_left(self._sorted_down, up - limit) for up in self.up[1:]]

    def _starts(self, places: Sequence[int]) -> list[int]:
        """Return for each end the starts of the stages that may end there; none for 0."""
        return [
            0,
            *(
                self._starts_from[place] & ((1 << end) - 1)
                for end, place in enumerate(places, start=1)
            ),
        ]


def _bits(members: int) -> bytes:
    """Return a byte for each number from 0 on: 1 if it is a member."""
    return f"{members:b}".encode()[::-1].translate(_IS_MEMBER)


def _members(members: int) -> Iterator[int]:
    while members:
        lowest = members & -members
        yield lowest.bit_length() - 1
        members ^= lowest


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
        """Seconds of the slowest stage, whose pace the pipeline has."""
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
    this is more than they cost; it moves cuts away from wide boundaries.

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
    layers = as_items(layer_s, "layer_s", ScheduleError, wanted=wanted)
    check_num_stages(num_stages, len(layers))
    spread("layer_s", layers, len(layers))
    messages = spread(f"message_s of {len(layers)} layers", message_s, len(layers) - 1)
    exact = list(map(_exact, (*layers, *messages)))
    scale = math.lcm(*(time.denominator for time in exact))
    scaled = [int(time * scale) for time in exact]
    row = _LayerRow(scaled[: len(layers)], scaled[len(layers) :])
    bounds = row.best_cut(num_stages, row.least_limit(num_stages))
    stage_s = tuple(Fraction(row.stage(start, end), scale) for start, end in pairwise(bounds))
    if all(isinstance(time, Rational) for time in (*layers, *messages)):
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


def _exact(time: Any) -> Fraction:
    # NumPy's numbers are not all numbers to `Fraction`.
    if isinstance(time, Fraction):
        return time
    return Fraction(int(time) if isinstance(time, Integral) else float(time))
