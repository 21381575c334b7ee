"""Ranks that are threads of one process: the whole of mpimesh without MPI.

A :class:`VirtualWorld` holds n ranks. Every operation is a record under one
lock; whoever completes it moves the bytes. Waiting means sleeping on the world's
condition, and since the world sees every rank it also sees when all of them
sleep and nothing can change any more: then it says what each one waits for, and
raises, instead of hanging as MPI would.

With ``rendezvous=True`` a send is done only when its receive has begun, as MPI
is free to do for any message. Programs that lean on MPI's buffering deadlock
there, and so show it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from mpimesh.errors import DeadlockError, RemoteError, on_all_ranks

__all__ = ["VirtualWorld"]

_LOOK_AGAIN_S = 50e-6
"""Sleep of a rank that waits for a device and not for another rank."""


class VirtualWorld:
    """The state that the ranks of one virtual job share.

    Args:
        size: How many ranks.
        rendezvous: Sends wait for their receives.
        circle: Says which ranks wait for each other, when all wait; empty if that is not known.
    """

    def __init__(
        self,
        size: int,
        *,
        rendezvous: bool = False,
        circle: Callable[[], str] = str,
    ) -> None:
        self.size = size
        self.rendezvous = rendezvous
        self._circle = circle
        # Reentrant: what a waiting rank asks for may itself start operations.
        self.changed = threading.Condition(threading.RLock())
        self.failure: tuple[int, BaseException] | None = None
        self._version = 0
        self._stirred = False
        self._asleep: dict[int, tuple[int, object]] = {}
        self._running = set(range(size))

    def note_change(self) -> None:
        """Wake whoever waits; called, with the lock held, after every change of state."""
        self._version += 1
        self.changed.notify_all()

    def stir(self) -> None:
        """Let the wait that is about to sleep look again soon: a device moves, unseen."""
        with self.changed:
            self._stirred = True

    def fail(self, rank: int, error: BaseException) -> None:
        """End the waits of all ranks because `rank` ended with `error`."""
        with self.changed:
            if self.failure is None:
                self.failure = (rank, error)
            self.note_change()

    def leave(self, rank: int) -> None:
        """Take a rank out that has returned; whoever waits for it now waits in vain."""
        with self.changed:
            self._running.discard(rank)
            self.note_change()

    def sleep(self, rank: int, ready: Callable[[], bool], until_s: float, what: object) -> bool:
        """Wait on `rank` for `ready`; False once the clock is past `until_s`."""
        with self.changed:
            while True:
                self._raise_failure(rank)
                version = self._version
                self._stirred = False
                if ready():
                    return True
                if version != self._version:
                    continue  # `ready` itself started something: look again
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    return False
                if self._stirred:
                    self.changed.wait(min(left_s, _LOOK_AGAIN_S))
                elif left_s == float("inf"):
                    self._asleep[rank] = (version, what)
                    self._raise_deadlock()
                    self.changed.wait()
                else:
                    self.changed.wait(left_s)
                self._asleep.pop(rank, None)

    def _raise_failure(self, rank: int) -> None:
        if self.failure is None or self.failure[0] == rank:
            return
        culprit, error = self.failure
        if culprit < 0:  # no rank's own, but the job's: a deadlock, or a wait that took too long
            raise type(error)(*error.args)
        raise RemoteError(
            f"virtual rank {culprit} failed while rank {rank} waited for it: "
            f"{type(error).__name__}: {error}"
        ) from error

    def _raise_deadlock(self) -> None:
        # Nothing has changed since any of them looked, and all of them sleep: nothing ever will.
        stuck = {r: what for r, (version, what) in self._asleep.items() if version == self._version}
        if not self._running <= stuck.keys():
            return
        rows = "\n".join(f"  rank {rank} waits in {what}" for rank, what in sorted(stuck.items()))
        gone = sorted(set(range(self.size)) - self._running)
        left = f"\n  returned already: ranks {gone}" if gone else ""
        circle = self._circle()
        text = f"all virtual ranks wait and none can go on:\n{rows}{left}"
        error = on_all_ranks(DeadlockError(f"{text}\n{circle}" if circle else text))
        self.failure = (-1, error)
        self.note_change()
        raise error
