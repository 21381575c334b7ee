"""The watchdog of virtual ranks: one thread that sees them all."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from mpimesh.errors import CollectiveTimeoutError, on_all_ranks
from mpimesh.runtime.progress import Progress
from mpimesh.runtime.rank_state import RankState, missing_ranks, wait_report
from mpimesh.transport import VirtualCommunicator, VirtualWorld

__all__ = ["VirtualWatchdog"]

_LONGEST_TICK_S = 0.1


class VirtualWatchdog:
    """Ends the waits of all virtual ranks when one of them waits too long.

    Args:
        world: The virtual job.
        ranks: Each rank's waits and thread.
        limit_s: The longest time that a rank may wait; 0 for no limit.
    """

    def __init__(
        self,
        world: VirtualWorld,
        ranks: Sequence[tuple[Progress, threading.Thread]],
        limit_s: float,
    ) -> None:
        self._world = world
        self._ranks = ranks
        self._limit_s = limit_s

    def join_ranks(self) -> None:
        """Wait until all ranks have ended, or one has waited too long and those that wait ended.

        A rank that does not wait then cannot be ended; it goes on as a daemon thread.
        """
        while alive := [thread for _, thread in self._ranks if thread.is_alive()]:
            if not self._limit_s:
                alive[0].join()
                continue
            alive[0].join(min(_LONGEST_TICK_S, self._limit_s / 4))
            if self._world.failure is None and self._overdue():
                break

    def _overdue(self) -> bool:
        for rank, (progress, _) in enumerate(self._ranks):
            wait = progress.current
            if wait is None or time.monotonic() - wait.since_s <= self._limit_s:
                continue
            communicator = wait.communicator
            if not isinstance(communicator, VirtualCommunicator):
                continue
            states = {
                one: RankState.of(progress, thread.ident, ended=not thread.is_alive())
                for one, (progress, thread) in enumerate(self._ranks)
            }
            missing = missing_ranks(wait, communicator.world_ranks, states)
            report = wait_report(rank, wait, self._limit_s, missing, states)
            self._world.fail(-1, on_all_ranks(CollectiveTimeoutError(report)))
            waiting = [t for p, t in self._ranks if p.current is not None]
            for thread in waiting:
                thread.join(self._limit_s)
            return True
        return False
