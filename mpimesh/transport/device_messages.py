"""Messages of device memory: each says first how its bytes travel.

Sender and receiver need not have agreed on anything. The sender looks what it can do with this
array and this peer, and writes it into a header; the receiver follows. An offer to read the
sender's memory in place may be declined, and is not made to that peer again.

Messages of one source, destination and tag queue on a chain, so that header and data of one never
meet those of another. Their tags are above those of host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from mpimesh.arrays.types import Array
from mpimesh.errors import TransportError
from mpimesh.transport.base import Communicator, RecvRequest, Request
from mpimesh.transport.device_work import Lane, in_lane
from mpimesh.transport.engine import Engine, StagedRequest, Steps
from mpimesh.transport.hand_over import OFFER_BYTES, HandOver
from mpimesh.transport.staged import Staged

if TYPE_CHECKING:
    from mpimesh.arrays.types import HostArray

__all__ = ["DeviceMessages"]

_FIRST_TAG = 1 << 15
_REPLY_TAG = 1 << 16
_LAST_TAG = _REPLY_TAG + _FIRST_TAG - 1
_STAGED, _DIRECT, _OFFERED = 0, 1, 2
_HEAD = 16


class DeviceMessages:
    """Sends and receives device memory between pairs of ranks.

    Args:
        host: The communicator whose ranks they are; tags from 32768 on are used.
        engine: Moves operations along.
        allowed: Ways that may be used: of ``"staged"``, ``"mpi_cuda"``, ``"cuda_ipc"``.
        direct: Tells whether all ranks of `host` may give device memory to MPI.

    Raises:
        TransportError: If this MPI has too few tags.
    """

    def __init__(
        self,
        host: Communicator,
        engine: Engine,
        allowed: tuple[str, ...],
        direct: Callable[[], bool],
    ) -> None:
        _check_tags(host)
        self._host = host
        self._direct = direct
        self._engine = engine
        self._staged = Staged(host, engine, ("device messages", id(self)))
        self._lane: Lane = self._staged.lane
        self._allowed = allowed
        self._hand_over = HandOver(self._lane) if "cuda_ipc" in allowed else None
        self._declined: set[int] = set()

    def isend(self, buffer: Array, dest: int, tag: int) -> Request:
        """Send `buffer`."""
        chain = ("device send", id(self), dest, tag)
        return self._start(chain, lambda: self._send(buffer.view(np.uint8), dest, tag))

    def irecv(self, buffer: Array, source: int, tag: int) -> RecvRequest:
        """Receive into `buffer`, which may have more room than comes."""
        chain = ("device receive", id(self), source, tag)
        receive = _Receive()
        data = buffer.view(np.uint8)
        receive.request = self._start(chain, lambda: self._receive(receive, data, source, tag))
        return receive

    def free(self) -> None:
        """Give back what is held. Local."""
        self._staged.free()
        if self._hand_over is not None:
            self._hand_over.free()

    def _start(self, chain: tuple[object, ...], make: Callable[[], Steps]) -> StagedRequest:
        return self._engine.stage(chain, in_lane(self._lane, make))

    # -- the sender ----------------------------------------------------------------------

    def _send(self, data: Array, dest: int, tag: int) -> Steps:
        offer = None
        if self._hand_over is not None and dest not in self._declined and data.size:
            offer = self._hand_over.offer(data)
        way = _STAGED
        if offer is not None:
            way = _OFFERED
        elif "mpi_cuda" in self._allowed and self._direct():
            way = _DIRECT
        header: HostArray = np.zeros(_HEAD + OFFER_BYTES, np.uint8)
        header[:_HEAD].view(np.int64)[:] = (data.size, way)
        if offer is not None:
            header[_HEAD:] = offer
            yield self._lane.reached()  # the receiver reads as soon as it knows
        yield self._host.isend(header, dest, _FIRST_TAG + tag)
        if way == _OFFERED:
            reply = np.zeros(1, np.uint8)
            yield self._host.irecv(reply, dest, _REPLY_TAG + tag)
            if reply[0]:
                return
            self._declined.add(dest)
            way = _STAGED
        if way == _DIRECT:
            yield self._lane.reached()
            yield self._host.isend(data, dest, _FIRST_TAG + tag)
        else:
            yield from self._staged.send_steps(data, dest, _FIRST_TAG + tag)

    # -- the receiver ---------------------------------------------------------------------

    def _receive(self, receive: _Receive, room: Array, source: int, tag: int) -> Steps:
        if receive.taken_back():
            return
        header: HostArray = np.zeros(_HEAD + OFFER_BYTES, np.uint8)
        receive.header = self._host.irecv(header, source, _FIRST_TAG + tag)
        yield receive.header_or_cancelled()
        if receive.taken_back():
            return
        nbytes, way = header[:_HEAD].view(np.int64).tolist()
        receive.nbytes = nbytes
        # Taken in even where it does not fit, or it would meet the next receive.
        data = room[:nbytes] if nbytes <= room.size else self._lane.cupy.empty(nbytes, np.uint8)
        if way == _OFFERED:
            taken = self._hand_over is not None and (
                yield from self._hand_over.take_steps(header[_HEAD:], data)
            )
            reply = np.array([taken], np.uint8)
            yield self._host.isend(reply, source, _REPLY_TAG + tag)
            if not taken:
                way = _STAGED
        if way == _DIRECT:
            yield self._lane.reached()
            yield self._host.irecv(data, source, _FIRST_TAG + tag)
        elif way == _STAGED:
            yield from self._staged.recv_steps(data, source, _FIRST_TAG + tag)
        if nbytes > room.size:
            raise TransportError(
                f"rank {self._host.rank} receives {room.size} bytes of device memory from rank "
                f"{source} with tag {tag}, but {nbytes} bytes were sent"
            )


def _check_tags(host: Communicator) -> None:
    if host.kind != "mpi":
        return
    from mpi4py import MPI

    most = int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 0)
    if most < _LAST_TAG:
        raise TransportError(
            f"messages of device memory need tags up to {_LAST_TAG}, but this MPI has them up to "
            f"{most}; send cupy.asnumpy(x)"
        )


class _Receive:
    """A receive of device memory, which knows afterwards how much came."""

    __slots__ = ("cancelled", "header", "nbytes", "request")

    class _HeaderOrCancelled:
        def __init__(self, receive: _Receive) -> None:
            self._receive = receive

        def test(self) -> bool:
            header = self._receive.header
            return self._receive.cancelled or (header is not None and header.test())

    def __init__(self) -> None:
        self.request: StagedRequest | None = None
        self.header: RecvRequest | None = None
        self.nbytes = 0
        self.cancelled = False

    def test(self) -> bool:
        """Move the receive along, and tell whether the message is here."""
        return self.request is not None and self.request.test()

    def header_or_cancelled(self) -> Request:
        """Return the request for the header, which is done, too, when this is taken back."""
        return self._HeaderOrCancelled(self)

    def received_bytes(self) -> int:
        """Return the message's size."""
        return self.nbytes

    def taken_back(self) -> bool:
        """Tell whether it was cancelled."""
        return self.cancelled

    def cancel(self) -> bool:
        """Take the receive back, if no message has met it."""
        if self.header is not None and not self.header.cancel():
            return False
        self.cancelled = True
        return True
