"""A rank's sends to the stages of other ranks in one step.

Messages take the arrays as the layers made them, and keep them until they are gone.
At most a window of them is unfinished, so that a fast stage does not fill the memory of
all. What a rank of the node is to read in place lies in slots of the pool: there a layer has
written it (:meth:`Outbox.room_for`), or it is copied there. A slot is free again when the reader
has let go of the array.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpimesh.arrays import (
    Array,
    DType,
    HostArray,
    is_cupy,
    moved,
    refuse_objects,
    to_numpy,
)
from mpimesh.comm import Request
from mpimesh.comm.lending import Lending
from mpimesh.errors import TransportError
from mpimesh.nn.context import Room
from mpimesh.parallel.known import Known
from mpimesh.parallel.slots import SlotPool
from mpimesh.parallel.tags import message_tag
from mpimesh.parallel.wire import LENT, Ended, Wire
from mpimesh.schedule import Action, ActionKind

__all__ = ["Outbox"]


@dataclass(slots=True)
class _Sending:
    """The sends of an action that are under way."""

    requests: list[Request]
    action: Action
    start_s: float
    nbytes: int


class _InWindow:
    """Done when no more sends are unfinished than may be."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox

    def test(self) -> bool:
        self._outbox.reap()
        return self._outbox.is_in_window


class Outbox:
    """The sends of one step on one rank.

    Args:
        wire: The ranks of the pipeline.
        known: The interfaces of this rank's stages. Those known from the start need no
            announcement.
        pool: Memory for what must be copied.
        window: Most sends that may be unfinished while the rank goes on.
    """

    def __init__(self, wire: Wire, known: Known, pool: SlotPool, window: int) -> None:
        self._wire = wire
        self._known = known
        self._announced: set[tuple[int, int]] = set()  # source and receiving stage
        self._known_before = frozenset(known.stages)
        self._pool = pool
        self._window = window
        self._sending: deque[_Sending] = deque()
        self._announcing: list[_Sending] = []
        self._sent: dict[tuple[int, int], list[int]] = {}

    def send(self, action: Action, leaves: Sequence[Array]) -> None:
        """Start the messages of a SEND, one for each array; waits while too many are unfinished.

        Raises:
            DTypeError: If an array holds Python objects.
        """
        for leaf in leaves:
            refuse_objects(np.dtype(leaf.dtype))
        if action.kind is ActionKind.SEND_F and self._is_news(action):
            notes = self._known.announcement(action.stage, action.microbatch)
            requests = [self._isend(note, action) for note in notes]
            self._announcing.append(_Sending(requests, action, 0.0, 0))
        start_s = self._wire.tracer.clock()
        nbytes = sum(leaf.nbytes for leaf in leaves)
        requests = [self._send_one(leaf, action) for leaf in leaves]
        self._sending.append(_Sending(requests, action, start_s, nbytes))
        self._wire.traffic.count("pipeline send", nbytes)
        self.reap()
        if not self.is_in_window:
            # Any of them may be the next to end: the oldest may need what this rank does later.
            self._wire.wait(_InWindow(self), self._sending[0].action)

    @property
    def is_in_window(self) -> bool:
        """Whether no more sends are unfinished than may be."""
        return len(self._sending) <= self._window

    def room_for(self, stage: int) -> Room:
        """Return what gives a layer memory for an array that is to go to `stage`.

        It gives None where the array may lie anywhere. Else the rank of that stage
        reads it there, once it is sent.
        """
        peer = self._wire.placement[stage]

        def room(shape: tuple[int, ...], dtype: DType) -> HostArray | None:
            lender = self._wire.lender(peer, math.prod(shape) * dtype.itemsize)
            return None if lender is None else self._slot(shape, dtype, lender)

        return room

    def reap(self) -> None:
        """Let go of the sends that are done. Asking them is what moves them along."""
        unfinished: deque[_Sending] = deque()
        for sending in self._sending:
            done = [request.test() for request in sending.requests]
            if all(done):
                self._wire.record("send", sending.action, sending.start_s, sending.nbytes)
            else:
                unfinished.append(sending)
        self._sending = unfinished

    def finish(self) -> None:
        """Wait for the last sends, once every rank is known to have received all messages."""
        for sending in (*self._announcing, *self._sending):
            for request in sending.requests:
                self._wire.wait_plainly(request, sending.action)
        self.reap()

    @property
    def sent(self) -> list[tuple[int, int, list[int]]]:
        """Receiving rank, tag, and bytes of each message sent in this step.

        Messages of device memory are a row of their own: their tag stands here as a negative.
        A ticket stands there as `LENT`.
        """
        return [(peer, tag, sizes) for (peer, tag), sizes in self._sent.items()]

    def drain(self) -> list[Request]:
        """After a failure: return what must be waited for, when the receivers take all in."""
        return [
            Ended(request)
            for sending in (*self._announcing, *self._sending)
            for request in sending.requests
        ]

    def _is_news(self, action: Action) -> bool:
        """Tell whether the receiver of a SEND_F has to be told what will come; note that it is."""
        edge = (action.stage, action.far_stage)
        if action.stage in self._known_before or edge in self._announced:
            return False
        if not self._known.free:
            self._announced.add(edge)
        return True

    def _send_one(self, x: Array, action: Action) -> Request:
        lender = self._wire.lender(self._wire.placement[action.far_stage], x.nbytes)
        if lender is None:
            return self._isend(self._outgoing(x).reshape(-1).view(np.uint8), action)
        return self._isend(self._ticket(x, lender), action, lent=True)

    def _isend(self, data: Array, action: Action, *, lent: bool = False) -> Request:
        peer, tag = self._wire.placement[action.far_stage], message_tag(action, self._wire.edges)
        request = self._wire.isend(data, peer, tag)
        row = (peer, -tag if is_cupy(data) else tag)
        self._sent.setdefault(row, []).append(LENT if lent else data.nbytes)
        return request

    def _outgoing(self, x: Array) -> Array:
        """Return `x` contiguous, where the messages of this pipeline are taken from."""
        library = self._wire.library
        if library is not np:
            return library.ascontiguousarray(moved(x, library))
        if not is_cupy(x) and x.flags.c_contiguous:
            return x
        host = self._pool.take(tuple(x.shape), np.dtype(x.dtype))
        host[...] = to_numpy(x)
        return host

    def _ticket(self, x: Array, lender: Lending) -> HostArray:
        """Lend `x` as it is, if it lies in a slot, else a copy; return the ticket."""
        if not is_cupy(x) and x.flags.c_contiguous and self._pool.holds(x):
            ticket = lender.lend(x)
        else:
            copy = self._slot(tuple(x.shape), np.dtype(x.dtype), lender)
            copy[...] = to_numpy(x)
            ticket = lender.lend(copy)
        if ticket is None:
            raise TransportError("no memory is left that other ranks of the node can read")
        return ticket

    def _slot(self, shape: Sequence[int], dtype: DType, lender: Lending) -> HostArray:
        lender.sweep()  # slots that have come back are to be used again
        return self._pool.take(shape, dtype)
