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

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import TypeAlias, TypeVar

import numpy as np

from mpimesh.arrays import ArrayPool
from mpimesh.arrays.types import DType, HostArray
from mpimesh.comm.engine import Steps
from mpimesh.comm.regions import FUNCTIONS, piece_work, pieces_of, raw_dtype, sum_dtype
from mpimesh.comm.requests import MAX_USER_TAG, Messages, RecvRequest, Request
from mpimesh.errors import MismatchError
from mpimesh.layout.boxes import (
    Box,
    extent,
    flat_fragments,
    global_box,
    run_start,
    slices,
    view,
    volume,
    whole,
)
from mpimesh.layout.regions import Regions

__all__ = ["REGIONS_TAG", "Blocks", "MessageExchange", "exchange_by_messages"]

T = TypeVar("T")

REGIONS_TAG = MAX_USER_TAG + 9

_STEPS_UNDER_WAY = 8
"""Messages that a rank sends, and receives, at a time."""

_POOLED_BYTES = 64 << 20
"""Most memory for packed pieces that is pooled for the next exchange."""

Blocks: TypeAlias = Mapping[int, Callable[[tuple[int, ...]], HostArray]]
"""For ranks whose memory this one reads: what gives their block by its shape."""


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


@dataclass(frozen=True, slots=True)
class _Pair:
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


@dataclass(frozen=True, slots=True)
class _MessagePlan:
    """The sends and receives of one rank.

    Attributes:
        sends: What goes to other ranks, step by step.
        receives: What comes from others, step by step.
        near: Takes of which no part is received.
        mixed: Takes of several parts, of which some are.
    """

    sends: tuple[_Pair, ...]
    receives: tuple[_Pair, ...]
    near: tuple[int, ...]
    mixed: tuple[int, ...]


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
    mixed: list[int] = []
    for number, take in enumerate(regions.takes):
        if not volume(take.box):
            continue
        far = [index for index, part in enumerate(take.parts) if part.rank not in near]
        for index in far:
            incoming.setdefault(take.parts[index].rank, []).append((number, index))
        if not far:
            near_takes.append(number)
        elif take.reduces:
            mixed.append(number)
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
    return _MessagePlan(tuple(sends), tuple(receives), tuple(near_takes), tuple(mixed))


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


def _nothing() -> HostArray:
    return np.empty(0, np.uint8)


@dataclass(slots=True)
class _Sending:
    """A pair's messages on their way out.

    Attributes:
        pair: What goes.
        at: How many elements have been started.
        request: The message under way.
    """

    pair: _Pair
    at: int = 0
    request: Request | None = None


@dataclass(slots=True)
class _Receiving:
    """A pair's messages on their way in.

    Attributes:
        pair: What comes.
        at: How many elements have been started.
        nbytes: Size of the message under way.
        request: That message.
        buffer: Where it goes.
        waiting: What has come and is not in its place yet.
    """

    pair: _Pair
    at: int = 0
    nbytes: int = 0
    request: RecvRequest | None = None
    buffer: HostArray = field(default_factory=_nothing)
    waiting: deque[tuple[int, int, Box]] = field(default_factory=deque)


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
        self._near: deque[int] = deque()
        self._turns: dict[int, int] = {}
        self._totals: dict[int, HostArray] = {}
        self._sending: deque[_Sending] = deque()
        self._receiving: deque[_Receiving] = deque()
        self._unplaced: list[_Receiving] = []
        self._unsent = 0
        self._piece = 0
        self._limited = max_bytes > 0
        if not itemsize:
            return
        near = frozenset(blocks) | {communicator.rank}
        shapes = source.shape, target.shape
        plan = regions.prepared(
            ("messages", communicator.rank, communicator.size, near, shapes),
            lambda: _message_plan(regions, communicator.rank, communicator.size, near, shapes),
        )
        self._near.extend(plan.near)
        self._turns.update(dict.fromkeys(plan.mixed, 0))
        self._sending.extend(map(_Sending, plan.sends))
        self._unsent = len(plan.sends)
        self._receiving.extend(map(_Receiving, plan.receives))
        if self._limited:
            pairs = 2 * max(1, communicator.size - 1)
            self._piece = max(1, max_bytes // (pairs * itemsize))

    def test(self) -> bool:
        """Move everything along that can move, and tell whether all is done."""
        while self._move():
            pass
        return not (self._receiving or self._sending or self._unplaced or self._turns)

    def _move(self) -> bool:
        """Look at everything once, and tell whether anything has moved."""
        moved = False
        for receiving in self._under_way(self._receiving):
            moved |= self._receive(receiving)
        # If nothing is left to be started, it is enough to look at the sends at the end.
        if self._unsent or not self._receiving:
            for sending in self._under_way(self._sending):
                moved |= self._send(sending)
        for receiving in tuple(self._unplaced):
            moved |= self._place(receiving)
        if self._turns:
            moved |= self._reduce_near()
        if self._near:
            self._make_near(self._near[0])
            self._near.popleft()
            moved = True
        return moved

    def _under_way(self, pairs: deque[T]) -> tuple[T, ...]:
        if self._limited or len(pairs) <= _STEPS_UNDER_WAY:
            return tuple(pairs)
        return tuple(islice(pairs, _STEPS_UNDER_WAY))

    # -- out -----------------------------------------------------------------------------

    def _send(self, sending: _Sending) -> bool:
        """Start the next message of a pair if the last one has gone; tell whether it did."""
        pair = sending.pair
        if sending.request is not None:
            if not sending.request.test():
                return False
            sending.request = None
            if sending.at == pair.size:
                self._sending.remove(sending)
                return True
        start, stop = sending.at, min(sending.at + (self._piece or pair.size), pair.size)
        message = self._packed(pair, start, stop)
        sending.request = self._communicator.isend(message, pair.rank, REGIONS_TAG)
        sending.at = stop
        self._unsent -= stop == pair.size
        return True

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

    def _receive(self, receiving: _Receiving) -> bool:
        """Take what has come from a rank, or start to receive more; tell whether it did."""
        if receiving.waiting:
            return False
        pair = receiving.pair
        if receiving.request is None:
            start, stop = receiving.at, min(receiving.at + (self._piece or pair.size), pair.size)
            receiving.nbytes = (stop - start) * self._itemsize
            if pair.run >= 0:
                room = _bytes_of(self._raw_target, pair.run + start, pair.run + stop)
            else:
                if not receiving.buffer.size:
                    receiving.buffer = self._empty(stop - start)
                room = receiving.buffer[: stop - start].view(np.uint8)
            receiving.request = self._communicator.irecv(room, pair.rank, REGIONS_TAG)
            receiving.at = stop
            return True
        if not receiving.request.test():
            return False
        came = receiving.request.received_bytes()
        if came != receiving.nbytes:
            raise MismatchError(
                f"rank {self._communicator.rank} takes {receiving.nbytes} bytes of rank "
                f"{pair.rank}, which gives it {came}; each rank gives what the others take of it"
            )
        receiving.request = None
        if pair.run < 0:
            start = receiving.at - receiving.nbytes // self._itemsize
            receiving.waiting.extend(pair.fragments(start, receiving.at))
            self._unplaced.append(receiving)
        if receiving.at == pair.size:
            self._receiving.remove(receiving)
        return True

    def _place(self, receiving: _Receiving) -> bool:
        """Put what has come from a rank in its place, as far as its turn has come."""
        moved = False
        pair, buffer = receiving.pair, receiving.buffer
        while receiving.waiting:
            number, at, part = receiving.waiting[0]
            size = volume(part)
            take, place = pair.items[number]
            came = buffer[at : at + size].reshape(extent(part))
            if not self._regions.takes[take].reduces:
                self._raw_target[slices(global_box(part, pair.boxes[number]))] = came
            elif self._turns[take] != place:
                return moved
            else:
                self._reduce(take, part, came.view(self._dtype))
                if tuple([stop for _, stop in part]) == extent(pair.boxes[number]):
                    self._next_turn(take)
            receiving.waiting.popleft()
            moved = True
        self._unplaced.remove(receiving)
        if receiving.at == pair.size:
            receiving.buffer = _nothing()
        return True

    # -- reductions, and what is near ------------------------------------------------------

    def _reduce_near(self) -> bool:
        """Reduce the parts that are in memory and whose turn has come."""
        moved = False
        for take in list(self._turns):
            while take in self._turns:
                part = self._regions.takes[take].parts[self._turns[take]]
                if part.rank not in self._blocks:
                    break
                block = self._blocks[part.rank](part.shape)
                self._reduce(take, whole(extent(part.box)), view(block, part.box))
                self._next_turn(take)
                moved = True
        return moved

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

    def _next_turn(self, number: int) -> None:
        take = self._regions.takes[number]
        if self._turns[number] + 1 < len(take.parts):
            self._turns[number] += 1
            return
        total = self._totals.pop(number, None)
        if total is not None:
            with np.errstate(all="ignore"):
                np.copyto(view(self._target, take.box), total, casting="unsafe")
        del self._turns[number]

    def _make_near(self, number: int) -> None:
        """Make a take whose parts are all in memory."""
        for op, box, parts in self._regions.prepared(
            ("near", number, self._itemsize),
            lambda: pieces_of(self._regions, [number], 0, self._itemsize),
        ):
            dtype = self._dtype if op else self._raw
            target = self._target.view(dtype)
            sources = [
                view(self._blocks[rank](shape).view(dtype), there) for rank, shape, there in parts
            ]
            with np.errstate(all="ignore"):
                for call in piece_work(op, view(target, box), sources, dtype, _fresh):
                    call()

    # -- memory ----------------------------------------------------------------------------

    def _empty(self, size: int) -> HostArray:
        """Return room for packed elements: warm from earlier exchanges, if it is not limited."""
        if self._limited:
            return np.empty(size, self._raw)
        pool = self._communicator.packed
        if pool is None:
            pool = self._communicator.packed = ArrayPool(limit_bytes=_POOLED_BYTES)
        return pool.empty((size,), self._raw)


def _fresh(nbytes: int) -> HostArray:
    return np.empty(nbytes, np.uint8)


def _bytes_of(array: HostArray, start: int, stop: int) -> HostArray:
    """Return elements of a C-contiguous array as bytes."""
    return array.reshape(-1)[start:stop].view(np.uint8)


def _dtype_of(*arrays: HostArray | None) -> DType:
    return next((array.dtype for array in arrays if array is not None), np.dtype(np.uint8))
