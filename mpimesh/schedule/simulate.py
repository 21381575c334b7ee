"""Time a schedule: a step with the times of each stage and message, without running it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from mpimesh.errors import ScheduleError
from mpimesh.schedule.action import ActionKind
from mpimesh.schedule.costs import spread
from mpimesh.schedule.edges import Edges
from mpimesh.schedule.lower import lower
from mpimesh.schedule.schedule import Schedule, check_schedule
from mpimesh.schedule.timetable import Seconds, Timetable
from mpimesh.schedule.validate import validate

__all__ = ["simulate"]

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
        transfer_s: Seconds that a message keeps the edge from the next one, likewise.
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
    given = {
        ActionKind.F: _durations("forward_s", forward_s, num_stages),
        ActionKind.B: _durations("backward_s", backward_s, num_stages),
        ActionKind.I: _durations("backward_input_s", backward_input_s, num_stages),
        ActionKind.W: _durations("backward_weight_s", backward_weight_s, num_stages),
    }
    durations = {kind: times for kind, times in given.items() if times is not None}
    if backward_s is None and ActionKind.I in durations and ActionKind.W in durations:
        halves = zip(durations[ActionKind.I], durations[ActionKind.W], strict=True)
        durations[ActionKind.B] = [first + second for first, second in halves]
    _check_stages(lowered)
    _check_given(lowered, durations)
    messages = spread("message_s", message_s, len(edges))
    transfers = spread("transfer_s", transfer_s, len(edges))
    sums = spread("reduce_s", reduce_s, num_stages)
    starts_s, ends_s = _run(lowered, edges, durations, messages, transfers, sums)
    if any(len(done) < len(all_) for done, all_ in zip(ends_s, lowered.ranks, strict=True)):
        validate(lowered)  # Raises: only a wrong schedule stops half-way.
    step_s = max((max(ends) for ends in ends_s if ends), default=0)
    return Timetable(lowered, tuple(map(tuple, starts_s)), tuple(map(tuple, ends_s)), step_s)


def _durations(
    name: str, given: Seconds | Sequence[Seconds] | None, count: int
) -> list[Seconds] | None:
    return None if given is None else list(spread(name, given, count))


def _check_stages(schedule: Schedule) -> None:
    """Refuse actions and messages of stages that do not exist, which have no times."""
    last = schedule.num_stages - 1
    sends_before_first, sends_after_last = ActionKind.SEND_B, ActionKind.SEND_F
    for action in schedule.actions():
        stage, kind = action.stage, action.kind
        if (
            stage > last
            or (stage == last and kind is sends_after_last)
            or (stage == 0 and kind is sends_before_first)
            or (action.other is not None and action.other > last)
        ):
            validate(schedule)  # Raises, and shows where.


def _check_given(schedule: Schedule, durations: dict[ActionKind, list[Seconds]]) -> None:
    missing = [kind for kind in _PARAMETERS if kind not in durations]
    if not missing:
        return
    for action in schedule.actions():
        if action.kind in missing:
            raise ScheduleError(
                f"schedule {schedule.name} does {action}: give {_PARAMETERS[action.kind]} "
                "to time it"
            )


_Times = list[list[Seconds]]


def _run(
    schedule: Schedule,
    edges: Edges,
    durations: dict[ActionKind, list[Seconds]],
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
