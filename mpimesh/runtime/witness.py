"""The processes of a node's ranks: which of them have gone, and how; and a witness of it.

A process that is killed says no goodbye, and a launcher need not tell which rank it was, or end
the others. The system does tell: a file that stands for a process (a pidfd) becomes readable when
it ends, and waiting for that costs nothing. Whether the rank was meant to end it says itself
before, in a pipe that nobody reads: the others have opened it, so that it outlives its rank, and
the number of bytes in it says how the rank has ended. Where the system has no such files, or a
process cannot open those of another, nobody is watched.

The mpiexec of MPICH, and often that of Open MPI, kills the other ranks some milliseconds after the
first, before they can speak, and MPICH's names none of them. So there, and under srun with PMIx,
the first rank of each node starts a witness: this file, run as a program. It has a session of its
own, which a launcher does not reach; mpiexec waits until it has written and let go of stderr.

The witness needs nothing of mpimesh, nor of anything else that would make its start slow. So this
file imports little.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import stat
import struct
import sys
import termios
import time
from array import array
from contextlib import suppress

TYPE_CHECKING = False  # importing typing takes the witness as long as all the rest
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

__all__ = ["NodeProcesses", "how_it_ended", "is_stopped", "unread_bytes"]

_FINISHED, _REPORTED, _WITNESSED = 1, 2, 3
"""Bytes in the pipe of a rank: it has ended in peace; it ends the job, and has said why; it has
gone without that, and the witness has said so. 0 before."""
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


# -- how a process has ended ---------------------------------------------------------------------


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
    with suppress(OSError), open(f"/proc/{pid}/stat") as stream:  # noqa: PTH123 - quicker to load than pathlib
        # Before them stands its name, in parentheses, with any characters.
        return stream.read().rpartition(")")[2].split()
    return []


# -- the other ranks of this node ----------------------------------------------------------------


class NodeProcesses:
    """The processes of the other ranks of this node.

    Args:
        launcher_kills_all: Whether the launcher may end all ranks before one can say who has gone.

    Attributes:
        pids: The process of each of them, by its rank in MPI's world, without this one.
    """

    def __init__(self, *, launcher_kills_all: bool) -> None:
        self.pids: dict[int, int] = {}
        self._launcher_kills_all = launcher_kills_all
        self._pipes: dict[int, int] = {}
        self._ranks: dict[int, int] = {}
        self._starting = 0
        self._poll = select.poll()
        self._pipe, self._pipe_end = os.pipe()
        self._poll.register(self._pipe, select.POLLIN)

    def watch(self, native: Any, world_ranks: Sequence[int], node: int) -> None:
        """Collective: watch the other ranks of a communicator of mpi4py's that are on this node.

        Args:
            native: The communicator.
            world_ranks: The rank in MPI's world of each of its ranks.
            node: A number that two processes share only if they see each other's process numbers.
        """
        mine = array("q", [node, os.getpid(), self._pipe])
        table = array("q", bytes(8 * len(mine) * len(world_ranks)))
        native.Allgather(mine, table)
        rows = zip(world_ranks, table[::3], table[1::3], table[2::3], strict=True)
        here = {rank: (pid, pipe) for rank, its_node, pid, pipe in rows if its_node == node}
        for rank, (pid, pipe) in here.items():
            if pid == os.getpid() or rank in self.pids:
                continue
            self.pids[rank] = pid
            with suppress(OSError, AttributeError):
                file, self._pipes[rank] = _open(pid, pipe)
                self._ranks[file] = rank
                self._poll.register(file, select.POLLIN)
        if self.has_witness and world_ranks[native.rank] < min(self._pipes):
            self._starting = _start_witness(f"{r}:{pid}:{pipe}" for r, (pid, pipe) in here.items())

    def await_witness(self) -> None:
        """Wait until the witness watches, if this rank has started one: it takes some 15 ms.

        The collective that comes next makes the other ranks wait for that, too.
        """
        starting, self._starting = self._starting, 0
        if starting:
            with suppress(OSError):
                os.waitpid(starting, 0)

    @property
    def has_witness(self) -> bool:
        """True if a separate process watches the ranks, for the launcher may kill them all."""
        return bool(self._pipes) and self._launcher_kills_all

    def wait(self, timeout_s: float) -> list[tuple[int, int]]:
        """Wait at most so long for ranks to go; return those that have not said why.

        It ends, too, when this rank says how it ends.

        Returns:
            Rank and pidfd of each.
        """
        gone = []
        for file, _ in self._poll.poll(timeout_s * 1e3):
            self._poll.unregister(file)
            if file == self._pipe:
                continue
            rank = self._ranks.pop(file)
            if unread_bytes(self._pipes[rank]) == _FINISHED:
                os.close(file)
            else:
                gone.append((rank, file))
        return gone

    def mark_finished(self) -> None:
        """This rank ends in peace."""
        self._mark(_FINISHED)

    def mark_reported(self) -> None:
        """This rank ends the job, and has said why."""
        self._mark(_REPORTED)

    @property
    def another_reported(self) -> bool:
        """True if another rank has said why it ends the job."""
        return any(unread_bytes(pipe) == _REPORTED for pipe in self._pipes.values())

    def is_witnessed(self, rank: int) -> bool:
        """Tell whether the witness has said that a rank has gone."""
        return unread_bytes(self._pipes[rank]) == _WITNESSED

    def index_without(self, rank: int, gone: int) -> int:
        """Return the index of `rank` among the ranks of the node but the one that has gone."""
        return sum(1 for other in self.pids if other < rank and other != gone)

    def _mark(self, state: int) -> None:
        os.write(self._pipe_end, bytes(max(state - unread_bytes(self._pipe), 0)))


def _open(pid: int, pipe: int) -> tuple[int, int]:
    """Return a pidfd of a process, and its pipe, opened for reading."""
    return os.pidfd_open(pid), os.open(f"/proc/{pid}/fd/{pipe}", os.O_RDONLY)


def unread_bytes(fd: int) -> int:
    """Return how much of what was written to a pipe has not been read; 0 if `fd` is none."""
    unread = array("i", [0])
    with suppress(OSError):
        if stat.S_ISFIFO(os.fstat(fd).st_mode):
            fcntl.ioctl(fd, termios.FIONREAD, unread)
    return unread[0]


# -- the witness ---------------------------------------------------------------------------------


def _start_witness(ranks: Iterable[str]) -> int:
    """Start the witness, and return its process: it watches once that has gone. 0 for none.

    Not by `subprocess`: to import it takes as long as the witness's own start.
    """
    with suppress(OSError):
        command = [sys.executable, "-I", "-S", __file__, *ranks]
        nowhere = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1)]
        return os.posix_spawn(sys.executable, command, os.environ, file_actions=nowhere)
    return 0


def _watch(ranks: list[str]) -> None:
    """Watch ranks until all have ended in peace or one has not.

    A process that ends closes its files first, by which its launcher learns of it, and is over some
    time later: which of two has gone first is told by the ends of their pipes.

    Args:
        ranks: ``"rank:process:pipe"`` of each.
    """
    # Away from the launcher, which waits for what it has started, and for the files of that.
    os.setsid()
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - as above
        with suppress(OSError):
            if int(name) > 2:  # all but stderr, and what leads nowhere
                os.close(int(name))
    # It tells of what has come in its order: whom the launcher kills comes later.
    waiting = select.epoll()
    watched: dict[int, tuple[int, int, int]] = {}
    pipes: dict[int, int] = {}
    for text in ranks:
        rank, pid, pipe = map(int, text.split(":"))
        with suppress(OSError):
            file, pipe = _open(pid, pipe)
            watched[file] = (rank, pid, pipe)
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
            rank, pid, pipe = watched.pop(file)
            sign = signs.setdefault(rank, len(signs))
            said = unread_bytes(pipe)
            if said == _FINISHED:
                continue
            if _REPORTED in (said, *(unread_bytes(other) for _, _, other in watched.values())):
                return
            how, code = how_it_ended(pid, file)
            text = f"mpimesh: rank {rank} (process {pid}) {how}, without ending MPI"
            # Of several the first, but rather one that nobody else can have ended.
            follows = code in _WHEN_ANOTHER_HAS_GONE
            gone.append((follows, sign, f"[rank {rank}] {text}\n"))
            with open(f"/proc/self/fd/{pipe}", "wb") as stream:  # noqa: PTH123 - as above
                stream.write(bytes(_WITNESSED))
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


if __name__ == "__main__":
    _watch(sys.argv[1:])
