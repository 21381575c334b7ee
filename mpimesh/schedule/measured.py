"""The timetable of a step that ran, and what the simulator makes of the times in it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

from mpimesh.errors import ScheduleError
from mpimesh.schedule.action import Action, ActionKind
from mpimesh.schedule.edges import Edges
from mpimesh.schedule.lower import lower
from mpimesh.schedule.schedule import Schedule
from mpimesh.schedule.simulate import simulate
from mpimesh.schedule.timetable import Timetable
from mpimesh.trace import Category, Event

__all__ = ["action_overhead_s", "measured_step", "predicted_step"]

_KINDS: dict[Category, ActionKind] = {
    "forward": ActionKind.F,
    "backward": ActionKind.B,
    "backward_input": ActionKind.I,
    "backward_weight": ActionKind.W,
}
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
        (_KINDS[event.category], event.stage, event.microbatch): event
        for event in events
        if event.category in _KINDS and event.stage is not None
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
    return replace(schedule, ranks=tuple(tuple(filter(happens, one)) for one in schedule.ranks))


def predicted_step(measured: Timetable) -> Timetable:
    """Simulate a step that was measured, with the mean time of each stage's actions.

    A message takes as long as those between its stages did for which the receiver waited, in the
    mean over both directions: when others arrived, nobody saw. Between stages without such a
    message it takes the mean of all, but no longer than makes nobody wait. What lies between the
    actions of a rank, such as the executor's own work, is left out: it is what the measured
    step has on top.
    """
    times: dict[ActionKind, list[list[float]]] = {
        kind: [[] for _ in range(measured.schedule.num_stages)] for kind in _KINDS.values()
    }
    for rank in range(measured.schedule.num_ranks):
        for action, start_s, end_s in measured.computing(rank):
            times[action.kind][action.stage].append(float(end_s - start_s))
    forward_s, backward_s, input_s, weight_s = (
        [fmean(one) if one else 0.0 for one in stages] for stages in times.values()
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
    for failures of others, and keeps the trace.
    """
    spent_s, count = 0.0, 0
    for actions in measured.ranks:
        # A send is a start in passing; what follows begins before it ends.
        here = [one for one in actions if not one.action.kind.is_send]
        spent_s += sum(max(0.0, float(b.start_s - a.end_s)) for a, b in pairwise(here))
        count += len(actions)
    return spent_s / max(count, 1)


def _message_times(measured: Timetable) -> list[float]:
    """Return the mean time of a message on each edge, by :func:`predicted_step`'s rule."""
    edges = Edges.of(measured.schedule)
    delays_s: list[list[float]] = [[] for _ in range(len(edges))]
    slacks_s: list[list[float]] = [[] for _ in range(len(edges))]
    timed = [one for actions in measured.ranks for one in actions if one.action.kind.is_message]
    sent_s = {one.action: float(one.start_s) for one in timed if one.action.kind.is_send}
    for one in timed:
        if one.action.kind.is_recv:
            edge = edges.number(one.action)
            waited = one.end_s > one.start_s
            took_s = float(one.end_s) - sent_s[one.action.partner]
            # The clocks of two ranks may differ by a little: no message takes less than no time.
            (delays_s if waited else slacks_s)[edge].append(max(0.0, took_s))
    every = [delay_s for one in delays_s for delay_s in one]
    usual_s = fmean(every) if every else 0.0
    return [
        fmean(delays) if delays else min([usual_s, *slacks])
        for delays, slacks in zip(delays_s, slacks_s, strict=True)
    ]
