"""The first meeting of an operation: the ranks of a node say which it is, and where arrays lie."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from mpimesh.transport.base import Request
from mpimesh.transport.board import Entry
from mpimesh.transport.quick import mismatch
from mpimesh.transport.team import Team

__all__ = ["NOT_READ", "enter"]

NOT_READ = 0
"""Where an array is said to lie that no other rank touches."""


def enter(
    team: Team,
    what: int,
    source_at: int = -1,
    target_at: int = NOT_READ,
    *,
    counts: Sequence[int] | None = None,
    on_all: bool = True,
) -> Generator[Request, None, Entry]:
    """Meet, and find out where all arrays lie.

    Args:
        team: The ranks of this node.
        what: The operation's number.
        source_at: Where in this rank's arena its input lies; -1 if it is an ordinary array.
        target_at: The same for its result, if other ranks are to read or write it.
        counts: What it sends to each rank, and what it receives from each.
        on_all: Whether these are all ranks, so that a mismatch is known to all.

    Raises:
        MismatchError: If the ranks are in different operations.
    """
    team.say(what, source_at, target_at, counts)
    yield team.meet()
    entry = team.heard(with_counts=counts is not None)
    if entry.what.count(what) != team.size:
        raise mismatch(entry.what, on_all=on_all)
    return entry
