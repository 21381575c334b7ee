"""A rank's receives from the stages of other ranks in one step.

Receives are posted ahead of need, into slots of their own, so that a message meets its buffer when
it comes: for each edge and direction two, or fewer where the schedule never lets two wait. What a
rank of the node lends comes as a ticket, and is read where it lies; receives of tickets take no
slots, so there are as many as the schedule ever lets wait.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mpimesh.arrays import Array, DType
from mpimesh.comm import RecvRequest, Request
from mpimesh.comm.lending import TICKET_BYTES, Lending
from mpimesh.errors import ShapeError
from mpimesh.parallel.interface import Interface, Leaf
from mpimesh.parallel.known import FIRST_PIECE_BYTES, Known, length_of
from mpimesh.parallel.slots import SlotPool
from mpimesh.parallel.tags import message_tag
from mpimesh.parallel.wire import LENT, Ended, GivenBack, Wire
from mpimesh.runtime import ProcessGroup
from mpimesh.schedule import Action, ActionKind

__all__ = ["Inbox", "take_in"]

_SLOTS_AHEAD = 2


@dataclass(slots=True)
class _Posted:
    """A receive under way.

    Attributes:
        request: The receive.
        buffer: What it receives into: the array, or the ticket of one.
        start_s: When it was posted.
        shape: The array's shape.
        dtype: Its dtype.
        lender: What lends the array of a ticket.
    """

    request: RecvRequest
    buffer: Array
    start_s: float
    shape: tuple[int, ...]
    dtype: DType
    lender: Lending | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize

    def array(self, peer: int) -> Array:
        """Return what `peer` has sent or lent. Its bytes are those of the shape.

        Raises:
            ShapeError: If there are more or fewer.
        """
        expected = self.nbytes
        got = self.request.received_bytes()
        if self.lender is not None and got == TICKET_BYTES:
            lent = self.lender.borrow(self.buffer, peer)
            got = lent.nbytes
            if got == expected:
                return lent.view(self.dtype).reshape(self.shape)
        elif got == expected:
            return _read_only(self.buffer)
        raise ShapeError(f"{got} bytes, but {expected} are expected")

    def unwanted(self, peer: int) -> Request:
        """Return what is done when the message has come, though nobody wants it."""
        if self.lender is None:
            return Ended(self.request)
        return GivenBack(self.request, self.buffer, peer, self.lender)


@dataclass(slots=True)
class _Channel:
    """The messages of one stage in one direction.

    Attributes:
        peer: The sending rank of the pipeline.
        tag: The messages' tag.
        source: The stage whose interface the messages have.
        kind: RECV_F or RECV_B.
        microbatches: Those whose receives are still to be posted.
        is_news: Whether the next data come behind an announcement.
        posted: Receives under way, a list for each microbatch, in order.
        announcement: The receive of the next interface that is not known: of the first
            microbatch, or of each, between their data.
        announced: Receives of an interface posted so far.
        count: Receives of data posted so far.
    """

    peer: int
    tag: int
    source: int
    kind: ActionKind
    is_news: bool
    most_waiting: int
    microbatches: deque[int] = field(default_factory=deque)
    posted: deque[list[_Posted]] = field(default_factory=deque)
    announcement: _Posted | None = None
    announced: int = 0
    count: int = 0

    def rows_of_messages(self, *, on_device: bool) -> list[_Row]:
        """Return what comes in one row each, as :attr:`Outbox.sent` counts it."""
        announcement = [] if self.announcement is None else [self.announcement]
        posted = [one for message in self.posted for one in message]
        key = (self.peer, self.tag)
        if not on_device:
            return [(key, [*posted, *announcement], self.announced + self.count)]
        data = ((self.peer, -self.tag), posted, self.count)
        return [(key, announcement, self.announced), data]

    def has_room(self) -> bool:
        """Tell whether a further receive may be posted, and would find a message sooner."""
        ahead = len(self.posted)
        if ahead < min(self.most_waiting, _SLOTS_AHEAD):
            return True
        return ahead < self.most_waiting and all(one.lender for one in self.posted[-1])

    def leaves(self, interface: Interface) -> tuple[Leaf, ...]:
        """Return the arrays that come for each microbatch."""
        return interface.leaves if self.kind is ActionKind.RECV_F else interface.gradients


_Row = tuple[tuple[int, int], list[_Posted], int]
"""Sender and tag, the receives that are open, and how many were posted."""


class Inbox:
    """The receives of one step on one rank.

    Args:
        wire: The ranks of the pipeline.
        known: The rows of microbatches, and the interfaces of stages; completed here.
        pool: Memory for what comes.
        most_waiting: As :attr:`Plan.most_waiting` has it.
    """

    def __init__(
        self,
        wire: Wire,
        known: Known,
        pool: SlotPool,
        most_waiting: Mapping[tuple[int, ActionKind], int],
    ) -> None:
        self._wire = wire
        self._known = known
        self._pool = pool
        self._most_waiting = most_waiting
        self._channels: dict[tuple[int, ActionKind, int], _Channel] = {}
        self._known_before = frozenset(known.stages)

    def open(self, actions: Sequence[Action]) -> None:
        """Post the first receives for the `actions` that this rank will do, in their order."""
        for action in actions:
            if action.kind.is_recv:
                self._channel(action).microbatches.append(action.microbatch)
        for channel in self._channels.values():
            self._post_ahead(channel)

    def receive(self, action: Action) -> list[Array]:
        """Wait for the messages of a RECV, one for each array.

        Raises:
            ShapeError: If one has not the size that its stage announced.
        """
        channel = self._channels[action.stage, action.kind, action.far_stage]
        self._post_ahead(channel)
        if not channel.posted and channel.announcement is not None:
            self._learn(channel, channel.announcement, action)
            self._post_ahead(channel)
        message = channel.posted[0]
        for posted in message:
            self._wire.wait(posted.request, action)
        channel.posted.popleft()
        self._post_ahead(channel)
        arrays = self._arrays(channel, message, action)
        nbytes = sum(posted.nbytes for posted in message)
        messages = sum(posted.nbytes > 0 for posted in message)
        self._wire.traffic.count("pipeline recv", 0)
        rank = self._wire.group.ranks[channel.peer]
        self._wire.traffic.receive("pipeline recv", rank, nbytes, messages)
        self._wire.record("recv", action, message[0].start_s, nbytes)
        return arrays

    def expect(self, stage: int) -> None:
        """Post receives of the gradients for `stage`, now that its interface is known."""
        for (receiver, kind, _), channel in self._channels.items():
            if receiver == stage and kind is ActionKind.RECV_B:
                self._post_ahead(channel)

    # -- after a failure ---------------------------------------------------------------------

    def drain(self, sent: Mapping[tuple[int, int], Sequence[int]]) -> list[Request]:
        """Take in every message that is on its way, and take back all other receives.

        Args:
            sent: For each sending rank and tag the bytes of all messages to this rank.

        Returns:
            What must be waited for.
        """
        waiting: list[Request] = []
        unposted = dict(sent)
        for key, still_open, count in self._rows():
            waiting += _settle(still_open, key[0], count, len(sent.get(key, ())))
            unposted[key] = sent.get(key, ())[count:]
        return waiting + take_in(self._wire.group, unposted)

    def abandon(self) -> None:
        """Take back all receives, where there will be no agreement with the other ranks."""
        for (peer, _), still_open, count in self._rows():
            _settle(still_open, peer, count, 0)
        self._wire.group._core.abandon()

    # -- helpers -----------------------------------------------------------------------------

    def _rows(self) -> list[_Row]:
        on_device = self._wire.library is not np
        return [
            row
            for channel in self._channels.values()
            for row in channel.rows_of_messages(on_device=on_device)
        ]

    def _channel(self, action: Action) -> _Channel:
        key = (action.stage, action.kind, action.far_stage)
        channel = self._channels.get(key)
        if channel is None:
            source = min(action.stage, action.far_stage)
            forward = action.kind is ActionKind.RECV_F
            channel = self._channels[key] = _Channel(
                peer=self._wire.placement[action.far_stage],
                tag=message_tag(action, self._wire.edges),
                source=source,
                kind=action.kind,
                is_news=forward and source not in self._known_before,
                most_waiting=self._most_waiting[self._wire.edges.number(action), action.kind],
            )
        return channel

    def _learn(self, channel: _Channel, announcement: _Posted, action: Action) -> None:
        self._wire.wait(announcement.request, action)
        left, text = length_of(announcement.buffer[: announcement.request.received_bytes()])
        if left:
            rest = channel.announcement = self._post_announcement(channel, left)
            self._wire.wait(rest.request, action)
            text = np.concatenate([text, rest.buffer])
        channel.announcement = None
        channel.is_news = False
        self._known.hear(channel.source, action.microbatch, text)

    def _arrays(self, channel: _Channel, message: list[_Posted], action: Action) -> list[Array]:
        """Return the arrays of a message that has come."""
        arrays: list[Array] = []
        for place, posted in enumerate(message):
            try:
                arrays.append(posted.array(channel.peer))
            except ShapeError as error:
                for other in message[place + 1 :]:
                    other.unwanted(channel.peer).test()
                raise ShapeError(
                    f"stage {action.far_stage} sent stage {action.stage} {error}: shape "
                    f"{posted.shape} and dtype {posted.dtype}, array {place} of "
                    f"{self._known.interface(channel.source, action.microbatch)}"
                ) from None
        return arrays

    def _post_announcement(self, channel: _Channel, nbytes: int) -> _Posted:
        posted = self._post(channel, np.empty(nbytes, np.uint8))
        channel.announced += 1
        return posted

    def _post_ahead(self, channel: _Channel) -> None:
        while channel.microbatches and channel.has_room():
            if channel.is_news:
                if channel.announcement is None:
                    channel.announcement = self._post_announcement(channel, FIRST_PIECE_BYTES)
                return
            interface = self._known.interface(channel.source, channel.microbatches[0])
            if interface is None:
                return
            rows = self._known.rows(channel.microbatches.popleft())
            message: list[_Posted] = []
            channel.posted.append(message)
            for leaf in channel.leaves(interface):
                message.append(self._post_leaf(channel, leaf, rows))
                channel.count += 1
            channel.is_news = self._known.free and channel.kind is ActionKind.RECV_F

    def _post_leaf(self, channel: _Channel, leaf: Leaf, rows: int) -> _Posted:
        shape = leaf.shape(rows)
        lender = self._wire.lender(channel.peer, leaf.nbytes(rows))
        if lender is None:
            return self._post(channel, self._slot(shape, leaf.dtype))
        ticket = np.zeros(TICKET_BYTES, np.uint8)
        return self._post(channel, ticket, shape, leaf.dtype, lender)

    def _slot(self, shape: Sequence[int], dtype: DType) -> Array:
        library = self._wire.library
        return self._pool.take(shape, dtype) if library is np else library.empty(shape, dtype)

    def _post(
        self,
        channel: _Channel,
        buffer: Array,
        shape: tuple[int, ...] | None = None,
        dtype: DType | None = None,
        lender: Lending | None = None,
    ) -> _Posted:
        start_s = self._wire.tracer.clock()
        request = self._wire.irecv(buffer.reshape(-1).view(np.uint8), channel.peer, channel.tag)
        return _Posted(
            request,
            buffer,
            start_s,
            tuple(buffer.shape) if shape is None else shape,
            buffer.dtype if dtype is None else dtype,
            lender,
        )


def _read_only(array: Array) -> Array:
    """Return an array that cannot be written to, so that it is as one that is lent."""
    if isinstance(array, np.ndarray):
        array = array.view()
        array.flags.writeable = False
    return array


def _settle(still_open: list[_Posted], peer: int, count: int, sent: int) -> list[Request]:
    """Return the receives that have one of `sent` messages to wait for; take back the others."""
    expected = max(sent - (count - len(still_open)), 0)
    for posted in still_open[expected:]:
        posted.request.cancel()
    return [posted.unwanted(peer) for posted in still_open[:expected]]


def take_in(group: ProcessGroup, sent: Mapping[tuple[int, int], Sequence[int]]) -> list[Request]:
    """Receive messages that nobody wants any more; return what must be waited for.

    Args:
        group: The ranks of the pipeline.
        sent: As :attr:`Outbox.sent` has it: a negative tag is that of device memory.
    """
    waiting: list[Request] = []
    for (peer, tag), sizes in sent.items():
        library = np if tag >= 0 else sys.modules["cupy"]
        side = group._core.side(library)
        for nbytes in sizes:
            lender = group.communicator.lending if nbytes == LENT else None
            buffer = library.zeros(TICKET_BYTES if nbytes == LENT else nbytes, np.uint8)
            request = side.irecv(buffer, peer, abs(tag))
            if lender is None:
                waiting.append(Ended(request))
            else:
                waiting.append(GivenBack(request, buffer, peer, lender))
    return waiting
