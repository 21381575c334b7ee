"""The doctor must not hang, whatever hangs below it."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import traceback
from types import TracebackType
from typing import Self

__all__ = ["Guard"]

_GRACE_S = 5.0


class Guard:
    """Ends the whole job when this rank fails or is not done in time. A context manager.

    Two clocks run. One says in which step the rank is and ends the job through MPI. Some steps,
    such as the start of MPI, let no other thread of Python run: for them there is the second one,
    in C, which ends this process.

    Args:
        limit_s: Seconds from now.

    Attributes:
        step: What the rank is at, for the message.
    """

    def __init__(self, limit_s: float) -> None:
        self.step = "starting"
        self._limit_s = limit_s
        self._clock = threading.Timer(limit_s, self._too_late)
        self._clock.daemon = True

    def __enter__(self) -> Self:
        """Start the clocks."""
        faulthandler.dump_traceback_later(self._limit_s + _GRACE_S, exit=True)
        self._clock.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop them; after an error end the job, for the other ranks wait for this one."""
        if error is not None and not isinstance(error, SystemExit):
            traceback.print_exception(error)
            _end_job()
        self._clock.cancel()
        faulthandler.cancel_dump_traceback_later()

    def _too_late(self) -> None:
        sys.stderr.write(
            f"mpimesh doctor: not done within {self._limit_s:g} s, in the step: {self.step}; "
            "--limit gives it more time\n"
        )
        sys.stderr.flush()
        _end_job()


def _end_job() -> None:
    """End all ranks with exit code 1."""
    sys.stdout.flush()
    mpi = getattr(sys.modules.get("mpi4py"), "MPI", None)
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        # Abort may hang, too, as over a cut cable; then this process at least ends.
        ending = threading.Timer(_GRACE_S, os._exit, [1])
        ending.daemon = True
        ending.start()
        mpi.COMM_WORLD.Abort(1)
    os._exit(1)
