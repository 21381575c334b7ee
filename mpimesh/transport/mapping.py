"""Map a file into memory so that huge pages fit, and advise the system about parts of it.

Python's own `mmap` cannot say where. A mapping whose address is not a multiple
of 2 MiB is never served by huge pages, and with pages of 4 KiB a reduction of
16 MiB takes 1.25 times as long (measured).
"""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, MAP_SHARED, PROT_READ, PROT_WRITE
from typing import Any

import numpy as np

from mpimesh.arrays.types import HostArray

__all__ = ["HUGE_PAGE_BYTES", "give_pages_back", "map_file", "take_huge_pages"]

HUGE_PAGE_BYTES = 2 << 20

_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MADV_REMOVE = 9  # by number, as the next: other systems do not have it
_MADV_COLLAPSE = 25
_FAILED = ctypes.c_void_p(-1).value


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
    whole: Any = (ctypes.c_char * nbytes).from_address(start)
    found: HostArray = np.frombuffer(whole, np.uint8)
    return found


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
