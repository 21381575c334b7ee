"""Memory of a GPU that another process can open.

CUDA gives a handle for a whole allocation, and whoever opens it gets the address of its beginning.
CuPy's pool cuts arrays out of larger allocations, so what travels is the handle and the array's
offset from the beginning, which the driver tells. Memory of the asynchronous pool, managed memory
and memory that CuPy does not own have no such handle, or none that can be relied on.

Opening costs tens of microseconds, so opened allocations are kept, the least used ones up to a
limit. Within one process, as between virtual ranks, an address is an address.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import socket
import sys
from collections import OrderedDict
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import RLock
from typing import Any
from weakref import WeakSet

import numpy as np

from mpimesh.arrays.types import Array
from mpimesh.errors import TransportError

__all__ = [
    "PLACE",
    "Imports",
    "address_range",
    "cannot_export",
    "describe",
    "gpu_key",
    "node_key",
    "process_key",
]

PLACE = np.dtype(
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

_OPENED_MOST = 128
_ENABLED_ALREADY = 704
"""CUDA's answer if kernels may read the other GPU's memory already."""


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


def cannot_export(x: Array) -> str | None:
    """Return why no other process can open the memory of `x`; None if one can."""
    identity = getattr(x.data.mem, "identity", type(x.data.mem).__name__)
    if identity == "MemoryAsync":
        return "memory of CuPy's asynchronous pool has no handle that another process can open"
    if identity != "Memory":
        return f"{identity} has no handle that another process can open"
    return None


def describe(x: Array, *, process: int, own: bool = False) -> Any:
    """Return the :data:`PLACE` of `x`; with ``nbytes == -1`` if it cannot be opened.

    Args:
        x: A C-contiguous CuPy array.
        process: What tells this process from all others of the node.
        own: It lies in memory that mpimesh allocated outside of any pool.
    """
    place = np.zeros((), PLACE)
    place["node"], place["process"] = node_key(), process
    place["address"], place["nbytes"] = x.data.ptr, x.nbytes
    place["device"] = x.data.device_id
    if x.nbytes == 0:
        return place
    place["nbytes"] = -1
    if not own and cannot_export(x) is not None:
        return place
    runtime = sys.modules["cupy"].cuda.runtime
    try:
        base, allocated = address_range(x.data.ptr)
        handle = runtime.ipcGetMemHandle(base)
    except (TransportError, runtime.CUDARuntimeError):
        return place
    place["offset"], place["allocated"] = x.data.ptr - base, allocated
    place["handle"] = np.frombuffer(handle, np.uint8)
    place["nbytes"] = x.nbytes
    return place


@dataclass(frozen=True, slots=True)
class _Opened:
    """An allocation of another process: where it is here, and where it was there."""

    base: int
    process: int
    start: int
    stop: int

    def overlaps(self, process: int, start: int, stop: int) -> bool:
        return process == self.process and start < self.stop and self.start < stop


class Imports:
    """Allocations of other processes that this one has opened.

    Args:
        process: As for :func:`describe`.
    """

    def __init__(self, *, process: int) -> None:
        self._process = process
        self._runtime: Any = sys.modules["cupy"].cuda.runtime
        self._opened: OrderedDict[bytes, _Opened] = OrderedDict()
        self._reached: set[tuple[int, int]] = set()
        _all_imports.add(self)

    def open(self, place: Any) -> int:
        """Return the address at which this process reads what `place` tells.

        Raises:
            TransportError: If it cannot.
        """
        if place["nbytes"] < 0:
            raise TransportError("the memory has no handle")
        if place["nbytes"] == 0:
            return int(place["address"])
        if place["process"] == self._process:
            self._reach(int(place["device"]))
            return int(place["address"])
        if place["node"] != node_key():
            raise TransportError("the memory is on another node")
        handle, offset = place["handle"].tobytes(), int(place["offset"])
        with _imports_lock:
            found = self._opened.get(handle)
            if found is None:
                start = int(place["address"]) - offset
                there = int(place["process"]), start, start + int(place["allocated"])
                found = self._opened[handle] = _Opened(self._open_new(handle, there), *there)
            self._opened.move_to_end(handle)
        return found.base + offset

    def _reach(self, device: int) -> None:
        """Let kernels of the current GPU read another one's memory: opening a handle does that."""
        mine = self._runtime.getDevice()
        if device == mine or (mine, device) in self._reached:
            return
        if not self._runtime.deviceCanAccessPeer(mine, device):
            raise TransportError(f"GPU {mine} cannot read the memory of GPU {device}")
        try:
            self._runtime.deviceEnablePeerAccess(device)
        except self._runtime.CUDARuntimeError as error:
            if getattr(error, "status", 0) != _ENABLED_ALREADY:
                raise TransportError(f"GPU {mine} cannot read GPU {device}: {error}") from None
        self._reached.add((mine, device))

    def _open_new(self, handle: bytes, there: tuple[int, int, int]) -> int:
        # Two allocations of a process never overlap: what does was freed there since, when all who
        # read it had said so. CUDA refuses the new one as long as anybody here has the old one.
        for imports in [one for one in _all_imports if one._process == self._process]:
            imports._forget(*there, but=handle)
        try:
            return int(self._runtime.ipcOpenMemHandle(handle))
        except self._runtime.CUDARuntimeError as error:
            raise TransportError(f"CUDA cannot open the memory: {error}") from None

    def _forget(self, process: int, start: int, stop: int, *, but: bytes) -> None:
        for handle, one in list(self._opened.items()):
            if handle != but and one.overlaps(process, start, stop):
                self._close(self._opened.pop(handle))

    @property
    def crowded(self) -> bool:
        """Whether more is open than should be."""
        return len(self._opened) > _OPENED_MOST

    def trim(self) -> None:
        """Close what was used longest ago, down to the limit; nothing may be reading it."""
        with _imports_lock:
            while len(self._opened) > _OPENED_MOST:
                self._close(self._opened.popitem(last=False)[1])

    def close(self) -> None:
        """Close all. A second call does nothing."""
        with _imports_lock:
            while self._opened:
                self._close(self._opened.popitem()[1])

    def _close(self, opened: _Opened) -> None:
        try:
            self._runtime.ipcCloseMemHandle(opened.base)
        except self._runtime.CUDARuntimeError:
            return  # its owner has ended: there is nothing left to close


# Of this process: CUDA knows no owners among those who have opened a handle.
_all_imports: WeakSet[Imports] = WeakSet()
_imports_lock = RLock()


@cache
def node_key() -> int:
    """Return a number that processes share only if they run on one start of one machine."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    facts = f"{socket.gethostname()}|{boot.read_text() if boot.exists() else ''}"
    return _number(facts)


def gpu_key() -> int:
    """Return a number that no other GPU of the node has."""
    runtime = sys.modules["cupy"].cuda.runtime
    device = runtime.getDevice()
    properties = runtime.getDeviceProperties(device)
    # Both: CuPy cuts the UUID off at a zero byte, and the parts of a GPU share its place.
    return _number(f"{properties.get('uuid')}|{runtime.deviceGetPCIBusId(device)}")


def process_key() -> int:
    """Return a number that no other process of the node has."""
    return _number(f"{os.getpid()}|{Path('/proc/self/stat').read_text().split()[21]}")


def _number(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
