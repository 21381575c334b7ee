"""Prove that a schedule is complete, in order, and free of deadlock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from typing import NoReturn

from mpimesh.errors import ScheduleError
from mpimesh.schedule.edges import Edges, pairs
from mpimesh.schedule.lower import lower
from mpimesh.schedule.messages import Messages
from mpimesh.schedule.progress import Progress
from mpimesh.schedule.rules import Rules
from mpimesh.schedule.schedule import Schedule, check_schedule
from mpimesh.schedule.table import schedule_table

__all__ = ["Proof", "validate"]


@dataclass(frozen=True, slots=True)
class Proof:
    """The outcome of :func:`validate` for a schedule that is correct.

    Attributes:
        num_messages: Messages of one step, over all ranks.
        send_window: The fewest unfinished sends that a rank must be able to leave behind
            for no rank to wait for ever, on an MPI that buffers nothing and with receives
            posted only where they stand. 0: safe even with blocking sends.
        peak_in_flight: For each rank :meth:`Schedule.peak_in_flight`.
    """

    num_messages: int
    send_window: int
    peak_in_flight: tuple[int, ...]


def validate(schedule: Schedule, *, skips: Iterable[tuple[int, int]] | None = None) -> Proof:
    """Prove that `schedule` is a correct step, or say where it is not.

    It proves that

    1. every stage does F once for each microbatch, and then, unless no backward is in the
       whole schedule (forward only), either B once or I and W once each, on its own rank;
    2. every action comes after those whose results it uses; REDUCE_GRAD, which a stage may
       have once, after all backwards of the stage, and STEP after that;
    3. sends and receives match: the messages from one stage to another are
       received in the order in which they are sent;
    4. no rank waits for ever with zero buffering, where a rank waits in receives only.
       :mod:`mpimesh.schedule.progress` has the model, and why it covers the executor.

    `schedule` may be lowered or not. If not, the messages are those :func:`lower` adds.

    Args:
        schedule: What to prove.
        skips: Its skips, see :func:`lower`. If None, those that have messages in it.

    Raises:
        ScheduleError: If a skip goes where none can, or a rule is broken. Then the message names
            the first wrong action, the rule, and shows the action in a table of ranks by steps.
            First is the smallest step,
            then the smallest rank, within the first of the rules above that is broken (1 and 2
            go together; what is missing comes after them).

    Cost:
        About a second for 64 stages and 1,024 microbatches.
    """
    check_schedule(schedule)
    skips = None if skips is None else Edges(schedule.num_stages, pairs(skips)).skips
    _check_actions(schedule, skips)
    lowered = lower(schedule, skips=skips or ())
    messages = Messages(lowered)
    if not messages.match:
        _refuse_messages(lowered)
    progress = Progress(messages)
    blocked = progress.blocked()
    if blocked:
        _refuse_deadlock(lowered, blocked)
    return Proof(
        num_messages=len(messages),
        send_window=progress.smallest_send_window(),
        peak_in_flight=tuple(map(schedule.peak_in_flight, range(schedule.num_ranks))),
    )


def _refuse(schedule: Schedule, rank: int, step: int, reason: str) -> NoReturn:
    table = schedule_table(schedule, mark=(rank, step))
    raise ScheduleError(
        f"schedule {schedule.name} is wrong at rank {rank}, step {step}: {reason}\n{table}"
    )


def _check_actions(schedule: Schedule, skips: tuple[tuple[int, int], ...] | None) -> None:
    rules = Rules(schedule, skips)
    for step in range(max(map(len, schedule.ranks))):
        for rank, actions in enumerate(schedule.ranks):
            if step < len(actions):
                reason = rules.why_wrong(rank, actions[step])
                if reason is not None:
                    _refuse(schedule, rank, step, reason)
    missing = rules.missing()
    if missing is not None:
        rank = schedule.placement[missing.stage]
        _refuse(schedule, rank, len(schedule.ranks[rank]), f"{missing} is missing")


_Edge = tuple[int, int]
"""The sending stage and the receiving one."""


def _refuse_messages(schedule: Schedule) -> NoReturn:
    """Name the first message whose ends do not match."""
    sends: dict[_Edge, list[tuple[int, int]]] = {}
    recvs: dict[_Edge, list[tuple[int, int]]] = {}
    for rank, actions in enumerate(schedule.ranks):
        for step, action in enumerate(actions):
            if action.kind.is_send:
                sends.setdefault((action.stage, action.far_stage), []).append((rank, step))
            elif action.kind.is_recv:
                recvs.setdefault((action.far_stage, action.stage), []).append((rank, step))
    wrong = [
        problem
        for edge in sends.keys() | recvs.keys()
        for problem in [_edge_problem(schedule, sends.get(edge, []), recvs.get(edge, []))]
        if problem is not None
    ]
    step, rank, reason = min(wrong)
    _refuse(schedule, rank, step, reason)


def _edge_problem(
    schedule: Schedule, sends: list[tuple[int, int]], recvs: list[tuple[int, int]]
) -> tuple[int, int, str] | None:
    """Return step, rank and reason of the first message of an edge whose ends do not match."""
    for number, (sent, received) in enumerate(zip_longest(sends, recvs)):
        if received is None:
            rank, step = sent
            action = schedule.ranks[rank][step]
            return step, rank, f"{action} is never received: there is no {action.partner}"
        rank, step = received
        action = schedule.ranks[rank][step]
        if sent is None:
            return step, rank, f"{action} waits for ever: there is no {action.partner}"
        sent_action = schedule.ranks[sent[0]][sent[1]]
        if sent_action.partner != action:
            reason = (
                f"{action} is receive {number} from stage {sent_action.stage}, but send {number} "
                f"there is {sent_action} (rank {sent[0]}, step {sent[1]})"
            )
            return step, rank, reason
    return None


def _refuse_deadlock(schedule: Schedule, blocked: dict[int, int]) -> NoReturn:
    """Name the ranks that wait for each other in a ring."""
    where = {action: step for actions in schedule.ranks for step, action in enumerate(actions)}

    def waits_for(rank: int) -> int:
        return schedule.placement[schedule.ranks[rank][blocked[rank]].partner.stage]

    # Each rank waits for one other that waits too, so from any rank the way ends in a ring.
    rank = min(blocked)
    seen: list[int] = []
    while rank not in seen:
        seen.append(rank)
        rank = waits_for(rank)
    ring = seen[seen.index(rank) :]
    lines = []
    for waiting in ring:
        action = schedule.ranks[waiting][blocked[waiting]]
        lines.append(
            f"rank {waiting} waits at step {blocked[waiting]} in {action} for {action.partner}, "
            f"which is step {where[action.partner]} of rank {waits_for(waiting)}"
        )
    step, rank = min((blocked[rank], rank) for rank in ring)
    _refuse(schedule, rank, step, "deadlock: " + "; ".join(lines))
