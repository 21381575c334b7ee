"""Regions exchanged by messages: one from each rank to each that takes something of it.

All boxes of a pair of ranks travel packed in one message, or in a row of pieces where
memory is limited, which both sides cut alike. A single box that is one run of memory
is sent from where it lies; one that comes is received where it goes.

Who waits for whom
1. Step k is from a rank to the one k places on. Without a limit, each rank has the messages
   of a few steps under way. Of all messages that are not done, that of the lowest step is
   under way on both sides.
2. With a limit, all pairs are under way, each with one piece at a time. What has come for a
   reduction out of turn waits in its buffer, and its pair with it. Both sides count takes and
   parts in one order, so the first of all that has not been put in its place is the next one
   of its pair, and its turn has come.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from typing import NamedTuple

import numpy as np

from mpimesh.arrays.dtypes import sum_dtype
from mpimesh.arrays.memory import POOLED_FROM_BYTES, ArrayPool
from mpimesh.arrays.namespace import DType, HostArray
from mpimesh.comm.engine import Steps
from mpimesh.comm.regions import (
    FUNCTIONS,
    Blocks,
    gives_otherwise,
    raw_dtype,
)
from mpimesh.comm.requests import MAX_USER_TAG, Condition, Messages, Request
from mpimesh.layout.boxes import (
    Box,
    Regions,
    extent,
    flat_fragments,
    global_box,
    run_start,
    slices,
    view,
    volume,
    whole,
)

__all__ = ["REGIONS_TAG", "MessageExchange", "exchange_by_messages"]

REGIONS_TAG = MAX_USER_TAG + 9

_STEPS_UNDER_WAY = 8
"""Messages that a rank sends, and receives, at a time."""

_POOLED_BYTES = 64 << 20
"""Most memory for packed pieces that is pooled for the next exchange."""


def exchange_by_messages(
    communicator: Messages,
    source: HostArray | None,
    target: HostArray | None,
    regions: Regions,
    *,
    max_bytes: int = 0,
) -> Steps:
    """Exchange regions by messages, but for what this rank takes of itself."""
    blocks: Blocks = {} if source is None else {communicator.rank: lambda shape: source}
    yield MessageExchange(communicator, source, target, regions, blocks, max_bytes)


# -- the plan --------------------------------------------------------------------------


class _Pair(NamedTuple):
    """The boxes that one rank sends to another, as one of the two sees them.

    Attributes:
        rank: The other.
        boxes: The boxes on this side, in their order; none is empty.
        items: The take and the part that each is; only where they are received.
        ends: How many elements have gone after each.
        run: Where they begin in the block, if they are one run there; -1 if not.
    """

    rank: int
    boxes: tuple[Box, ...]
    items: tuple[tuple[int, int], ...]
    ends: tuple[int, ...]
    run: int

    @property
    def size(self) -> int:
        """Number of their elements."""
        return self.ends[-1]

    def fragments(self, start: int, stop: int) -> list[tuple[int, int, Box]]:
        """Return what elements `start` to `stop` are.

        Returns:
            For each fragment the number of its box, where it begins among them, and its part of
            the box.
        """
        fragments = []
        for number, (box, end) in enumerate(zip(self.boxes, self.ends, strict=True)):
            begin = end - volume(box)
            first, last = max(start, begin), min(stop, end)
            if first < last:
                at = first
                for part in flat_fragments(extent(box), first - begin, last - begin):
                    fragments.append((number, at - start, part))
                    at += volume(part)
        return fragments


class _MessagePlan(NamedTuple):
    """The sends and receives of one rank.

    Attributes:
        sends: What goes to other ranks, step by step.
        receives: What comes from others, step by step.
        near: Takes of which a part is in memory.
    """

    sends: tuple[_Pair, ...]
    receives: tuple[_Pair, ...]
    near: tuple[int, ...]


def _message_plan(
    regions: Regions,
    rank: int,
    size: int,
    near: frozenset[int],
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
) -> _MessagePlan:
    """Plan who sends what to whom.

    Args:
        regions: What this rank takes and gives.
        rank: This rank.
        size: How many there are.
        near: The ranks that read each other's memory, this one among them.
        shapes: Those of its source and its target.
    """
    outgoing: dict[int, list[Box]] = {}
    for give in regions.gives:
        if give.rank != rank and give.rank not in near and volume(give.box):
            outgoing.setdefault(give.rank, []).append(give.box)
    incoming: dict[int, list[tuple[int, int]]] = {}
    near_takes: list[int] = []
    for number, take in enumerate(regions.takes):
        if not volume(take.box):
            continue
        far = [index for index, part in enumerate(take.parts) if part.rank not in near]
        for index in far:
            incoming.setdefault(take.parts[index].rank, []).append((number, index))
        if len(far) < len(take.parts):
            near_takes.append(number)
    sends = []
    receives = []
    for step in range(1, size):
        after, before = (rank + step) % size, (rank - step) % size
        if after in outgoing:
            sends.append(_pair(after, outgoing[after], (), shapes[0], is_copied=True))
        if before in incoming:
            items = incoming[before]
            boxes = [regions.takes[number].box for number, _ in items]
            is_copied = not regions.takes[items[0][0]].reduces
            receives.append(_pair(before, boxes, items, shapes[1], is_copied=is_copied))
    return _MessagePlan(tuple(sends), tuple(receives), tuple(near_takes))


def _pair(
    rank: int,
    boxes: Sequence[Box],
    items: Sequence[tuple[int, int]],
    shape: tuple[int, ...],
    *,
    is_copied: bool,
) -> _Pair:
    """Return the boxes of a pair; a single one that is only copied may be one run of memory."""
    run = run_start(boxes[0], shape) if is_copied and len(boxes) == 1 else -1
    return _Pair(rank, tuple(boxes), tuple(items), tuple(accumulate(map(volume, boxes))), run)


# -- the exchange ----------------------------------------------------------------------


class _Task:
    """Steps that go on, each when the request of the one before is done.

    Attributes:
        steps: The steps.
        request: That of the last one; None before the first.
    """

    __slots__ = ("request", "steps")

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.request: Request | None = None


class MessageExchange:
    """The request for an exchange of which all or some regions travel as messages.

    Args:
        communicator: The ranks.
        source: This rank's block, if it gives any.
        target: Where it takes to.
        regions: What it takes and gives.
        blocks: The blocks that this rank reads where they lie, its own among them. Their
            ranks read this one's, if they take of it.
        max_bytes: Most memory for packed pieces at a time; 0 for as much as it takes. The same
            on all ranks.
    """

    def __init__(
        self,
        communicator: Messages,
        source: HostArray | None,
        target: HostArray | None,
        regions: Regions,
        blocks: Blocks,
        max_bytes: int,
    ) -> None:
        self._communicator = communicator
        self._regions = regions
        self._blocks = blocks
        self._dtype = _dtype_of(source, target)
        self._raw = raw_dtype(self._dtype)
        self._itemsize = itemsize = self._dtype.itemsize
        nothing: HostArray = np.empty(0, self._dtype)
        source = nothing if source is None else source
        target = nothing if target is None else target
        self._source = source.view(self._raw)
        self._target = target
        self._raw_target = target.view(self._raw)
        self._turns: defaultdict[int, int] = defaultdict(int)
        self._totals: dict[int, HostArray] = {}
        self.error: BaseException | None = None
        self._limited = max_bytes > 0
        self._piece = 0
        self._receives: deque[_Task] = deque()
        self._sends: deque[_Task] = deque()
        self._others: deque[_Task] = deque()
        if not itemsize:
            return
        near = frozenset(blocks) | {communicator.rank}
        shapes = source.shape, target.shape
        plan = regions.prepared(
            ("messages", communicator.rank, communicator.size, near, shapes),
            lambda: _message_plan(regions, communicator.rank, communicator.size, near, shapes),
        )
        if self._limited:
            pairs = 2 * max(1, communicator.size - 1)
            self._piece = max(1, max_bytes // (pairs * itemsize))
        self._receives.extend([_Task(self._receive(pair)) for pair in plan.receives])
        self._sends.extend([_Task(self._send(pair)) for pair in plan.sends])
        self._others.extend([_Task(self._take_near(number)) for number in plan.near])

    def test(self) -> bool:
        """Move everything along that can move, and tell whether all is done."""
        if self.error is not None:
            raise self.error
        most = None if self._limited else _STEPS_UNDER_WAY
        rows = (self._receives, most), (self._sends, most), (self._others, None)
        while sum(self._move(*row) for row in rows):
            pass
        return not any(tasks for tasks, _ in rows)

    def _move(self, tasks: deque[_Task], most: int | None) -> bool:
        """Look once at so many tasks, from the first on, and tell whether any has moved."""
        moved = False
        for task in tuple(islice(tasks, most)):
            if task.request is not None and not task.request.test():
                continue
            moved = True
            task.request = None
            try:
                task.request = next(task.steps, None)
            except BaseException as error:
                self.error = error  # steps that were ended do not go on
                raise
            if task.request is None:
                tasks.remove(task)
        return moved

    def _pieces(self, pair: _Pair) -> Iterator[tuple[int, int]]:
        """Return from where to where in a pair's row of elements each of its messages is."""
        step = self._piece or pair.size
        return ((at, min(at + step, pair.size)) for at in range(0, pair.size, step))

    # -- out -----------------------------------------------------------------------------

    def _send(self, pair: _Pair) -> Steps:
        """Send what goes to a rank."""
        for start, stop in self._pieces(pair):
            # Nothing here refers to the message: its memory is free when it has gone.
            yield self._communicator.isend(self._packed(pair, start, stop), pair.rank, REGIONS_TAG)

    def _packed(self, pair: _Pair, start: int, stop: int) -> HostArray:
        """Return elements `start` to `stop` of what goes to a rank, as bytes in a row."""
        source = self._source
        if pair.run >= 0:
            return _bytes_of(source, pair.run + start, pair.run + stop)
        packed = self._empty(stop - start)
        if stop - start == pair.size:
            for box, first, last in zip(pair.boxes, (0, *pair.ends), pair.ends, strict=False):
                packed[first:last].reshape(extent(box))[...] = view(source, box)
            return packed.view(np.uint8)
        for number, at, part in pair.fragments(start, stop):
            piece = view(source, global_box(part, pair.boxes[number]))
            packed[at : at + piece.size].reshape(piece.shape)[...] = piece
        return packed.view(np.uint8)

    # -- in ------------------------------------------------------------------------------

    def _receive(self, pair: _Pair) -> Steps:
        """Receive what comes from a rank, and put it in its place."""
        buffer: HostArray = np.empty(0, self._raw)
        for start, stop in self._pieces(pair):
            if pair.run >= 0:
                room = _bytes_of(self._raw_target, pair.run + start, pair.run + stop)
            else:
                if not buffer.size:
                    buffer = self._empty(stop - start)
                room = buffer[: stop - start].view(np.uint8)
            request = self._communicator.irecv(room, pair.rank, REGIONS_TAG)
            yield request
            came = request.received_bytes()
            if came != room.nbytes:
                raise gives_otherwise(self._communicator.rank, room.nbytes, pair.rank, came)
            if pair.run >= 0:
                continue
            placing = self._place(pair, buffer, start, stop)
            if self._limited:
                yield from placing
            else:
                # No message is to wait until it is the turn of this one.
                self._others.append(_Task(placing))

    def _place(self, pair: _Pair, buffer: HostArray, start: int, stop: int) -> Steps:
        """Put elements `start` to `stop` of what comes from a rank in their place, in turn."""
        for number, at, part in pair.fragments(start, stop):
            take, place = pair.items[number]
            came = buffer[at : at + volume(part)].reshape(extent(part))
            if not self._regions.takes[take].reduces:
                self._raw_target[slices(global_box(part, pair.boxes[number]))] = came
                continue
            yield self._turn(take, place)
            self._reduce(take, part, came.view(self._dtype))
            if tuple([end for _, end in part]) == extent(pair.boxes[number]):
                self._end_turn(take)

    # -- reductions, and what is near ------------------------------------------------------

    def _turn(self, take: int, place: int) -> Request:
        """Return what is done when it is the turn of a part of a take."""
        return Condition(lambda: self._turns[take] == place)

    def _end_turn(self, number: int) -> None:
        self._turns[number] += 1
        take = self._regions.takes[number]
        if self._turns[number] == len(take.parts) and number in self._totals:
            with np.errstate(all="ignore"):
                np.copyto(view(self._target, take.box), self._totals.pop(number), casting="unsafe")

    def _take_near(self, number: int) -> Steps:
        """Copy what is in memory, or reduce the parts that are, each in its turn."""
        take = self._regions.takes[number]
        for place, part in enumerate(take.parts):
            if part.rank not in self._blocks:
                continue
            block = view(self._blocks[part.rank](part.shape), part.box)
            if not take.reduces:
                self._raw_target[slices(take.box)] = block.view(self._raw)
                continue
            yield self._turn(number, place)
            self._reduce(number, whole(extent(part.box)), block)
            self._end_turn(number)

    def _reduce(self, number: int, part: Box, came: HostArray) -> None:
        """Reduce a piece of the part whose turn it is into the total."""
        take = self._regions.takes[number]
        total = self._totals.get(number)
        if total is None and sum_dtype(self._dtype) != self._dtype:
            total = self._totals[number] = np.empty(extent(take.box), sum_dtype(self._dtype))
        where = (
            view(self._target, global_box(part, take.box)) if total is None else view(total, part)
        )
        if self._turns[number] == 0:
            np.copyto(where, came)
            return
        if came.dtype != where.dtype:
            came = came.astype(where.dtype)
        with np.errstate(all="ignore"):  # overflow and NaN pass silently, as in MPI
            FUNCTIONS[take.op](where, came, out=where)

    def _empty(self, size: int) -> HostArray:
        """Return room for packed elements: warm from earlier exchanges, if it is not limited."""
        if self._limited:
            return np.empty(size, self._raw)
        pool = self._communicator.packed
        if pool is None:
            pool = self._communicator.packed = ArrayPool(
                least_bytes=POOLED_FROM_BYTES, limit_bytes=_POOLED_BYTES
            )
        return pool.take((size,), self._raw)


def _bytes_of(array: HostArray, start: int, stop: int) -> HostArray:
    """Return elements of a C-contiguous array as bytes."""
    return array.reshape(-1)[start:stop].view(np.uint8)


def _dtype_of(*arrays: HostArray | None) -> DType:
    return next((array.dtype for array in arrays if array is not None), np.dtype(np.uint8))
