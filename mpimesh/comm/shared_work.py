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
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from operator import call
from typing import Any, TypeAlias

import numpy as np

from mpimesh.arrays.types import HostArray
from mpimesh.comm.engine import Steps
from mpimesh.comm.regions import FUNCTIONS, copying
from mpimesh.comm.shared_window import Entry, SharedWindow

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
    "chunks_of",
    "do_at_once",
    "part_of",
    "pieces",
    "reduce_into",
    "reduce_scatter_staged",
    "reduce_scatter_work",
    "reducing",
]

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


def chunks_of(size: int, step: int) -> list[slice]:
    """Cut `size` elements into chunks of `step`."""
    return [slice(at, min(at + step, size)) for at in range(0, size, step)]


def pieces(part: slice, itemsize: int) -> Iterator[slice]:
    """Cut a part of an array into pieces that fit into cache."""
    step = max(1, _PIECE_BYTES // itemsize)
    return (slice(at, min(at + step, part.stop)) for at in range(part.start, part.stop, step))


def _copy(window: SharedWindow, rank: int, at: int, target: HostArray) -> Work:
    """Return the copy of a rank's memory from `at` on into `target`."""
    return (copying(window.view(rank, at, target.nbytes, target.dtype), target),)


def _from_next(window: SharedWindow) -> list[int]:
    """Return all ranks, beginning after this one: not all read from the same at once."""
    return [(window.rank + step) % window.size for step in range(1, window.size + 1)]


# -- arrays that lie in shared memory on all ranks -------------------------------------


def all_reduce_work(window: SharedWindow, entry: Entry, own: HostArray, op: str) -> list[Work]:
    """Return what this rank is to reduce."""
    sources = window.views(entry.sources, own.nbytes, own.dtype)
    targets = window.views(entry.targets, own.nbytes, own.dtype)
    mine = part_of(own.size, own.itemsize, window.rank, window.size)
    return [
        reducing(window, op, [s[piece] for s in sources], [t[piece] for t in targets], window.rank)
        for piece in pieces(mine, own.itemsize)
    ]


def reduce_scatter_work(
    window: SharedWindow, entry: Entry, target: HostArray, counts: Sequence[int], op: str
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
    window: SharedWindow, entry: Entry, target: HostArray, counts: Sequence[int]
) -> list[Work]:
    """Return what to copy of all ranks' arrays into `target`."""
    starts = [0, *accumulate(counts)]
    blocks = [target[starts[rank] : starts[rank + 1]] for rank in range(window.size)]
    return [_copy(window, rank, entry.sources[rank], blocks[rank]) for rank in _from_next(window)]


def broadcast_work(window: SharedWindow, entry: Entry, buffer: HostArray, root: int) -> list[Work]:
    """Return what to copy of the root's array."""
    return [] if window.rank == root else [_copy(window, root, entry.sources[root], buffer)]


def all_to_all_work(
    window: SharedWindow, entry: Entry, target: HostArray, sent: Sequence[Sequence[int]]
) -> list[Work]:
    """Return what to copy of each rank's array: this rank's block.

    Args:
        window: The ranks.
        entry: Where their arrays lie.
        target: Where the blocks go, one after the other.
        sent: ``sent[s][d]`` elements go from rank s to rank d.
    """
    starts = [0, *accumulate(row[window.rank] for row in sent)]
    before = [sum(row[: window.rank]) * target.itemsize for row in sent]
    blocks = [target[start:end] for start, end in pairwise(starts)]
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
    chunks = chunks_of(source.size, window.stage_bytes // dtype.itemsize)
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
    starts = [0, *accumulate(counts)]
    step = window.stage_bytes // source.itemsize
    rounds = max(1, -(-max(counts) // step))
    _stage(window, source[:step])
    yield window.meet()
    for number in range(rounds):
        parts = window.inputs(source.dtype)
        for rank in _from_next(window):
            at = starts[rank] + number * step
            block = target[at : min(at + step, starts[rank + 1])]
            block[...] = parts[rank][: block.size]
        if number + 1 < rounds:
            _stage(window, source[(number + 1) * step : (number + 2) * step])
            yield window.meet()


def broadcast_staged(window: SharedWindow, buffer: HostArray, root: int) -> Steps:
    """Copy the root's ordinary array, a chunk at a time."""
    step = window.stage_bytes // buffer.itemsize
    if window.rank == root:
        _stage(window, buffer[:step])
    yield window.meet()
    for at in range(0, buffer.size, step):
        chunk = buffer[at : at + step]
        if window.rank != root:
            chunk[...] = window.inputs(buffer.dtype)[root][: chunk.size]
        if at + step < buffer.size:
            if window.rank == root:
                _stage(window, buffer[at + step : at + 2 * step])
            yield window.meet()


class _Compartments:
    """The stage cut into one room for each block of an array, of which each round fills a chunk.

    Args:
        window: The ranks, as many as there are blocks.
        counts: Elements of this rank's blocks, which follow each other.
        itemsize: Bytes of an element.
    """

    __slots__ = ("_counts", "_starts", "_window", "width")

    def __init__(self, window: SharedWindow, counts: Sequence[int], itemsize: int) -> None:
        self._window = window
        self._counts = counts
        self._starts = [0, *accumulate(counts)]
        lines = window.stage_bytes // (window.size * _LINE_BYTES)
        self.width = lines * _LINE_BYTES // itemsize

    def rounds(self, largest: int) -> int:
        """Return how many rounds blocks of up to `largest` elements take; at least one."""
        return max(1, -(-largest // self.width))

    def chunk(self, block: int, number: int) -> tuple[int, slice]:
        """Return where a block's chunk lies in the stage, and its elements in the block."""
        start = min(number * self.width, self._counts[block])
        stop = min(start + self.width, self._counts[block])
        return block * self.width, slice(start, stop)

    def stage(self, source: HostArray, number: int) -> None:
        """Stage a chunk of every block for the next step."""
        room = self._window.inputs(source.dtype, coming=1)[self._window.rank]
        for block, begin in enumerate(self._starts[:-1]):
            place, part = self.chunk(block, number)
            size = part.stop - part.start
            room[place : place + size] = source[begin + part.start : begin + part.stop]


def reduce_scatter_staged(
    window: SharedWindow, source: HostArray, target: HostArray, counts: Sequence[int], op: str
) -> Steps:
    """Reduce this rank's block of ordinary arrays: a chunk of every block at a time."""
    rooms = _Compartments(window, counts, source.itemsize)
    rounds = rooms.rounds(max(counts))
    rooms.stage(source, 0)
    yield window.meet()
    for number in range(rounds):
        inputs = window.inputs(source.dtype)
        place, part = rooms.chunk(window.rank, number)
        if part.start < part.stop:
            own = target[part]
            reduce_into(window, op, [one[place : place + own.size] for one in inputs], own)
        if number + 1 < rounds:
            rooms.stage(source, number + 1)
            yield window.meet()


def all_to_all_staged(
    window: SharedWindow,
    source: HostArray,
    target: HostArray,
    sent: Sequence[Sequence[int]],
) -> Steps:
    """Copy this rank's block of each rank's ordinary array, a chunk of every block at a time."""
    starts = [0, *accumulate(row[window.rank] for row in sent)]
    mine = _Compartments(window, sent[window.rank], source.itemsize)
    theirs = [_Compartments(window, row, source.itemsize) for row in sent]
    rounds = mine.rounds(max(map(max, sent)))
    mine.stage(source, 0)
    yield window.meet()
    for number in range(rounds):
        parts = window.inputs(source.dtype)
        for rank in _from_next(window):
            place, part = theirs[rank].chunk(window.rank, number)
            size = part.stop - part.start
            at = starts[rank] + part.start
            target[at : at + size] = parts[rank][place : place + size]
        if number + 1 < rounds:
            mine.stage(source, number + 1)
            yield window.meet()
