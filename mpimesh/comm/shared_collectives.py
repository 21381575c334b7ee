"""Collectives of ranks that all share the memory of one node.

Moving is reading: a rank reads the others' arrays where they lie, and no message is needed, not
even as a signal. Whether all arrays lie in shared memory the ranks learn from their notes
(`shared_window.py`). If so, they are used in place. If any does not, all go another way; a rank
with an ordinary array need not wait to know.

Which ways those are, the table of algorithms says (`algorithms.py`), by size and memory: ``slots``,
``in_place``, ``chunks`` or ``mpi``. Where its rows for shared and for ordinary memory are the same,
nobody need ask.

What the ranks publish is compared: a rank in another operation, or with an array of another size or
dtype, is an error on all of them, at no cost. In an exchange of regions a rank compares only with
those of which it takes something.

A signal handler may raise anywhere in here, as Ctrl-C does, and end a test but not the operation:
what is done again does the same, and what cannot be done again is noted with its work in one call
(`shared_work.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Self, cast

import numpy as np

from mpimesh.arrays.namespace import HostArray
from mpimesh.comm.algorithms import Ways
from mpimesh.comm.base import Communicator
from mpimesh.comm.engine import Moved, ProgressEngine, StagedRequest, Steps
from mpimesh.comm.region_shared import SharedRegions
from mpimesh.comm.requests import Request, agreed_counts, cut
from mpimesh.comm.shared_window import NOT_READ, NOTES, SharedWindow, WindowEntry, enter
from mpimesh.comm.shared_work import (
    Work,
    all_gather_staged,
    all_gather_work,
    all_reduce_staged,
    all_reduce_work,
    all_to_all_staged,
    all_to_all_work,
    broadcast_staged,
    broadcast_work,
    do_at_once,
    reduce_into,
    reduce_scatter_staged,
    reduce_scatter_work,
)
from mpimesh.comm.signatures import EXCHANGE, Operation, mismatch, operation_number
from mpimesh.errors import MpimeshError

__all__ = ["InPlace", "OneShot", "SharedCollectives"]

_MOST_KEPT = 64
_MOST_PARTS = 64
_ACKS_BETWEEN_RINGS = 8
_HASHES = (1 << 62) - 1


class Declined(NamedTuple):
    """An operation of which this rank has an ordinary array: all go another way.

    Attributes:
        what: The operation's number.
        otherwise: Begins what follows.
        counts: Not empty if the others write counts.
    """

    what: int
    otherwise: Callable[[], Request]
    counts: Sequence[int]


def _no_work(entry: WindowEntry) -> Sequence[Work]:
    return ()


class SharedCollectives:
    """The collectives of one window; each returns a request, and they are worked in order.

    Each takes the two ways of the table for its size: of ordinary arrays, and of those in shared
    memory. Both are alike on all ranks.

    Args:
        window: The ranks.
        engine: Moves the operations along.
        messages: Moves ordinary arrays for which the stage is too slow. What is started there
            must wait for its turn (:meth:`~.engine.ProgressEngine.begin_decided`).

    Attributes:
        window: The ranks.
        engine: Moves the operations along.
        regions: The exchanges of regions.
    """

    def __init__(
        self, window: SharedWindow, engine: ProgressEngine, messages: Communicator
    ) -> None:
        self.window = window
        self.engine = engine
        self.regions = SharedRegions(window, engine, messages, self, range(window.size))
        self._messages = messages
        self._cache: dict[tuple[object, ...], dict[tuple[int, ...], Sequence[Work]]] = {}

    def start(self, name: str, ways: Ways, *arguments: Any) -> Request:
        """Start a collective in these ways, with the arguments of the communicator's method."""
        request: Request | Declined = getattr(self, f"_{name}")(ways, *arguments)
        if type(request) is Declined:
            request = self._decline(request)
        # The engine knows nothing of messages of MPI's.
        return request.begin() if isinstance(request, Moved) else cast(Request, request)

    def _decline(self, declined: Declined, rest: OneShot | None = None) -> Request:
        """Tell the others that this rank has an ordinary array; return what is to be begun."""
        window = self.window
        if self.engine.busy(self) or not window.has_room():
            what, otherwise, counts = declined
            return InPlace(self, what, None, _no_work, otherwise, None, counts)
        # At once: who waits for MPI need not come by here.
        if declined.counts:
            window.slots.take(window.published + 1)
        window.decline()
        return declined.otherwise() if rest is None else rest

    def prepare(self, name: str, ways: Ways, *arguments: Any) -> Callable[[], Request]:
        """Return what starts a collective with the same arrays again and again.

        Each start is after the last one has settled.
        """
        made = getattr(self, f"_{name}")(ways, *arguments)
        if isinstance(made, OneShot | InPlace):
            return made.begin
        if type(made) is not Declined:
            return partial(self.start, name, ways, *arguments)
        rest = made.otherwise() if ways.host == "slots" else None
        one_shot = rest if isinstance(rest, OneShot) else None

        def decline() -> Request:
            request = self._decline(made, one_shot)
            return request.begin() if isinstance(request, Moved) else request

        return decline

    # -- the collectives, not begun -------------------------------------------------------

    def _all_reduce(
        self, ways: Ways, send: HostArray | None, recv: HostArray, op: str
    ) -> Request | Declined:
        """Reduce over all ranks into `recv` on each; also by ``"mean"``."""
        host, shared = ways
        source = recv if send is None else send
        what = operation_number(Operation.ALL_REDUCE, recv, op)
        if host == shared == "slots":
            return OneShot(self, what, op, source, recv)
        window = self.window
        otherwise = self._ordinary_all_reduce(host, what, send, recv, op)
        if host == shared:
            return otherwise()
        target_at = window.find(recv)
        source_at = target_at if send is None else window.find(send)
        if source_at < 0 or target_at < 0:
            return Declined(what, otherwise, ())
        return InPlace(
            self,
            what,
            (source_at, target_at),
            lambda entry: all_reduce_work(window, entry, recv, op),
            otherwise,
            self._kept(what, 0),
        )

    def _ordinary_all_reduce(
        self, way: str, what: int, send: HostArray | None, recv: HostArray, op: str
    ) -> Callable[[], Request]:
        """Return what begins an all-reduce of ordinary arrays."""
        source = recv if send is None else send
        if way == "slots":
            return partial(OneShot, self, what, op, source, recv)
        if way == "mpi" and op == "mean":
            return lambda: StagedRequest(self._mean_by_messages(send, recv), self.engine, self)
        begin = partial(self._messages.all_reduce, send, recv, op)
        return self._ordinary(
            way, what, begin, partial(all_reduce_staged, self.window, source, recv, op)
        )

    def _mean_by_messages(self, send: HostArray | None, recv: HostArray) -> Steps:
        yield self._messages.all_reduce(send, recv, "sum")
        np.divide(recv, self.window.size, out=recv)

    def _reduce_scatter(
        self, ways: Ways, send: HostArray, recv: HostArray, counts: Sequence[int], op: str
    ) -> Request | Declined:
        """Reduce `send`; rank r gets block r."""
        window = self.window
        return self._reading(
            ways,
            operation_number(Operation.REDUCE_SCATTER, send, op),
            partial(self._messages.reduce_scatter, send, recv, counts, op),
            partial(reduce_scatter_staged, window, send, recv, counts, op),
            lambda entry, own: reduce_scatter_work(window, entry, own, counts, op),
            (send, recv),
            *counts,
        )

    def _all_gather(
        self, ways: Ways, send: HostArray, recv: HostArray, counts: Sequence[int]
    ) -> Request | Declined:
        """Lay the ranks' `send` one after the other in `recv`."""
        window = self.window
        return self._reading(
            ways,
            operation_number(Operation.ALL_GATHER, recv),
            partial(self._messages.all_gather, send, recv, counts),
            partial(all_gather_staged, window, send, recv, counts),
            lambda entry, own: all_gather_work(window, entry, own, counts),
            (send, recv),
            *counts,
        )

    def _broadcast(self, ways: Ways, buffer: HostArray, root: int) -> Request | Declined:
        """Copy `buffer` of `root` into `buffer` of every rank."""
        window = self.window
        return self._reading(
            ways,
            operation_number(Operation.BROADCAST, buffer, root=root),
            partial(self._messages.broadcast, buffer, root),
            partial(broadcast_staged, window, buffer, root),
            lambda entry, own: broadcast_work(window, entry, own, root),
            (buffer if window.rank == root else None, buffer),
        )

    def _all_to_all(
        self,
        ways: Ways,
        send: HostArray,
        recv: HostArray,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
    ) -> Request | Declined:
        """Block d of `send` goes to rank d; block s of `recv` comes from rank s.

        A rank knows its own sizes only: it may offer its array or not, but nothing else may hang on
        them.
        """
        # The sizes of the arrays may differ over the ranks; those of the blocks are compared.
        what = operation_number(Operation.ALL_TO_ALL, send[:0])
        window, counts = self.window, [*send_counts, *recv_counts]

        def otherwise() -> Request:
            if ways.host == "mpi":
                return self._messages.all_to_all(send, recv, send_counts, recv_counts)
            steps = self._all_to_all_staged(what, send, recv, counts)
            return StagedRequest(steps, self.engine, self)

        at = window.find(send) if ways.shared == "in_place" else -1
        if at < 0:
            return Declined(what, otherwise, counts)
        own_at = window.find(recv)
        return InPlace(
            self,
            what,
            # Nobody uses the result, so in its place stands what tells other counts apart.
            (at, hash(tuple(counts)) & _HASHES),
            lambda entry: all_to_all_work(
                window, entry, self._own(recv, own_at), agreed_counts(entry.counts)
            ),
            otherwise,
            self._kept(what, own_at),
            counts,
        )

    def _all_to_all_staged(
        self, what: int, send: HostArray, recv: HostArray, counts: Sequence[int]
    ) -> Steps:
        entry = yield from enter(self.window, what, counts=counts)
        sent, ranks = agreed_counts(entry.counts), self.window.size
        outgoing, incoming = cut(send, counts[:ranks]), cut(recv, counts[ranks:])
        yield from all_to_all_staged(self.window, outgoing, incoming, sent)

    # -- the ways ----------------------------------------------------------------------

    def _reading(
        self,
        ways: Ways,
        what: int,
        begin: Callable[[], Request],
        staged: Callable[[], Steps],
        work: Callable[[WindowEntry, HostArray], Sequence[Work]],
        arrays: tuple[HostArray | None, HostArray],
        *counts: int,
    ) -> Request | Declined:
        """Return a collective in which each rank reads what the others send.

        Args:
            ways: Those of the table.
            what: The operation's number.
            begin: Begins it by messages.
            staged: Moves ordinary arrays through the stage.
            work: Gives what this rank is to do, in place.
            arrays: This rank's, if others read it, and where its result goes.
            counts: What the work depends on, beside the operation.
        """
        otherwise = self._ordinary(ways.host, what, begin, staged)
        if ways.host == ways.shared:
            return otherwise()
        send, recv = arrays
        at = NOT_READ if send is None else self.window.find(send)
        if at < 0:
            return Declined(what, otherwise, ())
        own_at = self.window.find(recv)
        return InPlace(
            self,
            what,
            (at, NOT_READ),
            lambda entry: work(entry, self._own(recv, own_at)),
            otherwise,
            self._kept(what, own_at, *counts),
        )

    def _ordinary(
        self, way: str, what: int, begin: Callable[[], Request], steps: Callable[[], Steps]
    ) -> Callable[[], Request]:
        """Return what begins an operation on ordinary arrays, once all ranks have agreed on it."""
        if way == "mpi":
            return begin

        def entered() -> Steps:
            yield from enter(self.window, what)
            yield from steps()

        return lambda: StagedRequest(entered(), self.engine, self)

    def _kept(
        self, what: int, own_at: int, *rest: int
    ) -> dict[tuple[int, ...], Sequence[Work]] | None:
        """Return where the work of such an operation is kept; None if not, for an own array."""
        if own_at < 0:
            return None
        key = (what, own_at, *rest)
        cache = self._cache.get(key)
        if cache is None:
            if len(self._cache) >= _MOST_KEPT:
                self._cache.clear()
            cache = self._cache[key] = {}
        return cache

    def _own(self, array: HostArray, at: int) -> HostArray:
        """Return an array as one that work may keep: it does not keep the array alive."""
        window = self.window
        return array if at < 0 else window.view(window.rank, at, array.nbytes, array.dtype)


# -- requests ----------------------------------------------------------------------------


class OneShot(Moved):
    """An all-reduce in which every rank puts its array into a slot, and reads those of all.

    One step, and nothing is shared any more when it is over: also the best way for small arrays
    that lie in shared memory. Any number of them may be under way, up to the room for their notes.

    Args:
        owner: The collectives of the ranks, which are worked in their order.
        what: The operation's number.
        op: Which reduction.
        source: This rank's array, no larger than a stage.
        target: Where the result goes; may be `source`.
    """

    __slots__ = (
        "_inputs",
        "_op",
        "_ring",
        "_source",
        "_target",
        "_views",
        "_what",
        "_window",
    )

    def __init__(
        self,
        owner: SharedCollectives,
        what: int,
        op: str,
        source: HostArray,
        target: HostArray,
    ) -> None:
        super().__init__(owner.engine, owner)
        self._window = window = owner.window
        self._what = what
        self._op = op
        self._source = source
        self._target = target
        ring = window.slots
        if source.nbytes > ring.nbytes:
            ring = window.stage
        self._ring = ring
        self._views = ring.views(source.dtype, source.size)
        self._inputs: Sequence[HostArray] = ()

    def begin(self) -> Self:
        """Publish, if those before it have; nobody waits for what this rank does after that."""
        engine = self._engine
        with engine.lock:
            engine.track(self)
            if self.after is None or self.after.committed:
                self.publish()
        return self

    def publish(self) -> bool:
        """Put this rank's array into its area, if that is free."""
        window, ring, number = self._window, self._ring, self.number
        if not number:
            number = window.published + 1
            turn = ring.state[0] + 1
            area = turn % len(ring.used)
            needed = max(ring.used[area], number - NOTES)
            if window.done_by_all < needed and not window.acknowledged_by_all(needed):
                window.look_elsewhere()
                return False
            self._inputs = inputs = self._views[area]
            inputs[window.rank][...] = self._source
            # A signal handler may end this anywhere: done again, it does the same.
            self.number = number
        if window.published < number:
            ring.take(number)
            window.publish(number, self._what)
        self.committed = True
        return True

    def _move(self) -> bool:
        if not self.committed and not self.publish():
            return False
        window, number = self._window, self.number
        agreed = window.agreed(number)
        if not agreed:
            if agreed is None or not window.published_by(number, window.others):
                window.look_elsewhere()
                return False
            entry = window.entry(number)
            window.acknowledge(number)
            raise mismatch(entry.what)
        self._engine.steps += 1
        reduce_into(window, self._op, self._inputs, self._target)
        window.acknowledge(number)
        if not number % _ACKS_BETWEEN_RINGS:
            window.ring()  # for those who wait for room
        return True


class InPlace(Moved):
    """An operation on arrays that lie in shared memory on all ranks, or else another way.

    Each rank publishes where its arrays lie, does its part of the work when it has seen the notes
    of all, acknowledges, and waits until all have: then nobody uses its arrays any more.

    Args:
        owner: The collectives of the ranks, which are worked in their order.
        what: The operation's number.
        places: Where this rank's input and result lie, as far as others need to know; None if
            others would have to use an ordinary array.
        work: Gives what this rank is to do, once it is known where all arrays lie; what it raises,
            it has to raise on all ranks.
        otherwise: Begins what follows if they do not all lie in shared memory.
        cache: Keeps the work from one time to the next, by the notes of all ranks: arrays come
            back, and so do their places. Nothing in it refers to the arrays themselves, only to the
            memory of the arenas. None for work that refers to an array of this rank's own.
        counts: What this rank sends to each, and receives from each, for the others to read.
    """

    __slots__ = (
        "_acknowledged",
        "_cache",
        "_counts",
        "_done_parts",
        "_identities",
        "_otherwise",
        "_parts",
        "_places",
        "_refusal",
        "_rest",
        "_steps",
        "_what",
        "_window",
        "_work",
    )

    def __init__(
        self,
        owner: SharedCollectives,
        what: int,
        places: tuple[int, int] | None,
        work: Callable[[WindowEntry], Sequence[Work]],
        otherwise: Callable[[], Request],
        cache: dict[tuple[int, ...], Sequence[Work]] | None,
        counts: Sequence[int] = (),
    ) -> None:
        super().__init__(owner.engine, owner)
        self._window = owner.window
        self._places = places
        self._what = what
        self._work = work
        self._otherwise = otherwise
        self._cache = cache
        self._counts = counts
        self._identities: tuple[int, ...] | None = None
        self._parts: Sequence[Work] = ()
        self._steps: Sequence[Work] | None = None
        self._done_parts: list[None] = []
        self._acknowledged = False
        self._rest: Request | None = None
        self._refusal: MpimeshError | None = None

    def begin(self) -> Self:
        """Begin, once the last time has settled."""
        self._steps = self._rest = self._refusal = None
        self._acknowledged = False
        self._done_parts.clear()
        return super().begin()

    def _move(self) -> bool:
        steps = self._steps
        if steps is None:
            if self._rest is None:
                steps = self._look()
            if steps is None:
                return self._rest is not None and self._rest.test()
        window, number, done = self._window, self.number, self._done_parts
        while len(done) < len(steps):
            do_at_once(window.quietly, steps[len(done)])
        if not self._acknowledged:
            window.acknowledge(number)
            window.ring()
            self._acknowledged = True
        if not window.done_by(number, window.others):
            window.look_elsewhere()
            return False
        self._engine.steps += 1
        if self._refusal is not None:
            raise self._refusal
        return True

    def _look(self) -> Sequence[Work] | None:
        """Publish, and find out what to do; None as long as that is not known, or another way."""
        window, number, places = self._window, self.number, self._places
        if not number:
            counts = self._counts
            if not window.has_room() or (counts and not window.slots.is_free(window)):
                window.look_elsewhere()
                return None
            if counts and places is not None:
                window.counts(coming=1)[window.rank][...] = counts
            self.number = number = window.published + 1
        if window.published < number:
            if self._counts:
                window.slots.take(number)
            if places is None:
                window.decline()
            else:
                window.publish(number, self._what, *places)
        identities = () if places is None else window.identities(number, self._identities)
        if identities is None:
            window.look_elsewhere()
            return None
        self._engine.steps += 1
        if not identities:
            window.acknowledge(number)
            self._rest = rest = self._otherwise()
            self.committed = not isinstance(rest, Moved)
            return None
        if identities is not self._identities:
            # Each with the note that it is done, which does not refer to this object: nobody would
            # know when to let go of the arrays.
            note = partial(self._done_parts.append, None)
            self._parts = [(*part, note) for part in self._parts_of(identities)]
            lasting = self._cache is not None and window.are_lasting(identities)
            self._identities = identities if lasting else None
        self._steps = self._parts
        self.committed = True
        return self._parts

    def _parts_of(self, identities: tuple[int, ...]) -> Sequence[Work]:
        """Return this rank's work, now that all have published where their arrays lie."""
        window, number = self._window, self.number
        cache = self._cache if window.are_lasting(identities) else None
        parts = None if cache is None else cache.get(identities)
        if parts is not None:
            return parts
        entry = window.entry(number, with_counts=bool(self._counts))
        if entry.what.count(self._what) != window.size:
            window.acknowledge(number)
            window.ring()
            # A rank in an exchange looks at those only of which it takes something.
            raise mismatch(entry.what, on_all=EXCHANGE not in entry.what)
        try:
            parts = self._work(entry)
        except MpimeshError as error:
            # The others have yet to read what it was found in.
            self._refusal = error
            return ()
        # Of larger arrays, working it out costs nothing beside doing it.
        if cache is not None and len(parts) <= _MOST_PARTS:
            if len(cache) >= _MOST_KEPT:
                cache.clear()
            cache[identities] = parts
        return parts
