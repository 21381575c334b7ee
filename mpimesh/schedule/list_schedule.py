"""List scheduling, and the V schedules made with it."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mpimesh.errors import ScheduleError
from mpimesh.schedule.action import Action, ActionKind
from mpimesh.schedule.costs import Costs, Seconds
from mpimesh.schedule.generators import vee_placement, vee_ranks
from mpimesh.schedule.schedule import Schedule

__all__ = ["BuildingBlock", "Rule", "list_schedule", "repeat", "vhalf", "vmin"]


Rule = Callable[[Action], tuple[Seconds, ...]]
"""Of the actions that a rank can do it takes the one of which this is the smallest."""


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
    has arrived, or a W whose I is done. A rank never waits if it can do something, and stores no
    more activations than its cap.

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
    choose = run.by_orders(orders) if orders is not None else run.by_rule(rule or _oldest)
    run.go(choose)
    if any(len(done) < count for done, count in zip(run.done, run.counts, strict=True)):
        return None
    ranks = tuple(map(tuple, run.done))
    return Schedule(name, len(placement), num_microbatches, ranks, tuple(placement))


def _oldest(action: Action) -> tuple[Seconds, ...]:
    return (action.microbatch,)


_Choose = Callable[[int, Seconds], Action | None]


class _ListScheduler:
    """The simulation: for each stage the times at which its inputs arrive, in order."""

    def __init__(
        self, placement: Sequence[int], num_microbatches: int, costs: Costs, caps: Sequence[int]
    ) -> None:
        self._placement = placement
        self._messages = costs.message_s
        self._seconds = {
            kind: costs.of_kind(kind) for kind in (ActionKind.F, ActionKind.I, ActionKind.W)
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
        """Choose the best by `rule`."""

        def choose(rank: int, now: Seconds) -> Action | None:
            ready = [*self._ready(rank, now), *list(self._weights[rank])[:1]]
            return min(ready, key=rule, default=None)

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
