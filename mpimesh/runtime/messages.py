"""Messages between two ranks of a group, which say what they are.

A transport delivers bytes. A receiver that expects other bytes than were sent gets wrong numbers,
cut or half-filled arrays. So between nodes each array goes as an envelope of at most 4 KiB, which
holds dtype, shape and the data itself where it is small enough; larger data follows as a second
message, received straight into its place. Between ranks that share memory the same text goes with
the data, and its digest: what is expected is told by that alone. The head of an envelope goes ahead
of a scatter, too, and of a broadcast whose root only that rank knows.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from mpimesh.arguments import as_flag, as_int, as_shape, digest_bits, shown
from mpimesh.arrays import (
    Array,
    DType,
    HostArray,
    StreamScope,
    is_cupy,
    moved,
    namespace,
    refuse_objects,
)
from mpimesh.arrays.dtypes import as_dtype, dtype_from_json, dtype_to_json
from mpimesh.comm import MAX_USER_TAG, WHOLE_MESSAGE_BYTES, RecvRequest, Request, Steps, run_steps
from mpimesh.comm.requests import all_done
from mpimesh.core.call import Counter, Courier, PlanRecord, Prepared, Route, ShiftRoute
from mpimesh.core.mail import Message as NodeMessage
from mpimesh.errors import (
    CollectiveTimeoutError,
    DTypeError,
    GroupError,
    MpimeshError,
    RankError,
    ShapeError,
    on_all_ranks,
)
from mpimesh.runtime.call import Call, Message
from mpimesh.runtime.operands import (
    check_output,
    output_array,
)
from mpimesh.runtime.persistent import PersistentMessage
from mpimesh.runtime.plan import receive, rule_by
from mpimesh.runtime.traffic import Arrival, sparse
from mpimesh.runtime.work import CollectiveTensor

if TYPE_CHECKING:
    from mpimesh.runtime.group_core import GroupCore

__all__ = [
    "ENVELOPE_BYTES",
    "MAX_TAG",
    "Envelope",
    "array_of",
    "broadcast",
    "library_of",
    "neighbour",
    "open_envelope",
    "open_head",
    "received_as",
    "recv",
    "recv_init",
    "roll_call",
    "row_of",
    "seal",
    "seal_head",
    "send",
    "send_init",
    "shift",
]

MAX_TAG = MAX_USER_TAG // 2
"""The largest `tag` of a message. Each tag takes two of MPI's: envelope and data."""

_SHIFT_TAG = MAX_USER_TAG + 3
_ROLL_CALL_TAG = MAX_USER_TAG + 5
_NOTE_BYTES = 8

# -- envelopes ------------------------------------------------------------------------------------

ENVELOPE_BYTES = WHOLE_MESSAGE_BYTES
_LENGTH_BYTES = 4
_MOST_KEPT = 256


@dataclass(frozen=True, slots=True)
class Envelope:
    """The contents of an envelope.

    Attributes:
        shape: The array's shape.
        dtype: Its dtype.
        group: Name of the group that it was sent on.
        on_device: Whether it lies on a device. Then its data never travels with the envelope.
        inline: Its data, if it was small enough.
    """

    shape: tuple[int, ...]
    dtype: DType
    group: str
    on_device: bool = False
    inline: HostArray | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


# Most arrays are like the one before: what their heads say is worked out once, on both sides.


@lru_cache(_MOST_KEPT)
def seal_head(
    shape: tuple[int, ...],
    dtype: DType,
    group: str,
    *,
    on_device: bool,
    most_bytes: int = ENVELOPE_BYTES,
) -> HostArray:
    """Return an envelope without data.

    Raises:
        DTypeError: If the dtype cannot be described, or the description does not fit.
    """
    text = json.dumps([shape, dtype_to_json(dtype), group, on_device]).encode()
    if _LENGTH_BYTES + len(text) > most_bytes:
        raise DTypeError(
            f"the description of the dtype takes {len(text)} bytes, more than "
            f"{most_bytes - _LENGTH_BYTES}: shorten its field names"
        )
    return np.frombuffer(len(text).to_bytes(_LENGTH_BYTES, "little") + text, np.uint8)


def open_head(envelope: HostArray) -> tuple[Envelope, int]:
    """Read an envelope but for the data; return where these begin, too."""
    end = _LENGTH_BYTES + int.from_bytes(envelope[:_LENGTH_BYTES].tobytes(), "little")
    return _read_head(envelope[_LENGTH_BYTES:end].tobytes()), end


@lru_cache(_MOST_KEPT)
def _read_head(text: bytes) -> Envelope:
    shape, dtype, group, on_device = json.loads(text)
    return Envelope(tuple(shape), dtype_from_json(dtype), group, on_device)


def seal(data: HostArray | None, head: HostArray) -> tuple[HostArray, bool]:
    """Return the envelope for an array, and whether it holds the data already.

    Args:
        data: The array's elements in C order as flat bytes; None if they are on a device.
        head: What :func:`seal_head` gives for it.
    """
    if data is None or head.size + data.size > ENVELOPE_BYTES:
        return head, False
    envelope = np.empty(head.size + data.size, np.uint8)
    envelope[: head.size] = head
    envelope[head.size :] = data
    return envelope, True


def open_envelope(envelope: HostArray) -> Envelope:
    """Read a received envelope, in whatever room it lies."""
    head, end = open_head(envelope)
    if head.on_device or end + head.nbytes > ENVELOPE_BYTES:
        return head
    return Envelope(head.shape, head.dtype, head.group, inline=envelope[end : end + head.nbytes])


# -- operations -----------------------------------------------------------------------------------


def send(group: GroupCore, x: Array, dest: int, tag: int, label: str | None) -> CollectiveTensor:
    """Start to send `x`; see :meth:`ProcessGroup.send`."""
    courier = group.courier
    if courier is not None and label is None:
        handle: CollectiveTensor | None = courier.send(x, dest, tag)
        if handle is not None:
            return handle
    _check_peer(group, dest, "dest", tag)
    group.member("send")
    data = group.operand(x)
    call = Message("send", group.name, dest, tag, data.shape, data.dtype, label)
    parcel = _Parcel.of(group, data)  # first: what cannot be described is not sent
    group.count_message(call, data.nbytes)
    request: Request
    scope = StreamScope.of(data)
    if scope is not None:
        steps = scope.steps(_all_of(parcel.begin, group, dest, 2 * tag))
        # A chain that nobody else uses: sends start at once.
        request = group.progress.stage(object(), steps)
    else:
        requests = parcel.begin(group, dest, 2 * tag)
        request = requests[0] if len(requests) == 1 else all_done(*requests)
    unlock = None if scope is not None else group.lock(x, call)
    is_plain = type(x) is np.ndarray and x.dtype.names is None  # which may be renamed in place
    if courier is not None and is_plain and group.mail_with(dest) is not None:
        tally = group.tally("send", data.nbytes, None)
        head, text, nbytes = parcel.digest, parcel.text, data.nbytes
        courier.learn(Route(call, tally, int(dest), tag, 2 * tag, head, text, data, nbytes), True)
    return CollectiveTensor(group, call, request, unlock=unlock, scope=scope, nbytes=data.nbytes)


def recv(
    group: GroupCore,
    source: int,
    *,
    shape: Sequence[int] | int | None,
    dtype: Any,
    out: Array | None,
    tag: int,
    label: str | None,
) -> CollectiveTensor:
    """Start to receive an array; see :meth:`ProcessGroup.recv`."""
    courier, expected = group.courier, None
    if courier is not None and label is None:
        target = out
        if out is None and shape is not None and dtype is not None:
            expected = _expected(shape, dtype)
            target = _room(group, expected)
        if target is not None or (shape is None and dtype is None):
            handle: CollectiveTensor | None = courier.receive(source, target, tag)
            if handle is not None:
                return handle
    _check_peer(group, source, "source", tag)
    if expected is None:
        expected = _expected(shape, dtype) if out is None else _kind_of(out)
    call = Message("recv", group.name, source, tag, expected[0], expected[1] or "", label)
    arrival = group.arrival()
    arrival.call = call
    nbytes = _nbytes_of(expected)
    if nbytes is not None:
        arrival.expect(source, nbytes, 1)
    mail, scope = group.mail_with(source), group.scope_if_any()
    if mail is not None and scope is None:
        incoming = _Incoming(group, call, source, expected, out, arrival)
        room = incoming.room()
        group.count_message(call)
        request: Request = mail.receive(room, source, 2 * tag, incoming.digest, incoming)
        is_any = out is None and _is_any(expected)
        if courier is not None and (is_any or (room is not None and room.dtype.names is None)):
            _Incoming(group, call, source, expected).learn(courier, room, tag)
        return CollectiveTensor(group, call, request, value=room)
    group.count_message(call)
    # Envelopes of one source and tag are opened in order, so that their data is, too.
    chain = (group.communicator, source, tag)

    def all_steps() -> Steps:
        result = yield from _recv_steps(group, source, 2 * tag, expected, out, arrival)
        arrival.settle()
        return result

    steps = all_steps()
    request = group.progress.stage(chain, steps if scope is None else scope.steps(steps))
    return CollectiveTensor(group, call, request, scope=scope)


def send_init(
    group: GroupCore, x: Array, dest: int, tag: int, label: str | None
) -> PersistentMessage:
    """Plan to send `x`; see :meth:`ProcessGroup.send_init`."""
    _check_peer(group, dest, "dest", tag)
    data = group.operand(x)
    seal_head(data.shape, np.dtype(data.dtype), group.name, on_device=is_cupy(data))
    text = f"send(shape {data.shape}, {data.dtype}, dest {dest}, tag {tag})"
    return PersistentMessage(group, text, partial(send, group, x, dest, tag, label))


def recv_init(
    group: GroupCore, out: Array, source: int, tag: int, label: str | None
) -> PersistentMessage:
    """Plan to receive into `out`; see :meth:`ProcessGroup.recv_init`."""
    _check_peer(group, source, "source", tag)
    shape, dtype = _kind_of(out)
    text = f"recv(shape {shape}, {dtype}, source {source}, tag {tag})"
    start = partial(recv, group, source, shape=None, dtype=None, out=out, tag=tag, label=label)
    return PersistentMessage(group, text, start)


def shift(
    group: GroupCore, x: Array, offset: int, *, wrap: bool, label: str | None
) -> CollectiveTensor:
    """Start to send `x` along the group; see :meth:`ProcessGroup.shift`."""
    courier = group.courier
    if courier is not None and label is None:
        handle: CollectiveTensor | None = courier.shift(x, offset, wrap)
        if handle is not None:
            return handle
    rank = group.member("shift")
    data = group.operand(x)
    offset = as_int(offset, "offset", RankError)
    wrap = as_flag(wrap, "wrap", GroupError)
    dest, source = rank + offset, rank - offset
    if wrap:
        dest, source = dest % group.size, source % group.size
    parcel = _Parcel.of(group, data)
    peers = tuple(peer for peer in (dest, source) if 0 <= peer < group.size)
    call = Call("shift", group.name, f"offset {offset}, wrap {wrap}", label=label, peers=peers)
    scope, traffic = group.scope_if_any(), group.context.traffic
    is_near = rank not in peers and all(map(group.mail_with, peers))
    if is_near and scope is None and namespace(x) is np and not traffic.budgets:
        handle = _shift_near(group, x, call, parcel, dest, source)
        is_plain = type(x) is np.ndarray and x.dtype.names is None
        if courier is not None and peers and is_plain and label is None:
            to, back = (peer if peer in peers else -1 for peer in (dest, source))
            counts = (sparse, (source, data.nbytes, 1)) if source in peers else None
            plan = PlanRecord(data.nbytes, counts)
            group.account(plan, call.name, (call.name, call.rule, call.compared, call.dtype))
            incoming = _Incoming(group, call, source, _ANY, guess=(data.shape, data.dtype))
            said = parcel.digest, parcel.text, data, data.nbytes, incoming
            tally = plan.tally or Counter()
            route = ShiftRoute(call, tally, 0, offset, _SHIFT_TAG, *said)
            courier.learn_shift(route.set_ends(wrap, to, back, plan))
        return handle
    arrival = group.arrival()
    arrival.call = call

    def steps() -> Steps:
        if dest == rank:
            return moved(data.copy(), namespace(x))
        result = None
        # Both under way at once: a ring of ranks that all send first must not wait.
        sent: list[Request] = []
        if 0 <= dest < group.size:
            sent += parcel.begin(group, dest, _SHIFT_TAG)
        if 0 <= source < group.size:
            result = yield from _recv_steps(group, source, _SHIFT_TAG, _ANY, None, arrival)
        yield from sent
        arrival.settle()
        return None if result is None else moved(result, namespace(x))

    return group.submit(call, Prepared(PlanRecord(data.nbytes), steps, scope=scope), x)


def _shift_near(
    group: GroupCore, x: Array, call: Call, parcel: _Parcel, dest: int, source: int
) -> CollectiveTensor:
    """Start a shift among ranks that share memory: what comes is in all likelihood like `x`."""
    shape, dtype, mail = parcel.shape, parcel.dtype, group.communicator.node_mail
    nbytes = parcel.flat.nbytes
    plan = PlanRecord(nbytes)
    has_source = 0 <= source < group.size
    if has_source:
        plan.receives = (sparse, (source, nbytes, 1))
    came: list[NodeMessage] = []

    def begin() -> Request:
        # First: where memory is lacking, nothing is sent.
        room = group.empty(shape, dtype, np, x) if has_source else None
        # Both under way at once: a ring of ranks that all send first must not wait.
        sent = parcel.begin(group, dest, _SHIFT_TAG)[0] if 0 <= dest < group.size else None
        if room is None or mail is None:
            return sent or all_done()
        incoming = _Incoming(group, call, source, _ANY, guess=(shape, dtype))
        message = mail.receive(room, source, _SHIFT_TAG, parcel.digest, incoming)
        message.rest = sent
        came.append(message)
        return message

    def finish() -> HostArray | None:
        if not came:
            return None
        return came[0].buffer if came[0].value is None else came[0].value

    return group.submit(call, Prepared(plan, begin, None, finish), x)


def neighbour(group: GroupCore, step: int, action: str) -> int:
    """Return the rank `step` places on in the group.

    Raises:
        RankError: If the group ends before.
    """
    peer = group.member(action) + step
    if not 0 <= peer < group.size:
        raise RankError(
            f"rank {group.rank} of group {group.name!r} has no neighbour for {action}: "
            f"the group ends here, with {group.size} ranks"
        )
    return peer


def roll_call(group: GroupCore, timeout_s: float, label: str | None) -> None:
    """Wait at most so long for all ranks to come; see :meth:`ProcessGroup.barrier`."""
    rank = group.member("barrier")
    communicator = group.communicator
    call = Call("barrier", group.name, rule=f"timeout_s {timeout_s}", label=label)
    group.count_from_each(call, _NOTE_BYTES)
    # Counted by communicator: groups of the same ranks share one, and so its messages.
    ledger = group.live("barrier")
    ledger.roll_calls = current = ledger.roll_calls + 1
    number = np.array([current])
    heard = {peer: np.zeros(1, np.int64) for peer in range(group.size) if peer != rank}
    receives: dict[int, RecvRequest] = {
        peer: communicator.irecv(buffer, peer, _ROLL_CALL_TAG) for peer, buffer in heard.items()
    }
    sends: list[Request] = [communicator.isend(number, p, _ROLL_CALL_TAG) for p in heard]

    def all_here() -> bool:
        for peer in list(receives):
            if not receives[peer].test():
                continue
            if heard[peer][0] < current:
                # Of an earlier barrier that this rank gave up: wait for the current one.
                receives[peer] = communicator.irecv(heard[peer], peer, _ROLL_CALL_TAG)
            else:
                del receives[peer]
        unsent = [send for send in sends if not send.test()]
        return not receives and not unsent

    try:
        if group.progress.wait(communicator, all_here, what=call, timeout_s=timeout_s):
            return
    except BaseException:
        group.abandon(number, heard, receives, sends)
        raise
    # A rank that comes later still looks for what this one has sent.
    unsent = [send for send in sends if not send.test()]
    group.abandon(number, unsent)
    missing = sorted(peer for peer, receive in receives.items() if receive.cancel())
    if not missing:  # the last one came in this moment
        return
    raise CollectiveTimeoutError(
        f"{call}: after {timeout_s} s, ranks {missing} of group {group.name!r} had not come "
        f"(ranks {[group.ranks[peer] for peer in missing]} of the mesh); rank {rank} waited"
    )


def _check_peer(group: GroupCore, rank: int, what: str, tag: int) -> None:
    mine = group.member("send" if what == "dest" else "recv")
    if group.check_rank(rank, what) == mine:
        raise RankError(f"{what} is this rank, {mine}, of group {group.name!r}; use a copy")
    if not isinstance(tag, int | np.integer) or not 0 <= tag <= MAX_TAG:
        raise RankError(f"tag must be a whole number from 0 to {MAX_TAG}, got {shown(tag)}")


@dataclass(frozen=True, slots=True)
class _Parcel:
    """An array to be sent.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        flat: Its bytes; those on a device stay on devices.
        head: What it is, as the first message between nodes says it.
        text: The same as the ranks of a node say it.
        digest: Stands for the text.
    """

    shape: tuple[int, ...]
    dtype: DType
    flat: Array
    head: HostArray
    text: bytes
    digest: int

    @staticmethod
    def of(group: GroupCore, data: Array) -> _Parcel:
        """Make it.

        Raises:
            DTypeError: If the dtype cannot be described, or the description is too long.
        """
        try:
            flat = namespace(data).ascontiguousarray(data).reshape(-1).view(np.uint8)
        except MemoryError as error:
            raise group.out_of_memory("a message", error) from error
        shape, dtype = data.shape, np.dtype(data.dtype)
        return _Parcel(shape, dtype, flat, *_said(shape, dtype, group.name, is_cupy(data)))

    def begin(self, group: GroupCore, dest: int, wire_tag: int) -> list[Request]:
        """Start to send it."""
        flat, mail, on_device = self.flat, group.mail_with(dest), is_cupy(self.flat)
        requests: list[Request] = []
        if mail is not None:
            data = np.empty(0, np.uint8) if on_device else flat
            requests.append(mail.send(data, dest, wire_tag, self.digest, self.text))
        else:
            envelope, inline = seal(None if on_device else flat, self.head)
            requests.append(group.communicator.isend(envelope, dest, wire_tag))
            if not inline and not on_device:
                requests.append(group.communicator.isend(flat, dest, wire_tag + 1))
        if on_device:
            requests.append(group.side(namespace(flat)).isend(flat, dest, wire_tag + 1))
        return requests


@lru_cache(_MOST_KEPT)
def _said(
    shape: tuple[int, ...], dtype: DType, group: str, on_device: bool
) -> tuple[HostArray, bytes, int]:
    """Return the head of an array, its text, and the digest of that."""
    head = seal_head(shape, dtype, group, on_device=on_device)
    text = head[_LENGTH_BYTES:].tobytes()
    return head, text, digest_bits(text, 64)


def _all_of(begin: Callable[..., list[Request]], *arguments: Any) -> Steps:
    """The steps of several requests."""
    yield from begin(*arguments)


_Kind = tuple[tuple[int, ...] | None, DType | None]
"""Shape and dtype; None if any may come."""

_ANY: _Kind = (None, None)


def _is_any(kind: _Kind) -> bool:
    return kind[0] is None and kind[1] is None


def _room(group: GroupCore, kind: _Kind) -> HostArray | None:
    """Return an array for what is known to come; None if there is none."""
    shape, dtype = kind
    if shape is None or dtype is None:
        return None
    try:
        room: HostArray = group.empty(shape, dtype)
    except (MemoryError, ValueError):
        return None  # who sends one as large has an array for it, and this rank will say so
    return room


def _nbytes_of(kind: _Kind) -> int | None:
    shape, dtype = kind
    return None if shape is None or dtype is None else math.prod(shape) * dtype.itemsize


class _Incoming:
    """A receive in shared memory: its expected shape and dtype, and the making of its result.

    Args:
        group: The group.
        call: The receive.
        source: The sending rank.
        expected: What may come.
        out: The caller's array; None if there is none, or it is that of the message.
        arrival: Counts what comes; None for further receives like `call`, of which what is
            expected is counted at the start.
        guess: What comes in all likelihood, where any may; the array of the message is for it.

    Attributes:
        digest: Stands for what is expected, or guessed; 0 if that may be anything.
    """

    __slots__ = (
        "_arrival",
        "_call",
        "_expected",
        "_group",
        "_guess",
        "_last",
        "_out",
        "_source",
        "digest",
    )

    def __init__(
        self,
        group: GroupCore,
        call: Call,
        source: int,
        expected: _Kind,
        out: Array | None = None,
        arrival: Arrival | None = None,
        guess: _Kind = _ANY,
    ) -> None:
        self._group, self._call, self._source, self._expected = group, call, source, expected
        self._out, self._arrival, self._guess = out, arrival, guess
        self._last = -1  # the digest of the last message that was taken; -2 if that is learnt
        self.digest = 0
        shape, dtype = expected if guess is _ANY else guess
        if shape is not None and dtype is not None:
            with suppress(DTypeError):  # nobody can send such a one
                self.digest = _said(shape, np.dtype(dtype), group.name, False)[2]

    def room(self) -> HostArray | None:
        """Return the array that what is expected can come into straight; None if there is none."""
        out = self._out
        if out is not None:
            return out if type(out) is np.ndarray and out.flags.carray else None
        return _room(self._group, self._expected)

    def learn(self, courier: Courier, room: HostArray | None, tag: int) -> None:
        """Let further receives alike start at once."""
        call, source, guess = self._call, self._source, self._guess
        known = self._expected if guess is _ANY else guess
        nbytes = _nbytes_of(known)
        counts = None if nbytes is None else (sparse, (source, nbytes, 1))
        tally, wire_tag = self._group.tally("recv", 0, counts), 2 * tag
        likely = None if guess is _ANY else guess
        route = Route(call, tally, source, tag, wire_tag, self.digest, None, room, 0, self, likely)
        courier.learn(route, False)

    def take(self, message: NodeMessage) -> None:
        """Make the result of another message than is expected, or of any."""
        group, envelope = self._group, _read_head(message.text)
        if envelope.on_device:
            _take_before(group, message)
            message.accept(None)
            chain = (group.communicator, self._source)
            message.rest = group.progress.stage(chain, self._steps(message, envelope))
            return
        out = self._out_of(message)
        target, is_direct = _target(group, envelope, self._expected, out, np)
        message.accept(target)
        self._end(message, envelope, target, out, is_direct)
        courier, is_lasting = group.courier, self._arrival is None and self._call.name == "recv"
        if is_lasting and _is_any(self._expected) and courier is not None:
            if self._last == message.head:
                kind, tag = (envelope.shape, envelope.dtype), message.tag // 2
                next_one = _Incoming(group, self._call, self._source, _ANY, guess=kind)
                next_one.learn(courier, None, tag)
            self._last = -2 if self._last in (-2, message.head) else message.head

    def _out_of(self, message: NodeMessage) -> Array | None:
        """Return the array that the result is to be in; None for any."""
        is_callers = self._guess is _ANY and message.buffer is not None
        return message.buffer if is_callers else self._out

    def _steps(self, message: NodeMessage, envelope: Envelope) -> Steps:
        """Receive an array on a device, on a rank that has not used any so far."""
        group, source, out = self._group, self._source, self._out_of(message)
        library = _cupy(group, source)
        target, is_direct = _target(group, envelope, self._expected, out, library)
        yield group.side(library).irecv(target.reshape(-1).view(np.uint8), source, message.tag + 1)
        self._end(message, envelope, target, out, is_direct)

    def _end(
        self,
        message: NodeMessage,
        envelope: Envelope,
        target: Array,
        out: Array | None,
        is_direct: bool,
    ) -> None:
        group, source, arrival = self._group, self._source, self._arrival
        if arrival is not None:
            arrival.came(source, envelope.nbytes, 1)
        else:
            counted = _nbytes_of(self._expected if self._guess is _ANY else self._guess)
            nbytes = envelope.nbytes - (counted or 0)
            peer = group.ranks[source]
            group.context.traffic.count_from(self._call.name, peer, nbytes, int(counted is None))
        message.value = _fitting(group, source, envelope, self._expected, out, target, is_direct)
        if arrival is not None:
            arrival.settle()


def _take_before(group: GroupCore, message: NodeMessage) -> None:
    """Take all messages of the same sender and tag that came before, so that their data does."""
    for work in group.open_work.all():
        request = work._request
        if isinstance(request, NodeMessage) and request.comes_before(message):
            with suppress(MpimeshError):  # kept by it
                request.test()
        if request is message:
            return


def _recv_steps(
    group: GroupCore,
    source: int,
    wire_tag: int,
    expected: _Kind,
    out: Array | None,
    arrival: Arrival,
) -> Steps:
    mail = group.mail_with(source)
    if mail is not None:
        message = mail.receive(None, source, wire_tag)
        yield message
        envelope = _read_head(message.text)
    else:
        buffer = np.empty(ENVELOPE_BYTES, np.uint8)
        yield group.communicator.irecv(buffer, source, wire_tag)
        envelope = open_envelope(buffer)
    library = _cupy(group, source) if envelope.on_device else np
    target, is_direct = _target(group, envelope, expected, out, library)
    # Taken in even where it does not fit, or it would meet the next receive.
    if mail is not None:
        message.accept(None if envelope.on_device else target)
    elif envelope.inline is not None:
        target.reshape(-1).view(np.uint8)[...] = envelope.inline
    if envelope.on_device or (mail is None and envelope.inline is None):
        bytes_of_target = target.reshape(-1).view(np.uint8)
        yield group.side(library).irecv(bytes_of_target, source, wire_tag + 1)
    arrival.came(source, envelope.nbytes, 1)
    return _fitting(group, source, envelope, expected, out, target, is_direct)


def _target(
    group: GroupCore,
    envelope: Envelope,
    expected: _Kind,
    out: Array | None,
    library: ModuleType,
) -> tuple[Array, bool]:
    """Return an array for a message, and whether it is the caller's own."""
    fits = _misfit(envelope, expected) is None
    if fits and out is not None and namespace(out) is library and out.flags.c_contiguous:
        return out, True
    return group.empty(envelope.shape, envelope.dtype, library), False


def _fitting(
    group: GroupCore,
    source: int,
    envelope: Envelope,
    expected: _Kind,
    out: Array | None,
    target: Array,
    is_direct: bool,
) -> Array:
    """Return the result of a message that has come into `target`, if it is what is expected."""
    if envelope.group != group.name:
        raise GroupError(
            f"rank {group.rank} of group {group.name!r} got a message from rank {source} that "
            f"was sent on group {envelope.group!r}, which has the same ranks and so the same "
            "row of messages; receive on the group that was sent on, in the order of sending"
        )
    problem = _misfit(envelope, expected)
    if problem is not None:
        raise type(problem)(
            f"rank {group.rank} of group {group.name!r} expected {problem} from rank {source}"
        )
    if out is None or is_direct:
        return target
    out[...] = moved(target, namespace(out))
    return out


def _cupy(group: GroupCore, source: int) -> ModuleType:
    """Return CuPy, on a rank that maybe has not used it so far."""
    try:
        import cupy
    except ImportError as error:
        raise DTypeError(
            f"rank {source} of group {group.name!r} sends an array on a device to rank "
            f"{group.rank}, which cannot import CuPy ({error}); send cupy.asnumpy(x)"
        ) from None
    library: ModuleType = cupy
    return library


def _kind_of(out: Array) -> tuple[tuple[int, ...], DType]:
    """Return the shape and the dtype of an array to receive into, which is checked."""
    shape, dtype = getattr(out, "shape", ()), getattr(out, "dtype", np.dtype(float))
    output_array(out, shape, dtype)
    refuse_objects(dtype)
    return shape, dtype


def _expected(shape: Any, dtype: Any) -> tuple[tuple[int, ...] | None, DType | None]:
    kind = None if dtype is None else as_dtype(dtype)
    if kind is not None:
        refuse_objects(kind)
    return None if shape is None else as_shape(shape, one=True), kind


def _misfit(
    envelope: Envelope, expected: tuple[tuple[int, ...] | None, DType | None]
) -> ShapeError | DTypeError | None:
    shape, dtype = expected
    if shape is not None and shape != envelope.shape:
        return ShapeError(f"shape {shape}, but shape {envelope.shape} came")
    if dtype is not None and dtype != envelope.dtype:
        return DTypeError(f"dtype {dtype}, but dtype {envelope.dtype} came")
    return None


# -- broadcast and scatter of what the ranks do not know: the root's head goes ahead ---------------

_ROW_BYTES = 1024
_HAS_ARRAY, _TAKES_DEVICE, _HEAD = range(3)
"""Places in a row: of the flag that its rank has an array, of the flag that it can send and receive
the memory of a device, and of the head."""
_ARRAY, _REFUSED = 1, 2
"""A note about an array: that its head follows, or why it has none."""


def row_of(data: Array | None, *, of_cupy: bool, takes_device: bool) -> HostArray:
    """Return what a rank tells the others: of its array, if it has one, and of itself.

    Args:
        data: The array.
        of_cupy: Whether the caller gave it as one of CuPy, on a device.
        takes_device: Whether this rank can send and receive the memory of a device.
    """
    row = np.zeros(_ROW_BYTES, np.uint8)
    row[_TAKES_DEVICE] = takes_device
    if data is not None:
        dtype, most = np.dtype(data.dtype), _ROW_BYTES - _HEAD
        try:
            head = seal_head(data.shape, dtype, "", on_device=of_cupy, most_bytes=most)
            row[_HAS_ARRAY] = _ARRAY
        except DTypeError as error:
            # The others wait for the head: they are told why there is none.
            head = np.frombuffer(str(error).encode(errors="backslashreplace")[:most], np.uint8)
            row[_HAS_ARRAY] = _REFUSED
        row[_HEAD : _HEAD + head.size] = head
    return row


def array_of(row: HostArray, root: int) -> Envelope:
    """Return what the row of the root says of its array.

    Raises:
        DTypeError: On all ranks, if its dtype cannot be described.
    """
    if row[_HAS_ARRAY] == _REFUSED:
        text = row[_HEAD:].tobytes().rstrip(b"\0").decode(errors="replace")
        raise on_all_ranks(DTypeError(f"rank {root}: {text}"))
    return open_head(row[_HEAD:])[0]


def broadcast(
    group: GroupCore,
    x: Array | None,
    root: int | None,
    out: Array | None,
    label: str | None,
    algorithm: str | None,
) -> CollectiveTensor:
    """Start a broadcast from the one rank that has an array; see :meth:`ProcessGroup.broadcast`."""
    rank = group.member("broadcast")
    if root is not None:
        root = group.check_rank(root, "root")
        raise ShapeError(
            f"broadcast with root={root} needs an array of the root's shape and dtype on every "
            f"rank, rank {rank} passed None; use root=None to let the ranks find both"
        )
    data = None if x is None else group.operand(x)
    if out is not None:
        check_output(out)
    group.check_algorithm("broadcast", algorithm)
    row = row_of(data, of_cupy=is_cupy(x), takes_device=group.moves_device_memory)
    arrival = group.arrival()

    def steps() -> Steps:
        table = np.empty((group.size, _ROW_BYTES), np.uint8)
        yield group.communicator.all_gather(row, table.reshape(-1), [_ROW_BYTES] * group.size)
        senders = np.flatnonzero(table[:, _HAS_ARRAY]).tolist()
        if len(senders) != 1:
            raise on_all_ranks(
                GroupError(
                    "broadcast with root=None needs exactly one rank of group "
                    f"{group.name!r} to pass an array, but ranks {senders} did"
                )
            )
        root = senders[0]
        array = array_of(table[root], root)
        library = library_of(array.on_device and bool(table[:, _TAKES_DEVICE].all()))
        try:
            group.check_algorithm("broadcast", algorithm, on_device=library is not np)
        except GroupError as error:
            raise on_all_ranks(error) from None

        def move(recv: Array, target: Array) -> Steps:
            source = None if data is None else moved(data, library)
            if source is not None and target is not source:
                target[...] = source
            if algorithm is None or library is not np:
                yield group.side(library).broadcast(recv, root)
            else:
                begin = group.communicator.prepare("broadcast", (recv, root), algorithm)
                yield from run_steps(begin)

        return (
            yield from received_as(group, arrival, root, array, array.shape, library, out, move)
        )

    arrival.call = Call("broadcast", group.name, rule_by("root None", algorithm), label=label)
    plan = PlanRecord(0 if data is None else data.nbytes)
    prepared = Prepared(plan, steps, scope=group.scope_if_any())
    return group.submit(arrival.call, prepared, None if x is out else x)


def received_as(
    group: GroupCore,
    arrival: Arrival,
    root: int,
    array: Envelope,
    shape: tuple[int, ...],
    library: ModuleType,
    out: Array | None,
    move: Callable[[Array, Array], Steps],
) -> Steps:
    """Receive this rank's part of an array; the steps' value is the result.

    Args:
        group: The ranks.
        arrival: Counts what comes.
        root: Who has the array.
        array: What the root said of it.
        shape: That of this rank's part.
        library: The library whose memory bytes come into.
        out: The caller's array for the result.
        move: Moves the bytes: into a flat buffer, which becomes an array of `shape`.
    """
    misfit = _wrong_output(out, shape, array.dtype)
    recv, target, finish = receive(
        group,
        library,
        (shape, array.dtype),
        out if misfit is None else None,
        of_caller=library_of(array.on_device),
    )
    yield from move(recv, target)
    if root != group.rank:
        arrival.came(root, recv.nbytes, int(recv.nbytes > 0))
    if misfit is not None:
        raise misfit
    arrival.settle()
    return target if finish is None else finish()


def library_of(of_cupy: bool) -> ModuleType:
    """Return CuPy if it is asked for and in use on this rank, else NumPy."""
    return sys.modules.get("cupy", np) if of_cupy else np


def _wrong_output(out: Array | None, shape: tuple[int, ...], dtype: DType) -> MpimeshError | None:
    """Return what is wrong with `out`.

    Its shape is known only when the exchange has begun, and from then on a rank has to take
    part to the end: one that left would meet the others' next collective in the wrong one.
    """
    try:
        if out is not None:
            output_array(out, shape, dtype)
    except MpimeshError as error:
        return error
    return None
