"""Ranks of one node that read each other's device memory in place, by CUDA's IPC handles.

CUDA gives a handle for a whole allocation, and whoever opens it gets the address of its beginning.
CuPy's pool cuts arrays out of larger allocations, so what travels is the handle and the array's
offset from the beginning, which the driver tells. Memory of the asynchronous pool, managed memory
and memory that CuPy does not own have no such handle, or none that can be relied on. Within one
process, as between virtual ranks, an address is an address.

What others have open must not be freed: CUDA leaves undefined what happens then. A program's memory
may be freed as soon as the operation is over, so it is open as long as that only. Opening and
closing costs tens of microseconds, so small arrays, and those without a handle, are copied to
buffers of mpimesh's own, which stay open: they are used again and never freed.

An operation meets twice. First every rank publishes where its arrays lie, after recording an event
that its stream reaches when they are ready: whoever knows the address lets its own stream wait for
that event, on the device. Then every rank reads what it needs, records a second event, and
acknowledges: the streams wait for all of these before anybody may write what others read. The
events are CUDA's interprocess events, kept to the end of the process, for a rank may yet wait for
those of one that has left; a later operation records them again only after all ranks
have let their streams wait for them, because it starts after the second meeting. A rank that cannot
open what another one has published, or has no memory of its own to publish, reads nothing, but
meets the others again, and then all ranks raise the same error.

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
import sys
from collections.abc import Callable, Sequence
from functools import cache
from threading import RLock
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from mpimesh.arrays.namespace import Array, DType
from mpimesh.comm.base import Communicator
from mpimesh.comm.device_strategy import (
    Collective,
    CommStream,
    DeviceStrategy,
    agree,
    is_plain,
    node_key,
    plain_copy,
    process_key,
)
from mpimesh.comm.engine import Steps
from mpimesh.comm.requests import Condition, block_slices
from mpimesh.errors import TransportError
from mpimesh.layout.boxes import even_sizes

__all__ = [
    "COPIED_BYTES",
    "DESCRIPTOR",
    "CudaIpc",
    "ExportedMemory",
    "ImportedMemory",
    "address_range",
    "array_at",
    "export_array",
    "exported_memory",
    "one_shot",
    "one_shot_bytes",
]

DESCRIPTOR = np.dtype(
    [
        ("node", np.int64),
        ("process", np.int64),
        ("device", np.int64),
        ("address", np.int64),
        ("offset", np.int64),
        ("nbytes", np.int64),
        ("lasting", np.bool_),
        ("handle", np.uint8, 64),
    ]
)
"""The place of an array, as another process needs it to read it. `nbytes` is -1 where it cannot,
-2 if the rank has failed before it could publish it.

`lasting` memory is never freed and may stay open. `device` is the GPU's number in that process.
The allocation begins at ``address - offset``.
"""

_NO_HANDLE, _FAILED = -1, -2

_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_EVENT_NAMES = ("ready", "read")

_EVENT = np.dtype([("process", np.int64), ("pointer", np.int64), ("handle", np.uint8, 64)])
"""Fields that another process needs to open an event; within one process, its pointer."""

COPIED_BYTES = 1 << 20
"""Up to here a copy costs less than opening and closing."""
_SMALLEST_BUFFER = 2 << 20
"""Smaller ones may lie in one allocation of CUDA's with memory that was not meant to be seen."""
_ENABLED_ALREADY = 704
"""CUDA's answer if kernels may read the other GPU's memory already."""

_TRIAL_NUMBERS = 4, COPIED_BYTES // 8 + 4
"""Of a small array, which is copied to a buffer, and of one that is read where it lies."""
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
        self._open: list[int] = []
        self._exports = exported_memory(self.cupy)
        self._buffers: dict[int, int] = {}
        self._outgrown: list[int] = []

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
                filled = strategy.cupy.full(_TRIAL_NUMBERS[1], host.rank + 1, np.int64)
                sample = plain_copy(filled, strategy.stream)
            if strategy._descriptor(sample)["nbytes"] < 0:
                problem = "the memory of CuPy's pool has no handle that other processes can open"
        problem = yield from agree(host, problem, _CANNOT_OPEN)
        if not problem and strategy is not None:
            problem = yield from strategy.stream.steps(strategy._try(sample))
            problem = yield from agree(host, problem, _CANNOT_OPEN)
        if problem and strategy is not None:
            strategy.free()
        return (None, problem) if problem else (strategy, "")

    def _try(self, sample: Array) -> Steps:
        """Read the samples of all ranks; the steps' value is what was wrong."""
        for numbers in _TRIAL_NUMBERS:
            copies = self.cupy.empty((self.size, numbers), np.int64)
            arguments = sample[:numbers], copies.reshape(-1), [numbers] * self.size
            try:
                yield from self.steps(Collective.of("all_gather", self.rank, self.size, *arguments))
            except TransportError as error:
                return str(error.__cause__ or error)
            yield self.stream.reached()
            expected = np.arange(1, self.size + 1)[:, None]
            if not (self.cupy.asnumpy(copies) == expected).all():
                return "memory of another rank was opened, but does not hold what it should"
        return ""

    def free(self) -> None:
        """Close what was opened, and give the own buffers back.

        It waits for the stream first: up to then this rank may read memory of others, and others
        read that of this one, because the stream waits for their reads.
        """
        with self.stream.device:
            self.stream.stream.synchronize()
            self._imports.close()
            self._events.close()
        for ptr in (*self._buffers.values(), *self._outgrown):
            self._exports.give_back(ptr)
        self._buffers, self._outgrown = {}, []

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
        all_addresses: list[list[int]] = []

        def add(addresses: list[list[int]]) -> None:
            all_addresses.extend(addresses)
            # Others read my slice of the result there. Nobody but me reads this slice of my input.
            target = array_at(addresses[self.rank][1], recv.size, recv.dtype)[mine]
            if mine.stop > mine.start:
                total = self._combined(addresses, send, mine, op, target)
                if total is not target:
                    target[...] = total

        yield from self._meet([send], add, result=recv, last=False)
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
            array_at(theirs[0] + part.start * itemsize, part.stop - part.start, send.dtype)
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

    def _meet(
        self,
        arrays: Sequence[Array],
        read: Callable[[list[list[int]]], None],
        *,
        result: Array | None = None,
        last: bool = True,
    ) -> Steps:
        """Let all ranks read `arrays`, and read those of all.

        Args:
            arrays: Of this rank.
            read: Is given where this rank sees the arrays of each rank, and reads them in the order
                of the stream.
            result: Is shown as the last one, but holds nothing yet.
            last: Whether nothing is read after the second meeting.
        """
        failed: Exception | None = None
        own: list[int] = []
        mine = np.zeros(len(arrays) + (result is not None), DESCRIPTOR)
        try:
            shown = [self._exportable(array, slot) for slot, array in enumerate(arrays)]
            if result is not None:
                shown.append(self._exportable(result, len(arrays), fill=False))
            mine[:] = [self._descriptor(array) for array in shown]
            own = [array.data.ptr for array in shown]
        except Exception as error:  # such as no memory: the others wait for this rank
            failed, mine["nbytes"] = error, _FAILED
        rows = np.empty(self.size * mine.nbytes, np.uint8)
        self._events.record("ready", self.stream)
        yield self.host.all_gather(mine.view(np.uint8), rows, [mine.nbytes] * self.size)
        yield from self._events.wait("ready", self.stream)
        table = rows.view(DESCRIPTOR).reshape(self.size, -1)
        if not (table["nbytes"] == _FAILED).any():
            try:
                read(
                    [
                        own
                        if rank == self.rank
                        else [self._imports.open(one, self._open) for one in row]
                        for rank, row in enumerate(table)
                    ]
                )
            except Exception as error:  # whatever it is, the others wait for this rank
                failed = error
        yield from self._acknowledge(failed, last=last)

    def _acknowledge(self, failed: Exception | None = None, *, last: bool = True) -> Steps:
        """Tell all ranks that this one has read; from here on everybody may write.

        Args:
            failed: What this rank has failed with.
            last: Whether all that was opened is closed first, for its owner may then free it.

        Raises:
            TransportError: On every rank, if one of them has failed to read.
        """
        if self._open and (last or failed is not None):
            yield self.stream.reached()
            self._imports.close_all(self._open)
        self._events.record("read", self.stream)
        problem = "" if failed is None else str(failed) or repr(failed)
        problem = yield from agree(self.host, problem, _CANNOT_OPEN)
        yield from self._events.wait("read", self.stream)
        if problem:
            # Others may have opened what this rank could not.
            yield self.stream.reached()
            self._imports.close_all(self._open)
            raise TransportError(
                f"device memory cannot be read in place on rank {self.rank}: {problem}"
            ) from failed

    def _descriptor(self, array: Array) -> Any:
        return export_array(array, process=self._process)

    def _exportable(self, array: Array, slot: int, *, fill: bool = True) -> Array:
        """Return `array` if others are to read it where it lies, else a buffer of its size."""
        large = array.nbytes > COPIED_BYTES and self._descriptor(array)["nbytes"] >= 0
        if large or array.nbytes == 0:
            return array
        copy = array_at(self._buffer(array.nbytes, slot), array.size, array.dtype)
        if fill:
            self.stream.copy_array(copy, array)
        return copy

    def _buffer(self, nbytes: int, slot: int) -> int:
        """Return memory outside of any pool; there is one for each array of an operation."""
        ptr = self._buffers.get(slot)
        if ptr is None or self._exports.sizes[ptr] < nbytes:
            new = self._exports.take(nbytes)
            if ptr is not None:
                self._outgrown.append(ptr)  # others may still read it
            self._buffers[slot] = ptr = new
        return ptr


def array_at(address: int, size: int, dtype: DType) -> Array:
    """Return a flat array over memory that stays where it is, read on the current device."""
    cupy: Any = sys.modules["cupy"]
    nbytes, device = size * dtype.itemsize, cupy.cuda.runtime.getDevice()
    memory = cupy.cuda.UnownedMemory(address, nbytes, cupy, device)
    return cupy.ndarray((size,), dtype, cupy.cuda.MemoryPointer(memory, 0))


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
                _exported_events.append(event)
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

    def wait(self, name: str, stream: CommStream) -> Steps:
        """Let the stream wait for the events of all other ranks.

        With one queue for all streams of a process, as ``CUDA_DEVICE_MAX_CONNECTIONS=1`` asks for,
        that would hold up all of them until other processes have come so far, which may wait for
        this one: so the host waits.
        """
        events = self._others[name]
        if os.environ.get(_CONNECTIONS) == "1":
            yield Condition(lambda: all(stream.has_come(event) for event in events))
        for event in events:
            self._runtime.streamWaitEvent(stream.ptr, event)

    def close(self) -> None:
        """Give the opened events back. A second call does nothing."""
        self._others = {name: [] for name in _EVENT_NAMES}
        while self._opened:
            self._runtime.eventDestroy(self._opened.pop())


_exported_events: list[Any] = []
"""Kept: what CUDA does with an event that is destroyed while others wait for it is undefined."""

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


class ExportedMemory:
    """Memory of `cudaMalloc` that others may have open. It is used again, and never freed.

    Attributes:
        sizes: The bytes of each buffer, by address.
    """

    def __init__(self, cupy: ModuleType) -> None:
        self._runtime: Any = cupy.cuda.runtime
        self._free: dict[tuple[int, int], list[int]] = {}
        self._devices: dict[int, int] = {}
        self._lock = RLock()
        self.sizes: dict[int, int] = {}
        self.handles: dict[int, Any] = {}

    def take(self, nbytes: int) -> int:
        """Return the address of a buffer of at least that size on the current device."""
        size = max(_SMALLEST_BUFFER, 1 << (nbytes - 1).bit_length())
        device = self._runtime.getDevice()
        with self._lock:
            if free := self._free.get((device, size)):
                return free.pop()
            ptr = int(self._runtime.malloc(size))
            handle = np.frombuffer(self._runtime.ipcGetMemHandle(ptr), np.uint8)
            self.sizes[ptr], self._devices[ptr], self.handles[ptr] = size, device, handle
            return ptr

    def give_back(self, ptr: int) -> None:
        """Let a buffer be used again: nobody reads it any more."""
        with self._lock:
            self._free.setdefault((self._devices[ptr], self.sizes[ptr]), []).append(ptr)


_exported: WeakKeyDictionary[ModuleType, ExportedMemory] = WeakKeyDictionary()


def exported_memory(cupy: ModuleType) -> ExportedMemory:
    """Return that of this process, whose ranks may be threads."""
    return _exported.get(cupy) or _exported.setdefault(cupy, ExportedMemory(cupy))


def export_array(x: Array, *, process: int) -> Any:
    """Return the :data:`DESCRIPTOR` of `x`; with ``nbytes == -1`` if it cannot be opened.

    Args:
        x: A C-contiguous CuPy array.
        process: A number that no other process of the node has.
    """
    cupy, ptr = sys.modules["cupy"], x.data.ptr
    descriptor = np.zeros((), DESCRIPTOR)
    descriptor["node"], descriptor["process"] = node_key(), process
    descriptor["address"], descriptor["nbytes"] = ptr, x.nbytes
    descriptor["device"] = x.data.device_id
    if x.nbytes == 0:
        return descriptor
    handle = exported_memory(cupy).handles.get(ptr)
    if handle is not None:
        descriptor["lasting"], descriptor["handle"] = True, handle
        return descriptor
    descriptor["nbytes"] = _NO_HANDLE
    if not is_plain(x):
        return descriptor
    try:
        base = address_range(ptr)[0]
        handle = cupy.cuda.runtime.ipcGetMemHandle(base)
    except (TransportError, cupy.cuda.runtime.CUDARuntimeError):
        return descriptor
    descriptor["offset"], descriptor["nbytes"] = ptr - base, x.nbytes
    descriptor["handle"] = np.frombuffer(handle, np.uint8)
    return descriptor


class ImportedMemory:
    """Memory of other processes that this one has opened. What lasts there stays open here.

    Args:
        process: As for :func:`export_array`.
    """

    def __init__(self, *, process: int) -> None:
        self._process = process
        self._runtime: Any = sys.modules["cupy"].cuda.runtime
        self._lasting: dict[bytes, int] = {}
        self._peers_enabled: set[tuple[int, int]] = set()

    def open(self, descriptor: Any, passing: list[int]) -> int:
        """Return the address at which this process reads the array of a descriptor.

        Args:
            descriptor: Of the array.
            passing: Gets what was opened if that is to be closed once it is read, before its owner
                learns that it is: see :meth:`close_all`. CUDA counts how often memory is open.

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
        base = self._lasting.get(handle)
        if base is None:
            try:
                base = int(self._runtime.ipcOpenMemHandle(handle))
            except self._runtime.CUDARuntimeError as error:
                raise TransportError(f"CUDA cannot open the memory: {error}") from None
            if descriptor["lasting"]:
                self._lasting[handle] = base
            else:
                passing.append(base)
        return base + offset

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

    def close_all(self, opened: list[int]) -> None:
        """Close what :meth:`open` has listed; nothing may be reading it.

        Raises:
            TransportError: If CUDA refuses, as after an error of the GPU.
        """
        while opened:
            try:
                self._runtime.ipcCloseMemHandle(opened.pop())
            except self._runtime.CUDARuntimeError as error:
                raise TransportError(f"CUDA cannot close memory of another rank: {error}") from None

    def close(self) -> None:
        """Close what lasts. A second call does nothing."""
        opened = [*self._lasting.values()]
        self._lasting.clear()
        self.close_all(opened)
