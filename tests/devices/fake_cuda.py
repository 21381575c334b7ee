"""A stand-in for CuPy with its CUDA: streams, events, pinned memory, IPC and NCCL, on the host.

How to use it: `with installed() as cupy:` puts it in `sys.modules` as "cupy". Then
`cupy.asarray(numpy_array)`, `cupy.asnumpy(x)`, `x.get()`, slices, operators, reductions and most
of NumPy's functions work as in CuPy: they go into the thread's current stream and happen only when
the clock ticks, that is, when an event is queried or a stream is waited for (`fake_streams.py`).
Results hold nonsense until then, so a missing `wait_event` or a result that is taken too early is
always seen. NumPy arrays are refused where CuPy refuses them. `x.data.ptr` and
`x.__cuda_array_interface__` are real host addresses, so real MPI can move the "device" memory.
Every thread, and so every virtual rank, has a default stream of its own.
`cupy.cuda.get_current_stream().delay(20)` makes a stream late; `cupy.identity = "MemoryAsync"`
makes new arrays come from the asynchronous pool; `FakeCupy(devices=n)` sees n GPUs, which differ
in number and UUID only.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from tests.devices.fake_arrays import FakeArray, Library, MemoryPointer, at_address
from tests.devices.fake_fuse import fuse
from tests.devices.fake_nccl import FakeNccl
from tests.devices.fake_streams import Clock, Event, Stream

__all__ = ["FakeCupy", "address_range", "installed"]


class CUDARuntimeError(RuntimeError):
    """The error of CuPy where CUDA refuses."""


class Runtime(SimpleNamespace):
    """`cupy.cuda.runtime`."""

    CUDARuntimeError = CUDARuntimeError
    memcpyHostToHost, memcpyHostToDevice, memcpyDeviceToHost = 0, 1, 2
    memcpyDeviceToDevice, memcpyDefault = 3, 4
    eventBlockingSync, eventDisableTiming, eventInterprocess = 1, 2, 4
    cudaIpcMemLazyEnablePeerAccess = 1

    def __init__(self, library: Library, devices: int) -> None:
        super().__init__()
        self._library = library
        self._devices = devices
        self.opened: list[int] = []
        self.closed: list[int] = []
        self.peers: set[tuple[int, int]] = set()
        self.raw: dict[int, np.ndarray] = {}
        self.open: Counter[int] = Counter()
        self.room: int | None = None

    def getDeviceCount(self) -> int:
        return self._devices

    def getDevice(self) -> int:
        return self._library.clock.device()

    def setDevice(self, device: int) -> None:
        if not 0 <= device < self._devices:
            raise CUDARuntimeError("cudaErrorInvalidDevice: invalid device ordinal")
        self._library.clock.current.device = device

    def getDeviceProperties(self, device: int) -> dict[str, Any]:
        return {"name": b"Fake GPU", "uuid": bytes([device + 1] * 16), "totalGlobalMem": 1 << 34}

    def deviceGetPCIBusId(self, device: int) -> str:
        return f"0000:{device:02X}:00.0"

    def deviceCanAccessPeer(self, device: int, peer: int) -> int:
        return int(device != peer)

    def deviceEnablePeerAccess(self, peer: int) -> None:
        pair = self.getDevice(), peer
        if pair in self.peers:
            error = CUDARuntimeError("cudaErrorPeerAccessAlreadyEnabled")
            error.status = 704  # type: ignore[attr-defined]
            raise error
        self.peers.add(pair)

    def driverGetVersion(self) -> int:
        return 13000

    def runtimeGetVersion(self) -> int:
        return 13000

    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int) -> None:
        self._library.clock.objects[stream].put(lambda: ctypes.memmove(dst, src, size) and None)

    def malloc(self, size: int) -> int:
        if self.room is not None and size > self.room:
            raise CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")
        memory = np.full(size, 0x6B, np.uint8)
        self.raw[memory.ctypes.data] = memory
        return int(memory.ctypes.data)

    def free(self, ptr: int) -> None:
        if ptr not in self.raw:
            raise CUDARuntimeError("cudaErrorInvalidValue: invalid argument")
        self.refuse_if_open(ptr)

    def refuse_if_open(self, base: int) -> None:
        """Say what CUDA calls undefined: memory is freed that another process has open."""
        assert not self.open[base], f"memory at {base:#x} is freed while another rank has it open"

    # -- events by their pointer ----------------------------------------------------------------

    def eventCreateWithFlags(self, flags: int) -> int:
        return Event(
            clock=self._library.clock, interprocess=bool(flags & 4), disable_timing=True
        ).ptr

    def eventDestroy(self, event: int) -> None:
        self._library.clock.objects[event].destroyed = True

    def eventQuery(self, event: int) -> int:
        return 0 if self._library.clock.objects[event].done else 600

    def eventRecord(self, event: int, stream: int) -> None:
        self._library.clock.objects[event].record(self._library.clock.objects[stream])

    def streamWaitEvent(self, stream: int, event: int, flags: int = 0) -> None:
        objects = self._library.clock.objects
        objects[stream].wait_event(objects[event])

    # -- memory and events of other processes -----------------------------------------------------

    def ipcGetMemHandle(self, ptr: int) -> bytes:
        base, _ = address_range(ptr)
        if ptr not in self.raw and self._block(base).identity != "Memory":
            raise CUDARuntimeError("cudaErrorInvalidValue: invalid argument")
        return b"mem" + base.to_bytes(8, "little") + bytes(53)

    def ipcOpenMemHandle(self, handle: bytes, flags: int = 1) -> int:
        if handle[:3] != b"mem" or len(handle) != 64:
            raise CUDARuntimeError("cudaErrorInvalidResourceHandle: invalid resource handle")
        base = int.from_bytes(handle[3:11], "little")
        self.opened.append(base)
        self.open[base] += 1  # one address, and a count, as in CUDA
        return base

    def ipcCloseMemHandle(self, ptr: int) -> None:
        assert self.open[ptr], f"memory at {ptr:#x} is closed more often than it was opened"
        self.open[ptr] -= 1
        self.closed.append(ptr)

    def ipcGetEventHandle(self, event: int) -> bytes:
        if not self._library.clock.objects[event].interprocess:
            raise CUDARuntimeError("cudaErrorInvalidResourceHandle: invalid resource handle")
        return b"evt" + event.to_bytes(8, "little") + bytes(53)

    def ipcOpenEventHandle(self, handle: bytes) -> int:
        return int.from_bytes(handle[3:11], "little")

    def _block(self, base: int) -> Any:
        for block in self._library.all_blocks():
            if block.base == base:
                return block
        raise CUDARuntimeError("cudaErrorInvalidValue: invalid argument")


class _Pinned(bytearray):
    """Pinned host memory; tests look whether it is still in use."""


def address_range(ptr: int) -> tuple[int, int]:
    """Return base and size of the allocation around `ptr`, as `cuMemGetAddressRange` does."""
    cupy: Any = sys.modules["cupy"]
    raw = cupy.cuda.runtime.raw
    for base, memory in raw.items():
        if base <= ptr < base + len(memory):
            return base, len(memory)
    for block in reversed(cupy.library.all_blocks()):
        if block.base <= ptr < block.base + len(block.block):
            return block.base, len(block.block)
    raise CUDARuntimeError("CUDA_ERROR_INVALID_VALUE")


class Device:
    """`cupy.cuda.Device`."""

    def __init__(self, device: int | None = None, *, runtime: Runtime) -> None:
        self._runtime = runtime
        self.id = runtime.getDevice() if device is None else int(device)
        self._before: list[int] = []

    @property
    def pci_bus_id(self) -> str:
        return self._runtime.deviceGetPCIBusId(self.id)

    def use(self) -> Device:
        self._runtime.setDevice(self.id)
        return self

    def synchronize(self) -> None:
        raise AssertionError("mpimesh must never wait for the whole device")

    def __enter__(self) -> Device:
        self._before.append(self._runtime.getDevice())
        self._runtime.setDevice(self.id)
        return self

    def __exit__(self, *error: object) -> None:
        self._runtime.setDevice(self._before.pop())

    def __int__(self) -> int:
        return self.id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and other.id == self.id

    def __hash__(self) -> int:
        return self.id


def _stream(
    clock: Clock,
    null: bool = False,
    non_blocking: bool = False,
    ptds: bool = False,
    priority: int | None = None,
) -> Stream:
    return Stream(clock=clock, device_id=clock.device())


class UnownedMemory:
    """Memory at an address that somebody else keeps."""

    identity = "UnownedMemory"

    def __init__(self, ptr: int, size: int, owner: object, device_id: int = -1) -> None:
        self.ptr, self.size, self.owner, self.device_id = ptr, size, owner, max(device_id, 0)


class MemoryPool:
    """`cupy.cuda.MemoryPool`, whose memory is of `cudaMalloc`, whatever that of new arrays is."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def malloc(self, nbytes: int) -> MemoryPointer:
        return MemoryPointer(self._library.allocate(nbytes, "Memory"))

    def free_all_blocks(self) -> None:
        """Give back to CUDA what no array has any more."""
        runtime: Any = sys.modules["cupy"].cuda.runtime
        gc.collect()
        for block in self._library.free_blocks():
            runtime.refuse_if_open(block.base)


class FakeCupy(ModuleType):
    """The module, to stand in `sys.modules` as "cupy"."""

    __version__ = "14.0.0"

    def __init__(self, devices: int = 1) -> None:
        super().__init__("cupy")
        clock = Clock()
        library = self.library = Library(clock)
        runtime = Runtime(library, devices)
        device = partial(Device, runtime=runtime)
        library.device = device  # type: ignore[attr-defined]

        class NdArray(FakeArray):
            """`cupy.ndarray`."""

            def __init__(self, *args: Any, **options: Any) -> None:
                if isinstance(args[0], np.ndarray):
                    super().__init__(*args)
                else:
                    self._from_shape(*args, **options)

            def _from_shape(self, shape: Any, dtype: Any = float, memptr: Any = None) -> None:
                shape = (shape,) if isinstance(shape, int) else tuple(shape)
                if memptr is None:
                    new = library.new(shape, dtype)
                    super().__init__(new.on_host, new.block, library)
                else:
                    host = at_address(memptr.ptr, shape, dtype)
                    super().__init__(host, memptr.mem, library)

        self.ndarray = library.array_class = NdArray
        self.get_default_memory_pool = partial(MemoryPool, library)
        self.cuda = SimpleNamespace(
            clock=clock,
            runtime=runtime,
            nccl=FakeNccl(clock),
            Device=device,
            Event=partial(Event, clock=clock),
            Stream=partial(_stream, clock),
            get_current_stream=clock.stream,
            alloc_pinned_memory=lambda nbytes: _Pinned(b"k" * nbytes),
            MemoryPool=partial(MemoryPool, library),
            MemoryPointer=MemoryPointer,
            UnownedMemory=UnownedMemory,
            is_available=lambda: devices > 0,
        )

    @property
    def identity(self) -> str:
        return self.library.identity

    @identity.setter
    def identity(self, name: str) -> None:
        self.library.identity = name

    fuse = staticmethod(fuse)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(np, name):
            raise AttributeError(f"the fake CuPy has no {name}")
        found = getattr(np, name)
        if isinstance(found, type) or not callable(found):
            return found
        return lambda *args, **options: self.library.call(found, args, options)

    def asarray(self, values: Any, dtype: Any = None) -> FakeArray:
        if isinstance(values, FakeArray):
            return values if dtype is None else values.astype(dtype)
        host = np.array(values, dtype)  # from pageable memory CuPy copies at once, too
        result = self.library.new(host.shape, host.dtype)
        self.library.clock.stream().put(lambda: result.on_host.__setitem__(..., host))
        return result

    array = asarray

    def empty(self, shape: Any, dtype: Any = float) -> FakeArray:
        return self.library.new((shape,) if isinstance(shape, int) else tuple(shape), dtype)

    def empty_like(self, x: FakeArray) -> FakeArray:
        return self.empty(x.shape, x.dtype)

    def copyto(self, out: FakeArray, values: FakeArray, where: Any = True) -> None:
        given, chosen = self.library.host(values), self.library.host(where)
        self.library.clock.stream().put(lambda: np.copyto(out.on_host, given, where=chosen))

    def asnumpy(self, values: FakeArray) -> np.ndarray:
        return values.get()


@contextmanager
def installed(devices: int = 1) -> Iterator[FakeCupy]:
    """Put a new fake CuPy in the place of CuPy."""
    before = sys.modules.get("cupy")
    cupy = sys.modules["cupy"] = FakeCupy(devices)
    try:
        yield cupy
    finally:
        if before is None:
            sys.modules.pop("cupy", None)
        else:
            sys.modules["cupy"] = before
