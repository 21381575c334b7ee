"""All-reduce and reduce-scatter in memory that the ranks of a node share.

Every element is added up in the order of the ranks, whichever rank does it and
however the array is cut. So the result has the same bits on all ranks, in every
run, for arrays in shared memory and for ordinary ones.

Arrays in shared memory are read and written where they lie: each rank reduces
one part over all ranks' arrays, and writes it into all ranks' results. Ordinary
arrays go through the stage, one chunk after the other, so that what is staged is
read back from cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from mpimesh.arrays.types import HostArray
from mpimesh.transport.board import Entry
from mpimesh.transport.engine import Steps
from mpimesh.transport.team import Team
from mpimesh.transport.team_stage import Compartments, stage
from mpimesh.transport.team_work import FUNCTIONS, Work, reducing

__all__ = [
    "all_reduce_staged",
    "all_reduce_work",
    "part_of",
    "reduce_into",
    "reduce_scatter_staged",
    "reduce_scatter_work",
]

_PIECE_BYTES = 128 * 1024
"""Bytes that are reduced at a time: the sum of two ranks' pieces stays in cache for the third's."""

_GRAIN_BYTES = 4096
"""Parts of ranks begin on pages, so that two ranks never write to one cache line."""


def part_of(size: int, itemsize: int, rank: int, ranks: int) -> slice:
    """Return the elements that fall to `rank` of an array of `size`; the last parts may be short.

    The same arithmetic on every rank: the parts follow each other and cover the array.
    """
    grain = max(1, _GRAIN_BYTES // itemsize)
    if size < grain * ranks:
        grain = max(1, 64 // itemsize)
    each = -(-size // (ranks * grain)) * grain
    return slice(min(rank * each, size), min((rank + 1) * each, size))


def all_reduce_work(team: Team, entry: Entry, own: HostArray, op: str) -> list[Work]:
    """Return what this rank is to reduce of arrays that all lie in shared memory."""
    sources = team.views(entry.sources, own.nbytes, own.dtype)
    targets = team.views(entry.targets, own.nbytes, own.dtype)
    mine = part_of(own.size, own.itemsize, team.rank, team.size)
    return [
        reducing(team, op, [s[piece] for s in sources], [t[piece] for t in targets], team.rank)
        for piece in pieces(mine, own.itemsize)
    ]


def all_reduce_staged(team: Team, source: HostArray, target: HostArray, op: str) -> Steps:
    """All-reduce ordinary arrays, which may be the same on a rank: in place.

    Takes one meeting a chunk, and one more where the ranks share the
    work. What happens between two meetings: this rank reduces its part of one chunk, copies the
    result of the chunk before from all ranks, and stages the chunk after.
    """
    dtype = source.dtype
    chunks = chunks_of(source.size, team.stage_bytes // dtype.itemsize)
    one_shot = team.size == 2
    stage(team, source[chunks[0]])
    yield team.meet()
    before: slice | None = None
    for number, chunk in enumerate(chunks):
        inputs = team.inputs(dtype)
        length = chunk.stop - chunk.start
        if one_shot:
            reduce_into(team, op, [part[:length] for part in inputs], target[chunk])
        else:
            mine = part_of(length, dtype.itemsize, team.rank, team.size)
            if mine.start < mine.stop:
                result = team.results(dtype, coming=1)[team.rank][mine]
                reduce_into(team, op, [part[mine] for part in inputs], result)
            if before is not None:
                _collect(team, target[before])
        if number + 1 < len(chunks):
            stage(team, source[chunks[number + 1]])
        elif one_shot:
            return
        before = chunk
        yield team.meet()
    if before is not None:
        _collect(team, target[before])


def _collect(team: Team, target: HostArray) -> None:
    """Copy the parts of a chunk's result from the ranks that have reduced them."""
    for rank, result in enumerate(team.results(target.dtype)):
        part = part_of(target.size, target.itemsize, rank, team.size)
        target[part] = result[part]


def reduce_scatter_work(
    team: Team, entry: Entry, target: HostArray, counts: Sequence[int], op: str
) -> list[Work]:
    """Return what to reduce of all ranks' arrays, which lie in shared memory: this rank's block."""
    sources = team.views(entry.sources, sum(counts) * target.itemsize, target.dtype)
    begin = sum(counts[: team.rank])
    return [
        reducing(
            team,
            op,
            [source[piece] for source in sources],
            [target[piece.start - begin : piece.stop - begin]],
        )
        for piece in pieces(slice(begin, begin + target.size), target.itemsize)
    ]


def reduce_scatter_staged(
    team: Team,
    source: HostArray,
    target: HostArray,
    counts: Sequence[int],
    op: str,
) -> Steps:
    """Reduce this rank's block of ordinary arrays: a chunk of every block at a time."""
    rooms = Compartments(team, counts, source.itemsize)
    rounds = rooms.rounds(max(counts))
    rooms.stage(source, 0)
    yield team.meet()
    for number in range(rounds):
        inputs = team.inputs(source.dtype)
        place, part = rooms.chunk(team.rank, number)
        if part.start < part.stop:
            own = target[part]
            reduce_into(team, op, [one[place : place + own.size] for one in inputs], own)
        if number + 1 < rounds:
            rooms.stage(source, number + 1)
            yield team.meet()


def chunks_of(size: int, step: int) -> list[slice]:
    """Cut `size` elements into chunks of `step`."""
    return [slice(at, min(at + step, size)) for at in range(0, size, step)]


def pieces(part: slice, itemsize: int) -> Iterator[slice]:
    """Cut a part of an array into pieces that fit into cache."""
    step = max(1, _PIECE_BYTES // itemsize)
    return (slice(at, min(at + step, part.stop)) for at in range(part.start, part.stop, step))


def reduce_into(team: Team, op: str, sources: Sequence[HostArray], target: HostArray) -> None:
    """Reduce `sources` in their order into `target`, which may be one of them."""
    function, quietly = FUNCTIONS[op], team.quietly
    total = sources[0]
    if len(sources) == 1:
        target[...] = total
        return
    # Overflow and NaN pass silently, as in MPI.
    if len(sources) > 2:
        # Not into `target` before the end: it may be a source that is still to come.
        scratch = team.scratch(target.nbytes).view(target.dtype)
        for source in sources[1:-1]:
            total = quietly(function, total, source, out=scratch)
    quietly(function, total, sources[-1], out=target)
    if op == "mean":
        quietly(np.divide, target, len(sources), out=target)
