"""Work on memory that the ranks of a node share: sums and copies, in place or through the stage.

Every element is added up in the order of the ranks, whichever rank does it and however the array
is cut. So a result has the same bits on all ranks, in every run, for arrays in shared memory and
for ordinary ones.

Arrays in shared memory are read and written where they lie: each rank reduces one part over all
ranks' arrays, and writes it into all ranks' results; or it copies what it lacks. Ordinary arrays go
through the stage, one chunk after the other, so that what is staged is read back from cache.

A signal handler that raises, as Ctrl-C does, ends a test of a request anywhere, and the next test
has to go on. What a sum is written over cannot be added up again. So a piece of work and the note
that it is done are one call into C: Python runs handlers between its own instructions only, and
there are none in there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import call
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpimesh.arrays.namespace import DType, HostArray
from mpimesh.comm.engine import Steps
from mpimesh.comm.regions import FUNCTIONS, copying
from mpimesh.comm.requests import block_slices, chunk_slices, cut
from mpimesh.comm.shared_window import SharedWindow, WindowEntry

__all__ = [
    "Work",
    "all_gather_staged",
    "all_gather_work",
    "all_reduce_staged",
    "all_reduce_work",
    "all_to_all_staged",
    "all_to_all_work",
    "broadcast_staged",
    "broadcast_work",
    "do_at_once",
    "length",
    "part_of",
    "pass_on",
    "pieces",
    "reduce_into",
    "reduce_parts",
    "reduce_scatter_staged",
    "reduce_scatter_work",
    "reducing",
    "share",
    "windows",
]

Stream: TypeAlias = Sequence[tuple[int, HostArray | None]]
"""Stages of a rank, one after the other: elements, and where another takes them to, if it does."""

Work: TypeAlias = tuple[Callable[[], object], ...]
"""Calls of NumPy, none of which runs Python."""

_FUNCTIONS: dict[str, Callable[..., Any]] = {**FUNCTIONS, "mean": np.add}

_PIECE_BYTES = 128 * 1024
"""Bytes that are reduced at a time: the sum of two ranks' pieces stays in cache for the third's."""

_GRAIN_BYTES = 4096
"""Parts of ranks begin on pages, so that two ranks never write to one cache line."""

_LINE_BYTES = 64


# -- pieces of work --------------------------------------------------------------------


def reducing(
    window: SharedWindow,
    op: str,
    sources: Sequence[HostArray],
    targets: Sequence[HostArray],
    first: int = 0,
) -> Work:
    """Return what reduces `sources` in their order into all `targets`.

    Args:
        window: Lends memory for what comes in between.
        op: Which reduction.
        sources: At least one.
        targets: May be the sources themselves, each at its place.
        first: Which of them the result is written into as it is made; the others get copies, while
            it is in cache.
    """
    function, own = _FUNCTIONS[op], targets[first]
    work: list[Callable[[], object]] = []
    total = sources[0]
    if len(sources) == 1:
        work.append(copying(total, own))
    else:
        if len(sources) > 2:
            # Not into a target before the end: it may be a source that is still to come.
            scratch = window.scratch(own.nbytes).view(own.dtype)
            for source in sources[1:-1]:
                work.append(partial(function, total, source, out=scratch))
                total = scratch
        work.append(partial(function, total, sources[-1], out=own))
    if op == "mean":
        work.append(partial(np.divide, own, len(sources), out=own))
    for place, target in enumerate(targets):
        if place != first:
            work.append(copying(own, target))
    return tuple(work)


def do_at_once(quietly: Callable[..., object], work: Work) -> None:
    """Do all of `work` or nothing; its last call notes that it is done.

    Overflow and NaN pass silently, as in MPI.
    """
    quietly(deque, map(call, work), 0)


def reduce_into(
    window: SharedWindow, op: str, sources: Sequence[HostArray], target: HostArray
) -> None:
    """Reduce `sources` in their order into `target`, which may be one of them."""
    function, quietly = _FUNCTIONS[op], window.quietly
    total = sources[0]
    if len(sources) == 1:
        target[...] = total
    else:
        if len(sources) > 2:
            # Not into `target` before the end: it may be a source that is still to come.
            scratch = window.scratch(target.nbytes).view(target.dtype)
            for source in sources[1:-1]:
                total = quietly(function, total, source, out=scratch)
        quietly(function, total, sources[-1], out=target)
    if op == "mean":
        quietly(np.divide, target, len(sources), out=target)


def part_of(size: int, itemsize: int, rank: int, ranks: int) -> slice:
    """Return the elements that fall to `rank` of an array of `size`; the last parts may be short.

    The same arithmetic on every rank: the parts follow each other and cover the array.
    """
    grain = max(1, _GRAIN_BYTES // itemsize)
    if size < grain * ranks:
        grain = max(1, _LINE_BYTES // itemsize)
    each = -(-size // (ranks * grain)) * grain
    return slice(min(rank * each, size), min((rank + 1) * each, size))


def pieces(part: slice, itemsize: int) -> list[slice]:
    """Cut a part of an array into pieces that fit into cache."""
    return chunk_slices(part.stop, _PIECE_BYTES // itemsize, part.start)


def _copy(window: SharedWindow, rank: int, at: int, target: HostArray) -> Work:
    """Return the copy of a rank's memory from `at` on into `target`."""
    return (copying(window.view(rank, at, target.nbytes, target.dtype), target),)


def _from_next(window: SharedWindow) -> list[int]:
    """Return all ranks, beginning after this one: not all read from the same at once."""
    return [(window.rank + step) % window.size for step in range(1, window.size + 1)]


# -- arrays that lie in shared memory on all ranks -------------------------------------


def all_reduce_work(
    window: SharedWindow, entry: WindowEntry, own: HostArray, op: str
) -> list[Work]:
    """Return what this rank is to reduce."""
    sources = window.views(entry.sources, own.nbytes, own.dtype)
    targets = window.views(entry.targets, own.nbytes, own.dtype)
    mine = part_of(own.size, own.itemsize, window.rank, window.size)
    return [
        reducing(window, op, [s[piece] for s in sources], [t[piece] for t in targets], window.rank)
        for piece in pieces(mine, own.itemsize)
    ]


def reduce_scatter_work(
    window: SharedWindow, entry: WindowEntry, target: HostArray, counts: Sequence[int], op: str
) -> list[Work]:
    """Return what to reduce: this rank's block."""
    sources = window.views(entry.sources, sum(counts) * target.itemsize, target.dtype)
    begin = sum(counts[: window.rank])
    return [
        reducing(
            window,
            op,
            [source[piece] for source in sources],
            [target[piece.start - begin : piece.stop - begin]],
        )
        for piece in pieces(slice(begin, begin + target.size), target.itemsize)
    ]


def all_gather_work(
    window: SharedWindow, entry: WindowEntry, target: HostArray, counts: Sequence[int]
) -> list[Work]:
    """Return what to copy of all ranks' arrays into `target`."""
    blocks = cut(target, counts)
    return [_copy(window, rank, entry.sources[rank], blocks[rank]) for rank in _from_next(window)]


def broadcast_work(
    window: SharedWindow, entry: WindowEntry, buffer: HostArray, root: int
) -> list[Work]:
    """Return what to copy of the root's array."""
    return [] if window.rank == root else [_copy(window, root, entry.sources[root], buffer)]


def all_to_all_work(
    window: SharedWindow, entry: WindowEntry, target: HostArray, sent: Sequence[Sequence[int]]
) -> list[Work]:
    """Return what to copy of each rank's array: this rank's block.

    Args:
        window: The ranks.
        entry: Where their arrays lie.
        target: Where the blocks go, one after the other.
        sent: ``sent[s][d]`` elements go from rank s to rank d.
    """
    before = [sum(row[: window.rank]) * target.itemsize for row in sent]
    blocks = cut(target, [row[window.rank] for row in sent])
    return [
        _copy(window, rank, entry.sources[rank] + before[rank], blocks[rank])
        for rank in _from_next(window)
    ]


# -- ordinary arrays, through the stage ------------------------------------------------


def _stage(window: SharedWindow, chunk: HostArray) -> None:
    """Stage a chunk for the next step."""
    window.inputs(chunk.dtype, chunk.size, coming=1)[window.rank][...] = chunk


def all_reduce_staged(window: SharedWindow, source: HostArray, target: HostArray, op: str) -> Steps:
    """All-reduce ordinary arrays, which may be the same on a rank: in place.

    Takes one step a chunk, and one more where the ranks share the work. What happens between two
    steps: this rank reduces its part of one chunk, copies the result of the chunk before from all
    ranks, and stages the chunk after.
    """
    dtype = source.dtype
    chunks = chunk_slices(source.size, window.stage_bytes // dtype.itemsize)
    alone = window.size == 2  # each reduces all of it
    _stage(window, source[chunks[0]])
    yield window.meet()
    before: slice | None = None
    for number, chunk in enumerate(chunks):
        inputs = window.inputs(dtype)
        size = chunk.stop - chunk.start
        if alone:
            reduce_into(window, op, [part[:size] for part in inputs], target[chunk])
        else:
            mine = part_of(size, dtype.itemsize, window.rank, window.size)
            if mine.start < mine.stop:
                result = window.results(dtype, coming=1)[window.rank][mine]
                reduce_into(window, op, [part[mine] for part in inputs], result)
            if before is not None:
                _collect(window, target[before])
        if number + 1 < len(chunks):
            _stage(window, source[chunks[number + 1]])
        elif alone:
            return
        before = chunk
        yield window.meet()
    if before is not None:
        _collect(window, target[before])


def _collect(window: SharedWindow, target: HostArray) -> None:
    """Copy the parts of a chunk's result from the ranks that have reduced them."""
    for rank, result in enumerate(window.results(target.dtype)):
        part = part_of(target.size, target.itemsize, rank, window.size)
        target[part] = result[part]


def all_gather_staged(
    window: SharedWindow, source: HostArray, target: HostArray, counts: Sequence[int]
) -> Steps:
    """Copy all ranks' ordinary arrays into `target`, a chunk of each at a time."""
    streams: list[Stream] = [[(block.size, block)] for block in cut(target, counts)]
    return pass_on(window, [source], streams, source.dtype)


def broadcast_staged(window: SharedWindow, buffer: HostArray, root: int) -> Steps:
    """Copy the root's ordinary array, a chunk at a time."""
    into = None if window.rank == root else buffer
    streams: list[Stream] = [[(buffer.size, into)] if r == root else [] for r in range(window.size)]
    return pass_on(window, [buffer], streams, buffer.dtype)


def all_to_all_staged(
    window: SharedWindow,
    outgoing: Sequence[HostArray],
    incoming: Sequence[HostArray],
    sent: Sequence[Sequence[int]],
) -> Steps:
    """Copy this rank's block of each rank's ordinary array, a chunk of every rank at a time.

    Args:
        window: The ranks.
        outgoing: The block for each of them.
        incoming: Where the block of each goes.
        sent: ``sent[s][d]`` elements go from rank s to rank d.
    """
    # Each begins with the rank after it, so that not all read from the same at once.
    orders = [[*range(m + 1, window.size), *range(m + 1)] for m in range(window.size)]
    streams: list[Stream] = [
        [(sent[m][to], incoming[m] if to == window.rank else None) for to in orders[m]]
        for m in range(window.size)
    ]
    blocks = [outgoing[to] for to in orders[window.rank]]
    return pass_on(window, blocks, streams, incoming[0].dtype)


def reduce_scatter_staged(
    window: SharedWindow, source: HostArray, target: HostArray, counts: Sequence[int], op: str
) -> Steps:
    """Reduce this rank's block of ordinary arrays: a chunk of every block at a time."""
    blocks = [[block] for block in block_slices(counts)]
    return reduce_parts(window, op, source, [-1] * window.size, blocks, target)


# -- pieces of arrays, in place or through the stage ------------------------------------
#
# Arrays that lie in shared memory are read where they lie; ordinary ones go through the stage, of
# which each rank fills one window after the other. All ranks of the node know how long all pieces
# are, so they take equally many steps.


def share(
    window: SharedWindow, array: HostArray, held: Sequence[Sequence[slice]], places: Sequence[int]
) -> Steps:
    """Copy parts of a result, which some ranks have in their arrays, into those of all.

    Who has given a part in shared memory leaves it alone until the next meeting.

    Args:
        window: The ranks.
        array: This rank's result.
        held: Which parts of it each rank has.
        places: Where each rank's result begins in its arena; -1 for an ordinary array.
    """
    givers = [member for member, parts in enumerate(held) if any(map(length, parts))]
    if window.size == 1 or not givers:
        return
    if min(places[giver] for giver in givers) < 0:
        streams: list[Stream] = [
            [(length(part), None if member == window.rank else array[part]) for part in parts]
            for member, parts in enumerate(held)
        ]
        yield from pass_on(
            window, [array[part] for part in held[window.rank]], streams, array.dtype
        )
        return
    yield window.meet()
    for giver in givers:
        if giver != window.rank:
            theirs = window.view(giver, places[giver], array.nbytes, array.dtype)
            for part in held[giver]:
                array[part] = theirs[part]


def pass_on(
    window: SharedWindow, outgoing: Sequence[HostArray], streams: Sequence[Stream], dtype: DType
) -> Steps:
    """Hand pieces of ordinary arrays on through the stage.

    Args:
        window: The ranks.
        outgoing: This rank's pieces, as long as its stream says.
        streams: For each rank its stream.
        dtype: That of all pieces.
    """
    step = window.stage_bytes // dtype.itemsize
    rows = [[size for size, _ in stream] for stream in streams]
    mine = windows(rows[window.rank], step)
    theirs = [
        (member, windows(rows[member], step))
        for member, stream in enumerate(streams)
        if any(target is not None for _, target in stream)
    ]
    for _ in range(-(-max(map(sum, rows)) // step)):
        room = window.inputs(dtype, coming=1)[window.rank]
        for fragment in next(mine, []):
            room[fragment.place] = outgoing[fragment.piece][fragment.part]
        yield window.meet()
        staged = window.inputs(dtype)
        for member, row in theirs:
            for fragment in next(row, []):
                target = streams[member][fragment.piece][1]
                if target is not None:
                    target[fragment.part] = staged[member][fragment.place]


def reduce_parts(
    window: SharedWindow,
    op: str,
    source: HostArray,
    places: Sequence[int],
    parts: Sequence[Sequence[slice]],
    target: HostArray,
) -> Steps:
    """Reduce parts of all ranks' arrays, each of them by one rank, in the order of the ranks.

    Args:
        window: The ranks.
        op: The reduction.
        source: This rank's array.
        places: Where each rank's array begins in its arena; -1 for an ordinary one.
        parts: What each of the first ranks reduces.
        target: What this rank's parts become, one after the other. May be the part of `source`
            that they are.
    """
    own = parts[window.rank] if window.rank < len(parts) else []
    if window.size > 1 and min(places) < 0:
        yield from _reduce_staged(window, op, source, parts, target)
        return
    sources = [source] if window.size == 1 else window.views(places, source.nbytes, source.dtype)
    at = 0
    for part in own:
        for piece in pieces(part, source.itemsize):
            size = length(piece)
            reduce_into(window, op, [one[piece] for one in sources], target[at : at + size])
            at += size


def _reduce_staged(
    window: SharedWindow,
    op: str,
    source: HostArray,
    parts: Sequence[Sequence[slice]],
    target: HostArray,
) -> Steps:
    """Reduce parts of ordinary arrays; the stage has a room for what each rank reduces."""
    step = window.stage_bytes // (len(parts) * _LINE_BYTES) * _LINE_BYTES // source.itemsize
    sizes = [sum(map(length, row)) for row in parts]
    rows = [windows(map(length, row), step) for row in parts]
    begin = window.rank * step
    for number in range(-(-max(sizes) // step)):
        room = window.inputs(source.dtype, coming=1)[window.rank]
        for worker, row in enumerate(rows):
            into = room[worker * step :]
            for fragment in next(row, []):
                into[fragment.place] = source[parts[worker][fragment.piece]][fragment.part]
        yield window.meet()
        if window.rank < len(parts):
            own = target[number * step : (number + 1) * step]
            if own.size:
                staged = window.inputs(source.dtype)
                reduce_into(window, op, [one[begin : begin + own.size] for one in staged], own)


# -- a row of pieces, seen through a window that moves along it ------------------------


class Fragment(NamedTuple):
    """The part of a piece that lies in a window.

    Attributes:
        piece: Its number.
        part: The elements of it.
        at: Where they lie in the window.
    """

    piece: int
    part: slice
    at: int

    @property
    def place(self) -> slice:
        """Places in the window, from the first to the last."""
        return slice(self.at, self.at + length(self.part))


def length(part: slice) -> int:
    """Return how many elements a part of an array has."""
    return int(part.stop - part.start)


def windows(lengths: Iterable[int], step: int) -> Iterator[list[Fragment]]:
    """Cut a row of pieces into windows of `step` elements, of which the last may be shorter."""
    window: list[Fragment] = []
    filled = 0
    for piece, size in enumerate(lengths):
        start = 0
        while start < size:
            stop = min(start + step - filled, size)
            window.append(Fragment(piece, slice(start, stop), filled))
            filled += stop - start
            start = stop
            if filled == step:
                yield window
                window, filled = [], 0
    if window:
        yield window
