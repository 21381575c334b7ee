"""Regions exchanged in memory that the ranks of a node share: each reads what it takes.

What ranks of other nodes take and give goes by messages (`region_messages.py`) in the same
exchange. On the node a rank has to do only with those of which it takes something, its *owners*,
and those that take of it, its *readers*. Exchange number s goes so on a rank, and the others need
not have come:

1. If there is room for note s, it copies its block, if that is to be copied, and posts the note,
   which says where the block or its copy lies.
2. When all owners have posted their notes s, it reads what it takes. Only then it starts the
   messages from and to other nodes, if any, and waits for them.
3. It says that it is through with s.
4. If the readers read its block and no copy, it waits until all of them are through with s.

Nothing is read torn. A reader looks at a block only when it has seen note s of its owner, which
was written after the copy was made, and after all that the owner's program has written into the
block. The owner's program may write it again after step 4, when all its readers are through, which
they say after they have read. The memory of a copy is used again when those who were its readers
are through with the exchange that it was made for.

No note is overwritten too early: note s + NOTES waits until *all* ranks of the node are through
with s, for all say so, whether they have read anything or not (`shared_window.py`). So a rank is at
most NOTES operations ahead of any other.

Nobody waits for ever. Take the lowest number s at which any rank is, and only ranks at s. There is
room for their notes: every rank is through with all numbers below s, so with s - NOTES. So
all of them post, which takes nothing else; the ranks that are further on have posted s long ago,
and it still stands there, for ranks at s are not through with it. So all of them read, and say
that they are through, and step 4 ends for them. So the lowest number grows. Where other
operations come between, they wait for all ranks and change nothing in this. On several nodes take
the lowest exchange, in the order in which all ranks start them, at which any rank is: all ranks at
it come to its messages by what was said, and those that are further on have theirs behind them,
so these end, too.

A rank without memory for a copy says so in its note, and sends its parts as messages to its
readers, who receive them when they see the note: nobody else need know. Messages of a pair go in
the order of the exchanges.

A rank in another operation is found by those who take of it; it may have found them before.

What others read is a rank's block where it lies, or a copy. A block that others take of and that
does not lie in the arena is copied there first, as far as they take of it: one copy more, where
messages have three. So may be a small one that lies there, for its rank need then not wait until
all others have read it.

What is the same again in each exchange of a kind is worked out once: arrays come and go, but the
places where they lie come back. One that is started many times is one request, made ready anew.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from operator import call
from typing import NamedTuple, Self, cast

import numpy as np

from mpimesh.arrays.namespace import DType, HostArray
from mpimesh.caches import Cache
from mpimesh.comm.base import Communicator
from mpimesh.comm.engine import Moved, ProgressEngine
from mpimesh.comm.region_messages import MessageExchange
from mpimesh.comm.regions import (
    Blocks,
    Call,
    Kind,
    check_contiguous,
    check_dtypes,
    check_regions,
    copied_boxes,
    copying,
    described_bytes,
    descriptor,
    kind_of,
    piece_work,
    pieces_of,
    raw_dtype,
)
from mpimesh.comm.requests import Request, all_done
from mpimesh.comm.shared_window import NOT_READ, Cells, Note, SharedWindow
from mpimesh.errors import MismatchError, MpimeshError
from mpimesh.layout.boxes import Regions, view, volume

__all__ = ["CopyRule", "SharedRegions"]

_AT_A_TIME = 4
"""Pieces that are read before other operations have a turn."""

_AT_ONCE_BYTES = 256 * 1024
"""Size of what a rank takes up to which all is read at once."""

_MOST_PLANS = 64
_MOST_PLACES = 64
"""Places of arrays of one kind for which work is cached: addresses come again and again."""

_MOST_NOTES = 16
"""Answers of the owners for which it is, for arrays at one place."""

_MOST_PIECES = 64
"""Of larger exchanges, working the pieces out costs little beside reading them."""

_REUSED_BYTES = 32 << 20
"""Largest copy whose memory is used for the next, for fresh memory costs more than the copy."""

_SMALL_PART = 8
_LARGEST = 16 << 20
"""No more than an eighth of a block up to this size counts as its edges."""

_MOST_OFFERS = 16
_NOTHING: HostArray = np.empty(0, np.uint8)


def _do_at_once(quietly: Callable[..., object], work: Sequence[Call]) -> None:
    """Do all of `work` or nothing; its last call notes that it is done.

    Overflow and NaN pass silently, as in MPI. A signal handler that raises, as Ctrl-C does, may end
    a test anywhere, and what a sum is written over cannot be added up again: so a piece of work and
    the note that it is done are one call into C, within which Python runs no handler.
    """
    quietly(deque, map(call, work), 0)


# -- offers: where others read a block, or a copy that is made for them -------------------


class CopyRule(NamedTuple):
    """Rule for blocks that are copied though others could read them where they lie.

    Attributes:
        block_bytes: Those up to this size.
        part_bytes: Larger ones of which no more than this, and a small part, is taken: the edges
            of a block, for a halo. The copy takes as much address space as the block.
    """

    block_bytes: int
    part_bytes: int

    @staticmethod
    def for_ranks(ranks: int) -> CopyRule:
        """Return the rule for so many ranks on this node.

        To wait until all readers are through is worth a copy where ranks share cores. Where each
        has its own, they read at the same time, and only the smallest blocks are copied.
        """
        # Not the cores that this process may use: a rank that is bound has but one.
        crowded = ranks > (os.cpu_count() or 1)
        return CopyRule(1 << 20 if crowded else 64 << 10, 128 << 10)

    def copies(self, nbytes: int, given_bytes: int) -> bool:
        """Tell whether a block is copied, of which the others take so much."""
        return nbytes <= self.block_bytes or (
            given_bytes <= self.part_bytes and _SMALL_PART * given_bytes <= nbytes <= _LARGEST
        )


class _Offer(NamedTuple):
    """A rank's block, as the others of its node can read it.

    Attributes:
        at: Where it begins in the arena; -1 if there is no room.
        is_read: Whether others read the block itself, and no copy of it.
        fill: What copies all that others take. Doing it again is harmless.
    """

    at: int
    is_read: bool = False
    fill: tuple[Call, ...] = ()


_NO_OFFER = _Offer(NOT_READ)
"""The offer of a rank from which nobody takes anything."""


# -- exchanges -------------------------------------------------------------------------


class SharedRegions:
    """The exchanges of regions of one communicator.

    Args:
        window: The ranks of this node.
        engine: Moves them along.
        messages: The communicator, for what goes to other nodes, and for the parts of blocks for
            which there is no memory.
        chain: What else the ranks do in the window goes on this chain of the engine, too.
        here: Which ranks of the communicator are on this node, in the window's order.

    Attributes:
        window: The ranks of this node.
        messages: The communicator.
        rule: Which blocks are copied before others take of them, though they could read them where
            they lie.
        copies: The memory for that.
    """

    def __init__(
        self,
        window: SharedWindow,
        engine: ProgressEngine,
        messages: Communicator,
        chain: Hashable,
        here: Sequence[int],
    ) -> None:
        self.window = window
        self.messages = messages
        self.rule = CopyRule.for_ranks(window.size)
        self.copies = _Copies(window)
        self._engine = engine
        self._chain = chain
        self._here = here
        self._plans: Cache[tuple[Regions, Kind, Kind], _Plan] = Cache(_MOST_PLANS)

    def prepare(
        self,
        source: HostArray | None,
        target: HostArray | None,
        regions: Regions,
        max_bytes: int = 0,
        *,
        often: bool = False,
    ) -> Callable[[], Request]:
        """Return what starts to copy or reduce boxes of the ranks' blocks into boxes of `target`.

        Args:
            source: This rank's block, if it gives any.
            target: Where it takes to.
            regions: What it takes and gives.
            max_bytes: Most memory for packed messages at a time; 0 for no limit.
            often: Whether it is started again and again, each time after the last one has settled.

        Raises:
            MpimeshError: At once, on this rank alone, if the arrays do not fit.
        """
        rank, size = self.messages.rank, self.messages.size
        key = (regions, kind_of(source), kind_of(target))
        plan = self._plans.get(key)
        if plan is None:
            check_regions(regions, rank, size, source, target)
            plan = self._plans[key] = _Plan(self.window, self._here, regions, source, target)
        else:
            check_contiguous(rank, source, target)
        bound = plan.bind(source, target, self.rule)
        return SharedExchange(
            self, self._engine, self._chain, bound, (source, target), max_bytes, often=often
        ).begin


class SharedExchange(Moved):
    """An exchange of regions, of which a rank waits for its owners and readers only.

    Args:
        regions: The exchanges of these ranks.
        engine: Moves it along until it is settled.
        chain: What the ranks do in the window, in its order.
        bound: What this rank does, and between which arrays.
        arrays: These arrays, which it keeps until it is over.
        max_bytes: Most memory for packed messages at a time; 0 for no limit.
        often: Whether it is started again and again; then it keeps them for good.
    """

    __slots__ = (
        "_arrays",
        "_bound",
        "_max_bytes",
        "_offer",
        "_often",
        "_parts",
        "_plan",
        "_refusal",
        "_regions",
        "_rest",
        "_window",
    )

    def __init__(
        self,
        regions: SharedRegions,
        engine: ProgressEngine,
        chain: Hashable,
        bound: _Bound,
        arrays: tuple[HostArray | None, HostArray | None],
        max_bytes: int,
        *,
        often: bool,
    ) -> None:
        super().__init__(engine, chain)
        self._regions = regions
        self._window = regions.window
        self._plan = bound.plan
        self._bound = bound
        self._arrays = arrays
        self._max_bytes = max_bytes
        self._often = often
        self._offer = _NO_OFFER
        self._parts: tuple[Call, ...] | None = None
        self._rest: Request | None = None
        self._refusal: MpimeshError | None = None

    def begin(self) -> Self:
        """Begin, once the last time has settled."""
        self._parts = self._rest = self._refusal = None
        return super().begin()

    def _move(self) -> bool:
        window, plan, number = self._window, self._plan, self.number
        if not number:
            if not window.has_room():
                window.look_elsewhere()
                return False
            self._offer = self._regions.copies.offer(self._bound)
            self.number = number = window.published + 1
        if window.published < number:
            at, _, fill = self._offer
            for copy in fill:
                copy()
            window.publish(number, at, plan.descriptor, plan.reader_doors)
        self.committed = True
        parts = self._parts
        if parts is None:
            identities = window.identities_of(number, plan.owner_cells)
            if identities is None:
                window.look_elsewhere()
                return False
            self._engine.steps += 1
            parts = self._bound.work.get(identities)
            if parts is None or self._offer.at < 0:
                parts = self._look(identities)
            self._parts = parts
        if parts:
            left: tuple[Call, ...] = ()
            if not plan.at_once:
                parts, left = parts[:_AT_A_TIME], parts[_AT_A_TIME:]
            # If a signal ends this in between, what is done again does the same.
            for part in parts:
                part()
            self._parts = left
            if left:
                self._engine.steps += 1
                return False
        if self._rest is not None and not self._rest.test():
            return False
        # Nothing is read from here on, however often this is done again.
        window.acknowledge(number)
        for door in plan.owner_doors:
            door.ring()
        if self._offer.is_read and not window.done_by(number, plan.reader_cells):
            window.look_elsewhere()
            return False
        if not self._often:
            # The engine, or the program, may hold this request for a while yet.
            self._bound, self._arrays, self._offer = _LET_GO, (None, None), _NO_OFFER
            self._rest = None
        if self._refusal is not None:
            raise self._refusal
        return True

    def _look(self, identities: tuple[int, ...]) -> tuple[Call, ...]:
        """Return what to read, now that the owners have posted; prepare what comes by messages."""
        window, plan, bound = self._window, self._plan, self._bound
        notes = window.notes(self.number, plan.owner_cells)
        try:
            descriptors = [plan.descriptor, *[note[1] for note in notes]]
            check_dtypes(dict(zip([plan.rank, *plan.owners], descriptors, strict=True)))
            if plan.is_far or self._offer.at < 0 or -1 in [note[0] for note in notes]:
                self._rest = self._by_messages(notes)
                return ()
            parts = bound.parts(notes)
        except MpimeshError as error:
            # The others may yet read this rank's block: it is raised when they are through.
            self._refusal = error
            return ()
        if window.are_lasting(identities) and (self._often or len(parts) <= _MOST_PIECES):
            bound.work[identities] = parts
        return parts

    def _by_messages(self, notes: Sequence[Note]) -> Request:
        """Return what sends this rank's parts, if it must, and what takes those of others."""
        (source, target), plan = self._arrays, self._plan
        gives = plan.gives if self._offer.at < 0 else plan.far_gives
        blocks = self._bound.blocks(notes)
        messages, most = self._regions.messages, self._max_bytes
        return all_done(
            MessageExchange(messages, source, None, gives, {}, most),
            MessageExchange(messages, source, target, plan.takes, blocks, most),
        )


# -- the plan --------------------------------------------------------------------------


class _Plan:
    """The constant part of an exchange of some regions between arrays of one kind.

    Args:
        window: The ranks of this node.
        here: Which ranks these are.
        regions: What this rank takes and gives.
        source: An array of the kind of this rank's block; no reference to it stays.
        target: One of the kind of what it takes into.

    Attributes:
        window: The ranks of this node.
        rank: This rank.
        takes: What it takes.
        gives: What it gives.
        far_gives: What it gives to ranks of other nodes.
        is_far: Whether it takes of them, or gives to them.
        descriptor: The size and the dtype of its arrays, for the others.
        pieces: What is read, piece by piece; none if it is far.
        at_once: Whether all are read before other operations have a turn.
        owners: The ranks of this node that this one reads of.
        owner_places: Their places in the window.
        owner_cells: Their cells.
        owner_doors: Their doors.
        reader_cells: The cells of the ranks that read of this one.
        reader_doors: Their doors.
        boxes: What is copied of its block, where they do not read that itself.
    """

    def __init__(
        self,
        window: SharedWindow,
        here: Sequence[int],
        regions: Regions,
        source: HostArray | None,
        target: HostArray | None,
    ) -> None:
        self.window = window
        self.rank = rank = here[window.rank]
        taken = {part.rank for take in regions.takes for part in take.parts if volume(part.box)}
        given = {give.rank for give in regions.gives if volume(give.box)}
        self.is_far = not (taken | given).issubset(here)
        self.takes, self.gives = Regions(regions.takes), Regions((), regions.gives)
        self.far_gives = Regions((), tuple([g for g in regions.gives if g.rank not in here]))
        self.descriptor = descriptor(source, target)
        self.owners = [other for other in here if other in taken and other != rank]
        self.owner_places = [here.index(owner) for owner in self.owners]
        readers = [at for at, other in enumerate(here) if other in given and other != rank]
        self.owner_cells = window.cells_of(self.owner_places)
        self.owner_doors = window.doors_of(self.owner_places)
        self.reader_cells = window.cells_of(readers)
        self.reader_doors = window.doors_of(readers)
        self.boxes = copied_boxes(regions, source.shape) if readers and source is not None else ()
        itemsize = 0 if source is None else source.itemsize
        self._given_bytes = itemsize * sum(map(volume, self.boxes))
        self.pieces = []
        self.at_once = True
        if target is not None and target.nbytes and not self.is_far:
            itemsize = target.itemsize
            # Beginning after this rank: not all read from the same at once.
            self.pieces = pieces_of(regions, range(len(regions.takes)), rank + 1, itemsize)
            taken_elements = sum([volume(take.box) for take in regions.takes])
            self.at_once = itemsize * taken_elements <= _AT_ONCE_BYTES
        self._bound: Cache[tuple[int, int], _Bound] = Cache(_MOST_PLACES)

    def bind(self, source: HostArray | None, target: HostArray | None, rule: CopyRule) -> _Bound:
        """Return what is worked out for these arrays: for those in the arena, from the last time.

        Arrays come and go, but the places where they lie come back.
        """
        window = self.window
        source_at, target_at = (
            NOT_READ if array is None else window.find(array) for array in (source, target)
        )
        bound = self._bound.get((source_at, target_at))
        if bound is None:
            copied = source is not None and rule.copies(source.nbytes, self._given_bytes)
            own, into = (
                _in_arena(window, *each) for each in ((source, source_at), (target, target_at))
            )
            bound = _Bound(self, own, into, source_at, copied=copied)
            if source_at >= 0 and target_at >= 0:
                self._bound[source_at, target_at] = bound
        return bound


class _Bound:
    """A plan with its arrays. Those in the arena it knows by their places, and keeps none alive.

    Args:
        plan: The plan.
        source: This rank's block.
        target: What this rank takes into.
        at: Where the block begins in the arena; -1 for an ordinary array.
        copied: Whether it is copied though it lies in the arena.

    Attributes:
        plan: The plan.
        at: Where the block begins.
        given_bytes: Its size; 0 if nobody takes of it.
        offer: The offer of it that is always the same; None if a copy is made each time.
        offers: Those of copies, by where the copies lie.
        work: What to read, by the identities of the owners' notes: they, too, come back.
    """

    __slots__ = ("_source", "_target", "at", "given_bytes", "offer", "offers", "plan", "work")

    def __init__(
        self,
        plan: _Plan,
        source: HostArray | None,
        target: HostArray | None,
        at: int,
        *,
        copied: bool,
    ) -> None:
        self.plan = plan
        self.work: Cache[tuple[int, ...], tuple[Call, ...]] = Cache(_MOST_NOTES)
        self._source = source
        self._target = target
        self.at = at
        self.given_bytes = source.nbytes if source is not None and plan.boxes else 0
        self.offers: Cache[int, _Offer] = Cache(_MOST_OFFERS)
        self.offer: _Offer | None = None
        if not self.given_bytes:
            self.offer = _NO_OFFER
        elif at >= 0 and not copied:
            self.offer = _Offer(at, is_read=True)

    def copy(self, memory: HostArray, at: int) -> _Offer:
        """Return the offer of a copy of the block in `memory`, which begins at `at`."""
        source = _NOTHING if self._source is None else self._source
        raw = raw_dtype(source.dtype)
        target, block = memory.view(raw).reshape(source.shape), source.view(raw)
        fill = [copying(view(block, box), view(target, box)) for box in self.plan.boxes]
        offer = self.offers[at] = _Offer(at, fill=tuple(fill))
        return offer

    def blocks(self, notes: Sequence[Note]) -> Blocks:
        """Return what gives the blocks that this rank reads where they lie, as far as they do.

        Each raises MismatchError, on this rank alone, if it has not the size that this rank takes
        it for.
        """
        plan, source = self.plan, self._source
        dtype = np.dtype(np.uint8) if self._target is None else self._target.dtype
        blocks: dict[int, Callable[[tuple[int, ...]], HostArray]] = {
            owner: cache(partial(_block_of, plan, owner, place, at, its_descriptor, dtype))
            for owner, place, (at, its_descriptor) in zip(
                plan.owners, plan.owner_places, notes, strict=True
            )
            if at >= 0
        }
        if source is not None:
            blocks[plan.rank] = lambda shape: source
        return blocks

    def parts(self, notes: Sequence[Note]) -> tuple[Call, ...]:
        """Return what to read, piece by piece, where the owners have their blocks.

        Doing a piece again from its beginning is harmless.

        Raises:
            MismatchError: As of :meth:`blocks`.
        """
        target, window = self._target, self.plan.window
        if target is None:
            return ()
        blocks = self.blocks(notes)
        work: list[Call] = []
        for piece in self.plan.pieces:
            calls = piece_work(piece, target, blocks, window.scratch)
            # A copy is one call into C as it is.
            work.append(calls[0] if not piece[0] else partial(_do_at_once, window.quietly, calls))
        return tuple(work)


_LET_GO = cast(_Bound, None)


def _in_arena(window: SharedWindow, array: HostArray | None, at: int) -> HostArray | None:
    """Return an array of this rank's arena as one that does not keep it alive."""
    if array is None or at < 0:
        return array
    return _array_at(window, window.rank, at, array.dtype, array.shape)


def _array_at(
    window: SharedWindow, member: int, at: int, dtype: DType, shape: tuple[int, ...]
) -> HostArray:
    """Return an array that begins at `at` in the arena of a member, as a view of its memory."""
    return window.view(member, at, prod(shape) * dtype.itemsize, dtype).reshape(shape)


def _block_of(
    plan: _Plan,
    rank: int,
    place: int,
    at: int,
    its_descriptor: int,
    dtype: DType,
    shape: tuple[int, ...],
) -> HostArray:
    """Return the block of another rank, where it lies.

    Raises:
        MismatchError: If it has another size than this rank takes it for.
    """
    nbytes, its_nbytes = prod(shape) * dtype.itemsize, described_bytes(its_descriptor)
    if its_nbytes != nbytes:
        raise MismatchError(
            f"rank {plan.rank} takes of a block of shape {shape} of rank {rank}, "
            f"{nbytes} bytes of dtype {dtype}, but that block has {its_nbytes}"
        )
    return _array_at(plan.window, place, at, dtype, shape)


# -- memory for copies -----------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Buffer:
    """Memory for a copy.

    Attributes:
        memory: The bytes.
        at: Where they begin in the arena.
        number: The number of the last operation that used it.
        readers: The cells of those who read it then.
    """

    memory: HostArray
    at: int
    number: int = 0
    readers: Cells = ()


class _Copies:
    """Memory of the arena for copies of blocks, which others may read for a while.

    Args:
        window: The ranks.
    """

    __slots__ = ("_buffers", "_window")

    def __init__(self, window: SharedWindow) -> None:
        self._window = window
        self._buffers: list[_Buffer] = []

    def offer(self, block: _Bound) -> _Offer:
        """Offer a rank's block for the next operation."""
        if block.offer is not None:
            return block.offer
        window, buffers, nbytes = self._window, self._buffers, block.given_bytes
        for buffer in buffers:  # the one that has not been used for longest first
            if nbytes <= buffer.memory.nbytes <= _REUSED_BYTES and window.done_by(
                buffer.number, buffer.readers
            ):
                buffers.remove(buffer)
                if len(buffers) > 1:
                    self._drop()
                break
        else:
            self._drop()
            memory = window.room(nbytes)
            if memory is None:
                return _Offer(block.at, is_read=block.at >= 0)
            buffer = _Buffer(memory, window.find(memory))
        buffer.number = window.published + 1
        buffer.readers = block.plan.reader_cells
        buffers.append(buffer)
        at = buffer.at
        # Through the window's view, which does not keep the memory of the copy.
        return block.offers.get(at) or block.copy(
            window.view(window.rank, at, nbytes, buffer.memory.dtype), at
        )

    @property
    def memories(self) -> list[HostArray]:
        """The copies that others may still read."""
        return [buffer.memory for buffer in self._buffers if not self._is_over(buffer)]

    def _is_over(self, buffer: _Buffer) -> bool:
        return self._window.done_by(buffer.number, buffer.readers)

    def _drop(self) -> None:
        """Give back what nobody reads any more."""
        self._buffers[:] = [buffer for buffer in self._buffers if not self._is_over(buffer)]
