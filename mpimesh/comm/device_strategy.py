"""The contract of a strategy to move device memory, and the stream that it works on.

NCCL, CUDA IPC, CUDA-aware MPI and staging through the host are strategies. Each turns a
:class:`Collective` of flat, C-contiguous CuPy arrays into steps: a generator that runs with the
strategy's own stream current. `device_communicator.py` chooses among them.

An operation takes its turn like this. At its start an event is recorded on the stream that is
current for the caller: all that the operation reads was made before. Its own work goes to a stream
of its own, which waits for that event on the device. At its end the caller's stream is made to
wait for an event of the own stream. The host never waits: where a step needs bytes to be there
(MPI is about to read them), it asks the event, again and again, in `test`.

Whichever thread of a rank waits moves the operations of all of them along. To CUDA it is all the
same, but for the default stream of each thread, which only its own thread can name: who called on
that gets the result when the device has come to it, which is then in order for all streams.

Temporary memory is allocated, used and given back with the own stream current, so CuPy's pool
gives it out again in the order of that stream.
"""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import numpy as np

from mpimesh.arguments import digest_bits
from mpimesh.arrays.dtypes import is_half
from mpimesh.arrays.namespace import Array, DType, StreamScope, is_cupy
from mpimesh.comm.base import Communicator
from mpimesh.comm.engine import Steps
from mpimesh.comm.requests import Condition, Request, cut
from mpimesh.errors import DTypeError, ShapeError, TransportError

__all__ = [
    "PARAMETERS",
    "Collective",
    "CommStream",
    "DeviceStrategy",
    "agree",
    "checked",
    "gpu_key",
    "is_plain",
    "node_key",
    "plain_copy",
    "plain_empty",
    "process_key",
]

R = TypeVar("R")

_SUCCESS, _NOT_READY = 0, 600
"""CUDA's answers to a query of an event."""


# -- streams ---------------------------------------------------------------------------------


class CommStream(StreamScope):
    """A stream of mpimesh's own on the device that is current when it is made.

    Args:
        host: Its waits are woken while work on the stream is under way.
    """

    def __init__(self, host: Communicator) -> None:
        super().__init__()
        self.stream = self._cuda.Stream(non_blocking=True)
        self._host = host

    @property
    def ptr(self) -> int:
        """CUDA's handle of the stream."""
        ptr: int = self.stream.ptr
        return ptr

    def reached(self) -> Request:
        """Return the request that is done when all the stream was given so far has happened."""
        event = self.mark()
        return Condition(lambda: self.has_come(event.ptr))

    def has_come(self, event: int) -> bool:
        """Ask the device whether it has come to an event; never waits for it.

        Args:
            event: CUDA's handle.

        Raises:
            TransportError: If work on the device has failed: the event will never come.
        """
        code = self._cuda.runtime.eventQuery(event)
        if code == _SUCCESS:
            return True
        if code != _NOT_READY:
            raise TransportError(
                f"work on the GPU of rank {self._host.rank} has failed with CUDA error {code}, and "
                "so the data of an operation will never be there"
            )
        self._host.stir()
        return False

    def copy(self, target_ptr: int, source_ptr: int, nbytes: int) -> None:
        """Copy bytes from anywhere to anywhere, on the stream."""
        if nbytes and target_ptr != source_ptr:
            runtime = self._cuda.runtime
            runtime.memcpyAsync(target_ptr, source_ptr, nbytes, runtime.memcpyDefault, self.ptr)

    def copy_array(self, target: Array, source: Array) -> None:
        """Copy all bytes of an array into another one."""
        self.copy(target.data.ptr, source.data.ptr, source.nbytes)

    def run(self, make: Callable[[], Steps]) -> Steps:
        """Return the steps of `make`, run on this stream between two events of the caller's.

        Call it where the operation is called: it takes the current stream.
        """
        caller = StreamScope()
        return self._run(caller, caller.mark(), make)

    def _run(self, caller: StreamScope, start: Any, make: Callable[[], Steps]) -> Steps:
        def attempt(function: Callable[[], R]) -> R:
            try:
                return self.call(function)
            except StopIteration:
                raise
            except Exception:
                # This stream may still be at work on the caller's arrays.
                with suppress(Exception):  # such as of a GPU that has failed
                    self._go_before(caller)
                raise

        self.stream.wait_event(start)
        steps = make()
        while True:
            try:
                request = attempt(lambda: next(steps))
            except StopIteration:
                break
            # MPI may work on the arrays in a test, with the device of who waits current. It may in
            # any other of its calls, too: so the device of a rank is current in its threads.
            yield Condition(partial(attempt, request.test))
        if caller.per_thread:
            yield self.reached()
        self._go_before(caller)

    def _go_before(self, caller: StreamScope) -> None:
        """Let the caller's stream wait for all that this one was given so far."""
        end = self.mark()
        with caller.device:
            caller.stream.wait_event(end)


# -- memory ----------------------------------------------------------------------------------


def is_plain(x: Array) -> bool:
    """Tell whether an array lies in memory of `cudaMalloc`, as CuPy's default pool gives it.

    Other processes can open no other, and MPI is tried with that alone: memory of
    `cupy.cuda.MemoryAsyncPool`, managed memory and that of other libraries crash some MPIs.
    """
    memory = x.data.mem
    return bool(getattr(memory, "identity", type(memory).__name__) == "Memory") or x.nbytes == 0


def plain_empty(like: Array) -> Array:
    """Return a new array of plain memory; what the program allocates may be of any kind."""
    cupy = sys.modules["cupy"]
    return cupy.ndarray(like.shape, like.dtype, _plain_pool(cupy).malloc(like.nbytes))


def plain_copy(x: Array, stream: CommStream) -> Array:
    """Return `x` if it lies in plain memory, else a copy that does, made on `stream`."""
    if is_plain(x):
        return x
    copy = plain_empty(x)
    stream.copy_array(copy, x)
    return copy


@lru_cache(maxsize=1)
def _plain_pool(cupy: ModuleType) -> Any:
    return cupy.cuda.MemoryPool()


# -- keys ------------------------------------------------------------------------------------


@cache
def node_key() -> int:
    """Return a number that processes share only if they run on one start of one machine."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    facts = f"{os.uname().nodename}|{boot.read_text() if boot.exists() else ''}"
    return digest_bits(facts.encode(), 63)


def gpu_key() -> int:
    """Return a number that no other GPU of the node has."""
    runtime = sys.modules["cupy"].cuda.runtime
    device = runtime.getDevice()
    properties = runtime.getDeviceProperties(device)
    # Both: CuPy cuts the UUID off at a zero byte, and the parts of a GPU share its place.
    place = f"{properties.get('uuid')}|{runtime.deviceGetPCIBusId(device)}"
    return digest_bits(place.encode(), 63)


def process_key() -> int:
    """Return a number that no other process of the node has."""
    begin = Path("/proc/self/stat").read_text().split()[21]
    return digest_bits(f"{os.getpid()}|{begin}".encode(), 63)


# -- agreement -------------------------------------------------------------------------------


def agree(host: Communicator, problem: str, elsewhere: str) -> Steps:
    """Collective: find out whether all ranks can; the steps' value says why not, empty if they can.

    Args:
        host: The ranks.
        problem: Why this rank cannot; empty if it can.
        elsewhere: What is said of the first rank that cannot, where this one can.
    """
    first = np.array([host.rank if problem else host.size], np.int64)
    yield host.all_reduce(None, first, "min")
    return problem or ("" if first[0] == host.size else f"rank {first[0]} {elsewhere}")


# -- collectives -----------------------------------------------------------------------------

PARAMETERS: dict[str, tuple[str, ...]] = {
    "all_reduce": ("send", "recv", "op"),
    "reduce": ("send", "recv", "op", "root"),
    "reduce_scatter": ("send", "recv", "counts", "op"),
    "all_gather": ("send", "recv", "counts"),
    "gather": ("send", "recv", "counts", "root"),
    "scatter": ("send", "recv", "counts", "root"),
    "all_to_all": ("send", "recv", "send_counts", "recv_counts"),
    "broadcast": ("buffer", "root"),
}
"""The parameters of each collective of a :class:`~mpimesh.comm.base.Communicator`."""


def checked(x: Array) -> Array:
    """Return `x` if it is a flat array of CuPy.

    Raises:
        DTypeError: If it is not CuPy's: no other device memory is ever touched.
        ShapeError: If its elements do not lie one after the other, as strategies expect.
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


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective of flat device memory, as one rank takes part in it.

    Attributes:
        name: The communicator's method.
        rank: This rank.
        size: Number of ranks.
        send: The array that this rank sends; None if it sends none.
        recv: The array that it receives; None if it receives none, as the root of a broadcast. An
            all-reduce may have one array for both.
        send_counts: Elements of each rank's block; in an all-to-all of this rank's block for each;
            of the one block, where all ranks have the whole array.
        recv_counts: The same, in an all-to-all of the block from each.
        op: The reduction; empty if blocks are moved: these are arrays of bytes.
        root: The rank that others send to or receive from; -1 if there is none.
        dtype: The type in which it is reduced, float32 for half types, or every hop would round;
            the caller's own, if blocks are moved.
    """

    name: str
    rank: int
    size: int
    send: Array
    recv: Array
    send_counts: Sequence[int]
    recv_counts: Sequence[int]
    op: str
    root: int
    dtype: DType

    @classmethod
    def of(cls, name: str, rank: int, size: int, *arguments: Any) -> Collective:
        """Return the collective `name` of these arguments of the communicator's method.

        Raises:
            DTypeError: If an array is not CuPy's.
            ShapeError: If its elements do not lie one after the other.
        """
        values = dict(zip(PARAMETERS[name], arguments, strict=True))
        op, root = values.get("op", ""), values.get("root", -1)
        sends = rank == root or name not in ("scatter", "broadcast")
        receives = rank == root or name not in ("reduce", "gather")
        send = values.get("send", values.get("buffer")) if sends else None
        recv = values.get("recv", values.get("buffer")) if receives else None
        if name == "broadcast" and sends:
            recv = None
        if name == "all_reduce" and send is None:
            send = recv
        whole = checked(recv if send is None else send)
        if recv is not None:
            checked(recv)
        dtype: DType = np.dtype(whole.dtype)
        counts = values.get("counts", [whole.size])
        send_counts, recv_counts = (values.get(f"{x}_counts", counts) for x in ("send", "recv"))
        if not op:
            send, recv = (None if x is None else x.view(np.uint8) for x in (send, recv))
            send_counts = [count * dtype.itemsize for count in send_counts]
            recv_counts = [count * dtype.itemsize for count in recv_counts]
        elif is_half(dtype):
            dtype = np.dtype(np.float32)
        return cls(name, rank, size, send, recv, send_counts, recv_counts, op, root, dtype)

    @property
    def nbytes(self) -> int | None:
        """Its bytes, the same on all ranks; None for an all-to-all, where each knows its own."""
        if self.name == "all_to_all":
            return None
        return sum(self.send_counts) * (self.dtype.itemsize if self.op else 1)

    @property
    def data(self) -> Array:
        """The array that this rank sends, else the one that it receives."""
        return self.recv if self.send is None else self.send

    def send_blocks(self) -> list[Array]:
        """Return the blocks that lie in `send`: one for each rank, or a single one for all."""
        if self.send is None:
            return []
        if self.name in ("reduce_scatter", "scatter", "all_to_all"):
            return cut(self.send, self.send_counts)
        return [self.send]

    def recv_blocks(self) -> list[Array]:
        """Return the blocks that lie in `recv`: one from each rank, or a single one."""
        if self.recv is None:
            return []
        if self.name in ("all_gather", "gather", "all_to_all"):
            return cut(self.recv, self.recv_counts)
        return [self.recv]

    def outgoing(self) -> list[Array]:
        """Return the block for each rank; none at all if this rank sends nothing."""
        blocks = self.send_blocks()
        if self.name in ("all_gather", "broadcast"):
            return blocks * self.size
        return self._at_root(blocks) if self.name == "gather" else blocks

    def incoming(self) -> list[Array]:
        """Return the block from each rank; none at all if this rank receives nothing."""
        blocks = self.recv_blocks()
        return self._at_root(blocks) if self.name in ("scatter", "broadcast") else blocks

    def _at_root(self, blocks: list[Array]) -> list[Array]:
        ranks = range(self.size)
        return [block if rank == self.root else block[:0] for block in blocks for rank in ranks]

    def start(
        self, host: Communicator, send: Any, recv: Any, piece: slice = slice(None)
    ) -> Request:
        """Start it on `host`, of arrays in the place of its own: a piece of each block."""
        send_counts, recv_counts = (
            [len(range(count)[piece]) for count in counts]
            for counts in (self.send_counts, self.recv_counts)
        )
        values = {
            "send": send,
            "recv": recv,
            "buffer": recv if send is None else send,
            "counts": recv_counts,
            "send_counts": send_counts,
            "recv_counts": recv_counts,
            "op": self.op,
            "root": self.root,
        }
        begin: Callable[..., Request] = getattr(host, self.name)
        return begin(*[values[parameter] for parameter in PARAMETERS[self.name]])


# -- the contract ----------------------------------------------------------------------------


class DeviceStrategy(ABC):
    """One way to move device memory between the ranks of a communicator.

    Its operations are steps, to be run by :meth:`CommStream.run`. All strategies of a communicator
    are started one after the other, so their operations happen in the order of the calls.

    Args:
        host: Moves host memory between the same ranks, for what the strategy itself has to say.
            Its collectives are the strategies' own.

    Attributes:
        name: As it is called in the table of algorithms.
        reason: Why it works, for a person.
        at_call: Whether its operations are put on its stream where they are called, in the order
            of the calls on this rank over all its communicators.
        below_bytes: The size below which it is the first choice; None for all sizes.
        host: As given.
        rank: This rank.
        size: Number of ranks.
        cupy: The module.
        stream: Does the strategy's work; that of other strategies of `host`, too, if these are not
            put there at the call.
    """

    name: str
    reason: str
    at_call = False
    below_bytes: int | None = None

    def __init__(self, host: Communicator) -> None:
        self.host = host
        self.rank = host.rank
        self.size = host.size
        self.cupy: Any = sys.modules["cupy"]
        if self.at_call:
            self.stream = CommStream(host)
        else:
            # One for all: a device has few queues, and streams that share one hold each other up.
            self.stream = host.device_stream = host.device_stream or CommStream(host)

    @classmethod
    @abstractmethod
    def find(cls, host: Communicator) -> Steps:
        """Collective: make it if it works on all ranks.

        Returns:
            (strategy or None, reason), as the steps' value: why not, where there is none.
        """

    def cannot(self, operation: str, dtype: DType | None = None, op: str = "") -> str | None:
        """Return why it does not do `operation`, for a person; None if it does. Local.

        The answer is the same on all ranks.

        Args:
            operation: A collective, or ``"messages"``.
            dtype: Of the arrays; None to ask about none in particular.
            op: The reduction.
        """
        return f"{self.name} has no messages" if operation == "messages" else None

    def free(self) -> None:  # noqa: B027 - most hold nothing that does not go by itself
        """Give back all resources. Local; a second call does nothing."""

    @abstractmethod
    def steps(self, what: Collective) -> Steps:
        """Return the steps of a collective."""

    def keep_own_block(self, what: Collective) -> list[list[tuple[int, Array]]]:
        """Copy the block that stays on this rank; return those for and from others, with the ranks.

        Empty blocks are left out. The rank after this one comes first, so that no rank is
        everybody's first.
        """
        outgoing, incoming = what.outgoing(), what.incoming()
        if outgoing and incoming:
            self.stream.copy_array(incoming[self.rank], outgoing[self.rank])
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        return [
            [(peer, blocks[peer]) for peer in others if blocks and blocks[peer].size]
            for blocks in (outgoing, incoming)
        ]

    def ufunc(self, op: str) -> Any:
        """Return CuPy's function that combines two arrays."""
        names = {"sum": "add", "prod": "multiply", "min": "minimum", "max": "maximum"}
        return getattr(self.cupy, names[op])
