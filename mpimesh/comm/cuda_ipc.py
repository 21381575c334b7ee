"""Ranks of one node that read each other's device memory in place, by CUDA's IPC handles.

CUDA gives a handle for a whole allocation, and whoever opens it gets the address of its beginning.
CuPy's pool cuts arrays out of larger allocations, so what travels is the handle and the array's
offset from the beginning, which the driver tells. Memory of the asynchronous pool, managed memory
and memory that CuPy does not own have no such handle, or none that can be relied on. Opening costs
tens of microseconds, so opened allocations stay open, the least used ones up to a limit. Within
one process, as between virtual ranks, an address is an address.

An operation meets twice. First every rank publishes where its arrays lie, after recording an event
that its stream reaches when they are ready: whoever knows the address lets its own stream wait for
that event, on the device. Then every rank reads what it needs, records a second event, and
acknowledges: the streams wait for all of these before anybody may write what others read. The
events are CUDA's interprocess events; a later operation records them again only after all ranks
have let their streams wait for them, because it starts after the second meeting. A rank that cannot
open what another one has published reads nothing, but meets the others again, and then all ranks
raise the same error.

All-reduce, n bytes and N ranks:

| | reads | when |
|---|---|---|
| one-shot: every rank reads and adds all | (N - 1) n | N = 2; N <= 4, 512 KiB; N <= 8, 256 KiB |
| two-shot: every rank adds its slice, then reads the others' | 2 n (N - 1) / N | above |

Ranks are added in their order by whoever adds, so the result is the same to the last bit on all.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import RLock
from typing import Any
from weakref import WeakSet

import numpy as np

from mpimesh.arguments import digest_bits
from mpimesh.arrays.namespace import Array, DType
from mpimesh.comm.base import Communicator
from mpimesh.comm.device_strategy import (
    Collective,
    CommStream,
    DeviceStrategy,
    agree,
    is_plain,
    steps_in,
)
from mpimesh.comm.engine import Steps
from mpimesh.comm.requests import block_slices
from mpimesh.errors import TransportError
from mpimesh.layout.boxes import even_sizes

__all__ = [
    "DESCRIPTOR",
    "CudaIpc",
    "ImportedMemory",
    "address_range",
    "export_array",
    "gpu_key",
    "node_key",
    "one_shot",
    "one_shot_bytes",
    "process_key",
]

DESCRIPTOR = np.dtype(
    [
        ("node", np.int64),
        ("process", np.int64),
        ("device", np.int64),
        ("address", np.int64),
        ("offset", np.int64),
        ("allocated", np.int64),
        ("nbytes", np.int64),
        ("handle", np.uint8, 64),
    ]
)
"""Where an array lies: what another process needs to read it. `nbytes` is -1 where it cannot.

`device` is the GPU's number in that process. `allocated` is the size in bytes of the whole
allocation, which begins at ``address - offset``.
"""

_EVENT_NAMES = ("ready", "read")

_EVENT = np.dtype([("process", np.int64), ("pointer", np.int64), ("handle", np.uint8, 64)])
"""Fields that another process needs to open an event; within one process, its pointer."""

_MAX_OPEN = 128
_ENABLED_ALREADY = 704
"""CUDA's answer if kernels may read the other GPU's memory already."""

_TRIAL_NUMBERS = 4
_CANNOT_OPEN = "cannot open the memory of the others"


def one_shot_bytes(size: int) -> int:
    """Return the bytes below which so many ranks read the whole of all others (vLLM's rule)."""
    if size <= 2:
        return 1 << 62
    if size <= 4:
        return 512 << 10
    return 256 << 10 if size <= 8 else 0


def one_shot(nbytes: int, size: int) -> bool:
    """Tell whether every rank reads the whole of all others."""
    return nbytes < one_shot_bytes(size)


# -- the strategy ----------------------------------------------------------------------------


class CudaIpc(DeviceStrategy):
    """Reads the memory of the other ranks of a node.

    Args:
        host: As for :class:`DeviceStrategy`.
        process: A number that no other process of the node has.

    Raises:
        TransportError: If CUDA makes no interprocess events here.
    """

    name = "cuda_ipc"
    reason = "all ranks open each other's memory on this node"

    def __init__(self, host: Communicator, *, process: int) -> None:
        super().__init__(host)
        self._events = _IpcEvents(process=process)
        self._process = process
        self._imports = ImportedMemory(process=process)
        self._allocated: dict[int, int] = {}
        self._buffers: dict[int, int] = {}

    @classmethod
    def find(cls, host: Communicator, *, process: int | None = None) -> Steps:
        """Collective: make it if it works on all ranks, which is found out by doing it once.

        Every step is taken by all ranks whatever they have found so far, and what one cannot do
        makes all say no.

        Args:
            host: As for :class:`DeviceStrategy`.
            process: A number that no other process of the node has; None for the usual one.

        Returns:
            (strategy or None, reason), as the steps' value.
        """
        mine = np.array([node_key()], np.int64)
        nodes = np.empty(host.size, np.int64)
        yield host.all_gather(mine, nodes, [1] * host.size)
        if len(set(nodes.tolist())) > 1:
            return None, "ranks are on several nodes"
        strategy, problem = None, ""
        try:
            strategy = cls(host, process=process_key() if process is None else process)
        except TransportError as error:
            problem = str(error)
        events = np.zeros(len(_EVENT_NAMES), _EVENT)
        events = events if strategy is None else strategy._events.records
        rows = np.empty(host.size * events.nbytes, np.uint8)
        yield host.all_gather(events.view(np.uint8), rows, [events.nbytes] * host.size)
        sample: Any = None
        if strategy is not None:
            problem = strategy._events.open(rows.view(_EVENT).reshape(host.size, -1), host.rank)
            with strategy.stream.current():
                sample = strategy.cupy.full(_TRIAL_NUMBERS, host.rank + 1, np.int64)
            if strategy._descriptor(sample)["nbytes"] < 0:
                problem = "the memory of CuPy's pool has no handle that other processes can open"
        problem = yield from agree(host, problem, _CANNOT_OPEN)
        if not problem and strategy is not None:
            problem = yield from steps_in(strategy.stream, strategy._try(sample))
            problem = yield from agree(host, problem, _CANNOT_OPEN)
        if problem and strategy is not None:
            strategy.free()
        return (None, problem) if problem else (strategy, "")

    def _try(self, sample: Array) -> Steps:
        """Read the samples of all ranks; the steps' value is what was wrong."""
        copies = self.cupy.empty((self.size, sample.size), np.int64)
        arguments = sample, copies.reshape(-1), [sample.size] * self.size
        try:
            yield from self.steps(Collective.of("all_gather", self.rank, self.size, *arguments))
        except TransportError as error:
            return str(error.__cause__ or error)
        yield self.stream.reached()
        expected = [[rank + 1] * sample.size for rank in range(self.size)]
        if self.cupy.asnumpy(copies).tolist() != expected:
            return "memory of another rank was opened, but does not hold what it should"
        return ""

    def free(self) -> None:
        """Close what was opened, and free the memory for arrays that others cannot open.

        It waits for the stream first: up to then this rank may read memory of others, and others
        read that of this one, because the stream waits for their reads.
        """
        with self.stream.device:
            self.stream.stream.synchronize()
            self._imports.close()
            self._events.close()
            while self._allocated:
                self.cupy.cuda.runtime.free(self._allocated.popitem()[0])
        self._buffers.clear()

    def steps(self, what: Collective) -> Steps:
        """Do a collective: each rank reads what it is to receive, and reduces it if need be."""
        if not what.op:
            return self._move(what)
        if what.name == "all_reduce" and not one_shot(what.send.nbytes, self.size):
            return self._two_shot(what.send, what.recv, what.op)
        part = slice(0, 0 if what.recv is None else what.send.size)
        if what.name == "reduce_scatter":
            part = block_slices(what.send_counts)[self.rank]
        return self._one_shot(what.send, what.recv, part, what.op)

    # -- reductions ----------------------------------------------------------------------

    def _one_shot(self, send: Array, out: Array, part: slice, op: str) -> Steps:
        """Reduce one part of all ranks' `send` into `out`; ranks may take no or different parts."""
        totals: list[Array] = []

        def add(addresses: list[list[int]]) -> None:
            if part.stop > part.start:
                totals.append(self._combined(addresses, send, part, op, out))

        yield from self._meet([send], add)
        if totals and totals[0] is not out:
            out[...] = totals[0]

    def _two_shot(self, send: Array, recv: Array, op: str) -> Steps:
        parts = block_slices(even_sizes(recv.size, self.size))
        mine = parts[self.rank]
        # Others read my slice of the result there. Nobody but me reads this slice of my input.
        result = self._exportable(recv, 1, fill=False)
        all_addresses: list[list[int]] = []

        def add(addresses: list[list[int]]) -> None:
            all_addresses.extend(addresses)
            target = result[mine]
            if mine.stop > mine.start:
                total = self._combined(addresses, send, mine, op, target)
                if total is not target:
                    target[...] = total

        yield from self._meet([send, result], add)
        for part, addresses in zip(parts, all_addresses, strict=True):
            target = recv[part]
            source_ptr = addresses[1] + part.start * recv.itemsize
            self.stream.copy(target.data.ptr, source_ptr, target.nbytes)
        yield from self._acknowledge()

    def _combined(
        self, addresses: list[list[int]], send: Array, part: slice, op: str, out: Array
    ) -> Array:
        """Combine one part of all ranks' arrays, in the order of ranks.

        Returns:
            The combination. It is `out` unless others may read the memory of `out` as their input:
            then it is new memory; a single rank's own part as it lies.
        """
        function, itemsize = self.ufunc(op), send.dtype.itemsize
        first, *others = [
            self._view(theirs[0] + part.start * itemsize, part.stop - part.start, send.dtype)
            for theirs in addresses
        ]
        if not others:
            return first
        apart = _disjoint(out, addresses[self.rank][0], send.nbytes)
        total = out if apart else self.cupy.empty_like(first)
        function(first, others[0], out=total)
        for other in others[1:]:
            function(total, other, out=total)
        return total

    # -- movements -----------------------------------------------------------------------

    def _move(self, what: Collective) -> Steps:
        """Read the blocks for this rank out of the others' arrays."""
        # Where the block for this rank begins in the array of each rank.
        starts = [0] * self.size
        if what.name == "scatter":
            starts[what.root] = block_slices(what.send_counts)[self.rank].start
        elif what.name == "all_to_all":
            # In the array of each other rank, only that rank knows.
            mine = np.array([block.start for block in block_slices(what.send_counts)], np.int64)
            theirs, ones = np.empty(self.size, np.int64), [1] * self.size
            yield self.host.all_to_all(mine, theirs, ones, ones)
            starts = theirs.tolist()
        send = self.cupy.empty(0, np.uint8) if what.send is None else what.send

        def read(addresses: list[list[int]]) -> None:
            # A rank that receives nothing has no blocks.
            for target, theirs, start in zip(what.incoming(), addresses, starts, strict=False):
                self.stream.copy(target.data.ptr, theirs[0] + start, target.nbytes)

        yield from self._meet([send], read)

    # -- the two meetings ------------------------------------------------------------------

    def _meet(self, arrays: Sequence[Array], read: Callable[[list[list[int]]], None]) -> Steps:
        """Let all ranks read `arrays`, and read those of all.

        Args:
            arrays: Of this rank.
            read: Is given where this rank sees the arrays of each rank, and reads them in the order
                of the stream.
        """
        shown = [self._exportable(array, slot) for slot, array in enumerate(arrays)]
        mine = np.array([self._descriptor(array) for array in shown], DESCRIPTOR)
        rows = np.empty(self.size * mine.nbytes, np.uint8)
        self._events.record("ready", self.stream)
        yield self.host.all_gather(mine.view(np.uint8), rows, [mine.nbytes] * self.size)
        self._events.wait("ready", self.stream)
        failed: Exception | None = None
        try:
            read(
                [
                    [array.data.ptr for array in shown]
                    if rank == self.rank
                    else [self._imports.open(descriptor) for descriptor in row]
                    for rank, row in enumerate(rows.view(DESCRIPTOR).reshape(self.size, -1))
                ]
            )
        except Exception as error:  # whatever it is, the others wait for this rank
            failed = error
        yield from self._acknowledge(failed)

    def _acknowledge(self, failed: Exception | None = None) -> Steps:
        """Tell all ranks that this one has read; from here on everybody may write.

        Raises:
            TransportError: On every rank, if one of them has failed to read.
        """
        self._events.record("read", self.stream)
        problem = "" if failed is None else str(failed) or repr(failed)
        problem = yield from agree(self.host, problem, _CANNOT_OPEN)
        self._events.wait("read", self.stream)
        if problem:
            raise TransportError(
                f"device memory cannot be read in place on rank {self.rank}: {problem}"
            ) from failed
        if self._imports.over_limit:
            yield self.stream.reached()
            self._imports.trim()

    def _descriptor(self, array: Array) -> Any:
        return export_array(array, process=self._process, own=array.data.ptr in self._allocated)

    def _exportable(self, array: Array, slot: int, *, fill: bool = True) -> Array:
        """Return `array`, or a copy of it in this rank's own memory, which others can open."""
        if self._descriptor(array)["nbytes"] >= 0:
            return array
        copy = self._view(self._buffer(array.nbytes, slot), array.size, array.dtype)
        if fill:
            self.stream.copy_array(copy, array)
        return copy

    def _buffer(self, nbytes: int, slot: int) -> int:
        """Return memory outside of any pool; there is one for each array of an operation."""
        ptr = self._buffers.get(slot)
        if ptr is None or self._allocated[ptr] < nbytes:
            # What is outgrown stays until the end: others may have it open.
            size = 1 << (nbytes - 1).bit_length()
            ptr = self._buffers[slot] = int(self.cupy.cuda.runtime.malloc(size))
            self._allocated[ptr] = size
        return ptr

    def _view(self, address: int, size: int, dtype: DType) -> Array:
        nbytes, cuda = size * dtype.itemsize, self.cupy.cuda
        memory = cuda.UnownedMemory(address, nbytes, self, self.stream.device.id)
        return self.cupy.ndarray((size,), dtype, cuda.MemoryPointer(memory, 0))


def _disjoint(out: Array, address: int, nbytes: int) -> bool:
    """Tell whether `out` shares no byte with the `nbytes` at `address`."""
    start: int = out.data.ptr
    return start + out.nbytes <= address or start >= address + nbytes


# -- events ----------------------------------------------------------------------------------


class _IpcEvents:
    """Interprocess events: each rank records its own, the streams of all others wait for them.

    Args:
        process: A number that no other process of the node has.

    Attributes:
        records: The fields of this rank's events, for the other ranks.

    Raises:
        TransportError: If CUDA makes none here.
    """

    def __init__(self, *, process: int) -> None:
        cuda: Any = sys.modules["cupy"].cuda
        self._runtime: Any = cuda.runtime
        self._process = process
        self._others: dict[str, list[int]] = {name: [] for name in _EVENT_NAMES}
        self._opened: list[int] = []
        self.records = np.zeros(len(_EVENT_NAMES), _EVENT)
        try:
            self._own = {name: cuda.Event(False, True, interprocess=True) for name in _EVENT_NAMES}
            for record, event in zip(self.records, self._own.values(), strict=True):
                record["process"], record["pointer"] = process, event.ptr
                handle = self._runtime.ipcGetEventHandle(event.ptr)
                record["handle"] = np.frombuffer(handle, np.uint8)
        except self._runtime.CUDARuntimeError as error:
            raise TransportError(f"CUDA makes no interprocess events here: {error}") from None

    def open(self, records: Any, rank: int) -> str:
        """Open the events of all ranks but `rank`, this one; return why not, if one cannot be.

        Args:
            records: A row for each rank.
            rank: This one.
        """
        for peer, row in enumerate(records):
            for name, record in zip(_EVENT_NAMES, row, strict=True):
                if peer == rank:
                    continue
                event = int(record["pointer"])
                if record["process"] != self._process:
                    try:
                        event = self._runtime.ipcOpenEventHandle(record["handle"].tobytes())
                    except self._runtime.CUDARuntimeError as error:
                        return f"CUDA cannot open the event of another rank: {error}"
                    self._opened.append(event)
                self._others[name].append(event)
        return ""

    def record(self, name: str, stream: CommStream) -> None:
        """Record this rank's event on the stream."""
        with stream.device:
            self._own[name].record(stream.stream)

    def wait(self, name: str, stream: CommStream) -> None:
        """Let the stream wait for the events of all other ranks."""
        for event in self._others[name]:
            self._runtime.streamWaitEvent(stream.ptr, event)

    def close(self) -> None:
        """Give the opened events back. A second call does nothing."""
        self._others = {name: [] for name in _EVENT_NAMES}
        while self._opened:
            self._runtime.eventDestroy(self._opened.pop())


# -- memory ----------------------------------------------------------------------------------


def address_range(ptr: int) -> tuple[int, int]:
    """Return address and size of the allocation that `ptr` lies in, as the driver knows it.

    Raises:
        TransportError: If there is no driver, or it does not know the address.
    """
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    code = _driver().cuMemGetAddressRange_v2(
        ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(ptr)
    )
    if code:
        raise TransportError(f"the CUDA driver knows no allocation at {ptr:#x} (error {code})")
    return base.value, size.value


@cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise TransportError(f"the CUDA driver cannot be loaded: {error}") from None


def export_array(x: Array, *, process: int, own: bool = False) -> Any:
    """Return the :data:`DESCRIPTOR` of `x`; with ``nbytes == -1`` if it cannot be opened.

    Args:
        x: A C-contiguous CuPy array.
        process: A number that no other process of the node has.
        own: It lies in memory that mpimesh allocated outside of any pool.
    """
    descriptor = np.zeros((), DESCRIPTOR)
    descriptor["node"], descriptor["process"] = node_key(), process
    descriptor["address"], descriptor["nbytes"] = x.data.ptr, x.nbytes
    descriptor["device"] = x.data.device_id
    if x.nbytes == 0:
        return descriptor
    descriptor["nbytes"] = -1
    if not own and not is_plain(x):
        return descriptor
    runtime = sys.modules["cupy"].cuda.runtime
    try:
        base, allocated = address_range(x.data.ptr)
        handle = runtime.ipcGetMemHandle(base)
    except (TransportError, runtime.CUDARuntimeError):
        return descriptor
    descriptor["offset"], descriptor["allocated"] = x.data.ptr - base, allocated
    descriptor["handle"] = np.frombuffer(handle, np.uint8)
    descriptor["nbytes"] = x.nbytes
    return descriptor


@dataclass(frozen=True, slots=True)
class _Allocation:
    """An allocation of another process: its address here, and where it was there."""

    base: int
    process: int
    start: int
    stop: int

    def overlaps(self, process: int, start: int, stop: int) -> bool:
        return process == self.process and start < self.stop and self.start < stop


class ImportedMemory:
    """Allocations of other processes that this one has opened, and keeps open.

    Their owner may give one back to CUDA meanwhile, as CuPy's pool does when it is told to. Nothing
    reads it then: an array that is published stays with its owner until all who read it have said
    so, and CUDA frees memory only after the owner's stream, which waits for their reads. What is
    open here is closed at the latest when new memory is opened at its place (:meth:`open`), which
    CUDA tells from the old one by its handle.

    Args:
        process: As for :func:`export_array`.
    """

    def __init__(self, *, process: int) -> None:
        self._process = process
        self._runtime: Any = sys.modules["cupy"].cuda.runtime
        self._opened: OrderedDict[bytes, _Allocation] = OrderedDict()
        self._peers_enabled: set[tuple[int, int]] = set()
        _all_imports.add(self)

    def open(self, descriptor: Any) -> int:
        """Return the address at which this process reads the array of a descriptor.

        Raises:
            TransportError: If it cannot.
        """
        if descriptor["nbytes"] < 0:
            raise TransportError("the memory has no handle")
        if descriptor["nbytes"] == 0:
            return int(descriptor["address"])
        if descriptor["process"] == self._process:
            self._enable_peer(int(descriptor["device"]))
            return int(descriptor["address"])
        if descriptor["node"] != node_key():
            raise TransportError("the memory is on another node")
        handle, offset = descriptor["handle"].tobytes(), int(descriptor["offset"])
        with _imports_lock:
            allocation = self._opened.get(handle)
            if allocation is None:
                start = int(descriptor["address"]) - offset
                there = int(descriptor["process"]), start, start + int(descriptor["allocated"])
                allocation = _Allocation(self._open_handle(handle, there), *there)
                self._opened[handle] = allocation
            self._opened.move_to_end(handle)
        return allocation.base + offset

    def _enable_peer(self, device: int) -> None:
        """Let kernels of the current GPU read another one's memory: opening a handle does that."""
        mine = self._runtime.getDevice()
        if device == mine or (mine, device) in self._peers_enabled:
            return
        if not self._runtime.deviceCanAccessPeer(mine, device):
            raise TransportError(f"GPU {mine} cannot read the memory of GPU {device}")
        try:
            self._runtime.deviceEnablePeerAccess(device)
        except self._runtime.CUDARuntimeError as error:
            if getattr(error, "status", 0) != _ENABLED_ALREADY:
                raise TransportError(f"GPU {mine} cannot read GPU {device}: {error}") from None
        self._peers_enabled.add((mine, device))

    def _open_handle(self, handle: bytes, there: tuple[int, int, int]) -> int:
        # Two allocations of a process never overlap: what does was freed there since, when all who
        # read it had said so. CUDA refuses the new one as long as anybody here has the old one.
        for imports in [other for other in _all_imports if other._process == self._process]:
            imports._close_overlapping(*there, but=handle)
        try:
            return int(self._runtime.ipcOpenMemHandle(handle))
        except self._runtime.CUDARuntimeError as error:
            raise TransportError(f"CUDA cannot open the memory: {error}") from None

    def _close_overlapping(self, process: int, start: int, stop: int, *, but: bytes) -> None:
        for handle, allocation in list(self._opened.items()):
            if handle != but and allocation.overlaps(process, start, stop):
                self._close(self._opened.pop(handle))

    @property
    def over_limit(self) -> bool:
        """Whether more is open than should be."""
        return len(self._opened) > _MAX_OPEN

    def trim(self) -> None:
        """Close what was used longest ago, down to the limit; nothing may be reading it."""
        with _imports_lock:
            while self.over_limit:
                self._close(self._opened.popitem(last=False)[1])

    def close(self) -> None:
        """Close all. A second call does nothing."""
        with _imports_lock:
            while self._opened:
                self._close(self._opened.popitem()[1])

    def _close(self, allocation: _Allocation) -> None:
        try:
            self._runtime.ipcCloseMemHandle(allocation.base)
        except self._runtime.CUDARuntimeError as error:
            raise TransportError(f"CUDA cannot close memory of another rank: {error}") from None


# Of this process: CUDA knows no owners among those who have opened a handle.
_all_imports: WeakSet[ImportedMemory] = WeakSet()
_imports_lock = RLock()


# -- keys ------------------------------------------------------------------------------------


@cache
def node_key() -> int:
    """Return a number that processes share only if they run on one start of one machine."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    facts = f"{socket.gethostname()}|{boot.read_text() if boot.exists() else ''}"
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
