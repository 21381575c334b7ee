"""All-gather, broadcast and all-to-all in shared memory: each rank reads what it lacks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from mpimesh.arrays.types import HostArray
from mpimesh.errors import MismatchError, on_all_ranks
from mpimesh.transport.board import Entry
from mpimesh.transport.engine import Steps
from mpimesh.transport.team import Team
from mpimesh.transport.team_stage import Compartments, stage
from mpimesh.transport.team_work import Work, copying

__all__ = [
    "agreed_counts",
    "all_gather_staged",
    "all_gather_work",
    "all_to_all_staged",
    "all_to_all_work",
    "broadcast_staged",
    "broadcast_work",
]


def all_gather_work(
    team: Team, entry: Entry, target: HostArray, counts: Sequence[int]
) -> list[Work]:
    """Return what to copy of all ranks' arrays, which lie in shared memory, into `target`."""
    starts = [0, *accumulate(counts)]
    blocks = [target[starts[rank] : starts[rank + 1]] for rank in range(team.size)]
    return [_copy(team, rank, entry.sources[rank], blocks[rank]) for rank in _from_next(team)]


def all_gather_staged(
    team: Team, source: HostArray, target: HostArray, counts: Sequence[int]
) -> Steps:
    """Copy all ranks' ordinary arrays into `target`, a chunk of each at a time."""
    starts = [0, *accumulate(counts)]
    step = team.stage_bytes // source.itemsize
    rounds = max(1, -(-max(counts) // step))
    stage(team, source[:step])
    yield team.meet()
    for number in range(rounds):
        parts = team.inputs(source.dtype)
        for rank in _from_next(team):
            at = starts[rank] + number * step
            block = target[at : min(at + step, starts[rank + 1])]
            block[...] = parts[rank][: block.size]
        if number + 1 < rounds:
            stage(team, source[(number + 1) * step : (number + 2) * step])
            yield team.meet()


def broadcast_work(team: Team, entry: Entry, buffer: HostArray, root: int) -> list[Work]:
    """Return what to copy of the root's array, which lies in shared memory."""
    return [] if team.rank == root else [_copy(team, root, entry.sources[root], buffer)]


def broadcast_staged(team: Team, buffer: HostArray, root: int) -> Steps:
    """Copy the root's ordinary array, a chunk at a time."""
    step = team.stage_bytes // buffer.itemsize
    if team.rank == root:
        stage(team, buffer[:step])
    yield team.meet()
    for at in range(0, buffer.size, step):
        chunk = buffer[at : at + step]
        if team.rank != root:
            chunk[...] = team.inputs(buffer.dtype)[root][: chunk.size]
        if at + step < buffer.size:
            if team.rank == root:
                stage(team, buffer[at + step : at + 2 * step])
            yield team.meet()


def all_to_all_work(
    team: Team, entry: Entry, target: HostArray, sent: Sequence[Sequence[int]]
) -> list[Work]:
    """Return what to copy of each rank's array, which lies in shared memory: this rank's block.

    Args:
        team: The ranks.
        entry: Where their arrays lie.
        target: Where the blocks go, one after the other.
        sent: ``sent[s][d]`` elements go from rank s to rank d.
    """
    starts = [0, *accumulate(row[team.rank] for row in sent)]
    before = [sum(row[: team.rank]) * target.itemsize for row in sent]
    return [
        _copy(
            team, rank, entry.sources[rank] + before[rank], target[starts[rank] : starts[rank + 1]]
        )
        for rank in _from_next(team)
    ]


def all_to_all_staged(
    team: Team,
    source: HostArray,
    target: HostArray,
    sent: Sequence[Sequence[int]],
) -> Steps:
    """Copy this rank's block of each rank's ordinary array, a chunk of every block at a time."""
    starts = [0, *accumulate(row[team.rank] for row in sent)]
    mine = Compartments(team, sent[team.rank], source.itemsize)
    theirs = [Compartments(team, row, source.itemsize) for row in sent]
    rounds = mine.rounds(max(map(max, sent)))
    mine.stage(source, 0)
    yield team.meet()
    for number in range(rounds):
        parts = team.inputs(source.dtype)
        for rank in _from_next(team):
            place, part = theirs[rank].chunk(team.rank, number)
            size = part.stop - part.start
            at = starts[rank] + part.start
            target[at : at + size] = parts[rank][place : place + size]
        if number + 1 < rounds:
            mine.stage(source, number + 1)
            yield team.meet()


def _copy(team: Team, rank: int, at: int, target: HostArray) -> Work:
    """Return the copy of a rank's memory from `at` on into `target`."""
    return copying(team.view(rank, at, target.nbytes, target.dtype), target)


def _from_next(team: Team) -> list[int]:
    """Return all ranks, beginning after this one: not all read from the same at once."""
    return [(team.rank + step) % team.size for step in range(1, team.size + 1)]


def agreed_counts(rows: list[list[int]], here: Sequence[int] | None = None) -> list[list[int]]:
    """Return what each rank of an all-to-all sends to each.

    Args:
        rows: What each says that it sends to each, and then that it receives from each.
        here: Which ranks these are, of several nodes; None if all.

    Raises:
        MismatchError: If they do not agree, on all of these ranks.
    """
    ranks = len(rows)
    sent = [row[:ranks] for row in rows]
    received = [row[ranks:] for row in rows]
    if [list(column) for column in zip(*received, strict=True)] == sent:
        return sent
    error = _misfit(sent, received, range(ranks) if here is None else here)
    raise on_all_ranks(error) if here is None else error


def _misfit(
    sent: list[list[int]], received: list[list[int]], ranks: Sequence[int]
) -> MismatchError:
    source, dest = next(
        (s, d)
        for s, row in enumerate(sent)
        for d, count in enumerate(row)
        if received[d][s] != count
    )
    return MismatchError(
        f"in an all_to_all, rank {ranks[source]} sends {sent[source][dest]} bytes to rank "
        f"{ranks[dest]}, which expects {received[dest][source]}"
    )
