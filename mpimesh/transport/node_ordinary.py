"""Collectives inside a node of arrays that do not all lie in shared memory.

They go through the stage, a chunk at a time, or by messages, whichever the choice has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from mpimesh.arrays.types import HostArray
from mpimesh.transport.base import Communicator, Request
from mpimesh.transport.choice import NEVER
from mpimesh.transport.engine import Engine, StagedRequest, Steps
from mpimesh.transport.entering import enter
from mpimesh.transport.team import Team
from mpimesh.transport.team_move import (
    agreed_counts,
    all_gather_staged,
    all_to_all_staged,
    broadcast_staged,
)
from mpimesh.transport.team_reduce import all_reduce_staged, reduce_scatter_staged
from mpimesh.transport.what import Operation, operation_number

__all__ = ["Ordinary"]


class Ordinary:
    """The collectives of one team on ordinary arrays; each returns a request.

    Args:
        team: The ranks.
        engine: Moves the operations along.
        messages: Moves arrays for which the stage is too slow.

    Attributes:
        in_chunks: Whether arrays go through the stage; if not, by messages.
        reduced_from: Bytes from which on those of an all-reduce do in any case.
    """

    def __init__(self, team: Team, engine: Engine, messages: Communicator) -> None:
        self._team = team
        self._engine = engine
        self._messages = messages
        self.in_chunks = False
        self.reduced_from = NEVER

    def all_reduce(self, send: HostArray | None, recv: HostArray, op: str) -> Request:
        """Reduce over all ranks into `recv` on each; also by ``"mean"``."""
        if self.in_chunks or recv.nbytes >= self.reduced_from:
            source = recv if send is None else send
            return self._staged(
                operation_number(Operation.ALL_REDUCE, recv, op),
                partial(all_reduce_staged, self._team, source, recv, op),
            )
        if op == "mean":
            return StagedRequest(self._mean_by_messages(send, recv), self._engine)
        return self._messages.all_reduce(send, recv, op)

    def reduce_scatter(
        self, send: HostArray, recv: HostArray, counts: Sequence[int], op: str
    ) -> Request:
        """Reduce `send`; rank r gets block r."""
        if not self.in_chunks:
            return self._messages.reduce_scatter(send, recv, counts, op)
        what = operation_number(Operation.REDUCE_SCATTER, send, op)
        steps = partial(reduce_scatter_staged, self._team, send, recv, counts, op)
        return self._staged(what, steps)

    def all_gather(self, send: HostArray, recv: HostArray, counts: Sequence[int]) -> Request:
        """Lay the ranks' `send` one after the other in `recv`."""
        if not self.in_chunks:
            return self._messages.all_gather(send, recv, counts)
        what = operation_number(Operation.ALL_GATHER, recv)
        return self._staged(what, partial(all_gather_staged, self._team, send, recv, counts))

    def broadcast(self, buffer: HostArray, root: int) -> Request:
        """Copy `buffer` of `root` into `buffer` of every rank."""
        if not self.in_chunks:
            return self._messages.broadcast(buffer, root)
        what = operation_number(Operation.BROADCAST, buffer, root=root)
        return self._staged(what, partial(broadcast_staged, self._team, buffer, root))

    def all_to_all(
        self,
        send: HostArray,
        recv: HostArray,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
    ) -> Request:
        """Block d of `send` goes to rank d; block s of `recv` comes from rank s."""
        if not self.in_chunks:
            return self._messages.all_to_all(send, recv, send_counts, recv_counts)
        steps = self._all_to_all_staged(send, recv, [*send_counts, *recv_counts])
        return StagedRequest(steps, self._engine)

    def _staged(self, what: int, steps: Callable[[], Steps]) -> Request:
        """Begin steps through the stage, when all ranks agree that they are in this operation."""

        def entered() -> Steps:
            yield from enter(self._team, what)
            yield from steps()

        return StagedRequest(entered(), self._engine)

    def _mean_by_messages(self, send: HostArray | None, recv: HostArray) -> Steps:
        yield self._messages.all_reduce(send, recv, "sum")
        np.divide(recv, self._team.size, out=recv)

    def _all_to_all_staged(self, send: HostArray, recv: HostArray, counts: Sequence[int]) -> Steps:
        what = operation_number(Operation.ALL_TO_ALL, send[:0])
        entry = yield from enter(self._team, what, counts=counts)
        yield from all_to_all_staged(self._team, send, recv, agreed_counts(entry.counts))
