"""The graph of ranks that wait for each other, and the search for a cycle in it.

A rank that waits needs all the ranks that its operation takes and that have not done their part,
and those do nothing more before their own waits end. So a cycle stays one for ever. Virtual ranks
are all in one process, which sees the graph; under MPI, with ``MPIMESH_CHECKS`` on, ranks that wait
ask each other what they wait in.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from mpimesh.arguments import rank_names
from mpimesh.errors import DeadlockError
from mpimesh.runtime.call import Call, Message
from mpimesh.runtime.control import (
    ControlChannel,
    ControlChannels,
    Survey,
    Tag,
    awaited_ranks,
    job_ranks,
)
from mpimesh.runtime.progress import Progress, Wait

__all__ = [
    "DeadlockSearch",
    "Mail",
    "Waiting",
    "blocked_by",
    "cycle_steps",
    "deadlock_text",
    "find_cycle",
    "find_deadlock",
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


class Waiting(NamedTuple):
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
    started: Mapping[str, int] = {}
    sent: Mapping[str, int] = {}
    received: Mapping[str, int] = {}

    @classmethod
    def of(cls, wait: Wait, progress: Progress) -> Waiting | None:
        """Describe a wait of this rank; None if it has a limit, or the job's ranks have no number.

        A wait with a limit ends by itself.
        """
        if wait.is_limited or not job_ranks(wait.communicator):
            return None
        started = dict(progress.counts)
        sent: dict[str, int] = {}
        received: dict[str, int] = {}
        for one in list(progress.ledgers.values()):
            started[one.name] = one.started
            if one.mail is not None and one.ranks:
                sent |= _by_text(one.name, one.mail.sent, one.ranks)
                received |= _by_text(one.name, one.mail.received, one.ranks)
        what, message = wait.what, None
        if isinstance(what, Message):
            message = (what.name, what.tag, what.count)
        return cls(
            operation=str(what),
            among=wait.among,
            number=wait.number or getattr(what, "number", 0),
            takes=awaited_ranks(wait),
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


def find_cycle(peers_of: Callable[[int], Iterable[int]], starts: Iterable[int]) -> list[int]:
    """Return a cycle that one of `starts` is in or leads to, from its lowest rank on; or nothing.

    Args:
        peers_of: Returns the ranks that a rank waits for.
        starts: Where the search begins.
    """
    done: set[int] = set()
    for start in starts:
        path = {start: iter(peers_of(start))}
        while path:
            rank = next(reversed(path))
            peer = next((peer for peer in path[rank] if peer not in done), None)
            if peer is None:
                done.add(rank)
                del path[rank]
            elif peer in path:
                cycle = [*path][[*path].index(peer) :]
                first = cycle.index(min(cycle))
                return cycle[first:] + cycle[:first]
            else:
                path[peer] = iter(peers_of(peer))
    return []


def find_deadlock(states: Mapping[int, Waiting], starts: Iterable[int]) -> list[int]:
    """Return a cycle of ranks, none of which can go on; see :func:`find_cycle`."""
    return find_cycle(lambda rank: blocked_by(rank, states), starts)


def ranks_reaching(states: Mapping[int, Waiting], cycle: Sequence[int]) -> list[int]:
    """Return all ranks that wait for a cycle, those in it among them."""
    graph = {rank: blocked_by(rank, states) for rank in states}
    reaching = set(cycle)
    while more := {r for r in graph if r not in reaching and reaching.intersection(graph[r])}:
        reaching |= more
    return sorted(reaching)


def cycle_steps(cycle: Sequence[int]) -> list[str]:
    """Return who waits for whom in a cycle, in words."""
    following = [*cycle[1:], *cycle[:1]]
    return [
        f"rank {rank} waits for rank {peer}" for rank, peer in zip(cycle, following, strict=True)
    ]


def deadlock_text(states: Mapping[int, Waiting], cycle: Sequence[int]) -> str:
    """Return a deadlock in words: a row for each rank of the cycle, and who waits for these."""
    rows = [
        f"  {step}, in {states[rank].operation}"
        for rank, step in zip(cycle, cycle_steps(cycle), strict=True)
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
        self._wait: weakref.ref[Wait] | None = None
        self._serial = 0
        self._next_check_s = self._next_round_s = self._round_ends_s = 0.0
        self._pause_s = _FIRST_S
        self._survey = Survey(channels, Tag.DEADLOCK_QUESTION, Tag.DEADLOCK_ANSWER, self._answer)
        self._suspects: dict[int, int] = {}

    def check(self, wait: Wait) -> None:
        """Answer and ask every now and then during `wait`. Never waits.

        Raises:
            DeadlockError: If this rank waits for a cycle of ranks, or is in it.
        """
        now_s = time.monotonic()
        if self._wait is None or self._wait() is not wait:
            self._begin(wait, now_s)
        if now_s < self._next_check_s:
            return
        self._next_check_s = now_s + _CHECK_EVERY_S
        self._survey.poll()
        for one in self._channels:
            for _, (report, stuck) in one.receive(Tag.DEADLOCK_VERDICT):
                if [self._rank, self._serial] in stuck:
                    raise DeadlockError(report)
        channel = self._channels.find(ranks) if (ranks := job_ranks(wait.communicator)) else None
        if channel is None:
            return
        if self._round_ends_s and (now_s >= self._round_ends_s or self._survey.is_answered):
            self._end_round(channel, now_s)
        elif not self._round_ends_s and now_s >= self._next_round_s:
            self._survey.ask(channel)
            self._round_ends_s = now_s + _ANSWERS_S

    def _begin(self, wait: Wait, now_s: float) -> None:
        self._wait = weakref.ref(wait)
        self._serial += 1
        self._pause_s = _FIRST_S
        self._next_round_s, self._round_ends_s = now_s + _FIRST_S, 0.0
        self._suspects = {}

    def _answer(self) -> tuple[int, dict[str, object] | None]:
        """Return the number of this rank's wait and its description, None if it has none."""
        wait = None if self._wait is None else self._wait()
        state = None if wait is None else Waiting.of(wait, self._progress)
        return self._serial, None if state is None else state._asdict()

    def _end_round(self, channel: ControlChannel, now_s: float) -> None:
        self._round_ends_s = 0.0
        answers = self._survey.answers | {self._rank: self._answer()}
        serials = {rank: serial for rank, (serial, _) in answers.items()}
        states = {rank: Waiting(**fields) for rank, (_, fields) in answers.items() if fields}
        cycle = find_deadlock(states, [self._rank]) if self._rank in states else []
        if cycle and all(self._suspects.get(rank) == serials[rank] for rank in cycle):
            report = deadlock_text(states, cycle)
            stuck = ranks_reaching(states, cycle)
            verdict = [report, [[rank, serials[rank]] for rank in stuck]]
            channel.send(Tag.DEADLOCK_VERDICT, verdict, stuck)
            raise DeadlockError(report)
        self._suspects = {rank: serials[rank] for rank in cycle}
        if cycle:
            self._next_round_s = now_s
        else:
            self._next_round_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
