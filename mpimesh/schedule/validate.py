"""Prove that a schedule is complete, in order, and free of deadlock."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import NoReturn

from mpimesh.errors import ScheduleError
from mpimesh.schedule.lower import Edges, lower, pairs
from mpimesh.schedule.schedule import Action, ActionKind, Schedule, check_schedule, schedule_table

__all__ = ["Proof", "Rules", "most_waiting", "validate"]


# B is I and W in one, so B excludes them.
_TWINS = {
    ActionKind.B: (ActionKind.I, ActionKind.W),
    ActionKind.I: (ActionKind.B,),
    ActionKind.W: (ActionKind.B,),
}
# What has a bit of its own: a kind, or a message of a skip with the stage at the other end.
_Key = ActionKind | tuple[ActionKind, int]
_BIT: dict[_Key, int] = {kind: 1 << number for number, kind in enumerate(ActionKind)}


def _key(action: Action) -> _Key:
    return action.kind if action.other is None else (action.kind, action.other)


@dataclass(frozen=True, slots=True)
class _Check:
    """The rules for one kind on one stage and edge, the same for each microbatch.

    Attributes:
        bit: What is noted when it is done.
        excluded: Bits of which none may be noted.
        needs: Stages, each with bits of which one must be noted.
    """

    bit: int
    excluded: int
    needs: tuple[tuple[int, int], ...]


class Rules:
    """The rules of one schedule, applied to its actions in the order of each rank's list.

    Only the rank's own list counts here. What comes from another rank is represented by
    its receive in a lowered schedule, and is ignored in others.

    A schedule has a million actions, and nearly all are right. So the rules of a kind on a stage
    are put into bits when it first comes, and a reason is only worded when the bits refuse.

    Args:
        schedule: Whose rules.
        edges: Its edges.
    """

    def __init__(self, schedule: Schedule, edges: Edges) -> None:
        self._schedule = schedule
        self._edges = edges
        self._placement = schedule.placement
        self._num_microbatches = schedule.num_microbatches
        self._lowered = schedule.is_lowered
        # For each stage: by microbatch the bits of what is done, and by kind the rules.
        self._done: list[dict[int, int]] = [{} for _ in schedule.placement]
        self._checks: list[dict[_Key, _Check]] = [{} for _ in schedule.placement]
        self._bits: dict[_Key, int] = dict(_BIT)

    def why_wrong(self, rank: int, action: Action) -> str | None:
        """Return why `rank` may not do `action` now; None, and note it as done, if it may."""
        stage, microbatch = action.stage, action.microbatch
        key: _Key = action.kind if action.other is None else (action.kind, action.other)
        check = None
        if stage < len(self._placement) and self._placement[stage] == rank:
            check = self._checks[stage].get(key)
        if check is None or microbatch >= self._num_microbatches:
            reason = self.in_words(rank, action)
            if reason is not None:
                return reason
            check = self._check(action)
            if not action.kind.is_whole:  # what a whole stage needs is not of one microbatch
                self._checks[stage][key] = check
        done = self._done[stage]
        bits = done.get(microbatch, 0)
        if bits & check.excluded:
            return self.in_words(rank, action)
        for needed, any_of in check.needs:
            if not self._done[needed].get(microbatch, 0) & any_of:
                return self.in_words(rank, action)
        done[microbatch] = bits | check.bit
        return None

    def in_words(self, rank: int, action: Action) -> str | None:
        """Return what :meth:`why_wrong` would, without the bits, and note nothing."""
        return (
            self._why_no_action(rank, action)
            or self._why_again(action)
            or self._why_too_early(action)
        )

    def missing(self) -> Action | None:
        """Return the first computation that no rank has done, by stage and microbatch."""
        trains = self._schedule.trains
        both = _BIT[ActionKind.I] | _BIT[ActionKind.W]
        for stage, done in enumerate(self._done):
            for microbatch in range(self._num_microbatches):
                bits = done.get(microbatch, 0)
                if not bits & _BIT[ActionKind.F]:
                    return Action(stage, ActionKind.F, microbatch)
                if trains and not bits & _BIT[ActionKind.B] and bits & both != both:
                    kind = ActionKind.W if bits & _BIT[ActionKind.I] else ActionKind.B
                    return Action(stage, kind, microbatch)
        return None

    def _check(self, action: Action) -> _Check:
        bit = self._bit(action)
        needs = () if action.kind.is_whole else self._needs(action)
        return _Check(
            bit=bit,
            excluded=bit | sum(_BIT[twin] for twin in _TWINS.get(action.kind, ())),
            needs=tuple((any_of[0].stage, sum(map(self._bit, any_of))) for any_of in needs),
        )

    def _is_done(self, action: Action) -> bool:
        return bool(self._done[action.stage].get(action.microbatch, 0) & self._bit(action))

    def _bit(self, action: Action) -> int:
        return self._bits.setdefault(_key(action), 1 << len(self._bits))

    # -- in words -----------------------------------------------------------------------------

    def _why_no_action(self, rank: int, action: Action) -> str | None:
        schedule = self._schedule
        if action.stage >= schedule.num_stages:
            return f"{action} is for a stage that does not exist; there are {schedule.num_stages}"
        if action.microbatch >= schedule.num_microbatches:
            return (
                f"{action} is for a microbatch that does not exist; "
                f"there are {schedule.num_microbatches}"
            )
        holder = schedule.placement[action.stage]
        if holder != rank:
            return f"{action} is for a stage that lies on rank {holder}"
        if not action.kind.is_message:
            return None
        other = action.far_stage
        if not 0 <= other < schedule.num_stages:
            return f"{action} has no other end: there is no stage {other}"
        if schedule.placement[other] == rank:
            return f"{action} is no message: stage {other} lies on the same rank"
        skip = min(action.stage, other), max(action.stage, other)
        if action.other is not None and skip not in self._edges.skips:
            return f"{action} is of no skip; there are {list(self._edges.skips)}"
        return None

    def _why_again(self, action: Action) -> str | None:
        if self._is_done(action):
            return f"{action} is done a second time"
        for kind in _TWINS.get(action.kind, ()):
            twin = Action(action.stage, kind, action.microbatch)
            if self._is_done(twin):
                return f"{action} does again what {twin} did"
        return None

    def _why_too_early(self, action: Action) -> str | None:
        for needed in self._needs(action):
            if not any(map(self._is_done, needed)):
                return f"{action} comes before {' or '.join(map(str, needed))}, which it needs"
        return None

    def _needs(self, action: Action) -> Iterator[tuple[Action, ...]]:
        """Give the needs of `action` on its own rank, each as actions of which any is enough."""
        stage, microbatch = action.stage, action.microbatch

        def one_of(stage: int, *kinds: ActionKind) -> tuple[Action, ...]:
            return tuple(Action(stage, kind, microbatch) for kind in kinds)

        if action.kind is ActionKind.F and stage > 0:
            if self._is_local(stage, stage - 1):
                yield one_of(stage - 1, ActionKind.F)
            elif self._lowered:
                yield one_of(stage, ActionKind.RECV_F)
            for source in self._edges.sources(stage):
                if self._is_local(stage, source):
                    yield one_of(source, ActionKind.F)
                elif self._lowered:
                    yield (Action(stage, ActionKind.RECV_F, microbatch, source),)
        elif action.kind in (ActionKind.B, ActionKind.I):
            yield one_of(stage, ActionKind.F)
            if stage < self._schedule.num_stages - 1:
                if self._is_local(stage, stage + 1):
                    yield one_of(stage + 1, ActionKind.B, ActionKind.I)
                elif self._lowered:
                    yield one_of(stage, ActionKind.RECV_B)
            for user in self._edges.destinations(stage):
                if self._is_local(stage, user):
                    yield one_of(user, ActionKind.B, ActionKind.I)
                elif self._lowered:
                    yield (Action(stage, ActionKind.RECV_B, microbatch, user),)
        elif action.kind is ActionKind.W:
            yield one_of(stage, ActionKind.I)
        elif action.kind is ActionKind.SEND_F:
            yield one_of(stage, ActionKind.F)
        elif action.kind is ActionKind.SEND_B:
            yield one_of(stage, ActionKind.B, ActionKind.I)
        elif action.kind is ActionKind.REDUCE_GRAD:
            for number in range(self._num_microbatches):
                yield Action(stage, ActionKind.B, number), Action(stage, ActionKind.W, number)
        elif action.kind is ActionKind.STEP:
            yield one_of(stage, ActionKind.REDUCE_GRAD)

    def _is_local(self, stage: int, other: int) -> bool:
        return self._schedule.placement[stage] == self._schedule.placement[other]


_Edge = tuple[int, int]
"""The sending stage and the receiving one."""


def _edge_of(message: Action) -> _Edge:
    ends = message.stage, message.far_stage
    return ends if message.kind.is_send else ends[::-1]


class _EdgeMessages:
    """The messages of a schedule whose actions exist.

    An edge goes from one stage to another; edges are numbered as they come.

    Attributes:
        schedule: Where the messages stand.
        ranks: For each rank its messages in order: the number of the edge for a send, and
            ``~number`` for a receive.
        edges: For each edge the stage that sends and the one that receives.
        senders: For each edge the rank at its beginning.
        receivers: For each edge the rank at its end.
        sends: For each edge the microbatches in the order in which they are sent.
        recvs: For each edge the microbatches in the order in which they are received.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.ranks: list[list[int]] = []
        self.edges: list[tuple[int, int]] = []
        self.senders: list[int] = []
        self.receivers: list[int] = []
        self.sends: list[list[int]] = []
        self.recvs: list[list[int]] = []
        numbers: dict[tuple[int, int], int] = {}
        # What a kind on a stage is; None for a computation.
        known: dict[tuple[ActionKind, int, int | None], int | None] = {}
        for actions in schedule.ranks:
            messages = []
            for action in actions:
                key = action.kind, action.stage, action.other
                if key in known:
                    message = known[key]
                elif action.kind.is_message:
                    edge = _edge_of(action)
                    number = numbers.setdefault(edge, len(numbers))
                    if number == len(self.edges):
                        self._add(edge)
                    message = known[key] = number if action.kind.is_send else ~number
                else:
                    message = known[key] = None
                if message is not None:
                    messages.append(message)
                    if message >= 0:
                        self.sends[message].append(action.microbatch)
                    else:
                        self.recvs[~message].append(action.microbatch)
            self.ranks.append(messages)

    def __len__(self) -> int:
        return sum(map(len, self.sends))

    def step(self, rank: int, position: int) -> int:
        """Return where the message `position` of `rank` stands in its list."""
        actions = enumerate(self.schedule.ranks[rank])
        steps = (step for step, action in actions if action.kind.is_message)
        return next(step for number, step in enumerate(steps) if number == position)

    def _add(self, edge: tuple[int, int]) -> None:
        placement = self.schedule.placement
        self.edges.append(edge)
        self.senders.append(placement[edge[0]])
        self.receivers.append(placement[edge[1]])
        self.sends.append([])
        self.recvs.append([])


class _Progress:
    """The progress of the ranks of a lowered schedule whose sends and receives match.

    Each rank goes through its list. The bytes of a message move only when both ends are there:
    the sender has reached its SEND and the receiver its RECV, as under rendezvous with zero
    buffering. A rank at a RECV waits for the message. A rank at a SEND starts it and goes on, as
    long as no more than `send_window` of its sends are unfinished; else it waits until enough of
    them have been received. With a window of 0 a send blocks, as `MPI_Ssend`.

    The model covers the executor, which promises that sends do not block (their buffers live until
    they are done), and that a receive is posted no later than its place in the list. A receive
    posted earlier, or an MPI that buffers, lets a message move sooner, and never makes a rank wait
    that did not wait before: which actions a rank can reach only grows. So a schedule that ends
    here ends there.

    Whether all ranks end does not depend on which of them runs first: a rank that can go on still
    can after any other rank went on. One order, here of a queue, decides for all.

    Computing never waits, so only the messages of each rank count. Those of an edge are received
    in the order in which they are sent, so two counts an edge are enough.

    Args:
        messages: The messages of the schedule.
        send_window: Most sends of a rank that may be unfinished while it goes on; None is
            no limit.

    Attributes:
        sent: For each edge the number of sends that have begun.
        received: For each edge the number of receives that have begun.
    """

    def __init__(self, messages: _EdgeMessages, send_window: int | None = None) -> None:
        self._messages = messages
        self._limit = len(messages) if send_window is None else send_window
        self._position = [0] * len(messages.ranks)
        self._unfinished = [0] * len(messages.ranks)
        self._waiting = [False] * len(messages.ranks)
        self.sent = [0] * len(messages.edges)
        self.received = [0] * len(messages.edges)

    def run(self, ranks: Iterable[int]) -> None:
        """Let `ranks` go on until each waits, and all others for which they do what those need."""
        messages, limit = self._messages, self._limit
        senders, receivers = messages.senders, messages.receivers
        position, unfinished, waiting = self._position, self._unfinished, self._waiting
        sent, received = self.sent, self.received
        queue = deque(ranks)
        while queue:
            rank = queue.popleft()
            mine, at = messages.ranks[rank], position[rank]
            if waiting[rank]:
                # It is in the queue again because what it waited for is done.
                waiting[rank] = False
                at += 1
            while at < len(mine):
                number = mine[at]
                if number >= 0:
                    sent[number] += 1
                    if sent[number] > received[number]:
                        unfinished[rank] += 1
                        if unfinished[rank] > limit:
                            waiting[rank] = True
                            break
                    else:
                        queue.append(receivers[number])
                else:
                    number = ~number
                    received[number] += 1
                    if received[number] > sent[number]:
                        waiting[rank] = True
                        break
                    sender = senders[number]
                    unfinished[sender] -= 1
                    if waiting[sender] and unfinished[sender] == limit:
                        queue.append(sender)
                at += 1
            position[rank] = at

    def blocked(self) -> dict[int, int]:
        """Let all ranks go on; return those that wait for ever, each with the step it waits in."""
        self.run(range(len(self._position)))
        return {
            rank: self._messages.step(rank, at)
            for rank, at in enumerate(self._position)
            if at < len(self._messages.ranks[rank])
        }


def _smallest_send_window(messages: _EdgeMessages) -> int:
    """Return the fewest unfinished sends with which no rank waits for ever.

    0 if the schedule is safe even where every send blocks. The schedule must be free of deadlock
    where sends have no limit.
    """
    # A wider window only lets ranks go on sooner, so the windows that suffice have no gap.
    # Most schedules need few: look at 0, 1, 3, 7, ... first.
    enough = 0
    while _Progress(messages, enough).blocked():
        enough = 2 * enough + 1
    return bisect_left(
        range(enough), True, key=lambda window: not _Progress(messages, window).blocked()
    )


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
       The model, and why it covers the executor, are in ``_Progress`` of this module.

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
    edges = Edges.of(schedule) if skips is None else Edges(schedule.num_stages, pairs(skips))
    _check_actions(schedule, edges)
    lowered = lower(schedule, skips=edges.skips)
    messages = _EdgeMessages(lowered)
    if messages.sends != messages.recvs:
        _refuse_messages(messages)
    blocked = _Progress(messages).blocked()
    if blocked:
        _refuse_deadlock(lowered, blocked)
    return Proof(
        num_messages=len(messages),
        send_window=_smallest_send_window(messages),
        peak_in_flight=tuple(map(schedule.peak_in_flight, range(schedule.num_ranks))),
    )


def _refuse(schedule: Schedule, rank: int, step: int, reason: str) -> NoReturn:
    table = schedule_table(schedule, mark=(rank, step))
    raise ScheduleError(
        f"schedule {schedule.name} is wrong at rank {rank}, step {step}: {reason}\n{table}"
    )


def _check_actions(schedule: Schedule, edges: Edges) -> None:
    rules = Rules(schedule, edges)
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


def _refuse_messages(messages: _EdgeMessages) -> NoReturn:
    """Name the first message whose ends do not match."""
    schedule = messages.schedule
    wrong: list[tuple[int, int, str]] = []
    for edge, *ranks in zip(messages.edges, messages.senders, messages.receivers, strict=True):
        sends, recvs = (
            [
                (step, rank, action)
                for step, action in enumerate(schedule.ranks[rank])
                if action.kind.is_message and _edge_of(action) == edge
            ]
            for rank in ranks
        )
        for number, (sent, received) in enumerate(zip_longest(sends, recvs)):
            if received is None:
                step, rank, action = sent
                reason = f"{action} is never received: there is no {action.partner}"
            elif sent is None:
                step, rank, action = received
                reason = f"{action} waits for ever: there is no {action.partner}"
            elif sent[2].partner != received[2]:
                step, rank, action = received
                reason = (
                    f"{action} is receive {number} from stage {edge[0]}, but send {number} "
                    f"there is {sent[2]} (rank {sent[1]}, step {sent[0]})"
                )
            else:
                continue
            wrong.append((step, rank, reason))
            break
    step, rank, reason = min(wrong)
    _refuse(schedule, rank, step, reason)


def _refuse_deadlock(schedule: Schedule, blocked: dict[int, int]) -> NoReturn:
    """Name the ranks that wait for each other in a ring."""
    where = {action: step for actions in schedule.ranks for step, action in enumerate(actions)}

    def waits_for(rank: int) -> int:
        return schedule.placement[schedule.ranks[rank][blocked[rank]].partner.stage]

    # Each rank waits for one other that waits too, so from any rank this leads to a ring.
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


def most_waiting(schedule: Schedule, rank: int) -> dict[tuple[int, int], int]:
    """Return the most messages of each edge to `rank` that can be sent and not yet received.

    The most over all speeds of the ranks, where no send waits: so many receives of the edge find a
    message if they are posted ahead, and never more. It is at least 1.

    While `rank` stands before a receive, all others go on until each waits for something: no other
    order of the ranks sends more by then. Then the receive is done, and so on.

    Args:
        schedule: A schedule that :func:`~mpimesh.schedule.validate` has proved; lowered here if
            it is not.
        rank: The rank that receives.

    Returns:
        By the sending stage and the receiving stage of each edge.

    Raises:
        ScheduleError: If there is no such rank.

    Cost:
        Half a microsecond for each message of the whole schedule.

    Example:
        >>> most_waiting(make_schedule("gpipe", 2, 8), 1)
        {(0, 1): 8}
        >>> most_waiting(make_schedule("1f1b", 3, 8), 1)
        {(0, 1): 3, (2, 1): 2}
    """
    check_schedule(schedule).stages_of(rank)  # raises if there is no such rank
    messages = _EdgeMessages(lower(schedule))
    progress = _Progress(messages)
    sent, received = progress.sent, progress.received
    progress.run(other for other in range(len(messages.ranks)) if other != rank)
    most: dict[tuple[int, int], int] = {}
    for message in messages.ranks[rank]:
        if message >= 0:
            sent[message] += 1
            if sent[message] <= received[message]:
                progress.run([messages.receivers[message]])
        else:
            edge = messages.edges[~message]
            most[edge] = max(most.get(edge, 0), sent[~message] - received[~message])
            received[~message] += 1
    return most
