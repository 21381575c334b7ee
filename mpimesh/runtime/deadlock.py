"""The graph of ranks that wait for each other, and the search for a cycle in it.

A rank that waits needs all the ranks that its operation takes and that have not done their part,
and those do nothing more before their own waits end. So a cycle stays one for ever. Virtual ranks
are all in one process, which sees the graph; under MPI, with ``MPIMESH_CHECKS`` on, ranks that wait
ask each other what they wait in.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mpimesh.arguments import rank_names
from mpimesh.comm import Request
from mpimesh.errors import DeadlockError
from mpimesh.runtime.call import Call, Message
from mpimesh.runtime.control import ControlChannel, ControlChannels, Tag
from mpimesh.runtime.progress import Progress, Wait

__all__ = [
    "DeadlockSearch",
    "Mail",
    "Waiting",
    "blocked_by",
    "cycle_text",
    "find_cycle",
    "ranks_reaching",
]

_CHECK_EVERY_S = 0.02
_FIRST_S = 0.5
"""Length of a wait after which its rank asks, in seconds."""
_ANSWERS_S = 0.25
"""Limit for answers, in seconds; a rank that is late counts as one that does not wait."""
_LONGEST_PAUSE_S = 8.0


# -- the graph: pure functions ---------------------------------------------------------------------


class Mail:
    """The messages of one rank on one communicator, by peer and tag; kept with checks on.

    Attributes:
        sent: How many it has sent.
        received: How many it has begun to receive.
        calls: The last send of each.
    """

    __slots__ = ("calls", "received", "sent")

    def __init__(self) -> None:
        self.sent: Counter[tuple[int, int]] = Counter()
        self.received: Counter[tuple[int, int]] = Counter()
        self.calls: dict[tuple[int, int], Call] = {}

    def post(self, call: Message) -> None:
        """Count a message that is sent or received from now on."""
        key = call.peer, call.tag
        if call.name == "send":
            self.sent[key] += 1
            call.count = self.sent[key]
            self.calls[key] = call
        else:
            self.received[key] += 1
            call.count = self.received[key]


@dataclass(frozen=True, slots=True)
class Waiting:
    """The wait of one rank, and what it has done. Ranks are those of the job.

    Attributes:
        operation: What it waits in, with its place.
        among: The communicator, called alike on all its ranks; empty if that is not known.
        number: Which of the collectives on it; 0 for another wait.
        takes: The ranks that it takes.
        message: Of a message: ``send`` or ``recv``, its tag, and which of those between the two
            ranks it is; 0 if nobody has counted.
        started: How many collectives it has started on each of its communicators.
        sent: How many messages it has sent, by communicator, receiver and tag.
        received: How many it has begun to receive, by communicator, sender and tag.
    """

    operation: str
    among: str = ""
    number: int = 0
    takes: Sequence[int] = ()
    message: tuple[str, int, int] | None = None
    started: Mapping[str, int] = field(default_factory=dict)
    sent: Mapping[str, int] = field(default_factory=dict)
    received: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, wait: Wait, progress: Progress) -> Waiting | None:
        """Describe a wait of this rank; None if it has a limit, or the job's ranks have no number.

        A wait with a limit ends by itself.
        """
        world_ranks = _world_ranks(wait.communicator)
        if wait.is_limited or not world_ranks:
            return None
        started = dict(progress.counts)
        sent: dict[str, int] = {}
        received: dict[str, int] = {}
        for name, (one, ranks) in list(progress.communicators.items()):
            started[name] = one.started
            if one.mail is not None and ranks:
                sent |= _by_text(name, one.mail.sent, ranks)
                received |= _by_text(name, one.mail.received, ranks)
        what, peers = wait.what, wait.peers
        message = None
        if isinstance(what, Message):
            message = (what.name, what.tag, what.count)
        return cls(
            operation=str(what),
            among=wait.among or wait.communicator.name,
            number=wait.number or getattr(what, "number", 0),
            takes=world_ranks if peers is None else [world_ranks[peer] for peer in peers],
            message=message,
            started=started,
            sent=sent,
            received=received,
        )


def blocked_by(rank: int, states: Mapping[int, Waiting]) -> list[int]:
    """Return the waiting ranks that `rank` waits for, and that cannot do their part meanwhile."""
    mine = states[rank]
    return [
        other
        for other in mine.takes
        if other != rank and other in states and _lacks(rank, mine, states[other])
    ]


def find_cycle(states: Mapping[int, Waiting], start: int) -> list[int]:
    """Return a cycle of ranks that wait for each other and that `start` waits for, or is in.

    It begins with its lowest rank; empty if there is none.
    """
    path: list[int] = []
    done: set[int] = set()

    def search(rank: int) -> list[int]:
        if rank in path:
            return path[path.index(rank) :]
        if rank in done:
            return []
        path.append(rank)
        for other in blocked_by(rank, states):
            if cycle := search(other):
                return cycle
        done.add(path.pop())
        return []

    cycle = search(start)
    first = cycle.index(min(cycle)) if cycle else 0
    return cycle[first:] + cycle[:first]


def ranks_reaching(states: Mapping[int, Waiting], cycle: Sequence[int]) -> list[int]:
    """Return all ranks that wait for a cycle, those in it among them."""
    reaching = set(cycle)
    while more := {
        rank
        for rank in states
        if rank not in reaching and reaching.intersection(blocked_by(rank, states))
    }:
        reaching |= more
    return sorted(reaching)


def cycle_text(states: Mapping[int, Waiting], cycle: Sequence[int]) -> str:
    """Return a cycle in words, a row for each rank."""
    following = [*cycle[1:], *cycle[:1]]
    rows = [
        f"  rank {rank} waits for rank {other}, in {states[rank].operation}"
        for rank, other in zip(cycle, following, strict=True)
    ]
    others = [rank for rank in ranks_reaching(states, cycle) if rank not in cycle]
    if others:
        rows.append(f"  {rank_names(others)} wait{'s' * (len(others) == 1)} for these")
    return "\n".join(["ranks wait for each other in a circle, and none can go on:", *rows])


def _lacks(rank: int, mine: Waiting, other: Waiting) -> bool:
    """Tell whether `other` has not done its part of what `rank` waits in."""
    if mine.message is not None:
        name, tag, count = mine.message
        if not count:
            return True
        done = other.sent if name == "recv" else other.received
        return done.get(_text(mine.among, rank, tag), 0) < count
    return bool(mine.among and mine.number) and other.started.get(mine.among, 0) < mine.number


def _text(among: str, rank: int, tag: int) -> str:
    return f"{among}|{rank}|{tag}"


def _by_text(
    among: str, counts: Mapping[tuple[int, int], int], ranks: Sequence[int]
) -> dict[str, int]:
    return {_text(among, ranks[peer], tag): count for (peer, tag), count in counts.items()}


def _world_ranks(communicator: Any) -> Sequence[int]:
    ranks: Sequence[int] = getattr(communicator, "world_ranks", ())
    return () if -1 in ranks else ranks


# -- the search for cycles among MPI processes -----------------------------------------------------


class DeadlockSearch:
    """The questions, answers and verdicts of one process.

    A rank that has waited for half a second asks all ranks of its channel; those that wait
    themselves answer from within their waits, the others later or never. If the answers show a
    cycle, it asks once more: who is in the same wait as before was in it all the time between, so
    all of them at once, and the cycle is real. It then tells those who wait for it, and all raise
    the same.

    Args:
        rank: This rank in MPI's world.
        progress: Its waits.
        channels: Those to the other ranks.
    """

    def __init__(self, rank: int, progress: Progress, channels: ControlChannels) -> None:
        self._rank = rank
        self._progress = progress
        self._channels = channels
        self._wait: Wait | None = None
        self._serial = 0
        self._next_check_s = self._next_round_s = self._round_ends_s = 0.0
        self._pause_s = _FIRST_S
        self._round = 0
        self._asked: dict[int, int] = {}
        self._answers: dict[int, tuple[int, Waiting]] = {}
        self._suspects: dict[int, int] = {}
        self._sends: list[Request] = []

    def check(self, wait: Wait) -> None:
        """Answer and ask every now and then during `wait`. Never waits.

        Raises:
            DeadlockError: If this rank waits for a cycle of ranks, or is in it.
        """
        now_s = time.monotonic()
        if wait is not self._wait:
            self._begin(wait, now_s)
        if now_s < self._next_check_s:
            return
        self._next_check_s = now_s + _CHECK_EVERY_S
        for one in self._channels:
            self._poll(one)
        channel = self._channel_of(wait)
        if channel is None:
            return
        if self._round_ends_s and (now_s >= self._round_ends_s or not self._missing()):
            self._end_round(channel, now_s)
        elif not self._round_ends_s and now_s >= self._next_round_s:
            self._ask(channel, now_s)

    def _begin(self, wait: Wait, now_s: float) -> None:
        self._wait = wait
        self._serial += 1
        self._pause_s = _FIRST_S
        self._next_round_s, self._round_ends_s = now_s + _FIRST_S, 0.0
        self._suspects = {}

    def _channel_of(self, wait: Wait) -> ControlChannel | None:
        ranks = _world_ranks(wait.communicator)
        return self._channels.find(ranks) if ranks else None

    # -- asking --------------------------------------------------------------------------

    def _ask(self, channel: ControlChannel, now_s: float) -> None:
        self._round += 1
        self._answers = {}
        self._round_ends_s = now_s + _ANSWERS_S
        # Who has not answered an earlier question yet is not asked another one.
        free = [one for one in channel.world_ranks if one != self._rank and one not in self._asked]
        self._asked |= dict.fromkeys(free, self._round)
        self._sends += channel.send(Tag.DEADLOCK_QUESTION, self._round, free)

    def _missing(self) -> bool:
        return any(number == self._round for number in self._asked.values())

    def _end_round(self, channel: ControlChannel, now_s: float) -> None:
        self._round_ends_s = 0.0
        mine = self._state()
        states = {rank: state for rank, (_, state) in self._answers.items()}
        cycle: list[int] = []
        if mine is not None:
            states[self._rank] = mine
            cycle = find_cycle(states, self._rank)
        serials = {rank: serial for rank, (serial, _) in self._answers.items()}
        serials[self._rank] = self._serial
        if cycle and all(self._suspects.get(rank) == serials[rank] for rank in cycle):
            report = cycle_text(states, cycle)
            stuck = ranks_reaching(states, cycle)
            verdict = [report, [[rank, serials[rank]] for rank in stuck]]
            self._sends += channel.send(Tag.DEADLOCK_VERDICT, verdict, stuck)
            raise DeadlockError(report)
        self._suspects = {rank: serials[rank] for rank in cycle}
        if cycle:
            self._next_round_s = now_s
        else:
            self._next_round_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    # -- answering -----------------------------------------------------------------------

    def _poll(self, channel: ControlChannel) -> None:
        for source, number in channel.receive(Tag.DEADLOCK_QUESTION):
            state = self._state()
            fields = None if state is None else asdict(state)
            answer = [number, self._serial, fields]
            self._sends += channel.send(Tag.DEADLOCK_ANSWER, answer, [source])
        for source, (number, serial, fields) in channel.receive(Tag.DEADLOCK_ANSWER):
            if self._asked.get(source) == number:
                del self._asked[source]
            if number == self._round and fields is not None:
                self._answers[source] = serial, Waiting(**fields)
        for _, (report, stuck) in channel.receive(Tag.DEADLOCK_VERDICT):
            if [self._rank, self._serial] in stuck:
                raise DeadlockError(report)
        self._sends = [send for send in self._sends if not send.test()]

    def _state(self) -> Waiting | None:
        return None if self._wait is None else Waiting.of(self._wait, self._progress)
