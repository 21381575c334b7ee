"""A nap that the other ranks of a node can end.

Who waits for another rank gives the core away, and would notice late that the other
has come. So each process has a *bell* in its arena: before it sleeps it says so, and
whoever does something that it may be waiting for rings. That costs the ringer
a look at one number, and a system call only if somebody is asleep there.

Order. The sleeper says that it is asleep, reads how often the bell has rung, looks
once more at what it waits for, and sleeps only if the bell has not rung since.
The ringer first does what is waited for, and then looks whether somebody is asleep. A
processor may let these two looks pass each other; then the nap ends by itself, as
it does where what is waited for rings no bell.

It is a futex of Linux, by its system call: Python has no such lock between processes.
"""

from __future__ import annotations

import ctypes
import errno
import platform
from functools import lru_cache
from typing import Any

import numpy as np

from mpimesh.arrays.namespace import HostArray

__all__ = ["BELL_BYTES", "Doorbell"]

BELL_BYTES = 128
"""Two cache lines: how often it has rung, and whether somebody is asleep."""

_ASLEEP_AT = 64
_CALL_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_WAIT, _WAKE = 0, 1
_EVERYBODY = 0x7FFFFFFF
_NUMBERS = 1 << 32


class Doorbell:
    """The bell of one process: to sleep at, if it is this one's, or to ring.

    Args:
        memory: `BELL_BYTES` that sleeper and ringers share, zero at first.

    Attributes:
        asleep: Not zero while the process sleeps.
    """

    __slots__ = ("_address", "_memory", "_rung", "asleep")

    def __init__(self, memory: HostArray) -> None:
        self._memory = memory
        self._address: int = memory.__array_interface__["data"][0]
        numbers: Any = memory.view(np.uint32)
        self._rung = memoryview(numbers[:1])
        self.asleep = memoryview(numbers[_ASLEEP_AT // 4 :][:1])

    @staticmethod
    def possible() -> bool:
        """Tell whether this system has what it takes."""
        return platform.system() == "Linux" and platform.machine() in _CALL_NUMBERS

    # -- the sleeper -----------------------------------------------------------------

    def lie_down(self) -> int:
        """Say that this process is about to sleep; return what :meth:`sleep` needs."""
        self.asleep[0] = 1
        return self._rung[0]

    def sleep(self, rung: int, longest_s: float) -> bool:
        """Sleep until the bell rings; False if nobody has rung, or a signal ended it."""
        seconds = int(longest_s)
        time_left = (ctypes.c_long * 2)(seconds, int((longest_s - seconds) * 1e9))
        return _futex(self._address, _WAIT, rung, time_left) in (0, errno.EAGAIN)

    def get_up(self) -> None:
        """Say that it sleeps no more."""
        self.asleep[0] = 0

    # -- the others ------------------------------------------------------------------

    def ring(self) -> None:
        """Wake the process up, if it is asleep."""
        if self.asleep[0]:
            # Two who ring at once may count as one: it has changed all the same.
            self._rung[0] = (self._rung[0] + 1) % _NUMBERS
            _futex(self._address, _WAKE, _EVERYBODY, None)


def _futex(address: int, what: int, value: int, time_left: Any) -> int:
    """Do the system call; return 0, or the number of the error."""
    call = _call()
    if call(_CALL_NUMBERS[platform.machine()], address, what, value, time_left, None, 0) >= 0:
        return 0
    return ctypes.get_errno()


@lru_cache(maxsize=1)
def _call() -> Any:
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    call.argtypes = [
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_uint32,
    ]
    return call
