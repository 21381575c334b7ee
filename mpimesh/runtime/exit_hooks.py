"""The hooks by which every way out of one rank ends the job, and none hangs.

Under plain ``python`` a rank that fails waits in `MPI_Finalize` for the others, and
they wait for it, for ever. These hooks are installed when the first mesh of more
than one MPI process is made:

- an uncaught exception, in any thread, is shown with the rank before each line, and
  ends the job; one that all ranks raise alike is shown by rank 0 only, and so is a
  setting that cannot be, unless only others have it;
- a rank whose program ends otherwise waits for the others to end, too. Meanwhile it
  tells them that it has left, so that whoever waits for it in mpimesh raises
  `PeerLostError`. If it leaves with an exit code and the others do not leave, it
  ends the job with that code.

Excepthooks that were there before are called as well. The hooks stay until the
process ends, also when all meshes are closed: the other ranks may still wait for
this one in MPI calls of their own, and hooks set since then may call these.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType

from mpimesh.errors import MpimeshError, PeerLostError, RemoteError, SettingsError
from mpimesh.runtime.abort import end_job, write_error
from mpimesh.runtime.main_program import MainProgram
from mpimesh.runtime.tracebacks import up_to_user

__all__ = ["ExitHooks"]

_STEP_S = 0.15
"""Longer than an abort takes: Open MPI's launcher can hang if two ranks abort at once."""
_LAST_STEP = 16
_APART_S = 1.0
"""How much later than another rank one may come to where it makes its first mesh."""


class ExitHooks:
    """What this process does when it fails or ends.

    Args:
        rank: This rank in MPI's world.
        leave: Called with an explanation and an exit code when the program has ended; tells
            whether all other ranks have ended, too.
        threads_may_fail: Asked after an exception in a thread: whether somebody else answers
            for it.
    """

    def __init__(
        self,
        rank: int,
        leave: Callable[[str, int], bool],
        threads_may_fail: Callable[[], bool],
    ) -> None:
        self._rank = rank
        self._leave = leave
        self._threads_may_fail = threads_may_fail
        self._pid = os.getpid()
        self._main = MainProgram()
        self._failure = 0
        self._untold = ""
        self._why = ""
        self._excepthook = sys.excepthook
        self._thread_excepthook = threading.excepthook

    def install(self) -> None:
        """Put the hooks into place."""
        sys.excepthook = self._on_exception
        threading.excepthook = self._on_thread_exception
        self._main.watch()
        # Exit functions run in reverse order, and MPI is finalized after all of them.
        atexit.register(self._on_exit)

    @property
    def applies(self) -> bool:
        """False in a forked child, which has no part in the job, and once MPI is finalized."""
        from mpi4py import MPI

        return os.getpid() == self._pid and not MPI.Is_finalized()

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if not self.applies:
            self._excepthook(kind, error, trace)
            return
        exit_code = 128 + signal.SIGINT if kind is KeyboardInterrupt else 1
        if isinstance(error, MpimeshError) and error.agreed:
            # All ranks are about to end with it: no reason to end them by force.
            self._failure = exit_code
            self._why = f"raised {kind.__name__}: {error}"
            if self._rank == 0:
                self._show(kind, error, trace)
            else:
                self._untold = _text(kind, error, trace)
            return
        if isinstance(error, PeerLostError):
            exit_code = error.exit_code
            time.sleep(self._later_s())
        elif isinstance(error, SettingsError) and self._rank:
            # All ranks mostly have one environment, but read it before they have met.
            time.sleep(_APART_S + self._later_s())
        self._show(kind, error, trace)
        end_job(exit_code)

    def _later_s(self) -> float:
        """Return how long to wait where many ranks find out at once: the first ends the others."""
        return _STEP_S * min(self._rank, _LAST_STEP)

    def _show(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if self._excepthook is sys.__excepthook__:
            write_error(self._rank, _text(kind, error, trace))
        else:
            write_error(self._rank, f"uncaught {kind.__name__}:")
            self._excepthook(kind, error, trace)

    def _on_thread_exception(self, failed: threading.ExceptHookArgs) -> None:
        kind = failed.exc_type
        if kind is SystemExit or not self.applies or self._threads_may_fail():
            self._thread_excepthook(failed)
            return
        name = "a thread" if failed.thread is None else f"thread {failed.thread.name!r}"
        headline = f"uncaught {kind.__name__} in {name}:\n"
        if self._thread_excepthook is threading.__excepthook__:
            text = traceback.format_exception(kind, failed.exc_value, failed.exc_traceback)
            write_error(self._rank, headline + "".join(text))
        else:
            write_error(self._rank, headline)
            self._thread_excepthook(failed)
        end_job(1)

    def _on_exit(self) -> None:
        if not self.applies:
            return
        exit_code = self._failure or self._main.exit_status()
        ending = f"ended with exit code {exit_code}" if exit_code else "has ended its program"
        if not self._leave(self._why or ending, exit_code):
            write_error(
                self._rank, self._untold or f"{ending} while other ranks had not: ending the job"
            )
            end_job(exit_code)


def _text(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> str:
    if isinstance(error, RemoteError):
        # What failed stands in the message; here is where the program came upon it.
        return up_to_user(error.with_traceback(trace))
    return "".join(traceback.format_exception(kind, error, trace))
