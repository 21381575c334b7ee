"""Pieces of arrays that go from some ranks of a node to others, and sums of pieces.

What the collectives over several nodes are made of inside a node. Arrays that lie in
shared memory are read where they lie; ordinary ones go through the stage, of which
each rank fills one window after the other. All ranks of the node know how long all
pieces are, so they meet equally often.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from mpimesh.arrays.types import DType, HostArray
from mpimesh.transport.engine import Steps
from mpimesh.transport.team import Team
from mpimesh.transport.team_reduce import pieces, reduce_into
from mpimesh.transport.windows import length, windows

__all__ = ["Stream", "pass_on", "reduce_parts", "share"]

Stream: TypeAlias = Sequence[tuple[int, HostArray | None]]
"""Stages of a rank, one after the other: elements, and where another takes them to, if it does."""

_LINE_BYTES = 64


def share(
    team: Team, array: HostArray, held: Sequence[Sequence[slice]], places: Sequence[int]
) -> Steps:
    """Copy parts of a result, which some ranks have in their arrays, into those of all.

    Who has given a part in shared memory leaves it alone until the next meeting.

    Args:
        team: The ranks.
        array: This rank's result.
        held: Which parts of it each rank has.
        places: Where each rank's result begins in its arena; -1 for an ordinary array.
    """
    givers = [member for member, parts in enumerate(held) if any(map(length, parts))]
    if team.size == 1 or not givers:
        return
    if min(places[giver] for giver in givers) < 0:
        streams: list[Stream] = [
            [(length(part), None if member == team.rank else array[part]) for part in parts]
            for member, parts in enumerate(held)
        ]
        yield from pass_on(team, [array[part] for part in held[team.rank]], streams, array.dtype)
        return
    yield team.meet()
    for giver in givers:
        if giver != team.rank:
            theirs = team.view(giver, places[giver], array.nbytes, array.dtype)
            for part in held[giver]:
                array[part] = theirs[part]


def pass_on(
    team: Team, outgoing: Sequence[HostArray], streams: Sequence[Stream], dtype: DType
) -> Steps:
    """Hand pieces of ordinary arrays on through the stage.

    Args:
        team: The ranks.
        outgoing: This rank's pieces, as long as its stream says.
        streams: For each rank its stream.
        dtype: That of all pieces.
    """
    step = team.stage_bytes // dtype.itemsize
    rows = [[size for size, _ in stream] for stream in streams]
    mine = windows(rows[team.rank], step)
    theirs = [
        (member, windows(rows[member], step))
        for member, stream in enumerate(streams)
        if any(target is not None for _, target in stream)
    ]
    for _ in range(-(-max(map(sum, rows)) // step)):
        room = team.inputs(dtype, coming=1)[team.rank]
        for fragment in next(mine, []):
            room[fragment.place] = outgoing[fragment.piece][fragment.part]
        yield team.meet()
        staged = team.inputs(dtype)
        for member, row in theirs:
            for fragment in next(row, []):
                target = streams[member][fragment.piece][1]
                if target is not None:
                    target[fragment.part] = staged[member][fragment.place]


def reduce_parts(
    team: Team,
    op: str,
    source: HostArray,
    places: Sequence[int],
    parts: Sequence[Sequence[slice]],
    target: HostArray,
) -> Steps:
    """Reduce parts of all ranks' arrays, each of them by one rank, in the order of the ranks.

    Args:
        team: The ranks.
        op: The reduction.
        source: This rank's array.
        places: Where each rank's array begins in its arena; -1 for an ordinary one.
        parts: What each of the first ranks reduces.
        target: What this rank's parts become, one after the other. May be the part of `source`
            that they are.
    """
    own = parts[team.rank] if team.rank < len(parts) else []
    if team.size > 1 and min(places) < 0:
        yield from _reduce_staged(team, op, source, parts, target)
        return
    sources = [source] if team.size == 1 else team.views(places, source.nbytes, source.dtype)
    at = 0
    for part in own:
        for piece in pieces(part, source.itemsize):
            size = length(piece)
            reduce_into(team, op, [one[piece] for one in sources], target[at : at + size])
            at += size


def _reduce_staged(
    team: Team,
    op: str,
    source: HostArray,
    parts: Sequence[Sequence[slice]],
    target: HostArray,
) -> Steps:
    """Reduce parts of ordinary arrays; the stage has a room for what each rank reduces."""
    step = team.stage_bytes // (len(parts) * _LINE_BYTES) * _LINE_BYTES // source.itemsize
    sizes = [sum(map(length, row)) for row in parts]
    rows = [windows(map(length, row), step) for row in parts]
    begin = team.rank * step
    for number in range(-(-max(sizes) // step)):
        room = team.inputs(source.dtype, coming=1)[team.rank]
        for worker, row in enumerate(rows):
            into = room[worker * step :]
            for fragment in next(row, []):
                into[fragment.place] = source[parts[worker][fragment.piece]][fragment.part]
        yield team.meet()
        if team.rank < len(parts):
            own = target[number * step : (number + 1) * step]
            if own.size:
                staged = team.inputs(source.dtype)
                reduce_into(team, op, [one[begin : begin + own.size] for one in staged], own)
