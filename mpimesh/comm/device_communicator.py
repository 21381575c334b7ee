"""Collectives and messages of device memory, by the best strategy that the ranks have.

The first collective finds out what the ranks can do together, step by step like every other
operation: nothing waits.

Messages need no such agreement: each says first how its bytes travel. The sender looks what it can
do with this array and this peer, and writes it into a header; the receiver follows. Inside a node
nothing needs to be sent: the header carries the array's descriptor, and the receiver copies from
the sender's memory straight into its own, one read and one write on the device. The sender's array
belongs to the message until the receiver has replied that the copy is done. An offer may be
declined, and is not made to that peer again. Where memory cannot be read in place and the ranks
have not agreed about CUDA-aware MPI in a collective, the first message to a peer asks: header and
reply say what each of the two knows of its proof, and both draw the same conclusion. Messages of
one source, destination and tag queue on a
chain, so that header and data of one never meet those of another. Their tags are above those of
host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, partialmethod
from typing import Any

import numpy as np

from mpimesh.arrays.namespace import Array, DType, StreamScope
from mpimesh.comm.algorithms import Algorithms, Row
from mpimesh.comm.base import Communicator
from mpimesh.comm.cuda_ipc import (
    COPIED_BYTES,
    DESCRIPTOR,
    CudaIpc,
    ImportedMemory,
    array_at,
    export_array,
    exported_memory,
    one_shot_bytes,
)
from mpimesh.comm.cuda_probe import KNOWN, PROCESS_PROBE, ProbeResult, pair_is_proven
from mpimesh.comm.device_strategy import (
    PARAMETERS,
    Collective,
    DeviceStrategy,
    checked,
    is_plain,
    plain_copy,
    plain_empty,
    process_key,
)
from mpimesh.comm.engine import ProgressEngine, StagedRequest, Steps
from mpimesh.comm.host_strategies import MPICuda, Staged
from mpimesh.comm.nccl import Nccl
from mpimesh.comm.requests import Condition, Receive, RecvRequest, Request
from mpimesh.errors import GroupError, TransportError, on_all_ranks

__all__ = ["DeviceCommunicator", "DeviceMessages", "SelfCommunicator", "device_communicator"]

_MESSAGE_STRATEGIES = {
    "": ("staged", "mpi_cuda", "cuda_ipc"),
    "staged": ("staged",),
    "mpi_cuda": ("staged", "mpi_cuda"),
    "cuda_ipc": ("staged", "cuda_ipc"),
    "nccl": ("staged", "mpi_cuda", "cuda_ipc"),
}
"""By which strategies messages may go, for each that may be asked for."""

_CALLS = "calls of device operations"
"""The chain of an engine on which their turns come."""

_ALIASES = {"mpi": "mpi_cuda"}
"""Backends of groups that have another name here."""


class DeviceCommunicator:
    """Moves flat, C-contiguous CuPy arrays between the ranks of a communicator.

    Its methods are those of :class:`~mpimesh.comm.base.Communicator`. Starting never waits. A
    request is done when its result is visible to the stream that was current at the start: work
    given to that stream from then on sees it. All ranks give device memory to the same collective.

    Args:
        communicator: The ranks.
        prefer: A strategy for all collectives: ``"staged"``, ``"mpi_cuda"`` (or ``"mpi"``),
            ``"nccl"`` or ``"cuda_ipc"``; empty to pick the fastest that works, for each operation
            and size.
        parent: Sends and receives the messages, which say by themselves how they travel; None if
            this one does.

    Raises:
        GroupError: If no strategy has that name. One that cannot do an operation is refused there,
            on every rank, with the reason.
    """

    def __init__(
        self,
        communicator: Communicator,
        *,
        prefer: str = "",
        parent: DeviceCommunicator | None = None,
    ) -> None:
        prefer = _ALIASES.get(prefer, prefer)
        if prefer not in _MESSAGE_STRATEGIES:
            known = ", ".join(filter(None, _MESSAGE_STRATEGIES))
            raise GroupError(f"no way to move device memory is called {prefer!r}; known: {known}")
        self.communicator = communicator
        self.rank = communicator.rank
        self.size = communicator.size
        self.variants: dict[str, DeviceCommunicator] = {}
        self._prefer = prefer
        self._parent = self if parent is None else parent
        self._engine = communicator.engine or ProgressEngine()
        self._queue = ("device", id(self))
        self._chain = ("device operations", id(self))
        self._search: StagedRequest | None = None
        self._host: Communicator | None = None
        self._strategies: list[DeviceStrategy] = []
        self._refused: dict[str, str] = {}
        self._messages: DeviceMessages | None = None

    # -- collectives -------------------------------------------------------------------------

    def start(self, name: str, *arguments: Any) -> Request:
        """Start the collective `name`, with the arguments of the communicator's method."""
        what = Collective.of(name, self.rank, self.size, *arguments)
        pick = partial(self._pick, name, what.nbytes, what.dtype, what.op)
        search, engine = self.prepare(), self._engine
        if search.done and not engine.busy(self._queue) and not engine.busy(_CALLS):
            return self._begin(pick(), what)
        scope, turn = StreamScope(), _Turn()
        engine.stage(_CALLS, turn.steps())

        def steps() -> Steps:
            try:
                yield search
                strategy = pick()
                if strategy.at_call:
                    yield Condition(lambda: turn.has_come)
                with scope.current():
                    request = self._begin(strategy, what)
            finally:
                turn.is_over = True
            yield request

        return engine.stage(self._queue, steps())

    def _begin(self, strategy: DeviceStrategy, what: Collective) -> Request:
        # What is put on its stream at the call waits for no other operation on the host.
        chain = object() if strategy.at_call else self._chain
        return self._engine.stage(chain, strategy.stream.run(partial(_converted, strategy, what)))

    all_reduce = partialmethod(start, "all_reduce")
    reduce = partialmethod(start, "reduce")
    reduce_scatter = partialmethod(start, "reduce_scatter")
    all_gather = partialmethod(start, "all_gather")
    gather = partialmethod(start, "gather")
    scatter = partialmethod(start, "scatter")
    all_to_all = partialmethod(start, "all_to_all")
    broadcast = partialmethod(start, "broadcast")

    def barrier(self) -> Request:
        """Done once every rank has started it."""
        return self.communicator.barrier()

    # -- messages ----------------------------------------------------------------------------

    def isend(self, buffer: Array, dest: int, tag: int) -> Request:
        """Send `buffer`. Messages of one (source, dest, tag) arrive in order."""
        return self._parent.messages().isend(checked(buffer), dest, tag)

    def irecv(self, buffer: Array, source: int, tag: int) -> RecvRequest:
        """Receive into `buffer`, which has the message's size or more room."""
        return self._parent.messages().irecv(checked(buffer), source, tag)

    def messages(self) -> DeviceMessages:
        """Return what sends and receives, made on first use. Local."""
        if self._messages is None:
            allowed = _MESSAGE_STRATEGIES[self._prefer]
            self._messages = DeviceMessages(
                self.communicator,
                self._engine,
                allowed,
                # Only once all ranks have agreed on it: a receiver is not asked again.
                lambda: any(s.name == "mpi_cuda" for s in self._strategies),
            )
        return self._messages

    # -- the choice --------------------------------------------------------------------------

    def prepare(self) -> StagedRequest:
        """Collective: find out what the ranks can do together; the first collective does it."""
        if self._search is None:
            # The strategies belong to this device, whatever is current where somebody waits.
            steps = StreamScope().steps(self._find())
            self._search = self._engine.stage((*self._queue, "search"), steps)
        return self._search

    def algorithms(self) -> Algorithms:
        """Return how device memory travels, and why. Local; empty before the first collective."""
        if not self._searched:
            return Algorithms(())
        collectives = [row for operation in PARAMETERS for row in self._rows_of(operation)]
        way, reason = _MESSAGE_STRATEGIES[self._prefer][-1], f"asked for: {self._prefer}"
        if way == CudaIpc.name:
            reason = "the receiver reads the sender's memory where it can open it, else mpi_cuda "
            reason += "where proven, else staged"
        return Algorithms([*collectives, Row("messages", "device", 0, way, reason)])

    def strategies(self) -> dict[str, ProbeResult]:
        """Return for each strategy whether the ranks have it, and why. Local; empty before."""
        if not self._searched:
            return {}
        refused = {name: ProbeResult(False, why) for name, why in self._refused.items()}
        return refused | {s.name: ProbeResult(True, s.reason) for s in self._strategies}

    def free(self, *, unended: bool = False) -> None:
        """Give back streams, buffers and communicators. A second call does nothing.

        Args:
            unended: Whether something may be under way that no rank waits for: its memory and
                streams stay.
        """
        while self.variants:
            self.variants.popitem()[1].free(unended=unended)
        messages, host = self._messages, self._host
        self._messages = self._host = None
        if messages is not None and not unended:
            messages.free()
        for strategy in self._strategies:
            if strategy.at_call or not unended:  # a kernel that waits on the device is ended
                strategy.free()
        if host is not None and unended:
            host.abandon()
        elif host is not None:
            host.free()

    @property
    def _searched(self) -> bool:
        return self._search is not None and self._search.done

    def _find(self) -> Steps:
        """Collective: find the strategies that all ranks have, in the order of preference."""
        host: Communicator = yield from self.communicator.idup()
        found: dict[str, DeviceStrategy] = {}
        for kind in (CudaIpc, Nccl, MPICuda, Staged):
            if kind is MPICuda and CudaIpc.name in found and self._prefer != MPICuda.name:
                self._refused[kind.name] = "not tried, since memory is read in place"
                continue
            strategy, why_not = yield from kind.find(host)
            if strategy is None:
                self._refused[kind.name] = why_not
            else:
                found[kind.name] = strategy
        if CudaIpc.name in found and Nccl.name in found:  # above, NCCL is faster
            found[CudaIpc.name].below_bytes = one_shot_bytes(host.size)
        self._host, self._strategies = host, [*found.values()]

    def _pick(self, operation: str, nbytes: int | None, dtype: DType, op: str) -> DeviceStrategy:
        """Return the strategy for an operation; the same on all ranks.

        Args:
            operation: The collective.
            nbytes: Its size; None where ranks do not know each other's.
            dtype: Of its arrays.
            op: The reduction.

        Raises:
            GroupError: On every rank, if a strategy was asked for that cannot.
        """
        reasons = []
        for strategy in self._strategies:
            below = strategy.below_bytes
            wanted = below is None or (nbytes is not None and nbytes < below)
            if strategy.name == self._prefer or (wanted and not self._prefer):
                why_not = strategy.cannot(operation, dtype, op)
                if why_not is None:
                    return strategy
                reasons.append(why_not)
        why = "; ".join(reasons) or self._refused.get(self._prefer, "it was not found")
        raise on_all_ranks(
            GroupError(
                f"{operation} of {dtype} cannot be done by {self._prefer!r}, which was asked for: "
                f"{why}; leave the way open, or ask for 'staged'"
            )
        )

    def _rows_of(self, operation: str) -> list[Row]:
        """Return who does an operation from which size on, and why."""
        sizes: Sequence[int | None] = [None]  # sizes differ over ranks, so they decide nothing
        if operation != "all_to_all":
            sizes = sorted({0} | {s.below_bytes for s in self._strategies if s.below_bytes})
        rows: list[Row] = []
        for nbytes in sizes:
            try:
                strategy = self._pick(operation, nbytes, np.dtype(np.float32), "sum")
            except GroupError as error:
                return [Row(operation, "device", 0, "none", str(error))]
            if not rows or rows[-1].algorithm != strategy.name:
                why = self._why(strategy)
                rows.append(Row(operation, "device", nbytes or 0, strategy.name, why))
        return rows

    def _why(self, strategy: DeviceStrategy) -> str:
        if self._prefer:
            return f"asked for; {strategy.reason}"
        return "; ".join([strategy.reason, *(f"{s}: {why}" for s, why in self._refused.items())])


class _Turn:
    """An operation's turn among those that a rank calls, over all its communicators.

    It comes when all that were called before have started. A first call may have to wait for the
    search for strategies, which ends at another moment on each rank. Only NCCL waits for its turn.

    Attributes:
        has_come: Whether it has come.
        is_over: Whether the operation has started.
    """

    __slots__ = ("has_come", "is_over")

    def __init__(self) -> None:
        self.has_come = self.is_over = False

    def steps(self) -> Steps:
        """Return the steps, to be staged on the chain of all turns."""
        self.has_come = True
        yield Condition(lambda: self.is_over)


class SelfCommunicator:
    """The collectives of one rank, for flat CuPy arrays: each is a copy on its device."""

    def _copy(self, send: Array | None, recv: Array, *_: object) -> Request:
        """Copy `send` to `recv`; ``send=None`` means that it is there."""
        if send is not None:
            recv[...] = send
        return Condition(lambda: True)

    all_reduce = reduce = reduce_scatter = _copy
    all_gather = gather = scatter = all_to_all = _copy

    def broadcast(self, buffer: Array, root: int) -> Request:
        """Leave `buffer` as it is."""
        return Condition(lambda: True)


def device_communicator(communicator: Communicator, *, prefer: str = "") -> DeviceCommunicator:
    """Return the device communicator of the ranks of `communicator`. Local.

    There is one for each communicator and preference, made when it is first asked for, and freed
    with the communicator.

    Args:
        communicator: The ranks.
        prefer: As for :class:`DeviceCommunicator`.
    """
    if communicator.device is None:
        communicator.device = DeviceCommunicator(communicator)
    default: DeviceCommunicator = communicator.device
    if not prefer:
        return default
    if prefer not in default.variants:
        variant = DeviceCommunicator(communicator, prefer=prefer, parent=default)
        default.variants[prefer] = variant
    return default.variants[prefer]


def _converted(strategy: DeviceStrategy, what: Collective) -> Steps:
    """Do a collective in the type in which it is reduced."""
    send, recv = what.send, what.recv
    if not what.op or send.dtype == what.dtype:
        yield from strategy.steps(what)
        return
    wide = send.astype(what.dtype)
    out = wide if recv is send else None if recv is None else recv.astype(what.dtype)
    yield from strategy.steps(replace(what, send=wide, recv=out))
    if recv is not None:
        recv[...] = out


# -- messages ------------------------------------------------------------------------------------

_FIRST_TAG = 1 << 15
_REPLY_TAG = 1 << 16
_LAST_TAG = _REPLY_TAG + _FIRST_TAG - 1
_STAGED, _DIRECT, _OFFERED, _ASKED = 0, 1, 2, 3
_HEADER = np.dtype([("nbytes", np.int64), ("way", np.int64), ("array", DESCRIPTOR), ("mpi", KNOWN)])


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
        self._exports = exported_memory(self._staged.cupy)
        self._declined: set[int] = set()
        self._answers: dict[int, bool] = {}
        """Of peers that were asked whether they and this rank may give device memory to MPI."""

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

    @property
    def _may_be_direct(self) -> bool:
        return "mpi_cuda" in self._allowed and self._host.kind == "mpi"

    # -- the sender ----------------------------------------------------------------------

    def _send(self, data: Array, dest: int, tag: int) -> Steps:
        header, way, lent = np.zeros(1, _HEADER), _STAGED, 0
        if "cuda_ipc" in self._allowed and dest not in self._declined and data.size:
            descriptor = export_array(data, process=self._process)
            if descriptor["nbytes"] >= 0:
                if data.nbytes <= COPIED_BYTES:
                    lent, descriptor = self._lend(data)
                header["array"], way = descriptor, _OFFERED
        if way == _STAGED and data.size and self._may_be_direct:
            if self._direct() or self._answers.get(dest):
                way = _DIRECT
            elif dest not in self._answers:
                way, header["mpi"] = _ASKED, PROCESS_PROBE.known()
        header["nbytes"], header["way"] = data.size, way
        if way == _OFFERED:
            yield self._stream.reached()  # the receiver reads as soon as it knows
        yield self._host.isend(header.view(np.uint8), dest, _FIRST_TAG + tag)
        if way == _OFFERED:
            reply = np.zeros(1, np.uint8)
            yield self._host.irecv(reply, dest, _REPLY_TAG + tag)
            if lent:
                self._exports.give_back(lent)
            if reply[0]:
                return
            self._declined.add(dest)
            way = _STAGED
        if way == _ASKED:
            known = np.zeros(1, KNOWN)
            yield self._host.irecv(known.view(np.uint8), dest, _REPLY_TAG + tag)
            self._answers[dest] = pair_is_proven(header["mpi"][0], known[0])
            way = _DIRECT if self._answers[dest] else _STAGED
        if way == _DIRECT:
            data = plain_copy(data, self._stream)
            yield self._stream.reached()
            yield self._host.isend(data, dest, _FIRST_TAG + tag)
        else:
            yield from self._staged.send(data, dest, _FIRST_TAG + tag)

    def _lend(self, data: Array) -> tuple[int, Any]:
        """Return a buffer that may stay open, filled with an array, and its descriptor."""
        lent = self._exports.take(data.nbytes)
        copy = array_at(lent, data.size, data.dtype)
        self._stream.copy_array(copy, data)
        return lent, export_array(copy, process=self._process)

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
        if way == _ASKED:
            known = PROCESS_PROBE.known() if self._may_be_direct else np.zeros(1, KNOWN)
            yield self._host.isend(known.view(np.uint8), source, _REPLY_TAG + tag)
            way = _DIRECT if pair_is_proven(known[0], header["mpi"][0]) else _STAGED
        if way == _DIRECT:
            plain = data if is_plain(data) else plain_empty(data)
            yield self._stream.reached()
            yield self._host.irecv(plain, source, _FIRST_TAG + tag)
            self._stream.copy_array(data, plain)
        elif way == _STAGED:
            yield from self._staged.recv(data, source, _FIRST_TAG + tag)
        if not fits:
            raise TransportError(
                f"rank {self._host.rank} receives {buffer.size} bytes of device memory from rank "
                f"{source} with tag {tag}, but {nbytes} bytes were sent"
            )

    def _read(self, descriptor: Any, target: Array) -> Steps:
        """Copy an offered array into `target`; the steps' value is False if that cannot be."""
        opened: list[int] = []
        try:
            address = self._imports.open(descriptor, opened)
        except TransportError:
            return False
        self._stream.copy(target.data.ptr, address, target.nbytes)
        yield self._stream.reached()
        self._imports.close_all(opened)
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
