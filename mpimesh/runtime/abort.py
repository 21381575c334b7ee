"""The end of all ranks at once, come what may."""

from __future__ import annotations

import array
import faulthandler
import fcntl
import os
import stat
import sys
import termios
import threading
import time
from contextlib import suppress
from typing import NoReturn

__all__ = ["end_job", "write_error"]

_GRACE_S = 3.0
_STDERR_FD = 2
_DELIVERY_S = 0.1
_LONGEST_DELIVERY_S = 1.0


def end_job(exit_code: int) -> NoReturn:
    """End all ranks of the MPI job, with `exit_code` where the launcher hands it on.

    If `MPI_Abort` has not ended this process after 3 s, it ends by itself; the launcher
    then ends the others, because it left without finalizing MPI.
    """
    # A thread in C: it needs neither the interpreter's lock nor MPI to come to an end.
    with suppress(Exception):
        faulthandler.dump_traceback_later(_GRACE_S, exit=True, file=_STDERR_FD)
    flush()
    _deliver()
    with suppress(Exception):
        from mpi4py import MPI

        may_call = (
            threading.current_thread() is threading.main_thread()
            or MPI.Query_thread() == MPI.THREAD_MULTIPLE
        )
        if may_call and MPI.Is_initialized() and not MPI.Is_finalized():
            MPI.COMM_WORLD.Abort(exit_code & 0xFF or 1)
    os._exit(exit_code & 0xFF or 1)


def flush() -> None:
    """Write out what the standard streams hold back."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def _deliver() -> None:
    """Give the launcher time to read what was written: once a rank aborts it reads no more."""
    end_s = time.monotonic() + _LONGEST_DELIVERY_S
    while any(map(_unread_bytes, (1, _STDERR_FD))) and time.monotonic() < end_s:
        time.sleep(0.005)
    # From the launcher's part on this node to the one that started it.
    time.sleep(_DELIVERY_S)


def _unread_bytes(fd: int) -> int:
    """Return how much of what was written to a pipe has not been read; 0 if `fd` is none."""
    unread = array.array("i", [0])
    with suppress(OSError):
        if stat.S_ISFIFO(os.fstat(fd).st_mode):
            fcntl.ioctl(fd, termios.FIONREAD, unread)
    return unread[0]


def write_error(rank: int, text: str) -> None:
    """Write `text` to stderr in one piece, each line with the rank before it."""
    lines = "".join(f"[rank {rank}] {line}\n" for line in text.splitlines())
    with suppress(Exception):
        sys.stderr.write(lines)
        sys.stderr.flush()
