"""The way a process has ended, and a witness of it that a launcher does not kill.

Run as a program, this file is the witness: a process that watches the ranks of a node and says
which of them was killed. The mpiexec of MPICH, and often that of Open MPI, kills the other ranks
some milliseconds after the first, and MPICH's names none of them. The witness has a session of its
own, which that does not reach; mpiexec waits until it has written and let go of stderr.

It needs nothing of mpimesh, nor of anything else that would make its start slow.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path

__all__ = ["FINISHED", "REPORTED", "WITNESSED", "WORD_BYTES", "how_it_ended", "is_stopped"]

FINISHED, REPORTED, WITNESSED = 1, 2, 3
"""Values of the word of a rank: it has ended in peace; it ends the job, and has said why; it
has gone without that, and the witness has said so. 0 before."""
WORD_BYTES = 8
_LATER_S = 0.005
"""A rank that crashes may take longer to go than one that the launcher kills after it."""
_FEW = 4
_LONGEST_END_S = 1.0
"""Time from the end of a process's pipe to its own, on a busy machine."""
_WHEN_ANOTHER_HAS_GONE = (128 + signal.SIGKILL, 14)
"""Ends of ranks of which another has gone: a launcher kills them, and Open MPI, told so by Slurm
through PMIx, leaves with this code."""

_GET_INFO = 0xC040FF0B
_INFO = struct.Struct("=QQ11Ii")
_INFO_EXIT = 8
"""PIDFD_GET_INFO of Linux 6.15 and later: how a process has ended, also when it was waited for."""


def how_it_ended(pid: int, file: int) -> tuple[str, int]:
    """Return how a process has ended, as words after its name, and an exit code for the job."""
    status = _status(pid, file)
    if status is None:
        return "has gone", 1
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with suppress(ValueError):
            return f"was killed by {signal.Signals(number).name}", 128 + number
        return f"was killed by signal {number}", 128 + number
    code = os.waitstatus_to_exitcode(status)
    return f"has left with exit code {code}", code or 1


def _status(pid: int, file: int) -> int | None:
    """Return the status of an ended process as `os.wait` does; None where nobody knows it."""
    fields = _fields(pid)
    if fields[:1] == ["Z"]:
        return int(fields[-1])
    with suppress(OSError):
        wanted = bytearray(_INFO.pack(_INFO_EXIT, *(0,) * 13))
        fcntl.ioctl(file, _GET_INFO, wanted)
        mask, *_, status = _INFO.unpack(wanted)
        if mask & _INFO_EXIT:
            return int(status)
    return None


def is_stopped(pid: int) -> bool:
    """Tell whether a process has been stopped, by SIGSTOP or a debugger."""
    return _fields(pid)[:1] in (["T"], ["t"])


def _fields(pid: int) -> list[str]:
    """Return what stands in /proc of a process, from its state on."""
    with suppress(OSError):
        # Before them stands its name, in parentheses, with any characters.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def _watch(ranks: list[str]) -> None:
    """Watch ranks until all have ended in peace or one has not.

    A process that ends closes its files first, by which its launcher learns of it, and is over some
    time later: which of two has gone first is told by a pipe that each has open.

    Args:
        ranks: ``"rank:process:file:place:pipe"`` of each: where its word stands in a file of it,
            and the reading end of its pipe.
    """
    # It tells of what has come in its order: whom the launcher kills comes later.
    waiting = select.epoll()
    watched: dict[int, tuple[int, int, int, int]] = {}
    pipes: dict[int, int] = {}
    for text in ranks:
        rank, pid, number, place, end = map(int, text.split(":"))
        with suppress(OSError):
            words = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
            pipe = os.open(f"/proc/{pid}/fd/{end}", os.O_RDONLY)
            file = os.pidfd_open(pid)
            watched[file] = (rank, pid, words, place)
            waiting.register(file, select.EPOLLIN)
            pipes[pipe] = rank
            waiting.register(pipe, 0)  # its end alone, not what is written
    # Its parent goes once it watches, for that is waited for; and a program that waits for its
    # children must not meet this one.
    if os.fork():
        os._exit(0)
    signs: dict[int, int] = {}
    gone: list[tuple[bool, int, str]] = []
    while watched:
        events = waiting.poll(_LATER_S if gone else -1)
        for file, _ in events:
            waiting.unregister(file)
            if file in pipes:
                signs.setdefault(pipes.pop(file), len(signs))
                continue
            rank, pid, words, place = watched.pop(file)
            sign = signs.setdefault(rank, len(signs))
            said = _word(words, place)
            if said == FINISHED:
                continue
            if REPORTED in (said, *(_word(other, at) for _, _, other, at in watched.values())):
                return
            how, code = how_it_ended(pid, file)
            text = f"mpimesh: rank {rank} (process {pid}) {how}, without ending MPI"
            # Of several the first, but rather one that nobody else can have ended.
            follows = code in _WHEN_ANOTHER_HAS_GONE
            gone.append((follows, sign, f"[rank {rank}] {text}\n"))
            os.pwrite(words, WITNESSED.to_bytes(WORD_BYTES, sys.byteorder), place)
            if not follows:
                break
            end_s = time.monotonic() + _LONGEST_END_S
        else:
            ending = any(row[0] in signs for row in watched.values())
            more = (events and len(gone) < _FEW) or (ending and time.monotonic() < end_s)
            if watched and (more or not gone):
                continue
        if gone:
            os.write(2, min(gone)[2].encode())
            return


def _word(file: int, place: int) -> int:
    return int.from_bytes(os.pread(file, WORD_BYTES, place), sys.byteorder)


if __name__ == "__main__":
    _watch(sys.argv[1:])
