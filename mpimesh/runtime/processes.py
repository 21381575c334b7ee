"""The processes of the other ranks of this node: which of them have gone, and how.

A process that is killed says no goodbye, and a launcher need not tell which rank it was, or end
the others. The system does tell: a file that stands for a process (a pidfd) becomes readable when
it ends, and waiting for that costs nothing. Whether the rank was meant to end it says itself
before, in a word of memory that the ranks of the node share and that outlives it.

Where the system has no such files, or the ranks share no memory, nobody is watched.

Under mpiexec, and under srun with PMIx, the other ranks may have to go before they can speak; there
one rank of each node starts a :mod:`~.witness`.
"""

from __future__ import annotations

import os
import select
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from mpimesh.arrays import HostArray
from mpimesh.errors import TransportError
from mpimesh.runtime import witness
from mpimesh.runtime.launch import Launch
from mpimesh.runtime.witness import FINISHED, REPORTED, WITNESSED, WORD_BYTES

if TYPE_CHECKING:
    # Importing them starts MPI.
    from mpimesh.comm.mpi import MPICommunicator
    from mpimesh.comm.node import Node

__all__ = ["NodeProcesses"]


class NodeProcesses:
    """The processes of the ranks of this node.

    Attributes:
        pids: The process of each of them, by its rank in MPI's world, without this one.
    """

    def __init__(self) -> None:
        self.pids: dict[int, int] = {}
        self._word: HostArray | None = None
        self._words: dict[int, HostArray] = {}
        self._ranks: dict[int, int] = {}
        self._poll = select.poll()
        self._wake_read, self._wake_write = os.pipe()
        self._poll.register(self._wake_read, select.POLLIN)

    def watch(self, communicator: MPICommunicator, node: Node) -> None:
        """Collective: watch the other ranks of `communicator` that are on this node."""
        arena = node.arena
        if self._word is None and arena is not None:
            self._word = arena.empty(WORD_BYTES)
            if self._word is not None:
                self._word[:] = 0
                node.keep(self._word)  # it outlives all arrays
        offset = -1
        if arena is not None and self._word is not None:
            offset = arena.find(self._word)
        mine = np.array([*node.address, os.getpid(), offset, self._wake_read], np.int64)
        rows = np.empty((communicator.size, mine.size), np.int64)
        communicator.native.Allgather(mine, rows)
        by_rank = dict(zip(communicator.world_ranks, rows.tolist(), strict=True))
        for rank, (*address, pid, at, _) in by_rank.items():
            if address[0] != node.address[0] or pid == os.getpid() or rank in self.pids:
                continue
            self.pids[rank] = pid
            if at < 0 or arena is None or self._word is None:
                continue
            with suppress(OSError, AttributeError, TransportError):
                word = node.open(tuple(address))[at : at + WORD_BYTES]
                file = os.pidfd_open(pid)
                self._words[rank] = word.view(np.int64)
                self._ranks[file] = rank
                self._poll.register(file, select.POLLIN)
        first = all(other > communicator.world_ranks[communicator.rank] for other in self._words)
        if self.has_witness and first:
            watched = [
                f"{rank}:{pid}:{number}:{at}:{pipe}"
                for rank, (key, _, number, _, _, pid, at, pipe) in by_rank.items()
                if key == node.address[0] and at >= 0
            ]
            _start_witness(watched)

    @property
    def has_witness(self) -> bool:
        """True if a separate process watches the ranks, for the launcher may kill them all."""
        # By PMIx, Open MPI's ranks learn it and leave, under Slurm, too.
        hasty = Launch.detect().launcher.startswith("mpiexec") or "PMIX_RANK" in os.environ
        return bool(self._words) and hasty

    def wait(self, timeout_s: float) -> list[tuple[int, int]]:
        """Wait at most so long for ranks to go; return those that have not said why.

        Returns:
            Rank and pidfd of each.
        """
        gone = []
        for file, _ in self._poll.poll(timeout_s * 1e3):
            if file == self._wake_read:
                os.read(file, 1)
                continue
            rank = self._ranks.pop(file)
            self._poll.unregister(file)
            if self._words[rank][0] == FINISHED:
                os.close(file)
            else:
                gone.append((rank, file))
        return gone

    def wake(self) -> None:
        """End a wait of another thread."""
        os.write(self._wake_write, b"\0")

    def mark_finished(self) -> None:
        """This rank ends in peace."""
        self._mark(FINISHED)

    def mark_reported(self) -> None:
        """This rank ends the job, and has said why."""
        self._mark(REPORTED)

    @property
    def another_reported(self) -> bool:
        """True if another rank has said why it ends the job."""
        return any(word[0] == REPORTED for word in self._words.values())

    def is_witnessed(self, rank: int) -> bool:
        """Tell whether the witness has said that a rank has gone."""
        return bool(self._words[rank][0] == WITNESSED)

    def index_without(self, rank: int, gone: int) -> int:
        """Return the index of `rank` among the ranks of the node but the one that has gone."""
        return sum(1 for other in self.pids if other < rank and other != gone)

    def _mark(self, state: int) -> None:
        if self._word is not None:
            self._word.view(np.int64)[0] = state


def _start_witness(ranks: list[str]) -> None:
    """Start the witness, and wait until it watches: its parent, a child of this process, has gone.

    Some 15 ms, once. The collective that comes next makes the other ranks wait for that, too.
    """
    import subprocess  # late: most programs never need it

    with suppress(OSError):
        command = [sys.executable, "-I", "-S", witness.__file__, *ranks]
        nowhere = subprocess.DEVNULL
        subprocess.run(command, stdin=nowhere, stdout=nowhere, start_new_session=True, check=False)
