"""The guard that keeps a job of several MPI processes from hanging when one of them ends.

One for each process, made with its first mesh of more than one rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from mpi4py import MPI

from mpimesh.comm import Communicator
from mpimesh.comm.mpi import MPICommunicator
from mpimesh.comm.node import Node
from mpimesh.comm.waiting import poll
from mpimesh.runtime.control import ControlChannel, ControlChannels
from mpimesh.runtime.deadlock import DeadlockSearch
from mpimesh.runtime.failure import TOGETHER_S, exit_status, install
from mpimesh.runtime.flight import record
from mpimesh.runtime.processes import NodeProcesses
from mpimesh.runtime.progress import Progress, Wait
from mpimesh.runtime.tracebacks import write_error
from mpimesh.runtime.watchdog import Notice, Watchdog
from mpimesh.settings import DEFAULT_TIMEOUT_S, Settings

__all__ = ["JobGuard"]

_UNNOTICED_S = 0.2
"""Ranks that end within this time of each other tell each other nothing."""
_NOTICES = 16
"""Ranks from this one on wait at their end without a word."""


class JobGuard:
    """The control channels, hooks and watchdog of this process.

    Args:
        progress: The waits of this rank.
        settings: Those of the first mesh.
        threads_may_fail: See :class:`~.failure.FailureHooks`.
    """

    def __init__(
        self, progress: Progress, settings: Settings, threads_may_fail: Callable[[], bool]
    ) -> None:
        self._progress = progress
        self._settings = settings
        self._rank = MPI.COMM_WORLD.rank
        self._channels = ControlChannels()
        record(progress, settings.record_dir, self._rank, MPI.COMM_WORLD.size)
        # The watchdog's report says more, where it comes soon.
        soon = 0 < settings.timeout_s < DEFAULT_TIMEOUT_S
        self._notice = Notice(self._rank, 0.0 if soon else settings.notice_s)
        self._deadlocks: DeadlockSearch | None = None
        if settings.checks:
            self._deadlocks = DeadlockSearch(self._rank, progress, self._channels)
        progress.on_idle = self._check
        self._processes = NodeProcesses()
        self._watchdog = Watchdog(
            self._rank, settings.timeout_s, progress, self._channels, self._processes
        )
        self._watchdog.start()
        hooks = install(among_others=True)
        if hooks is not None:
            hooks.put_in_place()
            hooks.job = self
            hooks.threads_may_fail = threads_may_fail
        # Whoever finalizes MPI, this comes first: it frees MPI's own communicators then.
        MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=self._on_finalize), None)

    @property
    def native(self) -> Any:
        """A communicator of mpi4py's for notes, or None."""
        channel = next(iter(self._channels), None)
        return None if channel is None else channel.communicator.native

    def mark_reported(self) -> None:
        """Let the ranks of the node know that this one is about to end the job."""
        self._processes.mark_reported()

    def _on_finalize(self, *_: object) -> None:
        self._processes.mark_finished()

    def connect(self, communicator: Communicator, node: Node) -> None:
        """Collective: make sure that the ranks of `communicator` can tell each other that they end.

        All ranks of a channel know it, so those of the communicator decide alike.
        """
        if not isinstance(communicator, MPICommunicator):
            return
        world_ranks = communicator.world_ranks
        if -1 in world_ranks or self._channels.find(world_ranks) is not None:
            return  # of another world, whose ranks have no number here; or not the first
        self._channels.add(ControlChannel(MPICommunicator.duplicate(communicator.native)))
        self._processes.watch(communicator, node)

    def register_mesh(self, communicator: Communicator) -> None:
        """Name the mesh that is to be made of `communicator`, whose ranks are connected."""
        if isinstance(communicator, MPICommunicator) and -1 not in communicator.world_ranks:
            communicator.family = self._channels.register_mesh(communicator.world_ranks)

    def count_by(
        self, communicator: Communicator, started: Callable[[], Mapping[str, int]]
    ) -> None:
        """Ask `started` for the number of collectives on each group of a mesh."""
        self._channels.count_by(communicator.family, started)

    def forget_mesh(self, communicator: Communicator) -> None:
        """Forget a mesh that is closed, on all its ranks."""
        self._channels.forget_mesh(communicator.family)

    def leave_mesh(self, communicator: Communicator, error: BaseException) -> None:
        """This rank leaves a mesh by `error`, which may yet be caught. Tells the other ranks."""
        exit_code = exit_status(error.code) if isinstance(error, SystemExit) else 0
        why = f"left the mesh by {type(error).__name__}: {error}"
        self._channels.leave_mesh(communicator.family, why, exit_code)

    def _check(self, wait: Wait) -> None:
        """Look after a wait of this rank, every now and then."""
        self._channels.check(wait)
        if self._deadlocks is not None:
            self._deadlocks.check(wait)
        self._notice.check(wait)

    def leave(self, why: str, exit_code: int) -> bool:
        """Wait until all ranks have ended; False if the job must not wait for that."""
        self._watchdog.note_end()
        channel = next(iter(self._channels), None)
        what = "the end of the program"
        progress = self._progress
        with nullcontext() if channel is None else progress.watched(what, channel.communicator):
            here = self._all_here()
            together = poll(here, _UNNOTICED_S, progress.advance)
            if not together:
                self._channels.leave(why, exit_code)
                together = self._wait_for_all(here, TOGETHER_S if exit_code else None)
                self._channels.poll()  # so that no message is left
        if together:
            self._processes.mark_finished()
            self._watchdog.stop()
        return together

    def _all_here(self) -> Callable[[], bool]:
        barriers = [channel.communicator.barrier() for channel in self._channels]
        return lambda: all(barrier.test() for barrier in barriers)

    def _wait_for_all(self, here: Callable[[], bool], timeout_s: float | None) -> bool:
        start_s = time.monotonic()
        warn_s = self._settings.exit_warn_s if self._rank < _NOTICES else float("inf")
        warned = False

        def idle() -> None:
            nonlocal warned
            # Others may still need what this rank has started.
            self._progress.advance()
            self._channels.poll()
            if not warned and time.monotonic() - start_s > warn_s:
                warned = True
                write_error(
                    self._rank,
                    f"mpimesh: ended {warn_s:g} s ago and waits for ranks that have not",
                )

        return poll(here, timeout_s, idle)
