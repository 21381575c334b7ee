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
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np

from mpimesh.arrays.namespace import HostArray
from mpimesh.comm.algorithms import Ways
from mpimesh.comm.base import Communicator
from mpimesh.comm.engine import Moved, ProgressEngine, StagedRequest, Steps, run_steps
from mpimesh.comm.notes import Operation, enter, operation_number
from mpimesh.comm.region_shared import SharedRegions
from mpimesh.comm.requests import Request, agreed_counts, block_slices
from mpimesh.comm.shared_requests import InPlace, OneShot
from mpimesh.comm.shared_window import (
    NOT_READ,
    SharedWindow,
    WindowEntry,
)
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
    reduce_scatter_staged,
    reduce_scatter_work,
)

__all__ = ["SharedCollectives"]

_MOST_KEPT = 64
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
            must wait for its turn (:meth:`in_turn`).

    Attributes:
        regions: The exchanges of regions.
    """

    def __init__(
        self, window: SharedWindow, engine: ProgressEngine, messages: Communicator
    ) -> None:
        self._window = window
        self._engine = engine
        self._messages = messages
        self._cache: dict[tuple[object, ...], dict[tuple[int, ...], Sequence[Work]]] = {}
        self.regions = SharedRegions(window, engine, messages, self, range(window.size))

    def start(self, name: str, ways: Ways, *arguments: Any) -> Request:
        """Start a collective in these ways, with the arguments of the communicator's method."""
        request: Request | Declined = getattr(self, f"_{name}")(ways, *arguments)
        if type(request) is Declined:
            request = self._decline(request)
        # The engine knows nothing of messages of MPI's.
        return request.begin() if isinstance(request, Moved) else cast(Request, request)

    def _decline(self, declined: Declined, rest: OneShot | None = None) -> Request:
        """Tell the others that this rank has an ordinary array; return what is to be begun."""
        window, engine = self._window, self._engine
        if engine.busy(self) or not window.has_room():
            what, otherwise, counts = declined
            return InPlace(window, engine, self, what, None, _no_work, otherwise, None, counts)
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
            return self._slots(what, op, source, recv)
        otherwise = partial(self._ordinary_all_reduce, host, what, send, recv, op)
        if host == shared:
            return otherwise()
        window = self._window
        target_at = window.find(recv)
        source_at = target_at if send is None else window.find(send)
        if source_at < 0 or target_at < 0:
            return Declined(what, otherwise, ())
        return self._in_place(
            what,
            (source_at, target_at),
            lambda entry: all_reduce_work(window, entry, recv, op),
            otherwise,
            self._kept(what),
        )

    def _reduce_scatter(
        self, ways: Ways, send: HostArray, recv: HostArray, counts: Sequence[int], op: str
    ) -> Request | Declined:
        """Reduce `send`; rank r gets block r."""
        what = operation_number(Operation.REDUCE_SCATTER, send, op)
        window = self._window
        otherwise = partial(
            self._ordinary,
            ways[0],
            what,
            partial(self._messages.reduce_scatter, send, recv, counts, op),
            partial(reduce_scatter_staged, window, send, recv, counts, op),
        )
        if ways[0] == ways[1]:
            return otherwise()
        at, own_at = window.find(send), window.find(recv)
        return self._in_place(
            what,
            None if at < 0 else (at, NOT_READ),
            lambda entry: reduce_scatter_work(window, entry, self._own(recv, own_at), counts, op),
            otherwise,
            self._kept(what, own_at, *counts),
        )

    def _all_gather(
        self, ways: Ways, send: HostArray, recv: HostArray, counts: Sequence[int]
    ) -> Request | Declined:
        """Lay the ranks' `send` one after the other in `recv`."""
        what = operation_number(Operation.ALL_GATHER, recv)
        window = self._window
        otherwise = partial(
            self._ordinary,
            ways[0],
            what,
            partial(self._messages.all_gather, send, recv, counts),
            partial(all_gather_staged, window, send, recv, counts),
        )
        if ways[0] == ways[1]:
            return otherwise()
        at, own_at = window.find(send), window.find(recv)
        return self._in_place(
            what,
            None if at < 0 else (at, NOT_READ),
            lambda entry: all_gather_work(window, entry, self._own(recv, own_at), counts),
            otherwise,
            self._kept(what, own_at, *counts),
        )

    def _broadcast(self, ways: Ways, buffer: HostArray, root: int) -> Request | Declined:
        """Copy `buffer` of `root` into `buffer` of every rank."""
        what = operation_number(Operation.BROADCAST, buffer, root=root)
        window = self._window
        otherwise = partial(
            self._ordinary,
            ways[0],
            what,
            partial(self._messages.broadcast, buffer, root),
            partial(broadcast_staged, window, buffer, root),
        )
        if ways[0] == ways[1]:
            return otherwise()
        own_at = window.find(buffer)
        at = own_at if window.rank == root else NOT_READ
        return self._in_place(
            what,
            None if at < 0 else (at, NOT_READ),
            lambda entry: broadcast_work(window, entry, self._own(buffer, own_at), root),
            otherwise,
            self._kept(what, own_at),
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
        window, counts = self._window, [*send_counts, *recv_counts]

        def otherwise() -> Request:
            if ways[0] == "mpi":
                return self._messages.all_to_all(send, recv, send_counts, recv_counts)
            steps = self._all_to_all_staged(what, send, recv, counts)
            return StagedRequest(steps, self._engine, self)

        at = window.find(send) if ways[1] == "in_place" else -1
        own_at = -1 if at < 0 else window.find(recv)
        return self._in_place(
            what,
            # Nobody uses the result, so in its place stands what tells other counts apart.
            None if at < 0 else (at, hash(tuple(counts)) & _HASHES),
            lambda entry: all_to_all_work(
                window, entry, self._own(recv, own_at), agreed_counts(entry.counts)
            ),
            otherwise,
            self._kept(what, own_at),
            counts,
        )

    def in_turn(self, begin: Callable[..., Request], *arguments: Any) -> Request:
        """Begin a collective of MPI's, once none is under way that may start another.

        Such a one may turn to MPI when it finds ordinary arrays, on one rank earlier than on
        another; but MPI's collectives must begin in the same order on all.
        """
        engine = self._engine
        if not engine.tails or not engine.undecided(self):
            return begin(*arguments)
        return engine.stage(self, run_steps(partial(begin, *arguments)))

    def close(self) -> None:
        """End what has not ended; what was started by then raises when it is tested."""
        self._window.close()

    # -- the start of any --------------------------------------------------------------

    def _slots(self, what: int, op: str, source: HostArray, target: HostArray) -> OneShot:
        return OneShot(self._window, self._engine, self, what, op, source, target)

    def _in_place(
        self,
        what: int,
        places: tuple[int, int] | None,
        work: Callable[[WindowEntry], Sequence[Work]],
        otherwise: Callable[[], Request],
        cache: dict[tuple[int, ...], Sequence[Work]] | None,
        counts: Sequence[int] = (),
    ) -> InPlace | Declined:
        """Return an operation in place, if this rank's arrays allow it."""
        if places is None:
            return Declined(what, otherwise, counts)
        window, engine = self._window, self._engine
        return InPlace(window, engine, self, what, places, work, otherwise, cache, counts)

    def _kept(
        self, what: int, own_at: int = 0, *rest: int
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
        window = self._window
        return array if at < 0 else window.view(window.rank, at, array.nbytes, array.dtype)

    # -- ordinary arrays ---------------------------------------------------------------

    def _ordinary_all_reduce(
        self, way: str, what: int, send: HostArray | None, recv: HostArray, op: str
    ) -> Request:
        source = recv if send is None else send
        if way == "slots":
            return self._slots(what, op, source, recv)
        begin: Callable[[], Request] = partial(self._messages.all_reduce, send, recv, op)
        if way == "mpi" and op == "mean":
            return StagedRequest(self._mean_by_messages(send, recv), self._engine, self)
        steps = partial(all_reduce_staged, self._window, source, recv, op)
        return self._ordinary(way, what, begin, steps)

    def _ordinary(
        self, way: str, what: int, begin: Callable[[], Request], steps: Callable[[], Steps]
    ) -> Request:
        """Begin an operation on ordinary arrays, which all ranks have agreed on, or will."""
        if way == "mpi":
            return begin()

        def entered() -> Steps:
            yield from enter(self._window, what)
            yield from steps()

        return StagedRequest(entered(), self._engine, self)

    def _mean_by_messages(self, send: HostArray | None, recv: HostArray) -> Steps:
        yield self._messages.all_reduce(send, recv, "sum")
        np.divide(recv, self._window.size, out=recv)

    def _all_to_all_staged(
        self, what: int, send: HostArray, recv: HostArray, counts: Sequence[int]
    ) -> Steps:
        entry = yield from enter(self._window, what, counts=counts)
        sent, ranks = agreed_counts(entry.counts), self._window.size
        outgoing = [send[block] for block in block_slices(counts[:ranks])]
        incoming = [recv[block] for block in block_slices(counts[ranks:])]
        yield from all_to_all_staged(self._window, outgoing, incoming, sent)
