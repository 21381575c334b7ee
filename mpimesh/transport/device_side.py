"""The device side of a communicator: one object with all the ways, which picks one.

The first collective finds out what the ranks can do together, step by step like every other
operation: nothing waits. Messages need no such agreement (see `device_messages.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mpimesh.arrays.namespace import is_cupy
from mpimesh.arrays.reduction import is_half
from mpimesh.arrays.stream_scope import StreamScope
from mpimesh.arrays.types import Array, DType
from mpimesh.errors import DTypeError, GroupError, ShapeError
from mpimesh.transport.base import Communicator, RecvRequest, Request
from mpimesh.transport.cuda_probe import ProbeResult
from mpimesh.transport.device_choice import Choice, find_ways
from mpimesh.transport.device_messages import DeviceMessages
from mpimesh.transport.device_mover import DeviceMover
from mpimesh.transport.device_work import steps_in
from mpimesh.transport.engine import Engine, StagedRequest, Steps
from mpimesh.transport.route import Route

__all__ = ["DeviceSide", "device_side"]

_MESSAGE_WAYS = {
    "": ("staged", "mpi_cuda", "cuda_ipc"),
    "staged": ("staged",),
    "mpi_cuda": ("staged", "mpi_cuda"),
    "cuda_ipc": ("staged", "cuda_ipc"),
    "nccl": ("staged", "mpi_cuda", "cuda_ipc"),
}
_ALIASES = {"mpi": "mpi_cuda"}
"""Backends of groups that have another name here."""


class DeviceSide:
    """Moves flat, C-contiguous CuPy arrays between the ranks of a communicator.

    Its methods are those of :class:`~mpimesh.transport.base.Communicator`. A request is done when
    its result is visible to the stream that was current at the start: work given to that stream
    from then on sees it. All ranks give device memory to the same collective.

    Args:
        communicator: The ranks.
        prefer: A way to be used for all collectives: ``"staged"``, ``"mpi_cuda"`` (or ``"mpi"``),
            ``"nccl"`` or ``"cuda_ipc"``; empty to pick the fastest that works, for each operation
            and size.

    Raises:
        GroupError: If no way has that name. One that cannot do an operation is refused there, on
            every rank, with the reason.
    """

    def __init__(self, communicator: Communicator, *, prefer: str = "") -> None:
        prefer = _ALIASES.get(prefer, prefer)
        if prefer not in _MESSAGE_WAYS:
            known = ", ".join(filter(None, _MESSAGE_WAYS))
            raise GroupError(f"no way to move device memory is called {prefer!r}; known: {known}")
        self.communicator = communicator
        self.rank = communicator.rank
        self.size = communicator.size
        self._prefer = prefer
        self._engine = communicator.engine or Engine()
        self._queue = ("device", id(self))
        self._found: StagedRequest | None = None
        self._messages: DeviceMessages | None = None
        self._others: dict[str, DeviceSide] = {}

    def preferring(self, prefer: str) -> DeviceSide:
        """Return a side of the same communicator whose collectives go by `prefer`. Local.

        Its messages are those of this one: each says by itself how it travels.
        """
        if not prefer or prefer == self._prefer:
            return self
        if prefer not in self._others:
            other = DeviceSide(self.communicator, prefer=prefer)
            other._messages = self._of_messages()
            self._others[prefer] = other
        return self._others[prefer]

    # -- collectives -------------------------------------------------------------------------

    def all_reduce(self, send: Array | None, recv: Array, op: str) -> Request:
        """Reduce over all ranks into `recv` on each; ``send=None`` means `recv` is the input."""
        given = _checked(recv if send is None else send)

        def begin(mover: DeviceMover, data: Array, out: Array) -> Request:
            return mover.all_reduce(None if data is out else data, out, op)

        return self._reduction("all_reduce", given, _checked(recv), op, begin)

    def reduce(self, send: Array, recv: Array | None, op: str, root: int) -> Request:
        """Reduce over all ranks into `recv` on `root`."""
        out = _checked(recv) if recv is not None and self.rank == root else None

        def begin(mover: DeviceMover, data: Array, out: Array | None) -> Request:
            return mover.reduce(data, out, op, root)

        return self._reduction("reduce", _checked(send), out, op, begin)

    def reduce_scatter(self, send: Array, recv: Array, counts: Sequence[int], op: str) -> Request:
        """Reduce `send`; rank r gets block r, ``counts[r]`` elements long."""

        def begin(mover: DeviceMover, data: Array, out: Array) -> Request:
            return mover.reduce_scatter(data, out, counts, op)

        return self._reduction("reduce_scatter", _checked(send), _checked(recv), op, begin)

    def all_gather(self, send: Array, recv: Array, counts: Sequence[int]) -> Request:
        """Lay the ranks' `send` one after the other in `recv`; rank r sends ``counts[r]``."""
        _checked(recv)
        nbytes = sum(counts) * _checked(send).dtype.itemsize
        return self._start(
            "all_gather", nbytes, send.dtype, lambda m: m.all_gather(send, recv, counts)
        )

    def gather(self, send: Array, recv: Array | None, counts: Sequence[int], root: int) -> Request:
        """As :meth:`all_gather`, but only `root` receives."""
        nbytes = sum(counts) * _checked(send).dtype.itemsize
        out = _checked(recv) if recv is not None and self.rank == root else None
        return self._start(
            "gather", nbytes, send.dtype, lambda m: m.gather(send, out, counts, root)
        )

    def scatter(self, send: Array | None, recv: Array, counts: Sequence[int], root: int) -> Request:
        """Rank r gets block r of root's `send`."""
        nbytes = sum(counts) * _checked(recv).dtype.itemsize
        given = _checked(send) if send is not None and self.rank == root else None
        return self._start(
            "scatter", nbytes, recv.dtype, lambda m: m.scatter(given, recv, counts, root)
        )

    def all_to_all(
        self, send: Array, recv: Array, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> Request:
        """Block d of `send` goes to rank d; block s of `recv` comes from rank s."""
        _checked(recv)
        # Sizes differ over ranks, so the choice cannot depend on them.
        return self._start(
            "all_to_all",
            None,
            _checked(send).dtype,
            lambda m: m.all_to_all(send, recv, send_counts, recv_counts),
        )

    def broadcast(self, buffer: Array, root: int) -> Request:
        """Copy `buffer` of `root` into `buffer` of every rank."""
        nbytes = _checked(buffer).nbytes
        return self._start("broadcast", nbytes, buffer.dtype, lambda m: m.broadcast(buffer, root))

    def barrier(self) -> Request:
        """Done once every rank has started it."""
        return self.communicator.barrier()

    # -- messages ----------------------------------------------------------------------------

    def isend(self, buffer: Array, dest: int, tag: int) -> Request:
        """Send `buffer`. Messages of one (source, dest, tag) arrive in order."""
        return self._of_messages().isend(_checked(buffer), dest, tag)

    def irecv(self, buffer: Array, source: int, tag: int) -> RecvRequest:
        """Receive into `buffer`, which has the message's size or more room."""
        return self._of_messages().irecv(_checked(buffer), source, tag)

    # -- what was chosen ---------------------------------------------------------------------

    def prepare(self) -> StagedRequest:
        """Collective: find out what the ranks can do together; the first collective does it."""
        if self._found is None:
            steps = find_ways(self.communicator, self._engine, self._prefer)
            # The ways belong to this device, whatever is current where somebody waits.
            steps = steps_in(StreamScope(), steps)
            self._found = self._engine.stage((*self._queue, "ways"), steps)
        return self._found

    def routes(self) -> Sequence[Route]:
        """Return how device memory travels, and why. Local; empty before the first collective."""
        if self._found is None or not self._found.done:
            return ()
        choice: Choice = self._found.value
        return (*choice.routes(), *self._message_routes())

    def ways(self) -> dict[str, ProbeResult]:
        """Return for each way whether the ranks have it, and why. Local; empty as `routes` is."""
        if self._found is None or not self._found.done:
            return {}
        choice: Choice = self._found.value
        return choice.ways()

    def free(self) -> None:
        """Give back streams, buffers and communicators. A second call does nothing."""
        while self._others:
            self._others.popitem()[1].free()
        if self._messages is not None:
            self._messages.free()
            self._messages = None
        if self._found is not None and self._found.done:
            choice: Choice = self._found.value
            choice.free()

    # -- helpers -----------------------------------------------------------------------------

    def _of_messages(self) -> DeviceMessages:
        if self._messages is None:
            allowed = _MESSAGE_WAYS[self._prefer]
            self._messages = DeviceMessages(
                self.communicator, self._engine, allowed, self._mpi_may_take_messages
            )
        return self._messages

    def _mpi_may_take_messages(self) -> bool:
        """Tell whether all ranks have agreed on it: a receiver is not asked again."""
        if self._found is None or not self._found.done:
            return False
        choice: Choice = self._found.value
        return choice.has("mpi_cuda", "messages")

    def _message_routes(self) -> Sequence[Route]:
        allowed = _MESSAGE_WAYS[self._prefer]
        if "cuda_ipc" in allowed:
            reason = "the receiver reads the sender's memory where it can open it, else mpi_cuda "
            reason += "where proven, else staged"
            return (Route("messages", "device", 0, "cuda_ipc", reason),)
        return (Route("messages", "device", 0, allowed[-1], f"asked for: {self._prefer}"),)

    def _reduction(
        self,
        name: str,
        data: Array,
        out: Array | None,
        op: str,
        begin: Callable[[DeviceMover, Array, Array], Request],
    ) -> Request:
        if not is_half(np.dtype(data.dtype)):
            return self._start(name, data.nbytes, data.dtype, lambda m: begin(m, data, out), op)
        # Half types are summed in float32, or every hop would round.
        scope = StreamScope()
        wide = data.astype(np.float32)
        wide_out = wide if out is data else None if out is None else out.astype(np.float32)
        request = self._start(name, wide.nbytes, wide.dtype, lambda m: begin(m, wide, wide_out), op)

        def steps() -> Steps:
            yield request
            if out is not None:
                with scope.current():
                    out[...] = wide_out

        return self._engine.stage(object(), steps())

    def _start(
        self,
        operation: str,
        nbytes: int | None,
        dtype: DType,
        begin: Callable[[DeviceMover], Request],
        op: str = "",
    ) -> Request:
        found = self.prepare()
        if found.done and not self._engine.busy(self._queue):
            return begin(found.value.pick(operation, nbytes, np.dtype(dtype), op))
        scope = StreamScope()

        def steps() -> Steps:
            yield found
            with scope.current():
                request = begin(found.value.pick(operation, nbytes, np.dtype(dtype), op))
            yield request

        return self._engine.stage(self._queue, steps())


def device_side(communicator: Communicator, *, prefer: str = "") -> DeviceSide:
    """Return who moves device memory between the ranks of `communicator`. Local.

    There is one for each communicator, made when it is first asked for, and given back with it.

    Args:
        communicator: The ranks.
        prefer: As for :class:`DeviceSide`.
    """
    if communicator.device is None:
        communicator.device = DeviceSide(communicator)
    side: DeviceSide = communicator.device
    return side.preferring(prefer)


def _checked(x: Array) -> Array:
    """Return `x` if it is a flat array of CuPy.

    Raises:
        DTypeError: If it is not CuPy's: no other device memory is ever touched.
        ShapeError: If its elements do not lie one after the other, as those who move it expect.
    """
    if not is_cupy(x):
        raise DTypeError(
            f"device memory is moved as arrays of CuPy, got {type(x).__module__}."
            f"{type(x).__qualname__}; pass cupy.asarray(x)"
        )
    if x.ndim != 1 or not x.flags.c_contiguous:
        raise ShapeError(
            f"device memory is moved as flat, contiguous arrays, got shape {x.shape} with strides "
            f"{x.strides}; pass cupy.ascontiguousarray(x).reshape(-1)"
        )
    return x
