"""The graph of ranks that wait for each other, and its circles, which can never go on.

Pure functions. A rank that waits needs all the ranks that its operation takes and that have not
done their part, and those do nothing more before their own waits end. So a circle stays one for
ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpimesh.arguments import rank_names
from mpimesh.runtime.call import Call, Message
from mpimesh.runtime.progress import Progress, Wait

__all__ = ["Mail", "Waiting", "blocked_by", "circle_of", "circle_text", "reaching"]


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


def circle_of(states: Mapping[int, Waiting], start: int) -> list[int]:
    """Return a circle of ranks that wait for each other and that `start` waits for, or is in.

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
            if found := search(other):
                return found
        done.add(path.pop())
        return []

    found = search(start)
    first = found.index(min(found)) if found else 0
    return found[first:] + found[:first]


def reaching(states: Mapping[int, Waiting], circle: Sequence[int]) -> list[int]:
    """Return all ranks that wait for a circle, those in it among them."""
    found = set(circle)
    while more := {
        rank
        for rank in states
        if rank not in found and found.intersection(blocked_by(rank, states))
    }:
        found |= more
    return sorted(found)


def circle_text(states: Mapping[int, Waiting], circle: Sequence[int]) -> str:
    """Return a circle in words, a row for each rank."""
    following = [*circle[1:], *circle[:1]]
    rows = [
        f"  rank {rank} waits for rank {other}, in {states[rank].operation}"
        for rank, other in zip(circle, following, strict=True)
    ]
    others = [rank for rank in reaching(states, circle) if rank not in circle]
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
