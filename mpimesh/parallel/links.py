"""The links between stages on different ranks: one for each edge, direction and end.

A :class:`Links` is made once with a model, and its links are used in every microbatch and step
after. An activation or gradient goes from rank to rank in one of two ways:

- between ranks of a node it is *lent*: the receiver reads it in place, see
  :mod:`mpimesh.comm.lending`. The link is a row of loans, and nothing is sent. What is lent is in
  slots of a pool: there a layer has written it (:meth:`SendLink.room`), or it is copied there. A
  slot is free again when the reader has let go of the array;
- all others are messages. They take the arrays as the layers made them, and keep them until they
  are gone. At most a window of them is unfinished, so that a fast stage does not fill the memory of
  all. Receives are posted ahead of need, into slots of their own, so that a message meets its
  buffer when it comes: two, or fewer where the schedule never lets two wait.

Both ends know which: the ranks tell each other where rows begin when the model is made.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from types import ModuleType
from typing import Literal

import numpy as np

from mpimesh.arrays import (
    Array,
    DType,
    HostArray,
    is_cupy,
    moved,
    namespace,
    refuse_objects,
    to_numpy,
)
from mpimesh.arrays.memory import ArrayPool
from mpimesh.comm import RecvRequest, Request
from mpimesh.comm.engine import test_often
from mpimesh.comm.lending import Borrowing, Lending, LendingRow
from mpimesh.comm.requests import Condition
from mpimesh.errors import ShapeError, TransportError
from mpimesh.parallel.plans import message_tags
from mpimesh.parallel.task import FIRST_PIECE_BYTES, NO_TASK, Kind, Task, length_of
from mpimesh.runtime import ProcessGroup, Traffic
from mpimesh.schedule import Action, ActionKind, Edges
from mpimesh.trace import Tracer

__all__ = ["Links", "RecvLink", "SendLink"]

LENDS = True
"""Arrays are lent where ranks share memory; tests turn it off, on all ranks alike."""

_LENT = -1
"""Stands for a loan where the bytes of messages are listed."""

_POSTED_AHEAD = 2

_Places = Sequence[Sequence[int]]
"""For each row of loans its stage, the stage that it goes to, and where it begins."""


class Links:
    """The links of one rank's stages.

    Args:
        group: The ranks of the pipeline.
        placement: For each stage the rank that holds it.
        edges: The edges between the stages.
        pool: Memory for what is lent, received or copied.
        traffic: Counts what is sent and received.
        tracer: Records it.

    Attributes:
        library: NumPy, or CuPy where activations and gradients stay on devices. The same on all
            ranks.
        sending: By stage and the stage that it sends to.
        receiving: By stage and the stage that it receives from.
        task: In a step, the work of this rank's stages.
        check_abort: In a step, raises if it is to be left.
    """

    def __init__(
        self,
        group: ProcessGroup,
        placement: Sequence[int],
        edges: Edges,
        *,
        pool: ArrayPool,
        traffic: Traffic,
        tracer: Tracer,
    ) -> None:
        self.group = group
        self.pool = pool
        self.traffic = traffic
        self.tracer = tracer
        self.library: ModuleType = np
        self.task = NO_TASK
        self.check_abort: Callable[[], None] = _stay
        self.announcing: list[_Sending] = []  # which no window counts
        self.unfinished: deque[_Sending] = deque()
        self.window = 0
        self.sending: dict[tuple[int, int], SendLink] = {}
        self.receiving: dict[tuple[int, int], RecvLink] = {}
        for number, pair in enumerate([*pairwise(range(edges.num_stages)), *edges.skips]):
            for stage, far in (pair, pair[::-1]):
                if placement[stage] == placement[far] or group.rank != placement[stage]:
                    continue
                peer, forward = placement[far], stage < far
                tags = message_tags(number, f"stages {pair[0]} and {pair[1]}")
                self.sending[stage, far] = SendLink(self, (stage, far), peer, tags[not forward])
                self.receiving[stage, far] = RecvLink(self, (stage, far), peer, tags[forward])

    # -- while the model is made: rows of loans -----------------------------------------------

    def lend(self) -> list[list[int]]:
        """Make a row of loans for each link that can have one; return where they begin. Local."""
        lending = self.group.communicator.lending if LENDS and self.sending else None
        if lending is None:
            return []
        rows = []
        for (stage, far), link in self.sending.items():
            if lending.reaches(link.peer):
                link.lending, link.row = lending, lending.row(link.peer)
                rows.append([stage, far, link.row.start])
        return rows

    def borrow(self, places: Mapping[int, _Places], library: ModuleType) -> None:
        """Take in where the rows of other ranks begin. Local, on all ranks alike.

        Args:
            places: By rank of the pipeline, what :meth:`lend` has returned there.
            library: Whose arrays go from rank to rank; those on devices are not lent.
        """
        self.library = library
        lending = self.group.communicator.lending
        if library is not np or lending is None:
            for link in self.sending.values():
                link.row = None
            return
        for rank, rows in places.items():
            for stage, far, start in rows:
                receiver = self.receiving.get((far, stage))
                if receiver is not None:
                    receiver.loans = lending.borrowing(rank, start)

    # -- a step --------------------------------------------------------------------------------

    def begin(self, task: Task, check_abort: Callable[[], None]) -> None:
        """Begin a step, and post the first receives for what this rank will do in it.

        Args:
            task: The work of this rank's stages; what it knows of interfaces is completed here.
            check_abort: Raises if the step is to be left.
        """
        plan = task.plan
        self.task = task
        self.check_abort = check_abort
        self.window = plan.send_window
        announced = task.announced
        for (stage, _), sender in self.sending.items():
            sender.is_news = stage not in announced
        for ends, receiver in self.receiving.items():
            receiver.begin(plan.most_waiting.get(ends[::-1], 0), announced)
            if receiver.loans is None:
                receiver.microbatches.extend(plan.received.get(ends, ()))
                receiver.post_ahead()

    def expect(self, stage: int) -> None:
        """Post receives of the gradients for `stage`, now that its interface is known."""
        for (receiver, _), link in self.receiving.items():
            if receiver == stage:
                link.post_ahead()

    def reap(self) -> None:
        """Let go of the sends that are done. Asking them is what moves them along."""
        unfinished = self.unfinished
        for _ in range(len(unfinished)):
            sending = unfinished.popleft()
            done = [request.test() for request in sending.requests]
            if all(done):
                self.record("send", sending.action, sending.peer, sending.start_s, sending.nbytes)
            else:
                unfinished.append(sending)

    def is_in_window(self) -> bool:
        """Let go of the sends that are done, and tell whether more may be started."""
        self.reap()
        return len(self.unfinished) <= self.window

    def finish(self) -> None:
        """Wait for the last sends, once every rank is known to have received all messages."""
        for sending in (*self.announcing, *self.unfinished):
            for request in sending.requests:
                self._wait(request, sending.action, sending.peer, "", 0)
        self.reap()

    def end(self) -> None:
        """Let go of the step. Local."""
        self.task = NO_TASK
        self.check_abort = _stay
        self.announcing.clear()
        self.unfinished.clear()
        for sender in self.sending.values():
            sender.end()
        for receiver in self.receiving.values():
            receiver.end()

    # -- after a failure -----------------------------------------------------------------------

    @property
    def sent(self) -> list[tuple[int, int, list[int]]]:
        """Receiving rank, tag, and bytes of each message sent in this step.

        Messages of device memory are a row of their own: their tag stands here as a negative.
        Loans are counted, too.
        """
        return [
            (link.peer, tag, sizes)
            for link in self.sending.values()
            for tag, sizes in link.sent.items()
        ]

    def drain(self, sent: Mapping[tuple[int, int], Sequence[int]]) -> list[Request]:
        """Take in every message that is on its way, and take back all other receives.

        Args:
            sent: For each sending rank and tag the bytes of all messages to this rank.

        Returns:
            What must be waited for, when the others do the same.
        """
        waiting = [
            _ended(request)
            for sending in (*self.announcing, *self.unfinished)
            for request in sending.requests
        ]
        for link in self.receiving.values():
            waiting += link.drain(sent)
        return waiting

    def abandon(self) -> None:
        """Take back all receives, where there will be no agreement with the other ranks."""
        for link in self.receiving.values():
            if link.loans is None:
                link.drain({})
        self.group._core.abandon()

    # -- for links -----------------------------------------------------------------------------

    def isend(self, data: Array, peer: int, tag: int) -> Request:
        """Start a send of flat bytes, from wherever they lie."""
        request: Request = self.group._core.side(namespace(data)).isend(data, peer, tag)
        return request

    def irecv(self, data: Array, peer: int, tag: int) -> RecvRequest:
        """Start a receive of flat bytes into `data`, which is in the memory of their source."""
        request: RecvRequest = self.group._core.side(namespace(data)).irecv(data, peer, tag)
        return request

    def wait(self, test: Callable[[], bool], action: Action, peer: int, messages: str = "") -> None:
        """Wait for the other end of `action`, which the trace shows as waiting.

        It also looks whether the step is to be left, which ends it by raising. Messages are counted
        by name on both ends, so that a circle of waits is found.
        """
        check_abort, progress = self.check_abort, self.group._core.progress
        received = messages and f"{messages}, received"
        if test() or test_often(test, progress):
            return self.count(received)

        def ready() -> bool:
            # The check for the abort signal polls MPI, too, and takes longer than a test.
            if test_often(test, progress):
                return True
            check_abort()
            return False

        stage, microbatch = action.stage, action.microbatch
        with self.tracer.span(str(action), "wait", stage=stage, microbatch=microbatch):
            number = progress.counts.get(received, 0) + bool(messages)
            self._wait(Condition(ready), action, peer, messages, number)
        self.count(received)

    def _wait(self, request: Request, action: Action, peer: int, among: str, number: int) -> None:
        what, core = f"pipeline action {action} of group {self.group.name!r}", self.group._core
        core.progress.wait(
            core.communicator, request, what=what, peers=(peer,), number=number, among=among
        )

    def count(self, messages: str) -> None:
        """Count one more of `messages`; none without a name."""
        if messages:
            counts = self.group._core.progress.counts
            counts[messages] = counts.get(messages, 0) + 1

    def record(
        self,
        category: Literal["send", "recv"],
        action: Action,
        peer: int,
        start_s: float,
        nbytes: int,
    ) -> None:
        """Note in the trace what has been sent or received."""
        if self.tracer.enabled:
            ranks, me = self.group.ranks, self.group.rank or 0
            sender, receiver = (me, peer) if category == "send" else (peer, me)
            sent = action if category == "send" else action.partner
            self.tracer.record(
                str(action),
                category,
                start_s=start_s,
                duration_s=self.tracer.clock() - start_s,
                nbytes=nbytes,
                stage=action.stage,
                microbatch=action.microbatch,
                message=f"{ranks[sender]}>{ranks[receiver]} {sent}",
            )

    def slot(self, shape: Sequence[int], dtype: DType, lending: Lending) -> HostArray:
        """Return a slot for what is to be lent; those that have come back are used again."""
        array = self.pool.take_again(shape, dtype)
        if array is None:
            lending.sweep()
            array = self.pool.take(shape, dtype)
        return array


def _stay() -> None:
    """Do not leave a step: there is none."""


@dataclass(slots=True)
class _Sending:
    """The messages of an action that are under way."""

    requests: list[Request]
    action: Action
    peer: int
    start_s: float = 0.0
    nbytes: int = 0


class SendLink:
    """The sending end: from a stage of this rank to one of another.

    Attributes:
        peer: The receiving rank of the pipeline.
        row: What is lent there; None if arrays are sent.
        is_news: Whether the receiver needs a header.
        sent: In this step, the bytes of all messages by tag; a negative tag is that of device
            memory.
    """

    def __init__(self, links: Links, ends: tuple[int, int], peer: int, tag: int) -> None:
        self._links = links
        self._stage = ends[0]
        self._messages = _messages(links, *ends)
        self._tag = tag
        self.peer = peer
        self.lending: Lending | None = None
        self.row: LendingRow | None = None
        self._room: HostArray | None = None
        self.is_news = False
        self.sent: dict[int, list[int]] = {}

    def end(self) -> None:
        """Let go of the step."""
        self._room = None
        self.sent = {}

    def room(self, shape: tuple[int, ...], dtype: DType) -> HostArray | None:
        """Return memory for a layer's result that is to go along this link.

        None where it may lie anywhere. Else the receiver reads it there, once it is sent.
        """
        if self.row is None or self.lending is None:
            return None
        self._room = self._links.slot(shape, dtype, self.lending)
        return self._room

    def send(self, action: Action, leaves: Sequence[Array]) -> None:
        """Do a SEND, of one array after the other; waits while too many sends are unfinished.

        Raises:
            DTypeError: If an array holds Python objects.
        """
        links = self._links
        for leaf in leaves:
            if leaf.dtype.hasobject:
                refuse_objects(np.dtype(leaf.dtype))
        if self.is_news and action.kind is ActionKind.SEND_F:
            self._announce(action)
        start_s = links.tracer.clock()
        nbytes = sum([leaf.nbytes for leaf in leaves])
        if self.row is not None:
            for leaf in leaves:
                self._lend(leaf)
            links.traffic.count("pipeline send", nbytes)
            links.record("send", action, self.peer, start_s, nbytes)
            return
        requests = [self._isend(self._outgoing(leaf)) for leaf in leaves]
        links.unfinished.append(_Sending(requests, action, self.peer, start_s, nbytes))
        links.traffic.count("pipeline send", nbytes)
        if not links.is_in_window():
            # Any of them may be the next to end: the oldest may need what this rank does later.
            oldest = links.unfinished[0]
            links.wait(links.is_in_window, oldest.action, oldest.peer)

    def _announce(self, action: Action) -> None:
        """Tell the receiver what will come; once, or where shapes are free each time."""
        task = self._links.task
        self.is_news = task.free
        if self.row is not None:
            self._lend(task.text(self._stage, action.microbatch), is_note=True)
            return
        notes = task.announcement(self._stage, action.microbatch)
        sending = _Sending([self._isend(note) for note in notes], action, self.peer)
        self._links.announcing.append(sending)

    def _lend(self, x: Array, *, is_note: bool = False) -> None:
        """Lend `x` in place, if it is in a slot, else a copy."""
        links, lending, row = self._links, self.lending, self.row
        if lending is None or row is None:
            raise TransportError("the row of loans is closed")
        at = -1
        if not is_cupy(x) and x.flags.c_contiguous:
            at = links.pool.place_of(x, lending.find)
        if at < 0:
            copy = links.slot(tuple(x.shape), np.dtype(x.dtype), lending)
            copy[...] = to_numpy(x)
            x, at = copy, links.pool.place_of(copy, lending.find)
        if at < 0:
            raise TransportError("no memory is left that other ranks of the node can read")
        row.lend(x, at, is_note=is_note)
        self._room = None
        self.sent.setdefault(self._tag, []).append(_LENT)
        self._links.count(self._messages)

    def _isend(self, data: Array) -> Request:
        request = self._links.isend(data, self.peer, self._tag)
        tag = -self._tag if is_cupy(data) else self._tag
        self.sent.setdefault(tag, []).append(data.nbytes)
        self._links.count(self._messages)
        return request

    def _outgoing(self, x: Array) -> Array:
        """Return the bytes of `x` contiguous, where this pipeline's messages are taken from."""
        library = self._links.library
        if library is not np:
            return library.ascontiguousarray(moved(x, library)).reshape(-1).view(np.uint8)
        if is_cupy(x) or not x.flags.c_contiguous:
            host = self._links.pool.take(tuple(x.shape), np.dtype(x.dtype))
            host[...] = to_numpy(x)
            x = host
        return x.reshape(-1).view(np.uint8)


@dataclass(slots=True)
class _PostedMessage:
    """A receive under way.

    Attributes:
        request: The receive.
        buffer: What it receives into.
        start_s: When it was posted.
    """

    request: RecvRequest
    buffer: Array
    start_s: float


class RecvLink:
    """The receiving end: to a stage of this rank from one of another.

    Attributes:
        peer: The sending rank of the pipeline.
        source: The stage whose interface the arrays have.
        loans: Where they are borrowed; None if they are received.
        microbatches: Those whose receives are still to be posted.
    """

    def __init__(self, links: Links, ends: tuple[int, int], peer: int, tag: int) -> None:
        stage, far = ends
        self._links = links
        self._forward = far < stage
        self._far = far
        self._tag = tag
        self._messages = _messages(links, far, stage)
        self.peer = peer
        self.source = min(ends)
        self.loans: Borrowing | None = None
        self.microbatches: deque[int] = deque()
        self._is_news = False
        self._most_waiting = 0
        self._posted: deque[list[_PostedMessage]] = deque()  # of each microbatch, in order
        # The receive of the next interface that is not known: of the first microbatch, or of each,
        # between their data.
        self._announcement: _PostedMessage | None = None
        self._announced = 0
        self._count = 0

    def begin(self, most_waiting: int, announced: frozenset[int]) -> None:
        """Begin a step, in which these stages are known and so many messages may wait."""
        self._is_news = self._forward and self.source not in announced
        self._most_waiting = most_waiting

    def end(self) -> None:
        """Let go of the step."""
        self._announced = self._count = 0
        self.microbatches.clear()
        self._posted.clear()
        self._announcement = None

    def receive(self, action: Action) -> list[Array]:
        """Do a RECV: wait for its arrays.

        Raises:
            ShapeError: If one has not the size that its stage announced.
        """
        links = self._links
        if self.loans is None:
            arrays, start_s = self._receive_messages(action)
        else:
            start_s = links.tracer.clock()
            arrays = self._borrow(self.loans, action)
        nbytes = messages = 0
        for array in arrays:
            nbytes += array.nbytes
            messages += array.nbytes > 0
        links.traffic.count("pipeline recv", 0)
        links.traffic.receive("pipeline recv", links.group.ranks[self.peer], nbytes, messages)
        links.record("recv", action, self.peer, start_s, nbytes)
        return arrays

    def drain(self, sent: Mapping[tuple[int, int], Sequence[int]]) -> list[Request]:
        """Take in what was sent to this link; see :meth:`Links.drain`."""
        if self.loans is not None:
            # It is all there: the sender had sent it before its size.
            for _ in range(len(sent.get((self.peer, self._tag), ())) - self._count):
                self.loans.skip()
            return []
        waiting: list[Request] = []
        announcement = [] if self._announcement is None else [self._announcement]
        posted = [*chain.from_iterable(self._posted)]
        tag = self._tag
        if self._links.library is np:
            rows = [(tag, [*posted, *announcement], self._announced + self._count)]
        else:
            rows = [(tag, announcement, self._announced), (-tag, posted, self._count)]
        for tag, still_open, count in rows:
            sizes = sent.get((self.peer, tag), ())
            waiting += _settle(still_open, count, len(sizes))
            library = np if tag >= 0 else sys.modules["cupy"]
            side = self._links.group._core.side(library)
            for nbytes in sizes[count:]:
                buffer = library.empty(nbytes, np.uint8)
                waiting.append(_ended(side.irecv(buffer, self.peer, abs(tag))))
        return waiting

    # -- loans ---------------------------------------------------------------------------------

    def _borrow(self, loans: Borrowing, action: Action) -> list[Array]:
        links, task = self._links, self._links.task
        microbatch = action.microbatch
        if self._is_news:
            links.wait(loans.has_come, action, self.peer, self._messages)
            if loans.nbytes >= 0:
                raise TransportError(_NO_ANNOUNCEMENT)
            self._count += 1
            task.hear(self.source, microbatch, loans.take_note())
            self._is_news = task.free
        arrays: list[Array] = []
        for shape, dtype, nbytes in self._expected(microbatch):
            links.wait(loans.has_come, action, self.peer, self._messages)
            if loans.nbytes != nbytes:
                raise self._other_size(action, len(arrays), loans.nbytes)
            self._count += 1
            arrays.append(loans.take(shape, dtype))
        return arrays

    # -- messages ------------------------------------------------------------------------------

    def post_ahead(self) -> None:
        """Post as many receives as can find a message sooner for it."""
        task = self._links.task
        while self.microbatches and len(self._posted) < min(self._most_waiting, _POSTED_AHEAD):
            if self._is_news:
                if self._announcement is None:
                    self._announcement = self._post_announcement(FIRST_PIECE_BYTES)
                return
            if task.interface(self.source, self.microbatches[0]) is None:
                return
            message: list[_PostedMessage] = []
            self._posted.append(message)
            for shape, dtype, _ in self._expected(self.microbatches.popleft()):
                message.append(self._post(self._empty(shape, dtype)))
                self._count += 1
            self._is_news = task.free and self._forward

    def _receive_messages(self, action: Action) -> tuple[list[Array], float]:
        """Return the arrays of a RECV, and when the first was posted."""
        links = self._links
        self.post_ahead()
        if not self._posted and self._announcement is not None:
            self._learn(self._announcement, action)
            self.post_ahead()
        message = self._posted[0]
        for posted in message:
            links.wait(posted.request.test, action, self.peer, self._messages)
        self._posted.popleft()
        self.post_ahead()
        for place, posted in enumerate(message):
            got = posted.request.received_bytes()
            if got != posted.buffer.nbytes:
                raise self._other_size(action, place, got)
        return [_read_only(posted.buffer) for posted in message], message[0].start_s

    def _learn(self, announcement: _PostedMessage, action: Action) -> None:
        links = self._links
        links.wait(announcement.request.test, action, self.peer, self._messages)
        left, text = length_of(announcement.buffer[: announcement.request.received_bytes()])
        if left:
            rest = self._announcement = self._post_announcement(left)
            links.wait(rest.request.test, action, self.peer, self._messages)
            text = np.concatenate([text, rest.buffer])
        self._announcement = None
        self._is_news = False
        links.task.hear(self.source, action.microbatch, text)

    def _post_announcement(self, nbytes: int) -> _PostedMessage:
        posted = self._post(np.empty(nbytes, np.uint8))
        self._announced += 1
        return posted

    def _empty(self, shape: tuple[int, ...], dtype: DType) -> Array:
        library = self._links.library
        if library is np:
            return self._links.pool.take(shape, dtype)
        return library.empty(shape, dtype)

    def _post(self, buffer: Array) -> _PostedMessage:
        start_s = self._links.tracer.clock()
        flat = buffer.reshape(-1).view(np.uint8)
        return _PostedMessage(self._links.irecv(flat, self.peer, self._tag), buffer, start_s)

    # -- both ----------------------------------------------------------------------------------

    def _expected(self, microbatch: int) -> tuple[Kind, ...]:
        """Return the arrays that come for a microbatch."""
        return self._links.task.arrays(self.source, microbatch, forward=self._forward)

    def _other_size(self, action: Action, place: int, got: int) -> ShapeError:
        shape, dtype, nbytes = self._expected(action.microbatch)[place]
        interface = self._links.task.known(self.source, action.microbatch)
        return ShapeError(
            f"stage {self._far} sent stage {action.stage} {max(got, 0)} bytes, but {nbytes} are "
            f"expected: shape {shape} and dtype {dtype}, array {place} of {interface}"
        )


def _messages(links: Links, stage: int, far: int) -> str:
    """Return the name by which both ends count what goes from a stage to another."""
    return f"{links.group._core.full_name}, messages from stage {stage} to {far}"


_NO_ANNOUNCEMENT = "data came where an announcement of its shape was expected"


def _read_only(array: Array) -> Array:
    """Return an array that cannot be written to, so that it is as one that is lent."""
    if isinstance(array, np.ndarray):
        array = array.view()
        array.flags.writeable = False
    return array


def _ended(request: Request) -> Request:
    """Return the request that is done when another one has ended, be it by failing."""

    def test() -> bool:
        try:
            return request.test()
        except TransportError:
            return True

    return Condition(test)


def _settle(still_open: Sequence[_PostedMessage], count: int, sent: int) -> list[Request]:
    """Return the receives that have one of `sent` messages to wait for; take back the others."""
    expected = max(sent - (count - len(still_open)), 0)
    for posted in still_open[expected:]:
        posted.request.cancel()
    return [_ended(posted.request) for posted in still_open[:expected]]
