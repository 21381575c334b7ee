"""Memory of one process that other processes of its node can open.

One file without a name (Linux's `memfd_create`) holds all of it. The file is as
long as the address space allows, and costs only what is touched. Compared with
the windows of `MPI_Win_allocate_shared`, taking memory needs no other rank; the
size of /dev/shm does not limit it, so neither MPI's crash there nor a bus error
can happen; and since it has no name, nothing stays behind however the process
ends. Others open it as ``/proc/<pid>/fd/<number>``, which the system lets
processes of the same user do, and look for a token in it (:class:`Node`).
"""

from __future__ import annotations

import ctypes
import os
import sys
import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, MAP_SHARED, PROT_READ, PROT_WRITE
from resource import RLIM_INFINITY, RLIMIT_AS, getrlimit
from threading import Lock
from typing import Any

import numpy as np

from mpimesh.arguments import digest_bits
from mpimesh.arrays.memory import address_of, memory_at
from mpimesh.arrays.namespace import HostArray
from mpimesh.core.node import DOOR_BYTES, Door, Engine, can_read
from mpimesh.core.pool import MOST_BYTES, Pool
from mpimesh.errors import TransportError

__all__ = ["Arena", "FreeList", "Node", "WarmParts", "door_of"]

HUGE_PAGE_BYTES = 2 << 20

_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MADV_REMOVE = 9  # by number, as the next: other systems do not have it
_MADV_COLLAPSE = 25
_FAILED = ctypes.c_void_p(-1).value

_CACHE_LINE_BYTES = 64
_PAGE_BYTES = 4096
_WHOLE_PAGES_FROM_BYTES = 64 * 1024
"""Parts from this size on have pages of their own, which go back to the system when they end."""

_MOST_WARM_BYTES = 256 << 20
_WARM_SHARE = 64
"""Of the machine's memory, at most this part is kept for parts to come; there are many ranks."""

_MOST_BYTES = 1 << 38
_LEAST_BYTES = 1 << 30
_TOKEN_AT = 0
_DOOR_AT = 2 * _CACHE_LINE_BYTES


class Arena:
    """Memory that this process hands out and others can open.

    Args:
        warm_bytes: Most bytes of parts that have ended and keep their pages for others of their
            size; None for a share of the machine's memory.

    Attributes:
        fd: The file's number in this process.
        memory: All of it, as this process has it mapped.
        nbytes: Length of the file, most of which nothing is stored in.
        place: Where it begins in this process.
        token: What stands in its first eight bytes, to tell it from any other file.
        door: Where this process sleeps.
        pool: Hands out small parts.

    Raises:
        TransportError: If this system has no such files, or no address space for one.
    """

    def __init__(self, *, warm_bytes: int | None = None) -> None:
        self._pid = os.getpid()
        self._lock = Lock()
        self._ended: deque[int] = deque()
        self._living: dict[int, _Living] = {}
        self.fd = _open_file()
        try:
            self.memory = _map_most(self.fd)
        except TransportError:
            os.close(self.fd)
            raise
        self._buffer = memoryview(self.memory)  # type: ignore[arg-type]
        self.place: int = self.memory.__array_interface__["data"][0]
        self.nbytes = self.memory.nbytes
        self._parts = FreeList(self.nbytes)
        self.pool = Pool(self._chunk)
        if warm_bytes is None:
            warm_bytes = min(_MOST_WARM_BYTES, _physical_bytes() // _WARM_SHARE)
        self._warm = WarmParts(warm_bytes)
        self._parts.take(_DOOR_AT + DOOR_BYTES, _CACHE_LINE_BYTES)
        self.token = int.from_bytes(os.urandom(8), "little") >> 2
        self.memory[_TOKEN_AT : _TOKEN_AT + 8].view(np.int64)[0] = self.token
        self.door = door_of(self.memory)

    @property
    def used_bytes(self) -> int:
        """Bytes that are handed out."""
        with self._lock:
            self._take_back()
            return self._parts.used_bytes - self._warm.nbytes - self.pool.free_bytes

    def empty(self, nbytes: int) -> HostArray | None:
        """Return uninitialised bytes, on cache lines of their own; None if none are left.

        They are taken back when no array refers to them any more. A forked child gets none: its
        parent would hand the same out.
        """
        if nbytes <= MOST_BYTES:
            return self.pool.empty(nbytes)
        if os.getpid() != self._pid:
            return None
        unit = _CACHE_LINE_BYTES
        if nbytes > _WHOLE_PAGES_FROM_BYTES - unit:  # in whole lines it is as large
            unit = HUGE_PAGE_BYTES if nbytes >= HUGE_PAGE_BYTES else _PAGE_BYTES
        with self._lock:
            self._take_back()
            at, is_warm = self._take(-(-nbytes // unit) * unit, unit)
        if at is None:
            return None
        if unit == HUGE_PAGE_BYTES and not is_warm:
            take_huge_pages(self.memory[at : at + -(-nbytes // unit) * unit])
        # Through a memoryview, so that views of `part` refer to it and not to the whole: it lives
        # as long as any of them.
        part: HostArray = np.frombuffer(self._buffer, np.uint8, nbytes, at)
        # No `weakref.finalize`, which takes longer than all the rest.
        living = self._living[at] = _Living(part, self._has_ended)
        living.at = at
        return part

    def _chunk(self, nbytes: int) -> int:
        """Return the address of bytes that the pool keeps; 0 if none are left."""
        with self._lock:
            self._take_back()
            at, _ = self._take(nbytes, _CACHE_LINE_BYTES)
        return 0 if at is None else self.place + at

    def _take(self, size: int, unit: int) -> tuple[int | None, bool]:
        """Return where `size` bytes begin, and whether their pages are there."""
        if size >= _WHOLE_PAGES_FROM_BYTES:
            warm = self._warm.take(size, unit)
            if warm is not None:
                return warm, True
        at = self._parts.take(size, unit)
        if at is None and self._warm.nbytes:
            self._cool(self._warm.clear())
            at = self._parts.take(size, unit)
        return at, False

    def find(self, array: HostArray) -> int:
        """Return where the memory of a contiguous array begins in the file; -1 if it is not in it.

        Cost:
            Half a microsecond; ten for an array that is read-only or has no plain elements.
        """
        address = address_of(array)
        if address is None:
            address = array.__array_interface__["data"][0]
        at: int = address - self.place
        return at if at >= 0 and at + array.nbytes <= self.nbytes else -1

    def trim(self) -> None:
        """Give back the pages that are kept for arrays to come."""
        with self._lock:
            self._take_back()
            self._cool(self._warm.clear())

    def _has_ended(
        self, living: _Living, *, at_the_end: Callable[[], bool] = sys.is_finalizing
    ) -> None:
        # The collector may call this anywhere, in the middle of `empty` as well: only note it,
        # and do the work if nobody else is at it. At the very end this module has no names left,
        # only defaults.
        if at_the_end():
            return  # nobody asks for memory any more
        del self._living[living.at]
        self._ended.append(living.at)
        if self._lock.acquire(blocking=False):
            try:
                self._take_back()
            finally:
                self._lock.release()

    def _take_back(self) -> None:
        if os.getpid() != self._pid:
            return  # a fork: the memory is its parent's, which still uses it
        while self._ended:
            at = self._ended.popleft()
            size = self._parts.size_of(at)
            if size >= _WHOLE_PAGES_FROM_BYTES:
                unit = (
                    _PAGE_BYTES
                    if at % HUGE_PAGE_BYTES or size % HUGE_PAGE_BYTES
                    else HUGE_PAGE_BYTES
                )
                self._cool(self._warm.keep(at, size, unit))
            else:
                self._parts.give(at)

    def _cool(self, places: list[int]) -> None:
        """Give parts, and their pages, back."""
        for at in places:
            start, end = self._parts.give(at)
            give_pages_back(self.memory[start:end])


class _Living(weakref.ref[HostArray]):
    """A part that is handed out.

    Attributes:
        at: Where it begins.
    """

    __slots__ = ("at",)

    at: int


def door_of(memory: HostArray) -> Door:
    """Return the door of the process whose arena `memory` is."""
    return Door(memory[_DOOR_AT : _DOOR_AT + DOOR_BYTES])


def _open_file() -> int:
    try:
        return os.memfd_create("mpimesh", os.MFD_CLOEXEC)
    except (AttributeError, OSError) as error:
        raise TransportError(f"this system has no files in memory: {error}") from None


def _physical_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _map_most(fd: int) -> HostArray:
    """Map the file, as long as it can be."""
    limit, _ = getrlimit(RLIMIT_AS)
    if limit != RLIM_INFINITY:
        # What is reserved here, and for each neighbour, the program could not have.
        raise TransportError(
            f"no address space for memory that other ranks can open: it is limited to {limit} "
            "bytes (ulimit -v)"
        )
    nbytes = min(_MOST_BYTES, 1 << (2 * _physical_bytes()).bit_length())
    while True:
        try:
            os.ftruncate(fd, nbytes)
            return map_file(fd, nbytes)
        except OSError as error:
            nbytes //= 2
            if nbytes < _LEAST_BYTES:
                raise TransportError(
                    f"no address space for memory that other ranks can open: {error}"
                ) from None


# -- the arenas of a node ----------------------------------------------------------------------


class Node:
    """This process's arena, and those of others on its node that it has opened.

    Attributes:
        arena: The memory of this process; None if there can be none.
        core: What this process has started in memory that its node shares; None without an arena.
        why_not: Why there is none.
    """

    def __init__(self) -> None:
        self.arena: Arena | None = None
        self.core: Engine | None = None
        self.why_not = ""
        self._key = _node_key()
        self._opened: dict[tuple[int, ...], HostArray] = {}
        self._kept: list[HostArray | None] = []
        try:
            self.arena = Arena()
            self.core = Engine(self.arena.door)
        except TransportError as error:
            self.why_not = str(error)

    @property
    def memory(self) -> HostArray:
        """This process's memory, as its arrays lie in it.

        Raises:
            TransportError: If it has none.
        """
        if self.arena is None:
            raise TransportError(self.why_not)
        return self.arena.memory

    @property
    def address(self) -> tuple[int, ...]:
        """Node, process, file, token, length and place: what others need to find this memory."""
        arena = self.arena
        if arena is None:
            return (self._key, 0, -1, 0, 0, 0)
        return (self._key, os.getpid(), arena.fd, arena.token, arena.nbytes, arena.place)

    @staticmethod
    def can_read(address: tuple[int, ...]) -> bool:
        """Tell whether this process may read any memory of the one with this address."""
        _, pid, _, token, _, place = address
        return can_read(pid, place + _TOKEN_AT, token)

    def keep(self, memory: HostArray | None) -> None:
        """Never hand `memory` out again: other processes may still look at it."""
        self._kept.append(memory)

    def open(self, address: tuple[int, ...]) -> HostArray:
        """Return the memory of the process with this address, as bytes.

        Raises:
            TransportError: If it cannot be opened, or is not what the address says.
        """
        if address not in self._opened:
            self._opened[address] = _open(address)
        return self._opened[address]


def _open(address: tuple[int, ...]) -> HostArray:
    _, pid, fd, token, nbytes, _ = address
    if fd < 0:
        raise TransportError(f"process {pid} has no memory for others")
    try:
        own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise TransportError(f"the memory of process {pid} cannot be opened: {error}") from None
    try:
        if os.fstat(own).st_size != nbytes:
            raise TransportError(f"file {fd} of process {pid} is not its memory")
        found = map_file(own, nbytes)
    except OSError as error:
        raise TransportError(f"the memory of process {pid} cannot be mapped: {error}") from None
    finally:
        os.close(own)
    if found[:8].view(np.int64)[0] != token:
        raise TransportError(f"file {fd} of process {pid} is not its memory")
    return found


def _node_key() -> int:
    """Return a number that two processes share only if they see each other's process numbers."""
    facts = [os.uname().nodename]
    # By hand: to import pathlib takes longer than all the rest of this file.
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:  # noqa: PTH123
        facts.append(file.read().strip())
    with suppress(OSError):
        facts.append(os.readlink("/proc/self/ns/pid"))  # noqa: PTH115 - containers have their own
    return digest_bits("|".join(facts).encode(), 63)


# -- which parts are free ----------------------------------------------------------------------


class FreeList:
    """Free and used parts of ``size`` bytes: first fit, with neighbours joined again.

    Args:
        size: How many bytes there are.
    """

    __slots__ = ("_free", "_used", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        # (start, end) in order; no two touch, so the row is as short as it can be.
        self._free = [(0, size)] if size else []
        self._used: dict[int, int] = {}

    @property
    def used_bytes(self) -> int:
        """Bytes that are taken."""
        return sum(end - start for start, end in self._used.items())

    def take(self, nbytes: int, alignment_bytes: int) -> int | None:
        """Return where `nbytes` begin from now on; None if no gap is large enough.

        The first gap that is large enough is used, so that the far end stays untouched.
        """
        nbytes = max(nbytes, 1)  # every part has a place of its own
        for number, (start, end) in enumerate(self._free):
            at = -(-start // alignment_bytes) * alignment_bytes
            if at + nbytes <= end:
                rest = [(start, at), (at + nbytes, end)]
                self._free[number : number + 1] = [part for part in rest if part[0] < part[1]]
                self._used[at] = at + nbytes
                return at
        return None

    def size_of(self, at: int) -> int:
        """Return the bytes of the part that begins at `at`.

        Raises:
            KeyError: If no part begins there.
        """
        return self._used[at] - at

    def give(self, at: int) -> tuple[int, int]:
        """Free the part that begins at `at`; return where it began and ended.

        Raises:
            KeyError: If no part begins there.
        """
        part = start, end = at, self._used.pop(at)
        place = bisect_right(self._free, (start, end))
        if place < len(self._free) and self._free[place][0] == end:
            end = self._free.pop(place)[1]
        if place and self._free[place - 1][1] == start:
            start = self._free.pop(place - 1)[0]
        insort(self._free, (start, end))
        return part


class WarmParts:
    """Parts that nobody uses and whose pages are there, by size and the multiple they begin at.

    The first touch of a page costs more than copying into it. A program that makes one array after
    another of the same size, as a redistribution in a loop does, gets the pages of the last but one
    again. Beyond a limit the oldest goes.

    Args:
        limit_bytes: Most bytes that are kept.

    Attributes:
        nbytes: Bytes that are kept.
    """

    __slots__ = ("_by_kind", "_limit_bytes", "_order", "nbytes")

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._by_kind: dict[tuple[int, int], list[int]] = {}
        self._order: deque[tuple[int, tuple[int, int]]] = deque()
        self.nbytes = 0

    def take(self, size: int, unit: int) -> int | None:
        """Return where the part of just this size begins that was kept last; None for none."""
        found = self._by_kind.get((size, unit))
        if not found:
            return None
        self.nbytes -= size
        at = found.pop()
        self._order.remove((at, (size, unit)))
        return at

    def keep(self, at: int, size: int, unit: int) -> list[int]:
        """Keep a part; return which have to go for it, the oldest first."""
        self._by_kind.setdefault((size, unit), []).append(at)
        self._order.append((at, (size, unit)))
        self.nbytes += size
        return self._drop(self._limit_bytes)

    def clear(self) -> list[int]:
        """Keep none; return which have to go."""
        return self._drop(0)

    def _drop(self, limit_bytes: int) -> list[int]:
        gone = []
        while self.nbytes > limit_bytes:
            at, kind = self._order.popleft()
            self._by_kind[kind].remove(at)
            self.nbytes -= kind[0]
            gone.append(at)
        return gone


# -- mappings ------------------------------------------------------------------------------------
#
# Python's own `mmap` cannot say where. A mapping whose address is not a multiple of 2 MiB is never
# served by huge pages, and with pages of 4 KiB a reduction of 16 MiB takes 1.25 times as long
# (measured).


def map_file(fd: int, nbytes: int) -> HostArray:
    """Return the first `nbytes` of a file as memory that is shared with all who map it.

    It stays mapped as long as the process lives.

    Raises:
        OSError: If there is no address space for it.
    """
    # A reservation with room to spare, and the file over the part that begins on a huge page.
    anywhere = _MAP_NORESERVE | MAP_PRIVATE | MAP_ANONYMOUS
    reserved = _map(None, nbytes + HUGE_PAGE_BYTES, _PROT_NONE, anywhere, -1)
    start = -(-reserved // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    here = MAP_SHARED | _MAP_FIXED | _MAP_NORESERVE
    _map(start, nbytes, PROT_READ | PROT_WRITE, here, fd)
    return memory_at(start, nbytes, np.dtype(np.uint8))


def take_huge_pages(part: HostArray) -> bool:
    """Put huge pages under a fresh part of a mapping that begins on one; False if it cannot be.

    From Linux 6.1 on, whatever is set for shared memory in general.

    Cost:
        One millisecond a MiB, which is what touching the part for the first time costs anyway.
    """
    # A huge page can be made of one that has been touched, not of none.
    part[::HUGE_PAGE_BYTES] = 0
    return _advise(part, _MADV_COLLAPSE)


def give_pages_back(part: HostArray) -> None:
    """Give the memory of whole pages back to the system; they read as zeros from then on."""
    _advise(part, _MADV_REMOVE)


def _advise(part: HostArray, advice: int) -> bool:
    at = part.__array_interface__["data"][0]
    return bool(_libc().madvise(ctypes.c_void_p(at), ctypes.c_size_t(part.nbytes), advice) == 0)


def _map(at: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    start = _libc().mmap(at, nbytes, protection, flags, fd, 0)
    if start == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(start)


@lru_cache(maxsize=1)
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    return libc
