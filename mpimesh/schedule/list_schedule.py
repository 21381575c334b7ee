"""List scheduling: let time pass, and give each rank that is free the best of what it can do.

A rank can do an F or I whose input has arrived, and a W whose I is done. It never waits if it
can do something, and it keeps no more activations than its cap.

Why it never gets stuck without `orders`. An F is only begun if, after it, the rank has room for one
more activation of each stage that it holds further on. Look at the oldest microbatch that is
not through, and at its next action. An I or a W of it needs no room. If it is an F, then nothing
but microbatches before it has passed this stage, and they are through; so whatever the rank
keeps is of its earlier stages, and the last F there has left room for this one.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence

from mpimesh.schedule.action import Action, ActionKind
from mpimesh.schedule.costs import Costs
from mpimesh.schedule.schedule import Schedule
from mpimesh.schedule.timetable import Seconds

__all__ = ["Rule", "list_schedule"]

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

    Either `rule` or `orders` says what goes first. With `orders` a rank does its F and I in
    exactly this order, and a W whenever the next of them cannot be done: its input is not there,
    or there is no room.

    Args:
        name: The name of the schedule.
        placement: For each stage the rank that holds it.
        num_microbatches: Number of microbatches.
        costs: What everything takes.
        caps: For each rank the most activations it may keep, at least one for each of its stages.
        rule: What goes first.
        orders: For each rank all of its F and I.

    Returns:
        The schedule; None if `orders` do not fit the caps.
    """
    run = _Run(placement, num_microbatches, costs, caps)
    choose = run.by_orders(orders) if orders is not None else run.by_rule(rule or _oldest)
    run.go(choose)
    if any(len(done) < count for done, count in zip(run.done, run.counts, strict=True)):
        return None
    ranks = tuple(map(tuple, run.done))
    return Schedule(name, len(placement), num_microbatches, ranks, tuple(placement))


def _oldest(action: Action) -> tuple[Seconds, ...]:
    return (action.microbatch,)


_Choose = Callable[[int, Seconds], Action | None]


class _Run:
    """Time passing. What is ready is kept for each stage, as times of arrival in order."""

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
