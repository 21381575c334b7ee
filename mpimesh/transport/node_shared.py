"""Collectives of ranks that all share the memory of one node.

Moving is reading: a rank reads the others' arrays where they lie, and no message
is needed, not even as a signal. Whether all arrays lie in shared memory the ranks
learn from their boards. If so, they are used in place. If any does not, all go
through the stage or by messages, whichever is faster for their size; and a
rank with an ordinary array need not wait to know.

What the ranks post is compared: a rank in another operation, or with an array of
another size or dtype, is an error on all of them, at no cost. In an exchange of regions a rank
compares only with those of which it takes something.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpimesh.arrays.types import HostArray
from mpimesh.layout.regions import Regions
from mpimesh.transport.base import Communicator, Request
from mpimesh.transport.board import Entry, Room
from mpimesh.transport.choice import NEVER, OPERATIONS, Choice
from mpimesh.transport.engine import Engine, Moved, Steps
from mpimesh.transport.entering import NOT_READ
from mpimesh.transport.node_ordinary import Ordinary
from mpimesh.transport.quick import InPlaces, OneShot, Plans
from mpimesh.transport.region_shared import Copies, CopyRule, SharedExchange, SharedPlan
from mpimesh.transport.regions import check_contiguous, check_regions, kind_of
from mpimesh.transport.team import Team
from mpimesh.transport.team_move import (
    agreed_counts,
    all_gather_work,
    all_to_all_work,
    broadcast_work,
)
from mpimesh.transport.team_reduce import (
    all_reduce_work,
    reduce_scatter_work,
)
from mpimesh.transport.team_work import Work
from mpimesh.transport.what import Operation, operation_number

__all__ = ["NodeShared", "later"]

_ONE_SHOT_SHARE = 16
"""Up to this part of what fits into the stage, arrays in shared memory are staged as well: one
look at all ranks less is worth more than the copy."""

_MOST_EXCHANGES = 64


class NodeShared:
    """The collectives of one team; each returns a request, and its operations run in order.

    Args:
        team: The ranks.
        engine: Moves the operations along.
        messages: Moves ordinary arrays for which the stage is too slow. What is started there
            must queue while :attr:`busy`.

    Attributes:
        copied: Which blocks are copied before others take of them, though they could read them
            where they lie.
    """

    def __init__(self, team: Team, engine: Engine, messages: Communicator) -> None:
        self._team = team
        self._engine = engine
        self._messages = messages
        # Through the stage every rank reads all, so the more ranks, the sooner messages win.
        self._stage_bytes = 2 * team.stage_bytes // max(2, team.size)
        self._one_shot_bytes = self._stage_bytes // _ONE_SHOT_SHARE
        self._copies = Copies(team)
        self._ordinary = Ordinary(team, engine, messages)
        self._plans = Plans()
        self.copied = CopyRule.for_ranks(team.size)
        self._exchanges: dict[tuple[object, ...], SharedPlan] = {}
        self.use(Choice([NEVER] * len(OPERATIONS), ""))

    def use(self, choice: Choice) -> None:
        """Take each way from the sizes on that `choice` has, which are the same on all ranks."""
        self._ordinary.in_chunks = choice.staged
        self._ordinary.reduced_from = choice.chunks_from
        self._placed_from = choice.sizes[0]
        self._exchanged_from = choice.sizes[OPERATIONS.index("all_to_all")]
        self._staged_from = choice.staged_from

    @property
    def most_staged_bytes(self) -> int:
        """The largest ordinary array that an all-reduce stages as a whole."""
        return self._stage_bytes

    @property
    def busy(self) -> bool:
        """Whether an operation is unfinished."""
        return self._engine.busy(self)

    def all_reduce(self, send: HostArray | None, recv: HostArray, op: str) -> Request:
        """Reduce over all ranks into `recv` on each; also by ``"mean"``."""
        return self._start(self._begin_all_reduce, send, recv, op)

    def reduce_scatter(
        self, send: HostArray, recv: HostArray, counts: Sequence[int], op: str
    ) -> Request:
        """Reduce `send`; rank r gets block r."""
        return self._start(self._begin_reduce_scatter, send, recv, counts, op)

    def all_gather(self, send: HostArray, recv: HostArray, counts: Sequence[int]) -> Request:
        """Lay the ranks' `send` one after the other in `recv`."""
        return self._start(self._begin_all_gather, send, recv, counts)

    def broadcast(self, buffer: HostArray, root: int) -> Request:
        """Copy `buffer` of `root` into `buffer` of every rank."""
        return self._start(self._begin_broadcast, buffer, root)

    def all_to_all(
        self,
        send: HostArray,
        recv: HostArray,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
    ) -> Request:
        """Block d of `send` goes to rank d; block s of `recv` comes from rank s."""
        return self._start(self._begin_all_to_all, send, recv, send_counts, recv_counts)

    def exchange_regions(
        self,
        source: HostArray | None,
        target: HostArray | None,
        regions: Regions,
        max_bytes: int,
    ) -> Request:
        """Copy or reduce boxes of the ranks' blocks into boxes of `target`.

        Raises:
            MpimeshError: At once, on this rank alone, if the arrays do not fit.
        """
        plan = self._plan_of(regions, source, target)
        return self._start(self._begin_exchange, plan, source, target, max_bytes)

    @property
    def read_copies(self) -> list[HostArray]:
        """Copies of this rank's blocks that others may yet read."""
        return self._copies.memories

    def close(self) -> None:
        """End what has not ended; what was started by then raises when it is tested."""
        self._team.close()

    # -- the start of any --------------------------------------------------------------

    def _start(self, begin: Callable[..., Request], *arguments: Any) -> Request:
        engine = self._engine
        # Those before it may be over here, and not yet seen by the others, when its turn comes.
        if engine.busy(self) or not self._team.board.has_room():
            return engine.stage(self, self._when_there_is_room(begin, *arguments))
        request = begin(*arguments)
        if isinstance(request, Moved):  # the engine knows nothing of messages of MPI's
            engine.begin(self, request)
        return request

    def _when_there_is_room(self, begin: Callable[..., Request], *arguments: Any) -> Steps:
        """Begin when the others have seen enough of what this rank has posted before."""
        yield Room(self._team.board, self._team.look_elsewhere)
        yield begin(*arguments)

    def _decline(self) -> None:
        """Tell the others that this rank has an ordinary array."""
        self._team.board.decline()
        self._team.ring()

    def _in_place(
        self,
        what: int,
        places: tuple[int, int],
        plan: Callable[[Entry], Sequence[Work]],
        otherwise: Callable[[], Request],
        key: tuple[int, ...] | None,
    ) -> Request:
        """Begin an operation in place, if the arrays of all ranks allow it."""
        team, engine = self._team, self._engine
        return InPlaces(team, engine, what, places, plan, otherwise, self._plans, key)

    def _own(self, array: HostArray, at: int) -> HostArray:
        """Return an array as one that work may keep: it does not keep the array alive."""
        team = self._team
        return array if at < 0 else team.view(team.rank, at, array.nbytes, array.dtype)

    # -- all-reduce ------------------------------------------------------------------

    def _begin_all_reduce(self, send: HostArray | None, recv: HostArray, op: str) -> Request:
        team, nbytes = self._team, recv.nbytes
        if self._staged_from <= nbytes <= self._stage_bytes:
            if nbytes <= self._one_shot_bytes or nbytes < self._placed_from:
                return self._one_shot(send, recv, op)
            otherwise = self._one_shot
        elif self._ordinary.in_chunks or nbytes >= self._placed_from:
            otherwise = self._ordinary.all_reduce
        else:
            return self._ordinary.all_reduce(send, recv, op)
        target_at = team.find(recv)
        source_at = target_at if send is None else team.find(send)
        if source_at < 0 or target_at < 0:
            self._decline()
            return otherwise(send, recv, op)
        return self._in_place(
            operation_number(Operation.ALL_REDUCE, recv, op),
            (source_at, target_at),
            lambda entry: all_reduce_work(team, entry, recv, op),
            lambda: otherwise(send, recv, op),
            (),
        )

    def _one_shot(self, send: HostArray | None, recv: HostArray, op: str) -> Request:
        what = operation_number(Operation.ALL_REDUCE, recv, op)
        source = recv if send is None else send
        return OneShot(self._team, self._engine, what, op, source, recv)

    # -- the others --------------------------------------------------------------------

    def _begin_reduce_scatter(
        self, send: HostArray, recv: HostArray, counts: Sequence[int], op: str
    ) -> Request:
        team = self._team
        at, own_at = team.find(send), team.find(recv)
        if at < 0:
            self._decline()
            return self._ordinary.reduce_scatter(send, recv, counts, op)
        return self._in_place(
            operation_number(Operation.REDUCE_SCATTER, send, op),
            (at, NOT_READ),
            lambda entry: reduce_scatter_work(team, entry, self._own(recv, own_at), counts, op),
            lambda: self._ordinary.reduce_scatter(send, recv, counts, op),
            None if own_at < 0 else (own_at, *counts),
        )

    def _begin_all_gather(self, send: HostArray, recv: HostArray, counts: Sequence[int]) -> Request:
        team = self._team
        at, own_at = team.find(send), team.find(recv)
        if at < 0:
            self._decline()
            return self._ordinary.all_gather(send, recv, counts)
        return self._in_place(
            operation_number(Operation.ALL_GATHER, recv),
            (at, NOT_READ),
            lambda entry: all_gather_work(team, entry, self._own(recv, own_at), counts),
            lambda: self._ordinary.all_gather(send, recv, counts),
            None if own_at < 0 else (own_at, *counts),
        )

    def _begin_broadcast(self, buffer: HostArray, root: int) -> Request:
        team = self._team
        own_at = team.find(buffer)
        at = own_at if team.rank == root else NOT_READ
        if at < 0:
            self._decline()
            return self._ordinary.broadcast(buffer, root)
        return self._in_place(
            operation_number(Operation.BROADCAST, buffer, root=root),
            (at, NOT_READ),
            lambda entry: broadcast_work(team, entry, self._own(buffer, own_at), root),
            lambda: self._ordinary.broadcast(buffer, root),
            None if own_at < 0 else (own_at,),
        )

    def _begin_all_to_all(
        self,
        send: HostArray,
        recv: HostArray,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
    ) -> Request:
        team = self._team
        # A rank knows its own sizes only: it may offer or not, but nothing else may hang on them.
        at = team.find(send) if send.nbytes >= self._exchanged_from else -1
        if at < 0:
            self._decline()
            return self._ordinary.all_to_all(send, recv, send_counts, recv_counts)
        team.say_counts([*send_counts, *recv_counts])
        return self._in_place(
            # The sizes of the arrays may differ over the ranks; those of the blocks are compared.
            operation_number(Operation.ALL_TO_ALL, send[:0]),
            (at, NOT_READ),
            lambda entry: all_to_all_work(team, entry, recv, agreed_counts(team.counts_said())),
            lambda: self._ordinary.all_to_all(send, recv, send_counts, recv_counts),
            None,
        )

    # -- regions -----------------------------------------------------------------------

    def _begin_exchange(
        self,
        plan: SharedPlan,
        source: HostArray | None,
        target: HostArray | None,
        max_bytes: int,
    ) -> Request:
        team = self._team
        source_at = -1 if source is None else team.find(source)
        target_at = -1 if target is None else team.find(target)
        return SharedExchange(
            team,
            self._engine,
            self._messages,
            plan,
            plan.offer(self._copies, source, source_at, self.copied),
            (source, target),
            (source_at, target_at),
            max_bytes,
        )

    def _plan_of(
        self, regions: Regions, source: HostArray | None, target: HostArray | None
    ) -> SharedPlan:
        """Return what is worked out once for such an exchange."""
        key = (regions, kind_of(source), kind_of(target))
        plan = self._exchanges.get(key)
        if plan is not None:
            check_contiguous(self._team.rank, source, target)
        else:
            check_regions(regions, self._team.rank, self._team.size, source, target)
            if len(self._exchanges) >= _MOST_EXCHANGES:
                self._exchanges.clear()
            plan = self._exchanges[key] = SharedPlan(self._team, regions, source, target)
        return plan


def later(begin: Callable[..., Request], *arguments: Any) -> Steps:
    """Begin an operation as a step: when those before it have ended."""
    yield begin(*arguments)
