"""The end of the main program, as far as Python lets its exit functions know.

A program that ends by `SystemExit` calls no excepthook, and when the functions of
:mod:`atexit` run, the exception is gone. Yet whether this rank ends in peace or
with an exit code decides whether the others may go on. Three traces are left:

- :func:`sys.exit` is replaced by a function that raises a `SystemExit` that can be
  watched: if it dies where no Python code runs any more, it has ended the program.
- Of a script, CPython flushes stderr after its last line has run and before it
  looks at the exception. Then any `SystemExit` can be found, whoever raised it.
- `sys.last_value` holds an exception that some other excepthook has shown.

What is not seen: a bare ``raise SystemExit(3)`` in a program started with
``python -m`` or ``-c``. It counts as an end in peace.
"""

from __future__ import annotations

import dis
import gc
import sys
import threading
import weakref
from functools import partial
from types import CodeType, TracebackType
from typing import NoReturn, TextIO

__all__ = ["MainProgram", "exit_status"]


def exit_status(code: object) -> int:
    """Return the exit status of a process that ends by ``SystemExit(code)``."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


class WatchedExit(SystemExit):
    """`SystemExit`, but one that can be referred to weakly."""


WatchedExit.__name__ = WatchedExit.__qualname__ = "SystemExit"  # what a traceback shows
WatchedExit.__module__ = "builtins"


class MainProgram:
    """The program whose outermost frame is running when this is made."""

    def __init__(self) -> None:
        self._code = _outermost_code()
        self._status = 0
        self._watched: weakref.ref[WatchedExit] | None = None

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
        error = WatchedExit() if status is None else WatchedExit(status)
        self._watched = weakref.ref(error, partial(self._died, exit_status(error.code)))
        try:
            raise error
        finally:
            del error  # or it would live on in the frame that its own traceback holds

    def _died(self, status: int, _: object) -> None:
        if _called_by_nobody():
            self._status = status

    def _flush(self, stream: TextIO) -> None:
        type(stream).flush(stream)
        if _called_by_nobody():
            found = _exit_of_main(self._code)
            if found is not None:
                self._status = exit_status(found.code)


def _outermost_code() -> CodeType:
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    while frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code


def _called_by_nobody() -> bool:
    """Tell whether the caller was called by the interpreter itself, in the main thread."""
    return sys._getframe(1).f_back is None and (
        threading.current_thread() is threading.main_thread()
    )


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
    for found in gc.get_objects():
        if type(found) is TracebackType:  # isinstance would ask proxies for their class
            step: TracebackType | None = found if _ended_by(found, code) else None
            while step is not None:
                passed.add(id(step))
                step = step.tb_next
        elif issubclass(type(found), SystemExit):
            exits.append(found)
    if not passed:
        return None
    # Up to Python 3.11 the last part of the traceback is not yet tied to the exception.
    ours = [e for e in exits if e.__traceback__ is None or id(e.__traceback__) in passed]
    return ours[-1] if ours else None
