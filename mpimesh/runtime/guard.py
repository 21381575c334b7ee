"""What keeps a job of several MPI processes from hanging when one of them ends.

One for each process, made with its first mesh of more than one rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from mpi4py import MPI

from mpimesh.runtime.abort import write_error
from mpimesh.runtime.exit_hooks import ExitHooks
from mpimesh.runtime.lines import Line, Lines
from mpimesh.runtime.main_program import exit_status
from mpimesh.runtime.notice import Notice
from mpimesh.runtime.progress import Progress, Wait
from mpimesh.runtime.watchdog import Watchdog
from mpimesh.settings import Settings
from mpimesh.transport import Communicator
from mpimesh.transport.mpi import MPICommunicator
from mpimesh.transport.waiting import poll

__all__ = ["Guard"]

_UNNOTICED_S = 0.2
"""Ranks that end within this time of each other tell each other nothing."""
_TOGETHER_S = 1.5
"""Ranks that end with an exit code within this time of each other end in peace."""
_NOTICES = 16
"""Ranks from this one on wait at their end without a word."""


class Guard:
    """The lines, hooks and watchdog of this process.

    Args:
        progress: The waits of this rank.
        settings: Those of the first mesh.
        threads_may_fail: See :class:`ExitHooks`.
    """

    def __init__(
        self, progress: Progress, settings: Settings, threads_may_fail: Callable[[], bool]
    ) -> None:
        self._progress = progress
        self._settings = settings
        self._rank = MPI.COMM_WORLD.rank
        self._lines = Lines()
        # The watchdog's report says more.
        self._notice = Notice(self._rank, 0.0 if settings.timeout_s else settings.notice_s)
        progress.news = self._look
        self._watchdog: Watchdog | None = None
        if settings.timeout_s:
            self._watchdog = Watchdog(self._rank, settings.timeout_s, progress, self._lines)
            self._watchdog.start()
        ExitHooks(self._rank, self._end, threads_may_fail).install()

    def adopt(self, communicator: Communicator) -> None:
        """Collective: take care of the mesh that is to be made of `communicator`."""
        if not isinstance(communicator, MPICommunicator):
            return
        world_ranks = communicator.world_ranks
        if -1 in world_ranks:
            return  # of another world, whose ranks have no number here
        # All ranks of a line know it, so those of the communicator decide alike.
        if self._lines.find(world_ranks) is None:
            self._lines.add(Line(MPICommunicator.duplicate(communicator.native)))
        communicator.family = self._lines.join(world_ranks)

    def count(self, communicator: Communicator, started: Callable[[], Mapping[str, int]]) -> None:
        """Ask `started` for the number of collectives on each group of a mesh."""
        self._lines.count(communicator.family, started)

    def part(self, communicator: Communicator) -> None:
        """A mesh is closed, on all its ranks."""
        self._lines.part(communicator.family)

    def leave(self, communicator: Communicator, error: BaseException) -> None:
        """This rank leaves a mesh by `error`, which may yet be caught. Tells the other ranks."""
        exit_code = exit_status(error.code) if isinstance(error, SystemExit) else 0
        why = f"left the mesh by {type(error).__name__}: {error}"
        self._lines.leave_mesh(communicator.family, why, exit_code)

    def _look(self, wait: Wait) -> None:
        """Look around while this rank waits."""
        self._lines.look(wait)
        self._notice.look(wait)

    def _end(self, why: str, exit_code: int) -> bool:
        """Wait until all ranks have ended; False if the job must not wait for that."""
        if self._watchdog is not None:
            self._watchdog.note_end()
        here = self._all_here()
        together = poll(here, _UNNOTICED_S, self._progress.advance)
        if not together:
            self._lines.leave(why, exit_code)
            together = self._wait_for_all(here, _TOGETHER_S if exit_code else None)
            self._lines.listen()  # so that no message is left
        if together and self._watchdog is not None:
            self._watchdog.stop()
        return together

    def _all_here(self) -> Callable[[], bool]:
        barriers = [line.communicator.barrier() for line in self._lines]
        return lambda: all(barrier.test() for barrier in barriers)

    def _wait_for_all(self, here: Callable[[], bool], timeout_s: float | None) -> bool:
        start_s = time.monotonic()
        warn_s = self._settings.exit_warn_s if self._rank < _NOTICES else float("inf")
        told = False

        def idle() -> None:
            nonlocal told
            # Others may still need what this rank has started.
            self._progress.advance()
            self._lines.listen()
            if not told and time.monotonic() - start_s > warn_s:
                told = True
                write_error(
                    self._rank,
                    f"mpimesh: ended {warn_s:g} s ago and waits for ranks that have not",
                )

        return poll(here, timeout_s, idle)
