"""Regions exchanged in memory that the ranks of a node share: each reads what it takes.

A rank has to do only with those of which it takes something, its *owners*, and those that take
of it, its *readers*. Exchange number s goes so on a rank, and the others need not have come:

1. If there is room for note s, it copies its block, if that is to be copied, and posts the note,
   which says where the block or its copy lies.
2. When all owners have posted their notes s, it reads what it takes.
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
operations come between, they wait for all ranks and change nothing in this.

A rank without memory for a copy says so in its note, and sends its parts as messages to its
readers, who receive them when they see the note: nobody else need know. Messages of a pair go in
the order of the exchanges.

A rank in another operation is found by those who take of it; it may have found them before.

What others read is a rank's block where it lies, or a copy (`region_offers.py`).

What is the same again in each exchange of a kind is worked out once, in a `SharedPlan`: arrays come
and go, but the places where they lie come back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, groupby
from math import prod

import numpy as np

from mpimesh.arrays.types import DType, HostArray
from mpimesh.comm.base import Communicator
from mpimesh.comm.engine import Engine, Moved
from mpimesh.comm.notes import EXCHANGE, mismatch
from mpimesh.comm.region_messages import Blocks, MessageExchange
from mpimesh.comm.region_offers import (
    NO_OFFER,
    Copies,
    CopyRule,
    Fill,
    Offer,
    copied_boxes,
)
from mpimesh.comm.regions import (
    Piece,
    check_dtypes,
    described_bytes,
    descriptor,
    piece_work,
    pieces_of,
    raw_dtype,
)
from mpimesh.comm.requests import Request
from mpimesh.comm.shared_window import Entry, Note, SharedWindow
from mpimesh.comm.shared_work import Work, do_at_once
from mpimesh.errors import MismatchError, MpimeshError
from mpimesh.layout.boxes import view, volume
from mpimesh.layout.regions import Regions

__all__ = [
    "PreparedExchange",
    "SharedExchange",
    "SharedPlan",
    "blocks_of_node",
]

_AT_A_TIME = 4
"""Pieces that are read before other operations have a turn."""

_MOST_WORK = 64
"""Works that are cached for one kind of exchange: addresses come again and again."""

_MOST_PIECES = 64
"""Of larger exchanges, working the pieces out costs nothing beside reading them."""

_AT_ONCE_BYTES = 256 * 1024
"""Size of what a rank takes up to which all is read at once."""


# -- the exchange ----------------------------------------------------------------------


class SharedExchange(Moved):
    """An exchange of regions, of which a rank waits for its owners and readers only.

    Args:
        window: The ranks.
        engine: Moves it along until it is settled.
        messages: Takes the parts of blocks for which there is no memory.
        plan: What this rank takes and gives.
        offers: Offers this rank's block, when its turn has come.
        arrays: Its source and its target.
        places: Where these begin in its arena; -1 for an ordinary array, or none.
        max_bytes: Most memory for packed messages at a time; 0 for no limit.
    """

    __slots__ = (
        "_arrays",
        "_done_parts",
        "_max_bytes",
        "_messages",
        "_number",
        "_offer",
        "_offers",
        "_parts",
        "_places",
        "_plan",
        "_refusal",
        "_rest",
        "_through",
        "_window",
    )

    def __init__(
        self,
        window: SharedWindow,
        engine: Engine,
        messages: Communicator,
        plan: SharedPlan,
        offers: Callable[[], Offer],
        arrays: tuple[HostArray | None, HostArray | None],
        places: tuple[int, int],
        max_bytes: int,
    ) -> None:
        super().__init__(engine)
        self._window = window
        self._messages = messages
        self._plan = plan
        self._offers = offers
        self._offer = NO_OFFER
        self._arrays = arrays
        self._places = places
        self._max_bytes = max_bytes
        self._number = 0
        self._parts: Sequence[Work] | None = None
        self._done_parts = 0
        self._rest: Sequence[Request] = ()
        self._through = False
        self._refusal: MpimeshError | None = None

    def _move(self) -> bool:
        window, plan = self._window, self._plan
        if self._parts is None:
            if not self._number:
                if not window.has_room():
                    window.look_elsewhere()
                    return False
                self._offer = self._offers()
                self._number = window.published + 1
            number = self._number
            if window.published < number:
                self._offer.fill()
                window.publish(
                    number, EXCHANGE, self._offer.at, plan.descriptor, bells=plan.reader_bells
                )
            self.committed = True
            if not window.published_by(number, plan.owner_cells):
                window.look_elsewhere()
                return False
            self._engine.steps += 1
            self._parts = self._work_of(window.notes(number, plan.owner_cells))
        if self._done_parts < len(self._parts) and not self._do_some(self._parts):
            return False
        if self._rest and not all(request.test() for request in self._rest):
            return False
        number = self._number
        if not self._through:
            window.acknowledge(number)
            for bell in plan.owner_bells:
                if bell.asleep[0]:
                    bell.ring()
            self._through = True
        if self._offer.is_read and not window.done_by(number, plan.reader_cells):
            window.look_elsewhere()
            return False
        self._engine.steps += 1
        self._let_go()
        if self._refusal is not None:
            raise self._refusal
        return True

    def _let_go(self) -> None:
        """Keep no arrays: the engine may hold this request for a while yet."""
        self._offer, self._arrays, self._parts, self._rest = NO_OFFER, (None, None), (), ()
        self._offers = _no_offer

    def _work_of(self, notes: Sequence[Note]) -> Sequence[Work]:
        """Return what to read, now that the owners have posted; prepare what comes by messages."""
        plan, (source, target) = self._plan, self._arrays
        operations = [note[0] for note in notes]
        if operations.count(EXCHANGE) != len(operations):
            ranks = [self._window.rank, *plan.owners]
            self._refusal = mismatch([EXCHANGE, *operations], ranks=ranks, on_all=False)
            self._offer = NO_OFFER  # nor may the readers ever come
            return ()
        try:
            if self._offer.at < 0 or -1 in [note[1] for note in notes]:
                plan.check(notes)
                self._rest = self._by_messages(notes, source, target)
                return ()
            return plan.work(notes, source, self._places[0], target, self._places[1])
        except MpimeshError as error:
            # The others may yet read this rank's block: it is raised when they are through.
            self._refusal = error
            return ()

    def _by_messages(
        self, notes: Sequence[Note], source: HostArray | None, target: HostArray | None
    ) -> Sequence[Request]:
        """Return what sends this rank's parts, if it must, and what takes those of others."""
        regions = self._plan.regions
        gives = regions.gives if self._offer.at < 0 else ()
        blocks = self._plan.blocks(notes, source, target)
        messages, most = self._messages, self._max_bytes
        own = {} if source is None else {self._window.rank: blocks[self._window.rank]}
        return (
            MessageExchange(messages, source, None, Regions((), gives), own, most),
            MessageExchange(messages, source, target, Regions(regions.takes, ()), blocks, most),
        )

    def _do_some(self, parts: Sequence[Work]) -> bool:
        """Do some of this rank's parts, from the first that is not done; tell whether all are."""
        stop = min(self._done_parts + _AT_A_TIME, len(parts))
        while self._done_parts < stop:
            note = partial(setattr, self, "_done_parts", self._done_parts + 1)
            do_at_once(self._window.quietly, (*parts[self._done_parts], note))
        self._engine.steps += 1
        return stop == len(parts)


def _no_offer() -> Offer:
    return NO_OFFER


class PreparedExchange(SharedExchange):
    """An exchange that is started again and again, between the same arrays.

    What it reads is found by the identities of the owners' notes: their copies come back to the
    same few places. It keeps its arrays.

    Args:
        window: The ranks.
        engine: Moves it along until it is settled.
        messages: Takes the parts of blocks for which there is no memory.
        plan: What this rank takes and gives.
        copies: Has the memory for copies.
        rule: Which blocks are copied.
        arrays: Its source and its target.
        places: Where these begin in its arena; -1 for an ordinary array, or none.
    """

    __slots__ = ("_known",)

    def __init__(
        self,
        window: SharedWindow,
        engine: Engine,
        messages: Communicator,
        plan: SharedPlan,
        copies: Copies,
        rule: CopyRule,
        arrays: tuple[HostArray | None, HostArray | None],
        places: tuple[int, int],
    ) -> None:
        offers = plan.offers(copies, arrays[0], places[0], rule)
        super().__init__(window, engine, messages, plan, offers, arrays, places, 0)
        self._known: dict[tuple[int, ...], Sequence[Work]] = {}

    def start(self, chain: object) -> Request:
        """Start it once more, once the last start has settled, as the last one of `chain`."""
        self.done = self.committed = self._through = False
        self._error = self._parts = self._refusal = None
        self._number = self._done_parts = 0
        self._rest = ()
        self._engine.begin(chain, self)
        return self

    def _move(self) -> bool:
        if self._parts is not None or not self._plan.copies_at_once:
            return super()._move()
        window, plan, number = self._window, self._plan, self._number
        if not number:
            if not window.has_room():
                window.look_elsewhere()
                return False
            self._offer = self._offers()
            self._number = number = window.published + 1
        offer = self._offer
        if window.published < number:
            for to, what in offer.copies:
                to[...] = what
            window.publish(number, EXCHANGE, offer.at, plan.descriptor, plan.reader_bells)
        self.committed = True
        identities = window.identities_of(number, plan.owner_cells)
        if identities is None:
            window.look_elsewhere()
            return False
        parts = self._known.get(identities) if offer.at >= 0 else None
        if parts is None:
            parts = self._new_parts(identities)
            if parts is None:
                return super()._move()
        self._engine.steps += 1
        for part in parts:
            for copy in part:
                copy()
        # From here on nothing is read again, if a signal ends this in between.
        self._parts = ()
        window.acknowledge(number)
        for bell in plan.owner_bells:
            if bell.asleep[0]:
                bell.ring()
        self._through = True
        # If others read the block itself, it takes its time.
        return not offer.is_read or super()._move()

    def _new_parts(self, identities: tuple[int, ...]) -> Sequence[Work] | None:
        """Return the copies that these notes mean; None if it is not as simple as that."""
        notes = self._window.notes(self._number, self._plan.owner_cells)
        parts = self._work_of(notes)
        if self._refusal is not None or self._rest:
            self._parts = parts
            return None
        if self._window.are_lasting(identities):
            if len(self._known) >= _MOST_WORK:
                self._known.clear()
            self._known[identities] = parts
        return parts

    def _let_go(self) -> None:
        self._parts, self._rest = (), ()


# -- the plan --------------------------------------------------------------------------


class SharedPlan:
    """The constant part of an exchange of some regions between arrays of one kind.

    Args:
        window: The ranks.
        regions: What this rank takes and gives.
        source: An array of the kind of this rank's block; no reference to it stays.
        target: One of the kind of what it takes into.

    Attributes:
        regions: What this rank takes and gives.
        copies_at_once: Whether what it takes is copied only, and no more than takes a moment.
        descriptor: The size and the dtype of its arrays, for the others.
        owners: The ranks that this one reads of.
        owner_cells: Their cells.
        owner_bells: Their bells.
        reader_cells: The cells of the ranks that read of this one.
        reader_bells: Their bells.
    """

    __slots__ = (
        "_at_once",
        "_boxes",
        "_fills",
        "_given_bytes",
        "_groups",
        "_nbytes",
        "_whole_work",
        "_window",
        "_work",
        "copies_at_once",
        "descriptor",
        "owner_bells",
        "owner_cells",
        "owners",
        "reader_bells",
        "reader_cells",
        "regions",
    )

    def __init__(
        self,
        window: SharedWindow,
        regions: Regions,
        source: HostArray | None,
        target: HostArray | None,
    ) -> None:
        self._window = window
        self.regions = regions
        self.descriptor = descriptor(source, target)
        taken = {part.rank for take in regions.takes for part in take.parts if volume(part.box)}
        given = {give.rank for give in regions.gives if volume(give.box)}
        self.owners = sorted(taken - {window.rank})
        readers = sorted(given - {window.rank})
        self.owner_cells = window.cells_of(self.owners)
        self.owner_bells = window.bells_of(self.owners)
        self.reader_cells = window.cells_of(readers)
        self.reader_bells = window.bells_of(readers)
        self._boxes = copied_boxes(regions, source.shape) if readers and source is not None else ()
        self._nbytes = self._given_bytes = 0
        if source is not None:
            self._nbytes = source.nbytes
            self._given_bytes = source.itemsize * sum(map(volume, self._boxes))
        self._fills: dict[tuple[int, int], Fill] = {}
        # Pieces of the same ranks in a row: their work depends on where these ranks' blocks lie.
        self._groups: list[tuple[tuple[int, ...], list[Piece]]] = []
        if target is not None and target.nbytes:
            itemsize = target.dtype.itemsize
            pieces = pieces_of(regions, range(len(regions.takes)), window.rank + 1, itemsize)
            self._groups = [(ranks, list(row)) for ranks, row in groupby(pieces, _ranks_of)]
        copies = not any(op for _, row in self._groups for op, _, _ in row)
        taken_elements = sum([volume(take.box) for take in regions.takes])
        self._at_once = target is None or taken_elements * target.itemsize <= _AT_ONCE_BYTES
        self.copies_at_once = copies and self._at_once
        # By all addresses, and by those that a group depends on; of few pieces only.
        self._whole_work: dict[tuple[object, ...], list[Work]] = {}
        self._work: dict[tuple[object, ...], list[Work]] | None = None
        if sum(len(row) for _, row in self._groups) <= _MOST_PIECES:
            self._work = {}

    def offer(self, copies: Copies, source: HostArray | None, at: int, rule: CopyRule) -> Offer:
        """Offer this rank's block, which begins at `at` of its arena, to its readers."""
        return copies.offer(
            source,
            self._boxes,
            self.reader_cells,
            at=at,
            copied=rule.copies(self._nbytes, self._given_bytes),
            fills=self._fills,
        )

    def offers(
        self, copies: Copies, source: HostArray | None, at: int, rule: CopyRule
    ) -> Callable[[], Offer]:
        """Return what offers a block again and again, that is the same each time."""
        boxes = self._boxes
        if source is None or not boxes or not source.nbytes:
            return _no_offer
        if at >= 0 and not rule.copies(self._nbytes, self._given_bytes):
            return partial(Offer, at, is_read=True)
        return partial(copies.again, source, source.nbytes, boxes, self.reader_cells, at, {})

    def check(self, notes: Sequence[Note]) -> None:
        """See whether the owners' arrays have the dtype of this rank's.

        Raises:
            MismatchError: If not.
        """
        descriptors = {owner: note[2] for owner, note in zip(self.owners, notes, strict=True)}
        check_dtypes({self._window.rank: self.descriptor, **descriptors})

    def work(
        self,
        notes: Sequence[Note],
        source: HostArray | None,
        source_at: int,
        target: HostArray | None,
        target_at: int,
    ) -> list[Work]:
        """Return what to read, once the owners have said where their blocks lie.

        Raises:
            MismatchError: On this rank alone, if a block has another dtype, or not the size that it
                takes of.
        """
        key = (source_at, target_at, *notes)
        work = self._whole_work.get(key)
        if work is None:
            self.check(notes)
            work = self._all_work(notes, source, source_at, target, target_at)
            if self._at_once and work:
                work = [tuple(chain.from_iterable(work))]
            if target_at >= 0 and (source_at >= 0 or source is None) and self._work is not None:
                if len(self._whole_work) >= _MOST_WORK:
                    self._whole_work.clear()
                self._whole_work[key] = work
        return work

    def _all_work(
        self,
        notes: Sequence[Note],
        source: HostArray | None,
        source_at: int,
        target: HostArray | None,
        target_at: int,
    ) -> list[Work]:
        """Return all pieces of work, of which those that came before are not made again."""
        if target is None:
            return []
        window = self._window
        places = {owner: note[1:] for owner, note in zip(self.owners, notes, strict=True)}
        places[window.rank] = (source_at, 0)
        work: list[Work] = []
        cache = self._work if target_at >= 0 else None
        for number, (ranks, pieces) in enumerate(self._groups):
            if cache is None or (source_at < 0 and window.rank in ranks):
                work += self._work_of(pieces, places, source, target)
                continue
            key = (number, target_at, *[places[rank] for rank in ranks])
            group = cache.get(key)
            if group is None:
                # Only of memory in the arena: nothing in the cache refers to the arrays themselves.
                own_target = self._in_arena(target, target_at)
                own_source = source
                if source is not None and window.rank in ranks:
                    own_source = self._in_arena(source, source_at)
                group = self._work_of(pieces, places, own_source, own_target)
                if len(cache) >= _MOST_WORK:
                    cache.clear()
                cache[key] = group
            work += group
        return work

    def _in_arena(self, array: HostArray, at: int) -> HostArray:
        """Return an array of this rank's arena as one that does not keep it alive."""
        return _array_at(self._window, self._window.rank, at, array.dtype, array.shape)

    def _work_of(
        self,
        pieces: Sequence[Piece],
        places: Mapping[int, tuple[int, int]],
        source: HostArray | None,
        target: HostArray,
    ) -> list[Work]:
        """Return the work of some pieces, by where the blocks begin and what they are."""
        window = self._window
        dtype, raw = target.dtype, raw_dtype(target.dtype)
        raw_target = target.view(raw)
        blocks: dict[tuple[int, tuple[int, ...]], HostArray] = {}

        def block(rank: int, shape: tuple[int, ...]) -> HostArray:
            if (rank, shape) not in blocks:
                own = source if rank == window.rank else None
                blocks[rank, shape] = (
                    self._block(rank, *places[rank], dtype, shape) if own is None else own
                )
            return blocks[rank, shape]

        work: list[Work] = []
        for op, box, parts in pieces:
            if op:
                sources = [view(block(rank, shape), there) for rank, shape, there in parts]
                work.append(piece_work(op, view(target, box), sources, dtype, window.scratch))
            else:
                rank, shape, there = parts[0]
                copied = view(block(rank, shape).view(raw), there)
                work.append(piece_work(op, view(raw_target, box), [copied], raw, window.scratch))
        return work

    def blocks(
        self, notes: Sequence[Note], source: HostArray | None, target: HostArray | None
    ) -> Blocks:
        """Return what gives the blocks that this rank reads where they lie, though not all do."""
        dtype = np.dtype(np.uint8) if target is None else target.dtype
        blocks: dict[int, Callable[[tuple[int, ...]], HostArray]] = {}
        for owner, (_, at, owner_descriptor) in zip(self.owners, notes, strict=True):
            if at >= 0:
                blocks[owner] = partial(self._block, owner, at, owner_descriptor, dtype)
        if source is not None:
            blocks[self._window.rank] = lambda shape: source
        return blocks

    def _block(
        self, rank: int, at: int, its_descriptor: int, dtype: DType, shape: tuple[int, ...]
    ) -> HostArray:
        """Return the block of another rank, where it lies.

        Raises:
            MismatchError: If it has another size than this rank takes it for.
        """
        nbytes, its_nbytes = prod(shape) * dtype.itemsize, described_bytes(its_descriptor)
        if its_nbytes != nbytes:
            raise MismatchError(
                f"rank {self._window.rank} takes of a block of shape {shape} of rank {rank}, "
                f"{nbytes} bytes of dtype {dtype}, but that block has {its_nbytes}"
            )
        return _array_at(self._window, rank, at, dtype, shape)


def _ranks_of(piece: Piece) -> tuple[int, ...]:
    return tuple([rank for rank, _, _ in piece[2]])


def _array_at(
    window: SharedWindow, member: int, at: int, dtype: DType, shape: tuple[int, ...]
) -> HostArray:
    """Return an array that begins at `at` in the arena of a member, as a view of its memory."""
    return window.view(member, at, prod(shape) * dtype.itemsize, dtype).reshape(shape)


def blocks_of_node(
    window: SharedWindow,
    entry: Entry,
    ranks: Sequence[int],
    source: HostArray | None,
    target: HostArray | None,
) -> Blocks:
    """Return what gives the blocks of the ranks on this node: of all, or of this one alone.

    Args:
        window: The ranks of this node.
        entry: Where their blocks lie.
        ranks: Their numbers.
        source: This rank's block.
        target: Where it takes to.
    """
    blocks: dict[int, Callable[[tuple[int, ...]], HostArray]] = {}
    if min(entry.sources) >= 0:
        dtype = np.dtype(np.uint8) if target is None else target.dtype
        for member, rank in enumerate(ranks):
            blocks[rank] = partial(_array_at, window, member, entry.sources[member], dtype)
    if source is not None:
        blocks[ranks[window.rank]] = lambda shape: source
    return blocks
