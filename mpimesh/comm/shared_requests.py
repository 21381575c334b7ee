"""Collectives under way in shared memory: one through slots, and one where the arrays lie.

A signal handler may raise anywhere in here, as Ctrl-C does, and end a test but not the operation:
what is done again does the same, and what cannot be done again is noted with its work in one call
(`shared_work.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Self

from mpimesh.arrays.namespace import HostArray
from mpimesh.comm.engine import Moved, ProgressEngine
from mpimesh.comm.notes import EXCHANGE, mismatch
from mpimesh.comm.requests import Request
from mpimesh.comm.shared_window import NOTES, SharedWindow, WindowEntry
from mpimesh.comm.shared_work import Work, do_at_once, reduce_into
from mpimesh.errors import MpimeshError

__all__ = ["InPlace", "OneShot"]

_ACKS_BETWEEN_RINGS = 8
_MOST_KEPT = 64
_MOST_PARTS = 64


class OneShot(Moved):
    """An all-reduce in which every rank puts its array into a slot, and reads those of all.

    One step, and nothing is shared any more when it is over: also the best way for small arrays
    that lie in shared memory. Any number of them may be under way, up to the room for their notes.

    Args:
        window: The ranks.
        engine: Moves it along until it is settled.
        chain: The operations of the window, which are worked in their order.
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
        window: SharedWindow,
        engine: ProgressEngine,
        chain: Hashable,
        what: int,
        op: str,
        source: HostArray,
        target: HostArray,
    ) -> None:
        super().__init__(engine, chain)
        self._window = window
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
        window: The ranks.
        engine: Moves it along until it is settled.
        chain: The operations of the window, which are worked in their order.
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
        "_refusal",
        "_rest",
        "_steps",
        "_what",
        "_window",
        "_work",
        "places",
    )

    def __init__(
        self,
        window: SharedWindow,
        engine: ProgressEngine,
        chain: Hashable,
        what: int,
        places: tuple[int, int] | None,
        work: Callable[[WindowEntry], Sequence[Work]],
        otherwise: Callable[[], Request],
        cache: dict[tuple[int, ...], Sequence[Work]] | None,
        counts: Sequence[int] = (),
    ) -> None:
        super().__init__(engine, chain)
        self.places = places
        self._window = window
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
        window, number, places = self._window, self.number, self.places
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
