"""Messages between two ranks of a group, which say what they are.

A transport delivers bytes. A receiver that expects other bytes than were sent gets wrong numbers,
cut or half-filled arrays. So between nodes each array goes as an envelope of at most 4 KiB, which
holds dtype, shape and the data itself where it is small enough; larger data follows as a second
message, received straight into its place. Between ranks that share memory the same text goes with
the data, and its digest, by which the receiver knows what it expects. The head of an envelope goes
ahead of a scatter, too, and of a broadcast whose root only that rank knows.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
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
from mpimesh.core.call import PlanRecord, Prepared, Route
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
    "describe",
    "library_of",
    "neighbour",
    "open_envelope",
    "received_as",
    "recv",
    "recv_init",
    "roll_call",
    "row_of",
    "seal",
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
_CACHED = 256


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


# Most arrays are like the one before: what is said of them is worked out once, on both sides.


@lru_cache(_CACHED)
def describe(
    shape: tuple[int, ...],
    dtype: DType,
    group: str,
    on_device: bool,
    most_bytes: int = ENVELOPE_BYTES,
) -> tuple[bytes, int]:
    """Return the text about an array, and its digest.

    Raises:
        DTypeError: If the dtype cannot be described, or the text takes more than `most_bytes` with
            its length.
    """
    text = json.dumps([shape, dtype_to_json(dtype), group, on_device]).encode()
    if _LENGTH_BYTES + len(text) > most_bytes:
        raise DTypeError(
            f"the description of the dtype takes {len(text)} bytes, more than "
            f"{most_bytes - _LENGTH_BYTES}: shorten its field names"
        )
    return text, digest_bits(text, 64)


@lru_cache(_CACHED)
def read_description(text: bytes) -> Envelope:
    """Return what :func:`describe` has said."""
    shape, dtype, group, on_device = json.loads(text)
    return Envelope(tuple(shape), dtype_from_json(dtype), group, on_device)


def seal(text: bytes, data: HostArray | None = None) -> tuple[HostArray, bool]:
    """Return the envelope for an array, and whether it holds the data already.

    Args:
        text: What :func:`describe` gives for it.
        data: Its elements in C order as flat bytes; None if they are on a device.
    """
    head = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    is_inside = data is not None and len(head) + data.size <= ENVELOPE_BYTES
    inside = data.tobytes() if data is not None and is_inside else b""
    return np.frombuffer(head + inside, np.uint8), is_inside


def open_head(envelope: HostArray) -> tuple[Envelope, int]:
    """Read an envelope but for the data; return where these begin, too."""
    end = _LENGTH_BYTES + int.from_bytes(envelope[:_LENGTH_BYTES].tobytes(), "little")
    return read_description(envelope[_LENGTH_BYTES:end].tobytes()), end


def open_envelope(envelope: HostArray) -> Envelope:
    """Read a received envelope, in whatever room it lies."""
    head, end = open_head(envelope)
    if head.on_device or end + head.nbytes > ENVELOPE_BYTES:
        return head
    return replace(head, inline=envelope[end : end + head.nbytes])


# -- operations -----------------------------------------------------------------------------------


def send(group: GroupCore, x: Array, dest: int, tag: int, label: str | None) -> CollectiveTensor:
    """Start to send `x`; see :meth:`ProcessGroup.send`."""
    courier = group.courier
    if courier is not None and label is None:
        handle: CollectiveTensor | None = courier.send(x, dest, tag)
        if handle is not None:
            return handle
    _check_peer(group, dest, "dest", tag)
    data = group.operand(x)
    call = Message("send", group.name, dest, tag, data.shape, data.dtype, label)
    route = _Route(group, call, 2 * tag, dest=int(dest))
    flat, scope = route.pack(data), StreamScope.of(data)  # what cannot be described is not sent
    # A chain that nobody else uses: sends start at once.
    handle = _start(route, call, flat, None, object(), scope)
    handle._unlock = group.lock(x, call)
    if _is_plain(x) and label is None:
        route.keep(x, (int(dest), int(tag)))
    return handle


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
    courier, expected, room = group.courier, None, out
    if out is None and (shape is not None or dtype is not None):
        expected = _expected(shape, dtype)
        room = None if courier is None else _room(group, expected)
    if courier is not None and label is None and (room is not None or expected is None):
        handle: CollectiveTensor | None = courier.receive(source, room, tag)
        if handle is not None:
            return handle
    _check_peer(group, source, "source", tag)
    if expected is None:
        expected = _ANY if out is None else _kind_of(out)
    call = Message("recv", group.name, source, tag, expected[0], expected[1] or "", label)
    route = _Route(group, call, 2 * tag, source=int(source), expected=expected, out=out)
    if route.counted_bytes is not None:
        group.context.traffic.admit(call, route.counted_bytes, 1)
    if type(room) is not np.ndarray or not room.flags.carray:
        room = None
    # Envelopes of one source and tag are opened in order, so that their data is, too.
    chain, scope = (group.communicator, source, tag), group.scope_if_any()
    handle = _start(route, call, None, room, chain, scope)
    if label is None and scope is None and (expected is _ANY or _is_plain(room)):
        route.keep(room, (int(source), int(tag)))
    return handle


def _start(
    route: _Route,
    call: Message,
    flat: Array | None,
    room: HostArray | None,
    chain: Hashable,
    scope: StreamScope | None,
) -> CollectiveTensor:
    """Start a send or a receive, in memory that the ranks share or by steps of a chain."""
    group = route.group
    if route.is_near and scope is None and group.courier is not None:
        handle: CollectiveTensor = group.courier.start(route, call, flat, room)
        return handle
    group.count_start(call, route)
    steps = route.steps(flat)
    request = group.progress.stage(chain, steps if scope is None else scope.steps(steps))
    return CollectiveTensor(group, call, request, scope=scope, nbytes=route.nbytes)


def send_init(
    group: GroupCore, x: Array, dest: int, tag: int, label: str | None
) -> PersistentMessage:
    """Plan to send `x`; see :meth:`ProcessGroup.send_init`."""
    _check_peer(group, dest, "dest", tag)
    data = group.operand(x)
    describe(data.shape, np.dtype(data.dtype), group.name, is_cupy(data))
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
    try:
        if courier is not None and label is None:
            handle: CollectiveTensor | None = courier.shift(x, offset, wrap)
            if handle is not None:
                return handle
        return _shift(group, x, offset, wrap=wrap, label=label)
    except Exception as error:
        group.fail("shift", error)


def _shift(
    group: GroupCore, x: Array, offset: int, *, wrap: bool, label: str | None
) -> CollectiveTensor:
    """Start to send what no earlier shift was like."""
    courier = group.courier
    rank = group.member("shift")
    data = group.operand(x)
    offset = as_int(offset, "offset", RankError)
    wrap = as_flag(wrap, "wrap", GroupError)
    dest, source = rank + offset, rank - offset
    if wrap:
        dest, source = dest % group.size, source % group.size
    peers = tuple(peer for peer in (dest, source) if 0 <= peer < group.size)
    call = Call("shift", group.name, f"offset {offset}, wrap {wrap}", label=label, peers=peers)
    to, back = (peer if peer in peers else -1 for peer in (dest, source))
    route = _Route(group, call, _SHIFT_TAG, to, back)
    flat, scope = route.pack(data), group.scope_if_any()
    if dest == rank:
        copy = moved(data.copy(), namespace(x))
        return group.submit(call, Prepared(route, all_done, copy, scope=scope), x)
    if courier is not None and route.is_near and scope is None and namespace(x) is np:
        if route.source >= 0:  # what comes is in all likelihood like `x`
            route.foresee(route.head, data.shape, data.dtype)
        handle: CollectiveTensor | None = courier.start(route, call, flat, None)
        if handle is not None:
            if _is_plain(x) and label is None:
                route.keep(x, (offset, wrap))
            return handle
        route.receives = None  # it is counted when it has come
    steps = partial(route.steps, flat, namespace(x))
    return group.submit(call, Prepared(route, steps, scope=scope), x)


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


def _is_plain(x: Any) -> bool:
    """Tell whether calls with an array like this one may go by what was planned for it."""
    # Fields may be renamed in place.
    return type(x) is np.ndarray and x.flags.c_contiguous and x.dtype.names is None


_Kind = tuple[tuple[int, ...] | None, DType | None]
"""Shape and dtype; None if any may come."""

_ANY: _Kind = (None, None)


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


class _Route(Route):
    """The plan of a send, of a receive, or of a shift, which is both.

    Args:
        group: The group.
        call: What is called.
        wire_tag: Its tag among all messages of the ranks.
        dest, source: The ranks that it sends to and receives from; -1 for none.
        expected: What may come.
        out: The caller's array for it; None if there is none.

    Attributes:
        group: The same.
        is_near: Whether it goes by memory that the ranks share.
        arrival: Counts what comes.
        counted_bytes: What of it is counted when it is called; None if that is not known.
    """

    __slots__ = "_expected", "_last_head", "_out", "arrival", "counted_bytes", "group", "is_near"

    def __init__(
        self,
        group: GroupCore,
        call: Call,
        wire_tag: int,
        dest: int = -1,
        source: int = -1,
        expected: _Kind = _ANY,
        out: Array | None = None,
    ) -> None:
        super().__init__(call, wire_tag, dest, source)
        self.group, self._expected, self._out, self._last_head = group, expected, out, 0
        self.arrival = group.arrival()
        self.arrival.call = call
        shape, dtype = expected
        self.counted_bytes: int | None = None
        ends = [rank for rank in (dest, source) if rank >= 0]
        self.is_near = bool(ends) and all(map(group.mail_with, ends))
        if shape is not None and dtype is not None:
            self.counted_bytes = math.prod(shape) * dtype.itemsize
            self.receives = sparse, (source, self.counted_bytes, 1)
            with suppress(DTypeError):  # nobody can send such a one
                self.expected_head = describe(shape, np.dtype(dtype), group.name, False)[1]

    # -- what is sent ------------------------------------------------------------------------

    def pack(self, data: Array) -> Array:
        """Describe the array that is sent, and return its bytes; those on a device stay there.

        Raises:
            DTypeError: If the dtype cannot be described, or the description is too long.
        """
        group = self.group
        try:
            flat: Array = namespace(data).ascontiguousarray(data).reshape(-1).view(np.uint8)
        except MemoryError as error:
            raise group.out_of_memory("a message", error) from error
        self.description, self.head = describe(
            data.shape, np.dtype(data.dtype), group.name, is_cupy(data)
        )
        self.nbytes = data.nbytes
        return flat

    def _begin(self, flat: Array) -> list[Request]:
        """Start to send it, be it in memory that the ranks share, between nodes or devices."""
        group, dest, tag = self.group, self.dest, self.wire_tag
        mail, side = group.mail_with(dest), group.communicator
        on_device = is_cupy(flat)
        if mail is not None:
            data = np.empty(0, np.uint8) if on_device else flat
            requests: list[Request] = [mail.send(data, dest, tag, self.head, self.description)]
            is_inside = True
        else:
            envelope, is_inside = seal(self.description, None if on_device else flat)
            requests = [side.isend(envelope, dest, tag)]
        if on_device or not is_inside:
            requests.append(group.side(namespace(flat)).isend(flat, dest, tag + 1))
        return requests

    # -- what comes --------------------------------------------------------------------------

    def steps(self, flat: Array | None, library: ModuleType | None = None) -> Steps:
        """Send and receive by any transport; the steps' value is what came, in that library."""
        # Both under way at once: a ring of ranks that all send first must not wait.
        sent = [] if flat is None or self.dest < 0 else self._begin(flat)
        result = (yield from self._receive()) if self.source >= 0 else None
        yield from sent
        self.arrival.settle()
        return result if result is None or library is None else moved(result, library)

    def _receive(self) -> Steps:
        group, source, tag = self.group, self.source, self.wire_tag
        mail = group.mail_with(source)
        if mail is None:
            buffer = np.empty(ENVELOPE_BYTES, np.uint8)
            yield group.communicator.irecv(buffer, source, tag)
            return (yield from self._data(open_envelope(buffer), self._out))
        # Not by `take`: what lies on a device comes in the order of the stream that is current.
        message = mail.receive(None, source, tag)
        yield message
        envelope = read_description(message.text)
        if not envelope.on_device:
            return self._accept(message, envelope, self._out)
        message.accept(None)
        return (yield from self._data(envelope, self._out))

    def take(self, message: NodeMessage) -> None:
        """Make the result of another message than is expected, or of any."""
        group, envelope = self.group, read_description(message.text)
        has_own = self._expected is _ANY or message.buffer is None  # the buffer is but a guess
        out = self._out if has_own else message.buffer
        if not envelope.on_device:
            message.value = self._accept(message, envelope, out)
            if self._expected is _ANY and message.head == self._last_head:
                self.foresee(message.head, envelope.shape, envelope.dtype)
            self._last_head = message.head
            self.arrival.settle()
            return
        # On a rank that has not used any device so far.
        _take_before(group, message)
        message.accept(None)

        def steps() -> Steps:
            message.value = yield from self._data(envelope, out)
            self.arrival.settle()

        message.rest = group.progress.stage((group.communicator, self.source), steps())

    def _accept(self, message: NodeMessage, envelope: Envelope, out: Array | None) -> Array:
        """Put a message in memory of the host into an array; return the result."""
        target = self._target(envelope, out, np)
        message.accept(target)
        counted = self.counted_bytes if message.buffer is None else message.buffer.nbytes
        return self._result(envelope, out, target, counted)

    def _data(self, envelope: Envelope, out: Array | None) -> Steps:
        """Receive the data of an envelope; the steps' value is the result."""
        library = _cupy(self.group, self.source) if envelope.on_device else np
        target = self._target(envelope, out, library)
        flat = target.reshape(-1).view(np.uint8)
        if envelope.inline is not None:
            flat[...] = envelope.inline
        else:
            yield self.group.side(library).irecv(flat, self.source, self.wire_tag + 1)
        return self._result(envelope, out, target, self.counted_bytes)

    def _target(self, envelope: Envelope, out: Array | None, library: ModuleType) -> Array:
        """Return an array for a message: the caller's own if it can be."""
        fits = out is not None and namespace(out) is library and out.flags.c_contiguous
        if fits and self._problem(envelope) is None:
            return out
        # Taken in even where it does not fit, or it would meet the next receive.
        return self.group.empty(envelope.shape, envelope.dtype, library)

    def _result(
        self, envelope: Envelope, out: Array | None, target: Array, counted_bytes: int | None
    ) -> Array:
        """Return the result of a message that is in `target`, if it is one that is expected."""
        group, source = self.group, self.source
        self.arrival.came(
            source, envelope.nbytes - (counted_bytes or 0), int(counted_bytes is None)
        )
        if envelope.group != group.name:
            raise GroupError(
                f"rank {group.rank} of group {group.name!r} got a message from rank {source} that "
                f"was sent on group {envelope.group!r}, which has the same ranks and so the same "
                "row of messages; receive on the group that was sent on, in the order of sending"
            )
        problem = self._problem(envelope)
        if problem is not None:
            raise problem
        if out is None or target is out:
            return target
        out[...] = moved(target, namespace(out))
        return out

    def _problem(self, envelope: Envelope) -> MpimeshError | None:
        """Return what is wrong with a message of this kind, if anything is."""
        group, (shape, dtype) = self.group, self._expected
        text = f"rank {group.rank} of group {group.name!r} expected"
        if shape is not None and shape != envelope.shape:
            came = f"but shape {envelope.shape} came"
            return ShapeError(f"{text} shape {shape}, {came} from rank {self.source}")
        if dtype is not None and dtype != envelope.dtype:
            came = f"but dtype {envelope.dtype} came"
            return DTypeError(f"{text} dtype {dtype}, {came} from rank {self.source}")
        return None

    def foresee(self, head: int, shape: tuple[int, ...], dtype: DType) -> None:
        """Have an array like this one ready for what comes from now on."""
        self.guess, self.expected_head = (shape, dtype), head
        self.receives = sparse, (self.source, math.prod(shape) * dtype.itemsize, 1)
        if self.tally is not None:
            self.tally = self.group.tally(self.name, self.nbytes, self.receives)

    def keep(self, like: HostArray | None, options: tuple[Any, ...]) -> None:
        """Let calls alike go by it, where nothing is to be compared or limited."""
        group = self.group
        if group.courier is None or not self.is_near:
            return
        if not (group.checked or group.context.traffic.budgets):
            self._out = None  # it is that of each call
            self.tally = group.tally(self.name, self.nbytes, self.receives)
            group.courier.keep(self, like, options)


def _take_before(group: GroupCore, message: NodeMessage) -> None:
    """Take all messages of the same sender and tag that came before, so that their data does."""
    for work in group.open_work.all():
        request = work._request
        if isinstance(request, NodeMessage) and request.comes_before(message):
            with suppress(MpimeshError):  # kept by it
                request.test()
        if request is message:
            return


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


def _expected(shape: Any, dtype: Any) -> _Kind:
    kind = None if dtype is None else as_dtype(dtype)
    if kind is not None:
        refuse_objects(kind)
    return None if shape is None else as_shape(shape, one=True), kind


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
            head, _ = seal(describe(data.shape, dtype, "", of_cupy, most)[0])
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
    problem = _wrong_output(out, shape, array.dtype)
    recv, target, finish = receive(
        group,
        library,
        (shape, array.dtype),
        out if problem is None else None,
        of_caller=library_of(array.on_device),
    )
    yield from move(recv, target)
    if root != group.rank:
        arrival.came(root, recv.nbytes, int(recv.nbytes > 0))
    if problem is not None:
        raise problem
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
