"""The end of a job: every way out of one rank ends all of them, and the first cause is shown, once.

Under plain ``python`` a rank that fails waits in `MPI_Finalize` for the others, and they wait for
it, for ever; one that fails before `MPI_Init` leaves them waiting there. So a process that a
launcher has started together with others gets hooks when it imports mpimesh, and any process of
an MPI world of several ranks when it makes its first mesh:

- An uncaught exception, in any thread, is shown with the rank before each line and ends the job.
  One that several ranks raise alike is shown by the lowest of them.
- A rank whose program ends otherwise waits for the others to end, too, once it has made a mesh.
  Meanwhile it tells them that it has left, so that whoever waits for it in mpimesh raises
  `PeerLostError`. If it leaves with an exit code and the others do not leave, it ends the job with
  that code.

Excepthooks that were there before are called as well. The hooks stay until the process ends, also
when all meshes are closed: the other ranks may still wait for this one in MPI calls of their own,
and hooks set since then may call these. Children of the process have no hooks, however they were
started: they have no part in the job.
"""

from __future__ import annotations

import atexit
import dis
import faulthandler
import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import CodeType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TextIO

from mpimesh.arguments import digest_bits, plain_text
from mpimesh.errors import (
    DeadlockError,
    LaunchError,
    MismatchError,
    MpimeshError,
    PeerLostError,
    TransportError,
)
from mpimesh.runtime.launch import Launch, end_before_mpi, exit_status, is_rank
from mpimesh.runtime.tracebacks import has_unshown_cause, readable, write_error
from mpimesh.runtime.witness import unread_bytes

if TYPE_CHECKING:
    # Importing mpimesh, which imports this module, is to load little.
    from mpimesh.runtime.control import ControlChannel

__all__ = [
    "TOGETHER_S",
    "FailureHooks",
    "JobEnd",
    "MainProgram",
    "TimeLimit",
    "end_job",
    "end_together",
    "install",
    "is_born_too_late",
    "is_of_another",
    "limited_start",
]

_STDERR_FD = 2
_GRACE_S = 3.0
_BACKSTOP_S = 5.0
_DELIVERY_S = 0.1
_LONGEST_DELIVERY_S = 1.0
_STEP_S = 0.15
"""Longer than an abort takes: Open MPI's launcher can hang if two ranks abort at once."""
_LAST_STEP = 16
_APART_S = 0.5
"""Longest time between two ranks at the same line, before the first mesh."""
TOGETHER_S = 1.5
"""Ranks that end with an exit code within this time of each other end in peace."""
_COMPARE_S = 0.25
"""Time that a rank that has failed waits for others that fail alike; the others, told by its mesh
that it leaves, wait longer before they say so."""
_FEW = 16
"""Ranks of the job below this one tell all others how they have failed; the others tell these."""
_OF_OTHERS = (MismatchError, DeadlockError, TransportError)
"""What a rank may raise because another one went wrong before."""
_LEFT = 0
"""Stands for the failure of a rank that has left with an exit code."""


# -- the end of all ranks ------------------------------------------------------------------------


def end_job(exit_code: int, ending: str) -> NoReturn:
    """End all ranks of the job, with `exit_code` where the launcher hands it on.

    The flight record keeps `ending`, which says why.

    If that has not ended this process after 3 s, it ends by itself; the launcher then ends the
    others, because it left without finalizing MPI.
    """
    exit_code = exit_code & 0xFF or 1
    # A thread in C: it needs neither the interpreter's lock nor MPI to come to an end.
    with suppress(Exception):
        faulthandler.dump_traceback_later(_GRACE_S, exit=True, file=_STDERR_FD)
    if _hooks is not None and _hooks.job is not None:
        _hooks.job.before_abort(ending)
    _flush_streams()
    _deliver()
    with suppress(Exception):
        mpi = _running_mpi()
        if mpi is None:
            end_before_mpi(exit_code)
        elif _may_call(mpi):
            mpi.COMM_WORLD.Abort(exit_code)
    os._exit(exit_code)


def _flush_streams() -> None:
    """Write out what the standard streams hold back."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def _deliver() -> None:
    """Give the launcher time to read what was written: once a rank aborts it reads no more."""
    end_s = time.monotonic() + _LONGEST_DELIVERY_S
    while any(map(unread_bytes, (1, _STDERR_FD))) and time.monotonic() < end_s:
        time.sleep(0.005)
    # From the launcher's part on this node to the one that started it.
    time.sleep(_DELIVERY_S)


def _loaded_mpi() -> Any:
    """Return `mpi4py.MPI` if somebody has imported it, be MPI running or not."""
    mpi = sys.modules.get("mpi4py.MPI")
    # While it is being imported, which starts MPI, it has nothing yet.
    return mpi if hasattr(mpi, "Is_initialized") else None


def _running_mpi() -> Any:
    mpi = _loaded_mpi()
    return mpi if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() else None


def _may_call(mpi: Any) -> bool:
    """Tell whether this thread may call MPI."""
    return _in_main_thread() or bool(mpi.Query_thread() == mpi.THREAD_MULTIPLE)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def limited_start(limit_s: float) -> Iterator[None]:
    """End this process if MPI has not started within `limit_s`, because another rank never does.

    While MPI starts no other thread of Python runs: the clock is one in C, which shows where the
    program stands. There is only one, so it is left alone where a test runner may have set it.
    """
    needed = limit_s and "mpi4py.MPI" not in sys.modules and _hooks is not None
    if not needed or "pytest" in sys.modules:
        yield
        return
    limit_s = min(limit_s, threading.TIMEOUT_MAX)
    faulthandler.dump_traceback_later(limit_s, exit=True, file=_STDERR_FD)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


class TimeLimit:
    """The longest time that a piece of work may take, from now on, until it is stopped.

    Two clocks run. A thread calls `too_late`, which says why and ends the process. Some calls, such
    as the start of MPI, let no other thread of Python run: for them there is a second clock, in C,
    which then shows where the program stands and ends this process.

    Args:
        limit_s: The time in seconds.
        too_late: What ends the process.
        fd: File descriptor that the second clock writes to.
    """

    def __init__(
        self, limit_s: float, too_late: Callable[[], None], *, fd: int = _STDERR_FD
    ) -> None:
        faulthandler.dump_traceback_later(limit_s + _BACKSTOP_S, exit=True, file=fd)
        self._timer = threading.Timer(limit_s, too_late)
        self._timer.daemon = True
        self._timer.start()

    def stop(self) -> None:
        """End the limit: the work was done in time."""
        self._timer.cancel()
        faulthandler.cancel_dump_traceback_later()


# -- the end of the main program -----------------------------------------------------------------


class _WatchedExit(SystemExit):
    """`SystemExit`, but one that can be referred to weakly."""


_WatchedExit.__name__ = _WatchedExit.__qualname__ = "SystemExit"  # what a traceback shows
_WatchedExit.__module__ = "builtins"


class MainProgram:
    """The program whose outermost frame is running when this is made.

    Tells how it has ended, as far as Python lets exit functions know. A program that ends by
    `SystemExit` calls no excepthook, and when the functions of :mod:`atexit` run, the exception is
    gone. Yet whether this rank ends in peace or with an exit code decides whether the others may go
    on. Three traces are left:

    - :func:`sys.exit` is replaced by a function that raises a `SystemExit` that can be watched: if
      it dies where no Python code runs any more, it has ended the program.
    - Of a script, CPython flushes stderr after its last line has run and before it looks at the
      exception. Then any `SystemExit` can be found, whoever raised it.
    - `sys.last_value` holds an exception that some other excepthook has shown.

    Not seen is a bare ``raise SystemExit(3)`` in a program started with ``python -m`` or ``-c``. It
    counts as an end in peace.
    """

    def __init__(self) -> None:
        self._code = _outermost_code()
        self._status = 0
        self._watched: weakref.ref[_WatchedExit] | None = None

    def watch(self) -> None:
        """Begin to look out for its end."""
        sys.exit = self._exit
        stream = sys.stderr
        if stream is not None and hasattr(stream, "__dict__"):
            stream.flush = partial(self._flush, stream)  # type: ignore[method-assign]

    def exit_status(self) -> int:
        """Return the exit status that the process is about to have; 0 if nobody knows."""
        last = getattr(sys, "last_value", None)
        if last is not None and _ended_by(last.__traceback__, self._code):
            return 1
        return self._status

    def _exit(self, status: object = None, /) -> NoReturn:
        """Exit the interpreter by raising SystemExit(status), as sys.exit does."""
        error = _WatchedExit() if status is None else _WatchedExit(status)
        self._watched = weakref.ref(error, partial(self._died, exit_status(error.code)))
        try:
            raise error
        finally:
            del error  # or it would live on in the frame that its own traceback holds

    def _died(self, status: int, _: object) -> None:
        if _called_by_interpreter():
            self._status = status

    def _flush(self, stream: TextIO) -> None:
        type(stream).flush(stream)
        if _called_by_interpreter():
            error = _exit_of_main(self._code)
            if error is not None:
                self._status = exit_status(error.code)


def _outermost_code() -> CodeType:
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    while frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code


def _called_by_interpreter() -> bool:
    """Tell whether the caller was called by the interpreter itself, in the main thread."""
    return sys._getframe(1).f_back is None and _in_main_thread()


def _ended_by(traceback: TracebackType | None, code: CodeType) -> bool:
    """Tell whether the exception of `traceback` has left the frame of `code`, unhandled."""
    if traceback is None or traceback.tb_frame.f_code is not code:
        return False
    frame = traceback.tb_frame
    return not dis.opname[code.co_code[frame.f_lasti]].startswith("RETURN")


def _exit_of_main(code: CodeType) -> SystemExit | None:
    """Find the `SystemExit` that has just left the frame of `code`."""
    passed: set[int] = set()
    exits: list[SystemExit] = []
    for thing in gc.get_objects():
        if type(thing) is TracebackType:  # isinstance would ask proxies for their class
            step: TracebackType | None = thing if _ended_by(thing, code) else None
            while step is not None:
                passed.add(id(step))
                step = step.tb_next
        elif issubclass(type(thing), SystemExit):
            exits.append(thing)
    if not passed:
        return None
    # Up to Python 3.11 the last part of the traceback is not yet tied to the exception.
    of_main = [e for e in exits if e.__traceback__ is None or id(e.__traceback__) in passed]
    return of_main[-1] if of_main else None


# -- the hooks -----------------------------------------------------------------------------------


class JobEnd(Protocol):
    """The end of a process that has made a mesh; implemented by :class:`~.watchdog.Watchdog`.

    Attributes:
        threads_may_fail: Asked after an exception in a thread: whether somebody else answers
            for it.
    """

    threads_may_fail: Callable[[], bool]

    @property
    def channel(self) -> ControlChannel | None:
        """A channel to the ranks of the first mesh; None before it is made."""

    def leave(self, why: str, exit_code: int) -> bool:
        """Wait until all ranks have ended; False if the job must not wait for that."""

    def before_abort(self, ending: str) -> None:
        """Leave behind what others need, before this rank ends the job. Never raises."""

    def close_record(self) -> None:
        """Close the flight record of a program that has ended by itself. Never raises."""


class FailureHooks:
    """Hooks that run when this process fails or ends.

    Attributes:
        job: The end of this process once it has made a mesh; None before.
    """

    def __init__(self) -> None:
        self.job: JobEnd | None = None
        self._pid = os.getpid()
        launch = Launch.detect()
        self._among_others, self._launch_rank = launch.size > 1, launch.rank
        self._main = MainProgram()
        self._failure = 0
        self._deferred_report: Callable[[], None] | None = None
        self._why = ""
        self._in_other_hook = False
        self._ending = False
        self._excepthook = sys.excepthook
        self._thread_excepthook = threading.excepthook
        self._main.watch()
        # Exit functions run in reverse order, and MPI is finalized after all of them.
        atexit.register(self._on_exit)
        self.put_in_place()

    def put_in_place(self) -> None:
        """Become the excepthooks, before those that are there."""
        if sys.excepthook != self._on_exception:
            self._excepthook, sys.excepthook = sys.excepthook, self._on_exception
        if threading.excepthook != self._on_thread_exception:
            before, threading.excepthook = threading.excepthook, self._on_thread_exception
            self._thread_excepthook = before

    @property
    def in_forked_child(self) -> bool:
        """True in a process that was forked from a rank."""
        return os.getpid() != self._pid

    @property
    def rank(self) -> int:
        """This rank in MPI's world, or as the launcher has it."""
        mpi = _running_mpi()
        return self._launch_rank if mpi is None else int(mpi.COMM_WORLD.rank)

    @property
    def applies(self) -> bool:
        """True if other ranks depend on this process.

        Not on a forked child, nor where MPI sees one rank only, nor once it is finalized.
        """
        if self.in_forked_child:
            return False
        mpi = _loaded_mpi()
        if mpi is None or not mpi.Is_initialized():
            return self._among_others
        return not mpi.Is_finalized() and mpi.COMM_WORLD.size > 1

    # -- exceptions --------------------------------------------------------------------------

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        error = error if error.__traceback__ is trace else error.with_traceback(trace)
        if self._in_other_hook:  # by a hook that was set after these, and calls them
            write_error(self.rank, readable(error))
            return
        if isinstance(error, LaunchError):
            self._among_others = False  # as far as this process can know
        if not self.applies:
            self._excepthook(kind, error, trace)
            return
        exit_code = 128 + signal.SIGINT if kind is KeyboardInterrupt else 1
        if isinstance(error, MpimeshError) and error.agreed:
            # All ranks are about to end with it: no reason to end them by force.
            self._failure = exit_code
            self._why = f"raised {kind.__name__}: {error}"
            of_another = is_of_another(error)
            if self.rank == 0 or (has_unshown_cause(error) and not of_another):
                if of_another:
                    time.sleep(_APART_S)  # a rank where it came of an error shows that one first
                self._show([self.rank], kind, error)
            else:
                text = readable(error)
                self._deferred_report = lambda: write_error(self.rank, text)
            return
        # Should MPI not answer while the ranks compare what they have to say.
        faulthandler.dump_traceback_later(2 * _GRACE_S, exit=True, file=_STDERR_FD)
        if isinstance(error, PeerLostError):
            exit_code = error.exit_code
            time.sleep(self._stagger_s())
            ranks = [self.rank]
        else:
            number = _fingerprint(kind, readable(error))
            is_first = isinstance(error, _OF_OTHERS) and not is_of_another(error)
            ranks = self._ranks_failing_alike(
                -number if is_first else number, gives_way=is_of_another(error)
            )
        if kind is KeyboardInterrupt and len(ranks) > 1:
            write_error(ranks, f"interrupted; rank {self.rank} was here:")
            ranks = [self.rank]
        self._show(ranks, kind, error)
        end_job(exit_code, f"{kind.__name__}: {error}")

    def _stagger_s(self) -> float:
        """Return how long to wait where many ranks find out at once: the first ends the others."""
        return _STEP_S * min(self.rank, _LAST_STEP)

    def _ranks_failing_alike(self, fingerprint: int, *, gives_way: bool) -> list[int]:
        """Return the ranks that fail alike and at once, if this is the lowest of them.

        Another one waits to be ended by that one, and then returns; so does one that `gives_way` to
        a rank with the first cause, whose number is negative.
        """
        channel = self._channel()
        if channel is None:
            # No way to ask. Rank 0 ends the others before they speak, if it fails, too.
            time.sleep(self.rank and _APART_S + self._stagger_s())
            return [self.rank]
        first, all_ranks = channel.world_ranks[:_FEW], channel.world_ranks
        failures = channel.exchange_failures(
            fingerprint,
            all_ranks if channel.world_rank in first else first,
            _APART_S if self.job is None else _COMPARE_S,
        )
        alike = sorted({self.rank, *(rank for rank, one in failures.items() if one == fingerprint)})
        waits = gives_way and any(one < 0 for one in failures.values())
        if alike[0] == self.rank and not waits:
            return alike
        time.sleep(_GRACE_S)
        return [self.rank]

    def _channel(self) -> ControlChannel | None:
        """Return a channel to the other ranks; None before MPI, or outside the main thread."""
        mpi = _running_mpi()
        if mpi is None or not _in_main_thread():
            return None
        if self.job is not None and self.job.channel is not None:
            return self.job.channel
        with suppress(Exception):  # where something is broken, this rank speaks for itself
            from mpimesh.runtime.control import ControlChannel  # late, see above

            return ControlChannel(mpi.COMM_WORLD)
        return None

    def _show(self, ranks: list[int], kind: type[BaseException], error: BaseException) -> None:
        if self._excepthook is sys.__excepthook__:
            write_error(ranks, readable(error))
            return
        write_error(ranks, f"uncaught {kind.__name__}:")
        self._in_other_hook = True
        try:
            self._excepthook(kind, error, error.__traceback__)
        finally:
            self._in_other_hook = False

    def _on_thread_exception(self, failed: threading.ExceptHookArgs) -> None:
        kind = failed.exc_type
        answered_for = self._in_other_hook or (self.job is not None and self.job.threads_may_fail())
        if kind is SystemExit or not self.applies or answered_for:
            self._thread_excepthook(failed)
            return
        name = "a thread" if failed.thread is None else f"thread {failed.thread.name!r}"
        headline = f"uncaught {kind.__name__} in {name}:\n"
        if self._thread_excepthook is threading.__excepthook__:
            error = failed.exc_value or kind()
            write_error(self.rank, headline + readable(error.with_traceback(failed.exc_traceback)))
        else:
            write_error(self.rank, headline)
            self._in_other_hook = True
            self._thread_excepthook(failed)
        end_job(1, f"{kind.__name__} in {name}: {failed.exc_value}")

    # -- ends --------------------------------------------------------------------------------

    def _on_exit(self) -> None:
        if self.in_forked_child:
            self._end_forked_child()
        if self.applies:
            self._end_rank()
        if self.job is not None:
            self.job.close_record()

    def _end_rank(self) -> None:
        """Return if the other ranks end, too, or need not; else end the job."""
        exit_code = self._failure or self._main.exit_status()
        ending = f"ended with exit code {exit_code}" if exit_code else "has ended its program"
        if self.job is not None:
            together = self.job.leave(self._why or ending, exit_code)
        else:
            # A rank that has made no mesh may leave in peace at any time.
            together = not exit_code or self._all_leave()
        if together:
            return
        if self._deferred_report is not None:
            self._deferred_report()
        else:
            write_error(self.rank, f"{ending} while other ranks had not: ending the job")
        end_job(exit_code, self._why or ending)

    def _end_forked_child(self) -> None:
        """End a forked child, if MPI was running: it would finalize what its parent uses."""
        if self._ending or not is_born_too_late() or _running_mpi() is None:
            return
        self._ending = True
        exit_code = self._main.exit_status()
        atexit._run_exitfuncs()  # of this function, too
        _flush_streams()
        os._exit(exit_code)

    def _all_leave(self) -> bool:
        """Tell whether all ranks leave with an exit code at once, before a mesh was made."""
        channel = self._channel()
        if channel is None:
            # Nobody can be asked. Where all have found the same mistake, one speaks for them.
            time.sleep(_APART_S + self._stagger_s())
            return False
        others = channel.exchange_failures(_LEFT, channel.world_ranks, TOGETHER_S)
        return len(others) == len(channel.world_ranks) - 1


def is_of_another(error: BaseException) -> bool:
    """Tell whether `error` came of what another rank did, and of nothing on this rank before."""
    first, seen = error, {id(error)}
    while (before := first.__cause__ or first.__context__) is not None and id(before) not in seen:
        first = before
        seen.add(id(first))
    return isinstance(first, _OF_OTHERS)


def _fingerprint(kind: type[BaseException], text: str) -> int:
    """Return a number that is equal for what several ranks raise alike."""
    # An interrupt comes to all ranks, wherever each is.
    shown = kind.__name__ if kind is KeyboardInterrupt else plain_text(text)
    return digest_bits(shown.encode(errors="replace"), 62) + 1


_hooks: FailureHooks | None = None
_born_too_late = False
"""True in a forked child of a process that had started MPI."""


def is_born_too_late() -> bool:
    """Tell whether this is a forked child of a process that had started MPI."""
    return _born_too_late


def _forked() -> None:
    global _born_too_late
    _born_too_late = "mpi4py.MPI" in sys.modules


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forked)


def install(job: JobEnd | None = None) -> None:
    """Install the hooks if other ranks depend on this process. Starts no MPI.

    Args:
        job: The end of this process, which has made a mesh among others; None to ask the launcher
            whether there are others.
    """
    global _hooks
    if _hooks is None and (job is not None or (Launch.detect().size > 1 and is_rank())):
        _hooks = FailureHooks()
    if _hooks is not None and job is not None:
        _hooks.put_in_place()
        _hooks.job = job


# -- an end on purpose ---------------------------------------------------------------------------


def end_together(exit_code: int) -> NoReturn:
    """End this rank with `exit_code` once all ranks have come to their end, and finalize MPI.

    Exit functions run and the standard streams are written out, but nothing is unwound. In a forked
    child, which is no rank, it raises SystemExit.
    """
    if _hooks is not None and _hooks.in_forked_child:
        raise SystemExit(exit_code)
    # Among them the one that waits for the other ranks.
    atexit._run_exitfuncs()
    mpi = _running_mpi()
    if mpi is not None:
        mpi.Finalize()
    _flush_streams()
    _exit_by_c(exit_code)


def _exit_by_c(exit_code: int) -> NoReturn:
    """End the process by C's ``exit``: after what MPI left to do there, and nothing of Python's.

    `os._exit` would leave that out. MPICH says goodbye to mpiexec in an exit function of C, not
    in `MPI_Finalize`; with one rank gone without it, mpiexec may kill the others and end with
    code 9. `sys.exit` would give the signals back their default actions while it tidies up, and
    `srun -K` sends SIGTERM as soon as the first rank has left.
    """
    import ctypes  # late: nobody else needs it

    # PyDLL keeps the interpreter's lock: no other thread may run Python any more.
    ctypes.PyDLL(None).exit(exit_code)
    os._exit(exit_code)  # not reached; C's exit does not return
