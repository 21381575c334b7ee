"""A fake GPU that several processes of a node share, as far as CUDA IPC lets them.

Its memory is a file that other processes map, so a handle names a process, a file and an offset.
An interprocess event is two numbers there: how often it was recorded, and which record its stream
has come to. The clock ticks by itself, because one process waits for what another one's GPU does.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from functools import partial
from typing import Any

import numpy as np

from tests.devices.fake_cuda import FakeCupy, address_range
from tests.devices.fake_streams import Clock, Event, Stream

__all__ = ["SharedCupy"]

_BYTES = 64 << 20
_HANDLE = struct.Struct("<4sqqq")


class _Memory:
    """The file of one process, as this process sees it."""

    def __init__(self, pid: int, fd: int) -> None:
        own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
        self.bytes = np.frombuffer(mmap.mmap(own, _BYTES), np.uint8)
        os.close(own)
        self.base = int(self.bytes.ctypes.data)
        self.used = 0

    def take(self, nbytes: int) -> np.ndarray:
        start = self.used
        self.used += -(-nbytes // 64) * 64
        assert self.used <= _BYTES, "the fake GPU is full"
        return self.bytes[start : start + nbytes]

    def cell(self, offset: int) -> Any:
        return self.bytes[offset : offset + 16].view(np.int64)


class _Reached:
    def __init__(self, cell: Any) -> None:
        self._cell, self._number = cell, int(cell[0])

    @property
    def reached(self) -> bool:
        return bool(self._cell[1] >= self._number)


class _SharedEvent(Event):
    """An event whose state lies in memory that processes share."""

    def __init__(self, cell: Any, *, clock: Clock) -> None:
        self.cell = cell
        super().__init__(disable_timing=True, interprocess=True, clock=clock)

    @property
    def record_now(self) -> Any:
        return _Reached(self.cell) if self.cell[0] else None

    @record_now.setter
    def record_now(self, record: Any) -> None:
        assert record is None

    def record(self, stream: Stream | None = None) -> None:
        stream = self._clock.stream() if stream is None else stream
        self.cell[0] += 1
        number = int(self.cell[0])
        stream.put(lambda: self.cell.__setitem__(1, number))


class SharedCupy(FakeCupy):
    """The module, whose memory other processes can open."""

    def __init__(self) -> None:
        super().__init__()
        fd = os.memfd_create("fake-gpu")
        os.ftruncate(fd, _BYTES)
        memory = _Memory(os.getpid(), fd)
        memories = {os.getpid(): memory}
        clock, runtime = self.library.clock, self.cuda.runtime
        self.library.take = memory.take
        self._stop = threading.Event()

        def handle(word: bytes, offset: int) -> bytes:
            return _HANDLE.pack(word, os.getpid(), fd, offset).ljust(64, b"\0")

        def opened(word: bytes, text: bytes) -> tuple[_Memory, int]:
            kind, pid, number, offset = _HANDLE.unpack(text[: _HANDLE.size])
            if kind != word or pid == os.getpid():  # as CUDA refuses its own
                raise runtime.CUDARuntimeError("cudaErrorInvalidResourceHandle")
            if pid not in memories:
                memories[pid] = _Memory(pid, number)
            return memories[pid], offset

        def malloc(size: int) -> int:
            room = memory.take(size)
            runtime.raw[int(room.ctypes.data)] = room
            return int(room.ctypes.data)

        def event(*args: Any, interprocess: bool = False, **options: Any) -> Event:
            if interprocess:
                return _SharedEvent(memory.take(16).view(np.int64), clock=clock)
            return Event(*args, clock=clock, **options)

        def mem_handle(ptr: int) -> bytes:
            return handle(b"mem_", address_range(ptr)[0] - memory.base)

        def open_mem(text: bytes, flags: int = 1) -> int:
            other, offset = opened(b"mem_", text)
            runtime.opened.append(other.base + offset)
            runtime.open[other.base + offset] += 1
            return other.base + offset

        def event_handle(ptr: int) -> bytes:
            return handle(b"evt_", clock.objects[ptr].cell.ctypes.data - memory.base)

        def open_event(text: bytes) -> int:
            other, offset = opened(b"evt_", text)
            return _SharedEvent(other.cell(offset), clock=clock).ptr

        self.cuda.Event, runtime.malloc = event, malloc
        runtime.ipcGetMemHandle, runtime.ipcOpenMemHandle = mem_handle, open_mem
        runtime.ipcGetEventHandle, runtime.ipcOpenEventHandle = event_handle, open_event
        threading.Thread(target=partial(self._tick, clock), daemon=True).start()

    def _tick(self, clock: Clock) -> None:
        while not self._stop.is_set():
            clock.tick()
            time.sleep(0.0002)

    def stop(self) -> None:
        """Let the clock stand still."""
        self._stop.set()
