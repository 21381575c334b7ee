"""Timetables: a schedule with the times of its actions, simulated or measured."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from operator import add
from statistics import fmean

from mpimesh.errors import ScheduleError
from mpimesh.schedule.costs import Seconds, spread
from mpimesh.schedule.lower import Edges, lower
from mpimesh.schedule.schedule import (
    Action,
    ActionKind,
    Schedule,
    check_schedule,
    peak_of_activations,
)
from mpimesh.schedule.validate import validate
from mpimesh.trace import Category, Event, svg

__all__ = [
    "Idle",
    "TimedAction",
    "Timetable",
    "action_overhead_s",
    "measured_step",
    "predicted_step",
    "simulate",
]


_CATEGORIES: dict[ActionKind, Category] = {
    ActionKind.F: "forward",
    ActionKind.B: "backward",
    ActionKind.I: "backward_input",
    ActionKind.W: "backward_weight",
    ActionKind.SEND_F: "send",
    ActionKind.SEND_B: "send",
    ActionKind.RECV_F: "wait",
    ActionKind.RECV_B: "wait",
    ActionKind.REDUCE_GRAD: "collective",
    ActionKind.STEP: "optimizer",
}
_COMPUTING: dict[Category, ActionKind] = {
    category: kind for kind, category in _CATEGORIES.items() if kind.computes
}


@dataclass(frozen=True, slots=True)
class TimedAction:
    """An action with its times.

    Attributes:
        action: What is done.
        start_s: When the rank reaches it, in seconds from the start of the step.
        end_s: When it is over. For a receive, when the message is there. For a send, when
            the message has arrived, and for a REDUCE_GRAD when the sums are there; the rank
            itself goes on at `start_s`.
    """

    action: Action
    start_s: Seconds
    end_s: Seconds


_WORDS = {
    "fill": "filling the pipeline",
    "inputs": "waiting for inputs",
    "gradients": "waiting for gradients",
    "other": "between actions",
    "drain": "draining the pipeline",
}


@dataclass(frozen=True, slots=True)
class Idle:
    """The causes of a rank's bubble. The parts add up to the bubble.

    Attributes:
        fill_s: Before the rank's first computation: the pipeline fills.
        inputs_s: Later, waiting for the output of the stage before.
        gradients_s: Later, waiting for the gradient of the stage after.
        other_s: Later, and waiting for no message: nothing in a simulation, and
            in a step that really ran what the actions cost beside their computing.
        drain_s: After the rank's last computation: the pipeline drains.
    """

    fill_s: Seconds = 0
    inputs_s: Seconds = 0
    gradients_s: Seconds = 0
    other_s: Seconds = 0
    drain_s: Seconds = 0

    def parts(self) -> dict[str, Seconds]:
        """Return the parts by the names of their attributes, without the ending ``_s``."""
        return {part.name.removesuffix("_s"): getattr(self, part.name) for part in fields(self)}

    def __str__(self) -> str:
        """The parts in words, the largest first; what is nothing but rounding is left out."""
        parts = sorted(self.parts().items(), key=lambda item: -item[1])
        least_s = 1e-6 * float(sum(part_s for _, part_s in parts))
        words = [
            f"{_WORDS[name]} {svg.duration(float(part_s))}"
            for name, part_s in parts
            if part_s > least_s
        ]
        return ", ".join(words) if words else "never idle"


@dataclass(frozen=True, slots=True)
class Timetable:
    """The times of all actions: the outcome of :func:`simulate`, or of a step that was measured.

    Attributes:
        schedule: The schedule with its messages.
        starts_s: For each rank when it reaches its actions, in the order of its list, in seconds
            from the start of the step.
        ends_s: When they are over, likewise; see :class:`TimedAction` for messages and sums.
        step_s: When the last rank is done.
    """

    schedule: Schedule
    starts_s: tuple[tuple[Seconds, ...], ...]
    ends_s: tuple[tuple[Seconds, ...], ...]
    step_s: Seconds
    _busy_s: tuple[Seconds, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # All else asks for it many times over.
        busy_s = (
            sum(end_s - start_s for _, start_s, end_s in self.computing(rank))
            for rank in range(self.schedule.num_ranks)
        )
        object.__setattr__(self, "_busy_s", tuple(busy_s))

    @property
    def ranks(self) -> tuple[tuple[TimedAction, ...], ...]:
        """For each rank its actions with their times, in the order of its list; made anew."""
        return tuple(
            tuple(TimedAction(*timed) for timed in self._timed(rank))
            for rank in range(self.schedule.num_ranks)
        )

    def computing(self, rank: int) -> list[tuple[Action, Seconds, Seconds]]:
        """Return what `rank` computes: each action with its start and its end."""
        return [timed for timed in self._timed(rank) if timed[0].kind.computes]

    def busy_s(self, rank: int) -> Seconds:
        """Return how long `rank` computes."""
        return self._busy_s[rank]

    def bubble_s(self, rank: int) -> Seconds:
        """Return how long `rank` is idle between the start and the end of the step."""
        return self.step_s - self.busy_s(rank)

    def idle_fraction(self, rank: int) -> float:
        """Return the share of the step in which `rank` is idle; 0 for a step of no time."""
        return float(self.bubble_s(rank) / self.step_s) if self.step_s else 0.0

    @property
    def mean_bubble_s(self) -> Seconds:
        """Idle time of a rank, the mean over the ranks."""
        num_ranks = self.schedule.num_ranks
        return (num_ranks * self.step_s - sum(self._busy_s)) / num_ranks

    @property
    def bubble_fraction(self) -> float:
        """Idle time of all ranks over the time of all ranks; 0 for a step that takes no time."""
        return float(self.mean_bubble_s / self.step_s) if self.step_s else 0.0

    def peak_activations(self, rank: int) -> int:
        """Return the most activations that `rank` stores, see :meth:`Schedule.peak_in_flight`."""
        return self.schedule.peak_in_flight(rank)

    def peak_bytes(self, rank: int, kept_bytes: Sequence[float]) -> float:
        """Return the most memory that activations take on `rank`.

        Args:
            rank: The rank.
            kept_bytes: For each stage what a microbatch leaves there from its forward to the end
                of its backward.
        """
        return peak_of_activations(self.schedule, rank, kept_bytes)

    def idle(self, rank: int) -> Idle:
        """Return the causes of the bubble of `rank`."""
        parts: dict[str, Seconds] = {part.name: 0 for part in fields(Idle)}
        computed_to_s: Seconds | None = None
        waits: list[tuple[str, Seconds]] = []
        for action, start_s, end_s in self._timed(rank):
            kind = action.kind
            if kind is ActionKind.RECV_F or kind is ActionKind.RECV_B:
                if end_s > start_s:
                    which = "inputs_s" if kind is ActionKind.RECV_F else "gradients_s"
                    waits.append((which, end_s - start_s))
            elif kind.computes:
                if computed_to_s is None:
                    parts["fill_s"] = start_s
                elif start_s > computed_to_s:
                    rest_s = start_s - computed_to_s
                    for which, wait_s in waits:
                        part_s = min(wait_s, rest_s)
                        parts[which] += part_s
                        rest_s -= part_s
                    parts["other_s"] += rest_s
                computed_to_s = end_s
                waits.clear()
        if computed_to_s is None:
            return Idle(fill_s=self.step_s)
        parts["drain_s"] = self.step_s - computed_to_s
        return Idle(**parts)

    def mean_idle(self) -> Idle:
        """Return the causes of the bubble, in the mean over the ranks."""
        num_ranks = self.schedule.num_ranks
        every = [self.idle(rank).parts() for rank in range(num_ranks)]
        return Idle(
            **{f"{name}_s": sum(parts[name] for parts in every) / num_ranks for name in every[0]}
        )

    def events(self) -> list[Event]:
        """Return what a tracer would have seen: computing, waiting, messages and sums under way.

        All but computations are left out where they take no time.
        """
        return [
            Event(
                rank=rank,
                name=str(action),
                category=_CATEGORIES[action.kind],
                start_s=float(start_s),
                duration_s=float(end_s - start_s),
                stage=action.stage,
                microbatch=None if action.kind.is_whole else action.microbatch,
                message=_message(action),
            )
            for rank in range(self.schedule.num_ranks)
            for action, start_s, end_s in self._timed(rank)
            if end_s > start_s or action.kind.computes
        ]

    def _timed(self, rank: int) -> Iterator[tuple[Action, Seconds, Seconds]]:
        return zip(self.schedule.ranks[rank], self.starts_s[rank], self.ends_s[rank], strict=True)


def _message(action: Action) -> str | None:
    """Return what both ends of a message have in common; None for what is none."""
    if not action.kind.is_message:
        return None
    return str(action if action.kind.is_send else action.partner)


_PARAMETERS = {
    ActionKind.F: "forward_s",
    ActionKind.B: "backward_s",
    ActionKind.I: "backward_input_s",
    ActionKind.W: "backward_weight_s",
}


def simulate(
    schedule: Schedule,
    *,
    forward_s: Seconds | Sequence[Seconds],
    backward_s: Seconds | Sequence[Seconds] | None = None,
    backward_input_s: Seconds | Sequence[Seconds] | None = None,
    backward_weight_s: Seconds | Sequence[Seconds] | None = None,
    message_s: Seconds | Sequence[Seconds] = 0,
    transfer_s: Seconds | Sequence[Seconds] = 0,
    reduce_s: Seconds | Sequence[Seconds] = 0,
    skips: Iterable[tuple[int, int]] = (),
) -> Timetable:
    """Time one step of `schedule`.

    Each rank does its list in order, an action as soon as what it waits for is there. A send
    takes none of the rank's time. Its message takes `transfer_s` to pass the edge, which in each
    direction carries one message at a time, and arrives `message_s` after it has passed. With
    integers or fractions all times are exact.

    A message of n bytes over a network of some latency and bandwidth has a `message_s`
    of the latency and a `transfer_s` of n over the bandwidth.

    A REDUCE_GRAD takes none of the rank's time either. Its sums are there `reduce_s` later, and
    those of a rank are made one after the other. A STEP waits for them and takes no time.

    Args:
        schedule: What to time; lowered here if it is not.
        forward_s: Seconds of F: one number, or one for each stage.
        backward_s: Seconds of B, likewise; if None, those of I and W together.
        backward_input_s: Seconds of I, likewise.
        backward_weight_s: Seconds of W, likewise.
        message_s: Seconds from a send to its arrival, however many are under way: one number, or
            one for each of the :class:`~mpimesh.schedule.Edges`, for both directions: those of
            neighbour stages, ``num_stages - 1`` of them, and then those of the skips.
        transfer_s: Seconds that a message occupies the edge, likewise.
        reduce_s: Seconds to sum the gradients of a stage over its replicas: one number, or one
            for each stage. It counts where :func:`lower` was asked for these sums.
        skips: The skips, beside those that have messages in `schedule`; see :func:`lower`.

    Raises:
        ScheduleError: If `schedule` is wrong (see :func:`validate`), or the time of an action in
            it is not given, is negative, or is not given for every stage.

    Cost:
        About a second for 64 stages and 1,024 microbatches, a microsecond for each action.
    """
    edges = Edges.of(check_schedule(schedule), skips)
    lowered = lower(schedule, skips=edges.skips)
    num_stages = lowered.num_stages
    times = {
        ActionKind.F: forward_s,
        ActionKind.B: backward_s,
        ActionKind.I: backward_input_s,
        ActionKind.W: backward_weight_s,
    }
    durations = {
        kind: spread(_PARAMETERS[kind], seconds, num_stages)
        for kind, seconds in times.items()
        if seconds is not None
    }
    if backward_s is None and ActionKind.I in durations and ActionKind.W in durations:
        durations[ActionKind.B] = tuple(map(add, durations[ActionKind.I], durations[ActionKind.W]))
    _check_actions(lowered, durations)
    messages = spread("message_s", message_s, len(edges))
    transfers = spread("transfer_s", transfer_s, len(edges))
    sums = spread("reduce_s", reduce_s, num_stages)
    starts_s, ends_s = _run(lowered, edges, durations, messages, transfers, sums)
    if any(len(done) < len(all_) for done, all_ in zip(ends_s, lowered.ranks, strict=True)):
        validate(lowered)  # Raises: only a wrong schedule stops half-way.
    step_s = max((max(ends) for ends in ends_s if ends), default=0)
    return Timetable(lowered, tuple(map(tuple, starts_s)), tuple(map(tuple, ends_s)), step_s)


_Times = list[list[Seconds]]
_Durations = dict[ActionKind, tuple[Seconds, ...]]  # of each stage


def _check_actions(schedule: Schedule, durations: _Durations) -> None:
    """Refuse actions and messages of stages that do not exist, and computations without a time."""
    last = schedule.num_stages - 1
    first: dict[tuple[int, ActionKind, int | None], Action] = {}
    for action in schedule.actions():
        first.setdefault((action.stage, action.kind, action.other), action)
    for action in first.values():
        stages = (action.stage, action.far_stage) if action.kind.is_message else (action.stage,)
        if not (min(stages) >= 0 and max(stages) <= last):
            validate(schedule)  # Raises, and shows where.
        if action.kind.computes and action.kind not in durations:
            raise ScheduleError(
                f"schedule {schedule.name} does {action}: give {_PARAMETERS[action.kind]} "
                "to time it"
            )


def _run(
    schedule: Schedule,
    edges: Edges,
    durations: _Durations,
    messages: Sequence[Seconds],
    transfers: Sequence[Seconds],
    sums: Sequence[Seconds],
) -> tuple[_Times, _Times]:
    """Let each rank go on until it needs a message not yet sent; a send wakes its receiver.

    What a rank does when does not depend on the order in which ranks are taken from the queue:
    the sends of an edge are all on one rank.
    """
    send_f, send_b = ActionKind.SEND_F, ActionKind.SEND_B
    recv_f, recv_b = ActionKind.RECV_F, ActionKind.RECV_B
    reduce_grad, step_ = ActionKind.REDUCE_GRAD, ActionKind.STEP
    placement = schedule.placement
    starts_s: _Times = [[] for _ in schedule.ranks]
    ends_s: _Times = [[] for _ in schedule.ranks]
    clocks_s: list[Seconds] = [0] * schedule.num_ranks
    # By edge and microbatch, outputs and gradients: when the message is there.
    outputs: dict[tuple[int, int], Seconds] = {}
    gradients: dict[tuple[int, int], Seconds] = {}
    # By edge: when the last message has left it.
    outputs_passed: list[Seconds] = [0] * len(edges)
    gradients_passed: list[Seconds] = [0] * len(edges)
    # By stage and by rank: when the sums of gradients are there.
    summed: list[Seconds] = [0] * schedule.num_stages
    summing: list[Seconds] = [0] * schedule.num_ranks
    queue = deque(range(schedule.num_ranks))
    queued = [True] * schedule.num_ranks
    while queue:
        rank = queue.popleft()
        queued[rank] = False
        actions, starts, ends = schedule.ranks[rank], starts_s[rank], ends_s[rank]
        now_s = clocks_s[rank]
        for step in range(len(ends), len(actions)):
            action = actions[step]
            kind, stage = action.kind, action.stage
            if kind is recv_f or kind is recv_b:
                edge = stage - 1 if kind is recv_f else stage
                if action.other is not None:
                    edge = edges.number(action)
                arrived = outputs if kind is recv_f else gradients
                end_s = arrived.get((edge, action.microbatch))
                if end_s is None:
                    break
                starts.append(now_s)
                now_s = max(now_s, end_s)
                ends.append(now_s)
            elif kind is send_f or kind is send_b:
                if kind is send_f:
                    receiver, edge, arrived, passed = stage + 1, stage, outputs, outputs_passed
                else:
                    receiver = edge = stage - 1
                    arrived, passed = gradients, gradients_passed
                if action.other is not None:
                    receiver, edge = action.other, edges.number(action)
                passed[edge] = max(now_s, passed[edge]) + transfers[edge]
                end_s = arrived[edge, action.microbatch] = passed[edge] + messages[edge]
                starts.append(now_s)
                ends.append(end_s)
                peer = placement[receiver]
                if not queued[peer]:
                    queued[peer] = True
                    queue.append(peer)
            elif kind is reduce_grad:
                summed[stage] = summing[rank] = max(now_s, summing[rank]) + sums[stage]
                starts.append(now_s)
                ends.append(summed[stage])
            elif kind is step_:
                starts.append(now_s)
                now_s = max(now_s, summed[stage])
                ends.append(now_s)
            else:
                starts.append(now_s)
                now_s += durations[kind][stage]
                ends.append(now_s)
        clocks_s[rank] = now_s
    return starts_s, ends_s


_BACKWARD = (ActionKind.B, ActionKind.I, ActionKind.W)


def measured_step(
    schedule: Schedule, events: Iterable[Event], *, skips: Iterable[tuple[int, int]] = ()
) -> Timetable:
    """Return when the actions of a step took place.

    The step begins with the first computation of any rank, and ends with the last. The end of a
    send is known where its receiver waited for it; elsewhere it is its start. So it is for a
    REDUCE_GRAD and a STEP: the tracer sees buckets, which may hold gradients of several stages.

    Args:
        schedule: What the ranks did. Backwards of the first stages may be missing in the events,
            as those of stages that are not trained are.
        events: What tracers saw in one step: ranks are those of the schedule, times of one clock.
        skips: The skips, if the schedule has no messages yet; see :func:`lower`.

    Raises:
        ScheduleError: If a computation of the schedule is not among the events.
    """
    events = list(events)
    computed = {
        (_COMPUTING[event.category], event.stage, event.microbatch): event
        for event in events
        if event.category in _COMPUTING and event.stage is not None
    }
    messages = {
        (event.name, event.category): event
        for event in events
        if event.category in ("send", "wait") and event.stage is not None
    }
    schedule = _as_trained(lower(schedule, skips=skips), computed)
    origin_s = min((event.start_s for event in computed.values()), default=0.0)
    starts_s: list[tuple[float, ...]] = []
    ends_s: list[tuple[float, ...]] = []
    for rank, actions in enumerate(schedule.ranks):
        starts: list[float] = []
        ends: list[float] = []
        now_s = origin_s
        for action in actions:
            if action.kind.is_send:
                event = messages.get((str(action), "send"))
                wait = messages.get((str(action.partner), "wait"))
                start_s = now_s if event is None else event.start_s
                end_s = start_s if wait is None else max(start_s, wait.end_s)
            elif action.kind.is_recv:
                event = messages.get((str(action), "wait"))
                start_s = now_s if event is None else event.start_s
                end_s = now_s = start_s if event is None else event.end_s
            elif action.kind.is_whole:
                start_s = end_s = now_s
            else:
                event = computed.get((action.kind, action.stage, action.microbatch))
                if event is None:
                    raise ScheduleError(
                        f"the events of rank {rank} hold no {action} of schedule {schedule.name}: "
                        "give those of one whole step, from a tracer with room for it"
                    )
                start_s, end_s = event.start_s, event.end_s
                now_s = end_s
            starts.append(start_s - origin_s)
            ends.append(end_s - origin_s)
        starts_s.append(tuple(starts))
        ends_s.append(tuple(ends))
    step_s = max((event.end_s for event in computed.values()), default=origin_s) - origin_s
    return Timetable(schedule, tuple(starts_s), tuple(ends_s), step_s)


def _as_trained(
    schedule: Schedule, computed: dict[tuple[ActionKind, int, int | None], Event]
) -> Schedule:
    """Leave out the backward of the stages before the first one that has any in the events."""
    stages = [stage for kind, stage, _ in computed if kind in _BACKWARD]
    first = min(stages, default=schedule.num_stages)

    def happens(action: Action) -> bool:
        if action.kind is ActionKind.SEND_B:
            return action.far_stage >= first
        if action.kind in _BACKWARD or action.kind is ActionKind.RECV_B or action.kind.is_whole:
            return action.stage >= first
        return True

    if not first:
        return schedule
    return replace(
        schedule, ranks=tuple(tuple(filter(happens, actions)) for actions in schedule.ranks)
    )


def predicted_step(measured: Timetable) -> Timetable:
    """Simulate a step that was measured, with the mean time of each stage's actions.

    A message takes as long as those between its stages did for which the receiver waited, in the
    mean over both directions: other arrivals were not observed. Between stages without such a
    message it takes the mean of all, but no longer than makes any rank wait. The time between the
    actions of a rank, such as the executor's own work, is left out: by it a measured step
    is longer.
    """
    times: dict[ActionKind, list[list[float]]] = {
        kind: [[] for _ in range(measured.schedule.num_stages)] for kind in _COMPUTING.values()
    }
    for rank in range(measured.schedule.num_ranks):
        for action, start_s, end_s in measured.computing(rank):
            times[action.kind][action.stage].append(float(end_s - start_s))
    forward_s, backward_s, input_s, weight_s = (
        [fmean(seconds) if seconds else 0.0 for seconds in stages] for stages in times.values()
    )
    return simulate(
        measured.schedule,
        forward_s=forward_s,
        backward_s=backward_s,
        backward_input_s=input_s,
        backward_weight_s=weight_s,
        message_s=_message_times(measured),
    )


def action_overhead_s(measured: Timetable) -> float:
    """Return the seconds that a rank spent on each action beside computing and waiting, on average.

    Messages are actions, too. It is what the runtime costs: it posts and starts messages, looks
    for failures of others, and writes the trace.
    """
    spent_s, count = 0.0, 0
    for actions in measured.ranks:
        # A send is a start in passing; what follows begins before it ends.
        here = [timed for timed in actions if not timed.action.kind.is_send]
        spent_s += sum(max(0.0, float(b.start_s - a.end_s)) for a, b in pairwise(here))
        count += len(actions)
    return spent_s / max(count, 1)


def _message_times(measured: Timetable) -> list[float]:
    """Return the mean time of a message on each edge, by :func:`predicted_step`'s rule."""
    edges = Edges.of(measured.schedule)
    delays_s: list[list[float]] = [[] for _ in range(len(edges))]
    slacks_s: list[list[float]] = [[] for _ in range(len(edges))]
    messages = [
        timed for actions in measured.ranks for timed in actions if timed.action.kind.is_message
    ]
    sent_s = {timed.action: float(timed.start_s) for timed in messages if timed.action.kind.is_send}
    for timed in messages:
        if timed.action.kind.is_recv:
            edge = edges.number(timed.action)
            waited = timed.end_s > timed.start_s
            took_s = float(timed.end_s) - sent_s[timed.action.partner]
            # The clocks of two ranks may differ by a little: no message takes less than no time.
            (delays_s if waited else slacks_s)[edge].append(max(0.0, took_s))
    every = [delay_s for delays in delays_s for delay_s in delays]
    usual_s = fmean(every) if every else 0.0
    return [
        fmean(delays) if delays else min([usual_s, *slacks])
        for delays, slacks in zip(delays_s, slacks_s, strict=True)
    ]
