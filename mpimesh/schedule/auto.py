"""List scheduling, the V schedules made by it, and a search for the fastest schedule.

The search goes by measured times and a cap on memory. Schedules are found by name here, too.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import add
from types import MappingProxyType
from typing import Literal, Protocol

from mpimesh.arguments import as_int, shown
from mpimesh.errors import ScheduleError, UnknownNameError
from mpimesh.schedule.costs import Costs, Seconds
from mpimesh.schedule.generators import (
    dualpipev,
    forward_only,
    gpipe,
    interleaved,
    looped_bfs,
    one_f_one_b,
    vee_placement,
    vee_ranks,
    zb1p,
    zb2p,
    zbv,
)
from mpimesh.schedule.schedule import Action, ActionKind, Schedule, check_sizes
from mpimesh.schedule.simulate import simulate

__all__ = [
    "BuildingBlock",
    "Rule",
    "auto",
    "list_schedule",
    "make_schedule",
    "repeat",
    "schedule_names",
    "stages_per_rank",
    "vhalf",
    "vmin",
]


Rule = Callable[[Action], tuple[Seconds, ...]]
"""Of the F and I that a rank can do it takes the one of which this is the smallest."""


def list_schedule(
    name: str,
    placement: Sequence[int],
    num_microbatches: int,
    costs: Costs,
    *,
    caps: Sequence[int],
    rule: Rule | None = None,
    orders: Sequence[Sequence[Action]] | None = None,
) -> Schedule | None:
    """Make a schedule with split backward; each stage takes the microbatches in order.

    Time passes, and each rank that is free takes the best of what it can do: an F or I whose input
    has arrived, else the oldest W whose I is done. A rank never waits if it can do something, and
    stores no more activations than its cap.

    Either `rule` or `orders` says what goes first. With `orders` a rank does its F and I in
    exactly this order, and a W whenever the next of them cannot be done: its input is not there,
    or there is no room.

    Without `orders` it always ends. An F only begins if, after it, the rank has room for one more
    activation of each of its stages further on. Look at the oldest microbatch that is not through,
    and at its next action. An I or a W of it needs no room. If it is an F, then only microbatches
    before it have passed this stage, and they are through; so whatever the rank stores is of its
    earlier stages, and the last F there has left room for this one.

    Args:
        name: The name of the schedule.
        placement: For each stage its rank.
        num_microbatches: Number of microbatches.
        costs: What everything takes.
        caps: For each rank the most activations it may store, at least one for each of its stages.
        rule: What goes first.
        orders: For each rank all of its F and I.

    Returns:
        The schedule; None if `orders` do not fit the caps.
    """
    run = _ListScheduler(placement, num_microbatches, costs, caps)
    if orders is not None:
        run.go(run.by_orders(orders))
    elif rule is not None:
        run.go(run.by_rule(rule))
    if any(len(done) < count for done, count in zip(run.done, run.counts, strict=True)):
        return None
    ranks = tuple(map(tuple, run.done))
    return Schedule(name, len(placement), num_microbatches, ranks, tuple(placement))


_Choose = Callable[[int, Seconds], Action | None]


class _ListScheduler:
    """The simulation: for each stage the times at which its inputs arrive, in order."""

    def __init__(
        self, placement: Sequence[int], num_microbatches: int, costs: Costs, caps: Sequence[int]
    ) -> None:
        self._placement = placement
        self._messages = costs.message_s
        self._seconds = {
            ActionKind.F: costs.forward_s,
            ActionKind.I: costs.backward_input_s,
            ActionKind.W: costs.backward_weight_s,
        }
        self._room = list(caps)
        self._local: list[list[int]] = [[] for _ in caps]
        for stage, rank in enumerate(placement):
            self._local[rank].append(stage)
        # Room that must be left before an F of a stage: for it, and for those further on.
        self._needed = [0] * len(placement)
        for stages in self._local:
            for further, stage in enumerate(reversed(stages), start=1):
                self._needed[stage] = further
        self._forwards: list[deque[Seconds]] = [deque() for _ in placement]
        self._inputs: list[deque[Seconds]] = [deque() for _ in placement]
        self._forwards[0].extend([0] * num_microbatches)
        self._next_forward = [0] * len(placement)
        self._next_input = [0] * len(placement)
        self._weights: list[deque[Action]] = [deque() for _ in caps]
        self._events: list[tuple[Seconds, int]] = [(0, rank) for rank in range(len(caps))]
        self._free_at: list[Seconds] = [0] * len(caps)
        self.done: list[list[Action]] = [[] for _ in caps]
        self.counts = [3 * num_microbatches * len(stages) for stages in self._local]

    def go(self, choose: _Choose) -> None:
        """Do what `choose` says until nothing can be done any more."""
        while self._events:
            now, rank = heapq.heappop(self._events)
            if self._free_at[rank] <= now:
                action = choose(rank, now)
                if action is not None:
                    self._do(rank, action, now)

    def by_rule(self, rule: Rule) -> _Choose:
        """Choose the best by `rule`, or else the oldest W."""

        def choose(rank: int, now: Seconds) -> Action | None:
            ready = self._ready(rank, now)
            return min(ready, key=rule) if ready else next(iter(self._weights[rank]), None)

        return choose

    def by_orders(self, orders: Sequence[Sequence[Action]]) -> _Choose:
        """Choose the next of the rank's order, or else the oldest W."""
        left = [deque(order) for order in orders]

        def choose(rank: int, now: Seconds) -> Action | None:
            if left[rank] and self._can(rank, left[rank][0], now):
                return left[rank].popleft()
            return next(iter(self._weights[rank]), None)

        return choose

    def _ready(self, rank: int, now: Seconds) -> list[Action]:
        ready = []
        for stage in self._local[rank]:
            forwards, inputs = self._forwards[stage], self._inputs[stage]
            if forwards and forwards[0] <= now and self._room[rank] >= self._needed[stage]:
                ready.append(Action(stage, ActionKind.F, self._next_forward[stage]))
            if inputs and inputs[0] <= now:
                ready.append(Action(stage, ActionKind.I, self._next_input[stage]))
        return ready

    def _can(self, rank: int, action: Action, now: Seconds) -> bool:
        if action.kind is ActionKind.F:
            arrived = self._forwards[action.stage]
            return bool(arrived) and arrived[0] <= now and self._room[rank] > 0
        arrived = self._inputs[action.stage]
        return bool(arrived) and arrived[0] <= now

    def _do(self, rank: int, action: Action, now: Seconds) -> None:
        stage = action.stage
        end = self._free_at[rank] = now + self._seconds[action.kind][stage]
        heapq.heappush(self._events, (end, rank))
        self.done[rank].append(action)
        if action.kind is ActionKind.F:
            self._room[rank] -= 1
            self._forwards[stage].popleft()
            self._next_forward[stage] += 1
            if stage + 1 < len(self._placement):
                self._hand_over(self._forwards, stage, stage + 1, end)
            else:
                self._inputs[stage].append(end)
        elif action.kind is ActionKind.I:
            self._inputs[stage].popleft()
            self._next_input[stage] += 1
            self._weights[rank].append(Action(stage, ActionKind.W, action.microbatch))
            if stage > 0:
                self._hand_over(self._inputs, stage, stage - 1, end)
        else:
            self._weights[rank].popleft()
            self._room[rank] += 1

    def _hand_over(self, arrivals: list[deque[Seconds]], stage: int, to: int, end: Seconds) -> None:
        """Let a result arrive, and have the rank there look."""
        rank = self._placement[to]
        if rank != self._placement[stage]:
            end += self._messages[min(stage, to)]
        arrivals[to].append(end)
        heapq.heappush(self._events, (end, rank))


_INTERVAL = 6


@dataclass(frozen=True, slots=True)
class BuildingBlock:
    """The times of one microbatch's F and I on each rank of a V, which are repeated at an interval.

    The interval is 6 units: a rank needs that many for the F, I and W of its two stages if each
    takes one. The repeated block must never need a rank twice at a time. A block that stores
    activations for n intervals needs memory for n of them: short ways need little.
    (Qi et al., 2024, "Pipeline Parallelism with Controllable Memory", arXiv 2405.15362.)

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
        cap: Most activations of one stage that a rank may store.
        costs: Under which times it would wait; equal times by default.

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


def vhalf(num_stages: int, num_microbatches: int, *, num_ranks: int | None = None) -> Schedule:
    """Make the schedule V-Half: rank r has stage r and its mirror.

    On p ranks a rank stores at most the activations of ``(p + 2) // 2`` microbatches on both its
    stages, where 1F1B stores p. With equal stages and F = I = W it is idle between its first action
    and its last for at most ``3 * p`` units of one stage, about half as long as under 1F1B.
    Other times leave a steady state without bubble as long as W + 2I is at least 2F, and
    W + 2F at least 2I.

    Args:
        num_stages: Number of stages, twice that of the ranks.
        num_microbatches: Number of microbatches.
        num_ranks: Number of ranks, if it is to be checked.

    Raises:
        ScheduleError: If a number is less than 1, or there are not two stages for each rank.
    """
    num_ranks = vee_ranks("vhalf", num_stages, num_microbatches, num_ranks)
    # Down at half speed, up at full speed, so that I finds the places that F leaves.
    block = BuildingBlock((2, 1, 2, 1), (1, 0 if num_ranks % 2 else 3, 0))
    # With an F a little longer than the rest no W is put where a longer F would have to wait for it
    # in every microbatch.
    costs = Costs.of(num_stages, forward_s=5, backward_input_s=4, backward_weight_s=4)
    cap = 2 * ((num_ranks + 2) // 2)
    return repeat("vhalf", block, num_ranks, num_microbatches, cap=cap, costs=costs)


def vmin(num_stages: int, num_microbatches: int, *, num_ranks: int | None = None) -> Schedule:
    """Make the schedule V-Min: rank r has stage r and its mirror.

    On p ranks a rank stores at most the activations of ``(p + 4) // 3`` microbatches on both its
    stages, where 1F1B stores p. With equal stages and F = I = W it is idle between its first action
    and its last for at most ``4 * p - 5`` units of one stage, two thirds as long as under 1F1B.
    Where F, I and W differ, ranks wait for each other in every microbatch: then take V-Half.

    Args:
        num_stages: Number of stages, twice that of the ranks.
        num_microbatches: Number of microbatches.
        num_ranks: Number of ranks, if it is to be checked.

    Raises:
        ScheduleError: If a number is less than 1, or there are not two stages for each rank.
    """
    num_ranks = vee_ranks("vmin", num_stages, num_microbatches, num_ranks)
    # As fast as can be, on every way. For multiples of 3 the ways meet without the gaps.
    block = BuildingBlock((1, 1, 1, 1), (0, 0, 0) if num_ranks % 3 else (2, 0, 2))
    return repeat("vmin", block, num_ranks, num_microbatches, cap=2 * ((num_ranks + 4) // 3))


# -- by name, and the fastest ---------------------------------------------------------------------


class _Generator(Protocol):
    """A function that makes a schedule."""

    def __call__(
        self, num_stages: int, num_microbatches: int, *, num_ranks: int | None = None
    ) -> Schedule:
        """Make the schedule; raise ScheduleError if there is none."""


ScheduleName = Literal[
    "gpipe", "1f1b", "interleaved", "looped_bfs", "zb1p", "zb2p", "zbv", "vhalf", "vmin",
    "dualpipev", "forward", "auto",
]  # fmt: skip
"""Schedules by name, so that a type checker finds a misspelt one."""

_FAMILY: Mapping[ScheduleName, _Generator] = MappingProxyType(
    {
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "interleaved": interleaved,
        "looped_bfs": looped_bfs,
        "zb1p": zb1p,
        "zb2p": zb2p,
        "zbv": zbv,
        "vhalf": vhalf,
        "vmin": vmin,
        "dualpipev": dualpipev,
        "forward": forward_only,
    }
)


def auto(
    num_stages: int,
    num_microbatches: int,
    *,
    num_ranks: int | None = None,
    forward_s: Seconds | Sequence[Seconds] = 1,
    backward_input_s: Seconds | Sequence[Seconds] = 1,
    backward_weight_s: Seconds | Sequence[Seconds] = 1,
    message_s: Seconds | Sequence[Seconds] = 0,
    max_in_flight: int | Sequence[int] | None = None,
) -> Schedule:
    """Find the fastest schedule for the times of stages, within a cap on activations.

    It tries every schedule of the family; each of them with its weight gradients put anew where
    ranks would wait under these times; and list scheduling by several rules, for stages in
    turn and, where each rank gets two, for a V. The one whose simulated step is shortest is
    returned, under the name ``auto-`` and that of its origin; among equals the one that stores
    least, then the first. So in simulation it is never slower than any of the family that fits.

    It is a heuristic, not an exhaustive search, and takes about twenty times as long as making and
    simulating one schedule.

    Args:
        num_stages: Number of stages.
        num_microbatches: Number of microbatches.
        num_ranks: Number of ranks; as many as stages by default.
        forward_s: Seconds of F: one number, or one for each stage.
        backward_input_s: Seconds of I, likewise.
        backward_weight_s: Seconds of W, likewise. B takes as long as both.
        message_s: Seconds of a message: one number, or one for each pair of neighbour stages.
        max_in_flight: Most activations of a stage that a rank may store, as
            :meth:`Schedule.peak_in_flight` counts them: one number, or one for each rank.
            No limit by default.

    Raises:
        ScheduleError: If a number is less than 1, a time is negative or missing, or a cap is less
            than the stages of its rank, each of which needs one.

    Example:
        >>> schedule = auto(4, 8, forward_s=[1, 1, 2, 1], message_s=0.1, max_in_flight=4)
        >>> PipelineParallel(stages, 8, mesh=mesh, schedule=functools.partial(auto, num_ranks=2))
    """
    check_sizes("auto", num_stages, num_microbatches, num_ranks)
    num_ranks = num_stages if num_ranks is None else num_ranks
    if num_ranks > num_stages:
        raise ScheduleError(
            f"schedule auto puts at least one stage on each rank, got num_stages {num_stages} and "
            f"num_ranks {num_ranks}"
        )
    costs = Costs.of(
        num_stages,
        forward_s=forward_s,
        backward_input_s=backward_input_s,
        backward_weight_s=backward_weight_s,
        message_s=message_s,
    )
    caps = _caps(max_in_flight, num_stages, num_microbatches, num_ranks)
    # Some come out alike: with one stage on each rank interleaved is 1F1B.
    different: dict[tuple[tuple[Action, ...], ...], Schedule] = {}
    for schedule in _candidates(num_stages, num_microbatches, num_ranks, costs, caps):
        if all(schedule.peak_in_flight(rank) <= cap for rank, cap in enumerate(caps)):
            different.setdefault(schedule.ranks, schedule)
    best = min(different.values(), key=lambda schedule: (_step_s(schedule, costs), _peak(schedule)))
    return replace(best, name=f"auto-{best.name}")


def _caps(
    max_in_flight: int | Sequence[int] | None,
    num_stages: int,
    num_microbatches: int,
    num_ranks: int,
) -> list[int]:
    stages = [len(range(rank, num_stages, num_ranks)) for rank in range(num_ranks)]
    if max_in_flight is None:
        return [count * num_microbatches for count in stages]
    listed = isinstance(max_in_flight, Sequence) and not isinstance(max_in_flight, str | bytes)
    caps = [
        as_int(cap, "max_in_flight", ScheduleError, least=1)
        for cap in (max_in_flight if listed else [max_in_flight] * num_ranks)  # type: ignore[union-attr]
    ]
    if len(caps) != num_ranks:
        raise ScheduleError(
            f"max_in_flight must be one number or one for each of {num_ranks} ranks, "
            f"got {len(caps)}"
        )
    for rank, (cap, count) in enumerate(zip(caps, stages, strict=True)):
        if cap < count:
            raise ScheduleError(
                "max_in_flight must be at least the number of a rank's stages, each of which "
                f"keeps an activation; rank {rank} has {count} stages, got {cap}"
            )
    return caps


def _candidates(
    num_stages: int, num_microbatches: int, num_ranks: int, costs: Costs, caps: Sequence[int]
) -> Iterator[Schedule]:
    for name, generator in _FAMILY.items():
        try:
            made = generator(num_stages, num_microbatches, num_ranks=num_ranks)
        except ScheduleError:
            continue
        if made.trains:
            yield made
            refilled = list_schedule(
                name, made.placement, num_microbatches, costs, caps=caps, orders=_orders(made)
            )
            if refilled is not None:
                yield refilled
    placements = {"dealt": tuple(stage % num_ranks for stage in range(num_stages))}
    if num_stages == 2 * num_ranks:
        placements["vee"] = vee_placement(num_ranks)
    for shape, placement in placements.items():
        for word, rule in _rules(costs).items():
            listed = list_schedule(
                f"{word}-{shape}", placement, num_microbatches, costs, caps=caps, rule=rule
            )
            if listed is not None:
                yield listed


def _orders(schedule: Schedule) -> list[list[Action]]:
    """Return the F and I of each rank, in the order of `schedule`."""
    return [
        [
            Action(action.stage, ActionKind.I, action.microbatch)
            if action.kind is ActionKind.B
            else action
            for action in actions
            if action.kind is not ActionKind.W
        ]
        for actions in schedule.ranks
    ]


def _rules(costs: Costs) -> dict[str, Rule]:
    """Return rules for what goes first.

    ``depth`` lets gradients go before anything, and activations that have come far before others,
    as 1F1B does. ``longest`` takes what is farthest from the end of its microbatch's way, and
    ``finish`` what is nearest. ``oldest`` takes the oldest microbatch.
    """
    # How long a microbatch needs from each F and I to the end of the first stage's I.
    inputs = list(accumulate(map(add, costs.backward_input_s, (0, *costs.message_s))))
    forwards = map(add, costs.forward_s[::-1], (0, *costs.message_s[::-1]))
    _, *outputs = accumulate(forwards, initial=inputs[-1])
    to_end: dict[ActionKind, list[Seconds]] = {
        ActionKind.F: outputs[::-1],
        ActionKind.I: inputs,
    }

    def left_s(action: Action) -> Seconds:
        return to_end[action.kind][action.stage]

    def depth(action: Action) -> tuple[Seconds, ...]:
        if action.kind is ActionKind.I:
            return (0, action.microbatch, -action.stage)
        return (1, -action.stage)

    return {
        "depth": depth,
        "longest": lambda action: (-left_s(action), action.microbatch),
        "oldest": lambda action: (action.microbatch, left_s(action)),
        "finish": lambda action: (left_s(action),),
    }


def _step_s(schedule: Schedule, costs: Costs) -> Seconds:
    return simulate(schedule, **costs.as_arguments()).step_s


def _peak(schedule: Schedule) -> int:
    return max(map(schedule.peak_in_flight, range(schedule.num_ranks)))


def schedule_names() -> tuple[ScheduleName, ...]:
    """Return the names that :func:`make_schedule` knows."""
    return (*_FAMILY, "auto")


def stages_per_rank(name: ScheduleName) -> int:
    """Return into how many stages for each rank a model is cut for the schedule called `name`.

    It is 2 for those on a V. ``interleaved`` and ``looped_bfs`` can do with any number, of which 2
    is returned, and ``auto`` with any, of which 1 is.

    Raises:
        UnknownNameError: If there is no such schedule.
    """
    return 2 // make_schedule(name, 2, 1).num_ranks


def make_schedule(
    name: ScheduleName, num_stages: int, num_microbatches: int, *, num_ranks: int | None = None
) -> Schedule:
    """Make the schedule called `name`, without messages.

    One stage on each rank: ``gpipe``, ``1f1b``, ``zb1p``, ``zb2p``; ``forward`` for inference.
    Several, in turn: ``interleaved``, ``looped_bfs``. Two, in the shape of a V: ``zbv``,
    ``vhalf``, ``vmin``, ``dualpipev``. Either: ``auto``, which takes all times as equal here; give
    :func:`~mpimesh.schedule.auto` the measured ones.

    Args:
        name: One of :func:`schedule_names`.
        num_stages: Number of stages over all ranks, at least 1.
        num_microbatches: Number of microbatches, at least 1; may be fewer than the stages.
        num_ranks: Number of ranks. By default as many as stages, or half as many where a
            schedule puts several stages on a rank.

    Raises:
        UnknownNameError: If there is no such schedule.
        ScheduleError: If a number is less than 1, or the schedule does not put so many stages
            on so many ranks.
    """
    if not isinstance(name, str) or name not in schedule_names():
        raise UnknownNameError(
            f"the name of a schedule is one of {', '.join(schedule_names())}, got {shown(name)}"
        )
    generator = auto if name == "auto" else _FAMILY[name]
    return generator(num_stages, num_microbatches, num_ranks=num_ranks)
