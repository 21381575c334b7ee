"""A time limit that ends a process even if all its threads are stuck.

A rank that hangs inside MPI sees neither signals nor exceptions. So the limit is
a thread of its own that writes where every thread stands and ends the process,
which makes the launcher end the other ranks. Should that thread not get the
interpreter's lock, `faulthandler`, which needs none, ends the process later.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
import traceback
from pathlib import Path

__all__ = ["EXIT_CODE", "TimeLimit"]

EXIT_CODE = 70
"""Exit code of a process that ran past its limit."""

# The ranks of a job meet their limits a little apart; each should have its say first.
_LAST_WORDS_S = 1.0
_BACKSTOP_S = 5.0
_MACHINERY = (f"{os.sep}_pytest{os.sep}", f"{os.sep}pluggy{os.sep}", "<frozen runpy>")


class TimeLimit:
    """One clock for one process; started for one piece of work after the other.

    Args:
        fd: File descriptor that the report goes to.
        who: How the report calls this process, for instance ``"rank 1 of 4"``.
    """

    def __init__(self, *, fd: int, who: str) -> None:
        self._fd = fd
        self._who = who
        self._timer: threading.Timer | None = None
        self._notes: list[str] = []

    def note(self, text: str) -> None:
        """Have `text` written, should a limit be met, before the report.

        For what would have been told at the end, which then does not come.
        """
        self._notes.append(text)

    def start(self, what: str, limit_s: float) -> None:
        """Give `what` at most `limit_s` seconds from now on."""
        self.stop()
        faulthandler.dump_traceback_later(limit_s + _BACKSTOP_S, exit=True, file=self._fd)
        self._timer = threading.Timer(limit_s, self._end, (what, limit_s))
        self._timer.daemon = True
        self._timer.start()

    def stop(self) -> None:
        """The work has ended in time."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            faulthandler.cancel_dump_traceback_later()

    def _end(self, what: str, limit_s: float) -> None:
        notes = "".join(f"\n{note}\n" for note in self._notes)
        report = f"{notes}\n{self._who}: {what} ran past its limit of {limit_s:g} s\n{_stacks()}"
        # One write, so that the reports of several ranks do not mix.
        os.write(self._fd, report.encode(errors="replace"))
        time.sleep(_LAST_WORDS_S)
        os._exit(EXIT_CODE)


def _stacks() -> str:
    """Where each thread but this one stands, without the test runner's own frames."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    text = []
    for ident, frame in sys._current_frames().items():
        if ident == threading.get_ident():
            continue
        stack = [
            entry
            for entry in traceback.extract_stack(frame)
            if not any(part in entry.filename for part in _MACHINERY)
            and Path(entry.filename).name != "runpy.py"
        ]
        text.append(f"  thread {names.get(ident, ident)}:\n")
        text.extend(traceback.format_list(stack))
    return "".join(text)
