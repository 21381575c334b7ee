"""Messages between two ranks of a group, and shifts along it."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from mpimesh.arguments import as_flag, shown
from mpimesh.arrays import Array, DType, StreamScope, is_cupy, moved, namespace, refuse_objects
from mpimesh.arrays.dtypes import as_dtype
from mpimesh.errors import DTypeError, GroupError, RankError, ShapeError
from mpimesh.runtime.arrival import Arrival
from mpimesh.runtime.call import Message
from mpimesh.runtime.device_operation import DeviceOperation
from mpimesh.runtime.envelope import ENVELOPE_BYTES, Envelope, open_envelope, seal
from mpimesh.runtime.group_core import GroupCore, collective
from mpimesh.runtime.handle import CollectiveTensor
from mpimesh.runtime.operands import output_array
from mpimesh.runtime.operation import Operation
from mpimesh.transport import MAX_USER_TAG, Steps
from mpimesh.transport.device_strategy import steps_in

__all__ = ["MAX_TAG", "Messages"]

MAX_TAG = MAX_USER_TAG // 2
"""The largest `tag` of a message. Each tag takes two of MPI's: envelope and data."""

_SHIFT_TAG = MAX_USER_TAG + 3


class Messages(GroupCore):
    """``send``, ``recv`` and their neighbours of a group."""

    def send(
        self, x: Array, dest: int, *, tag: int = 0, label: str | None = None
    ) -> CollectiveTensor:
        """Send `x` to one rank of the group, which must :meth:`recv` it.

        Returns at once; do not write `x` before the handle is resolved. Messages of one
        sender, receiver and tag arrive in order, and never meet a collective.

        Args:
            x: The array: any dtype but objects, any memory order.
            dest: The receiving rank, counted in the group; not this one.
            tag: 0 to `MAX_TAG`, tells messages of one pair apart.
            label: The caller's name for this message, for reports.

        Returns:
            A handle; ``resolve()`` gives None once `x` may be written again.

        Raises:
            RankError: If `dest` is no other rank of the group.
            DTypeError: If `x` holds Python objects, or its dtype cannot be described.

        Cost:
            One message up to 4 KiB, else two: ``2 * latency_s + nbytes / bytes_per_s``.
        """
        self._peer(dest, "dest", tag)
        data = self.operand(x)
        call = Message("send", self.name, dest, tag, data.shape, data.dtype, label)
        parcel = self._parcel(data)  # first: what cannot be described is not sent
        self._post(call)
        steps = self._send_steps(parcel, dest, 2 * tag)
        scope = StreamScope.of(data)
        # A chain that nobody else uses: sends start at once.
        request = self.stage(object(), steps if scope is None else steps_in(scope, steps))
        if scope is not None:
            return self.own(DeviceOperation(scope, self, call, request, None), data.nbytes)
        return self.own(Operation(self, call, request, None, self.lock(x, call)), data.nbytes)

    def recv(
        self,
        source: int,
        *,
        shape: Sequence[int] | int | None = None,
        dtype: Any = None,
        out: Array | None = None,
        tag: int = 0,
        label: str | None = None,
    ) -> CollectiveTensor:
        """Receive the array that `source` sends to this rank.

        What comes may be of any shape and dtype, or be held to those given: a message that
        differs is an error and is never cut or left half-filled.

        Args:
            source: The sending rank, counted in the group; not this one.
            shape: The shape that must come, for one axis as a number, too; any if None.
            dtype: The dtype that must come; any if None.
            out: Array to receive into; its shape and dtype must come. New if None.
            tag: The sender's tag.
            label: The caller's name for this message, for reports.

        Returns:
            A handle; ``resolve()`` gives the array, which lies where the sender's did: on the
            host, or on this rank's device.

        Raises:
            RankError: If `source` is no other rank of the group.
            ShapeError: If `shape` is no shape; from ``resolve()``, if another one came. The
                message is gone.
            DTypeError: If `dtype` is no dtype that can be sent; from ``resolve()``, if another one
                came. The message is gone.
            GroupError: From ``resolve()``, if it was sent on another group of the same ranks.
        """
        self._peer(source, "source", tag)
        if out is not None:
            shape, dtype = getattr(out, "shape", ()), getattr(out, "dtype", np.dtype(float))
            output_array(out, shape, dtype)
        expected = _expected(shape, dtype)
        call = Message("recv", self.name, source, tag, expected[0], expected[1] or "", label)
        arrival = Arrival(self._context.traffic, self._members)
        arrival.call = call
        if expected[0] is not None and expected[1] is not None:
            arrival.expect(source, math.prod(expected[0]) * expected[1].itemsize, 1)
        self._post(call)
        # Envelopes of one source and tag are opened in order, so that their data is, too.
        chain = (self.communicator, source, tag)

        def all_steps() -> Steps:
            result = yield from self._recv_steps(source, 2 * tag, expected, out, arrival)
            arrival.settle()
            return result

        steps = all_steps()
        scope = self.scope_if_any()
        if scope is None:
            return self.own(Operation(self, call, self.stage(chain, steps), None), 0)
        request = self.stage(chain, steps_in(scope, steps))
        return self.own(DeviceOperation(scope, self, call, request, None), 0)

    @collective
    def shift(
        self, x: Array, offset: int = 1, *, wrap: bool = False, label: str | None = None
    ) -> CollectiveTensor:
        """Send `x` to the rank `offset` places on, and receive from the one `offset` before.

        Collective: every rank of the group calls it with the same `offset` and `wrap`.

        Args:
            x: This rank's array; shapes and dtypes may differ over ranks.
            offset: How many places; negative goes backwards.
            wrap: Whether the last rank is followed by the first.
            label: The caller's name for this call.

        Returns:
            A handle; ``resolve()`` gives the array that came, or None where the row ends.
        """
        rank = self._member("shift")
        data = self.operand(x)
        if not isinstance(offset, int | np.integer):
            raise RankError(f"offset must be a whole number of places, got {shown(offset)}")
        wrap = as_flag(wrap, "wrap", GroupError)
        dest, source = rank + offset, rank - offset
        if wrap:
            dest, source = dest % self.size, source % self.size
        parcel = self._parcel(data)
        arrival = Arrival(self._context.traffic, self._members)

        def steps() -> Steps:
            if dest == rank:
                return moved(data.copy(), namespace(x))
            result = None
            # Both under way at once: a ring of ranks that all send first must not wait.
            sent = []
            if 0 <= dest < self.size:
                sent.append(self.stage(object(), self._send_steps(parcel, dest, _SHIFT_TAG)))
            if 0 <= source < self.size:
                result = yield from self._recv_steps(
                    source, _SHIFT_TAG, (None, None), None, arrival
                )
            yield from sent
            arrival.settle()
            return None if result is None else moved(result, namespace(x))

        return self._launch(
            "shift",
            steps,
            rule=f"offset {offset}, wrap {wrap}",
            scope=self.scope_if_any(),
            label=label,
            peers=tuple(peer for peer in (dest, source) if 0 <= peer < self.size),
            lock=x,
            nbytes=data.nbytes,
            arrival=arrival,
        )

    def send_next(self, x: Array, *, tag: int = 0) -> CollectiveTensor:
        """Send `x` to the next rank of the group; an error on the last one."""
        return self.send(x, self._neighbour(1, "send_next"), tag=tag)

    def send_prev(self, x: Array, *, tag: int = 0) -> CollectiveTensor:
        """Send `x` to the rank before; an error on the first one."""
        return self.send(x, self._neighbour(-1, "send_prev"), tag=tag)

    def recv_next(self, *, out: Array | None = None, tag: int = 0) -> CollectiveTensor:
        """Receive from the next rank of the group; an error on the last one."""
        return self.recv(self._neighbour(1, "recv_next"), out=out, tag=tag)

    def recv_prev(self, *, out: Array | None = None, tag: int = 0) -> CollectiveTensor:
        """Receive from the rank before; an error on the first one."""
        return self.recv(self._neighbour(-1, "recv_prev"), out=out, tag=tag)

    def _post(self, call: Message) -> None:
        """Count a message: a mesh is not to close as if one were received that was not."""
        self._context.unread += 1 if call.name == "send" else -1
        mail = self.communicator.mail
        if mail is not None:
            mail.post(call)

    def _neighbour(self, step: int, action: str) -> int:
        peer = self._member(action) + step
        if not 0 <= peer < self.size:
            raise RankError(
                f"rank {self.rank} of group {self.name!r} has no neighbour for {action}: "
                f"the group ends here, with {self.size} ranks"
            )
        return peer

    def _peer(self, rank: int, what: str, tag: int) -> None:
        mine = self._member("send" if what == "dest" else "recv")
        if self.check_rank(rank, what) == mine:
            raise RankError(f"{what} is this rank, {mine}, of group {self.name!r}; use a copy")
        if not isinstance(tag, int | np.integer) or not 0 <= tag <= MAX_TAG:
            raise RankError(f"tag must be a whole number from 0 to {MAX_TAG}, got {shown(tag)}")

    def _parcel(self, data: Array) -> list[Array]:
        """Return the messages that carry an array: its envelope, and its data if it is large.

        The data of an array on a device is always a message of its own, which stays on devices.
        """
        flat = namespace(data).ascontiguousarray(data).reshape(-1).view(np.uint8)
        held = None if is_cupy(data) else flat
        envelope, inline = seal(held, data.shape, np.dtype(data.dtype), self.name)
        return [envelope] if inline else [envelope, flat]

    def _send_steps(self, parcel: list[Array], dest: int, wire_tag: int) -> Steps:
        requests = [
            self.side(namespace(part)).isend(part, dest, wire_tag + place)
            for place, part in enumerate(parcel)
        ]
        yield from requests

    def _recv_steps(
        self,
        source: int,
        wire_tag: int,
        expected: tuple[tuple[int, ...] | None, DType | None],
        out: Array | None,
        arrival: Arrival,
    ) -> Steps:
        buffer = np.empty(ENVELOPE_BYTES, np.uint8)
        yield self.communicator.irecv(buffer, source, wire_tag)
        envelope = open_envelope(buffer)
        fits = _misfit(envelope, expected) is None
        library = _cupy(self, source) if envelope.on_device else np
        direct = fits and out is not None and namespace(out) is library and out.flags.c_contiguous
        target: Any = out if direct else self.empty(envelope.shape, envelope.dtype, library)
        if envelope.inline is None:
            # Taken in even where it does not fit, or it would meet the next receive.
            bytes_of_target = target.reshape(-1).view(np.uint8)
            yield self.side(library).irecv(bytes_of_target, source, wire_tag + 1)
        else:
            target.reshape(-1).view(np.uint8)[...] = envelope.inline
        arrival.came(source, envelope.nbytes, 1)
        if envelope.group != self.name:
            raise GroupError(
                f"rank {self.rank} of group {self.name!r} got a message from rank {source} that "
                f"was sent on group {envelope.group!r}, which has the same ranks and so the same "
                "row of messages; receive on the group that was sent on, in the order of sending"
            )
        problem = _misfit(envelope, expected)
        if problem is not None:
            raise type(problem)(
                f"rank {self.rank} of group {self.name!r} expected {problem} from rank {source}"
            )
        if out is None or direct:
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


def _expected(shape: Any, dtype: Any) -> tuple[tuple[int, ...] | None, DType | None]:
    kind = None if dtype is None else as_dtype(dtype)
    if kind is not None:
        refuse_objects(kind)
    return None if shape is None else _axes(shape), kind


def _axes(shape: Any) -> tuple[int, ...]:
    sizes = shape if isinstance(shape, Iterable) else (shape,)
    try:
        axes = tuple(operator.index(size) for size in sizes)
    except TypeError:
        axes = (-1,)
    if any(size < 0 for size in axes):
        raise ShapeError(f"shape must be whole numbers of at least 0, got {shown(shape)}")
    return axes


def _misfit(
    envelope: Envelope, expected: tuple[tuple[int, ...] | None, DType | None]
) -> ShapeError | DTypeError | None:
    shape, dtype = expected
    if shape is not None and shape != envelope.shape:
        return ShapeError(f"shape {shape}, but shape {envelope.shape} came")
    if dtype is not None and dtype != envelope.dtype:
        return DTypeError(f"dtype {dtype}, but dtype {envelope.dtype} came")
    return None
