"""Messages of device memory: each says first how its bytes travel.

Sender and receiver need not have agreed on anything. The sender looks what it can do with this
array and this peer, and writes it into a header; the receiver follows.

Inside a node nothing needs to be sent: the header carries the array's descriptor, and the receiver
copies from the sender's memory straight into its own, one read and one write on the device. The
sender's array belongs to the message until the receiver has replied that the copy is done. An
offer may be declined, and is not made to that peer again.

Messages of one source, destination and tag queue on a chain, so that header and data of one never
meet those of another. Their tags are above those of host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpimesh.arrays.namespace import Array
from mpimesh.comm.base import Communicator
from mpimesh.comm.cuda_ipc import DESCRIPTOR, ImportedMemory, export_array, process_key
from mpimesh.comm.engine import ProgressEngine, StagedRequest, Steps
from mpimesh.comm.requests import Condition, Receive, RecvRequest, Request
from mpimesh.comm.staged import Staged
from mpimesh.errors import TransportError

__all__ = ["DeviceMessages"]

_FIRST_TAG = 1 << 15
_REPLY_TAG = 1 << 16
_LAST_TAG = _REPLY_TAG + _FIRST_TAG - 1
_STAGED, _DIRECT, _OFFERED = 0, 1, 2
_HEADER = np.dtype([("nbytes", np.int64), ("way", np.int64), ("array", DESCRIPTOR)])


class DeviceMessages:
    """Sends and receives device memory between pairs of ranks.

    Args:
        host: The communicator whose ranks they are; tags from 32768 on are used.
        engine: Moves operations along.
        allowed: Strategies that may be used: of ``"staged"``, ``"mpi_cuda"``, ``"cuda_ipc"``.
        direct: Tells whether all ranks of `host` may give device memory to MPI.

    Raises:
        TransportError: If this MPI has too few tags.
    """

    def __init__(
        self,
        host: Communicator,
        engine: ProgressEngine,
        allowed: tuple[str, ...],
        direct: Callable[[], bool],
    ) -> None:
        _check_tags(host)
        self._host = host
        self._direct = direct
        self._engine = engine
        self._staged = Staged(host)
        self._stream = self._staged.stream
        self._allowed = allowed
        self._process = process_key()
        self._imports = ImportedMemory(process=self._process)
        self._reads = 0
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
        steps = self._start(chain, lambda: self._receive(receive, data, source, tag))
        return Receive(steps.test, lambda: receive.nbytes, receive.cancel)

    def free(self) -> None:
        """Close what was opened, once nothing on the stream reads it any more. Local."""
        with self._stream.device:
            self._stream.stream.synchronize()
            self._imports.close()

    def _start(self, chain: tuple[object, ...], make: Callable[[], Steps]) -> StagedRequest:
        return self._engine.stage(chain, self._stream.run(make))

    # -- the sender ----------------------------------------------------------------------

    def _send(self, data: Array, dest: int, tag: int) -> Steps:
        header, way = np.zeros(1, _HEADER), _STAGED
        if "cuda_ipc" in self._allowed and dest not in self._declined and data.size:
            descriptor = export_array(data, process=self._process)
            if descriptor["nbytes"] >= 0:
                header["array"], way = descriptor, _OFFERED
        if way == _STAGED and "mpi_cuda" in self._allowed and self._direct():
            way = _DIRECT
        header["nbytes"], header["way"] = data.size, way
        if way == _OFFERED:
            yield self._stream.reached()  # the receiver reads as soon as it knows
        yield self._host.isend(header.view(np.uint8), dest, _FIRST_TAG + tag)
        if way == _OFFERED:
            reply = np.zeros(1, np.uint8)
            yield self._host.irecv(reply, dest, _REPLY_TAG + tag)
            if reply[0]:
                return
            self._declined.add(dest)
            way = _STAGED
        if way == _DIRECT:
            yield self._stream.reached()
            yield self._host.isend(data, dest, _FIRST_TAG + tag)
        else:
            yield from self._staged.send(data, dest, _FIRST_TAG + tag)

    # -- the receiver ---------------------------------------------------------------------

    def _receive(self, receive: _Receive, buffer: Array, source: int, tag: int) -> Steps:
        if receive.was_cancelled():
            return
        header = np.zeros(1, _HEADER)
        receive.header = self._host.irecv(header.view(np.uint8), source, _FIRST_TAG + tag)
        yield Condition(receive.header_or_cancelled)
        if receive.was_cancelled():
            return
        nbytes, way = int(header["nbytes"][0]), int(header["way"][0])
        receive.nbytes = nbytes
        # Taken in even where it does not fit, or it would meet the next receive.
        fits = nbytes <= buffer.size
        data = buffer[:nbytes] if fits else self._staged.cupy.empty(nbytes, np.uint8)
        if way == _OFFERED:
            accepted = "cuda_ipc" in self._allowed and (
                yield from self._read(header["array"][0], data)
            )
            reply = np.array([accepted], np.uint8)
            yield self._host.isend(reply, source, _REPLY_TAG + tag)
            if not accepted:
                way = _STAGED
        if way == _DIRECT:
            yield self._stream.reached()
            yield self._host.irecv(data, source, _FIRST_TAG + tag)
        elif way == _STAGED:
            yield from self._staged.recv(data, source, _FIRST_TAG + tag)
        if not fits:
            raise TransportError(
                f"rank {self._host.rank} receives {buffer.size} bytes of device memory from rank "
                f"{source} with tag {tag}, but {nbytes} bytes were sent"
            )

    def _read(self, descriptor: Any, target: Array) -> Steps:
        """Copy an offered array into `target`; the steps' value is False if that cannot be."""
        try:
            address = self._imports.open(descriptor)
        except TransportError:
            return False
        self._reads += 1
        self._stream.copy(target.data.ptr, address, target.nbytes)
        yield self._stream.reached()
        self._reads -= 1
        if self._reads == 0:  # else a copy from what would be closed may be queued
            self._imports.trim()
        return True


def _check_tags(host: Communicator) -> None:
    if host.kind != "mpi":
        return
    from mpi4py import MPI

    tag_ub = int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 0)
    if tag_ub < _LAST_TAG:
        raise TransportError(
            f"messages of device memory need tags up to {_LAST_TAG}, but this MPI has them up to "
            f"{tag_ub}; send cupy.asnumpy(x)"
        )


class _Receive:
    """The message of a receive of device memory.

    Attributes:
        header: The request for its header, once that is started.
        nbytes: Its size, once the header is here.
        cancelled: Whether it was cancelled.
    """

    def __init__(self) -> None:
        self.header: RecvRequest | None = None
        self.nbytes = 0
        self.cancelled = False

    def header_or_cancelled(self) -> bool:
        """Tell whether the header is here, or none is to come."""
        return self.cancelled or (self.header is not None and self.header.test())

    def was_cancelled(self) -> bool:
        """Tell whether it was cancelled."""
        return self.cancelled

    def cancel(self) -> bool:
        """Cancel the receive, if no message has matched it."""
        if self.header is not None and not self.header.cancel():
            return False
        self.cancelled = True
        return True
