"""A program under way that must not take longer than it may.

It is a :class:`~mpimesh.transport.Request`: whoever waits for it tests it, and
between the tests everything else goes on. At its limit the program and all
that it started are ended, also what has a session of its own, as the ranks
under some launchers have: all of them carry a mark in their environment.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ChildProcess", "Ending"]

_MARK = "CHILD_PROCESS_MARK"
_GRACE_S = 2.0
# MPICH: "Segmentation fault (signal 11)"; Open MPI: "exited on\nsignal 11 (Segmentation fault)".
_SIGNAL = re.compile(r"\(signal (\d+)\)|exited on\s+signal (\d+)")


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a child process.

    Attributes:
        returncode: As :mod:`subprocess` has it: negative if a signal ended it.
        timed_out: True if it was ended at its limit.
        limit_s: The limit.
        output: What it wrote, errors too.
    """

    returncode: int
    timed_out: bool
    limit_s: float
    output: str

    @property
    def signal(self) -> int:
        """The signal that ended it or, under a launcher, one of its ranks; 0 if none did."""
        if self.returncode < 0:
            return -self.returncode
        told = _SIGNAL.search(self.output)
        if told:
            return int(told[1] or told[2])
        return self.returncode - 128 if 128 < self.returncode < 160 else 0

    def __str__(self) -> str:
        """Say it for a person."""
        if self.timed_out:
            return f"the child process did not end within {self.limit_s:g} s"
        if self.signal:
            name = signal.Signals(self.signal).name if self.signal in _SIGNALS else "unknown"
            return f"the child process was killed by signal {self.signal} ({name})"
        last = [line.strip() for line in self.output.splitlines() if line.strip()][-1:]
        return ": ".join([f"the child process ended with exit code {self.returncode}", *last])


_SIGNALS = {int(one) for one in signal.Signals}


class ChildProcess:
    """One program under way.

    Args:
        command: The program and its arguments; "{folder}" in one stands for :attr:`folder`.
        environment: All its variables.
        limit_s: Seconds after which it is ended.

    Attributes:
        folder: An empty folder of its own: where it works, and keeps its temporary files.
        ending: How it ended; None before.

    Raises:
        OSError: If it cannot be started.
    """

    def __init__(
        self, command: Sequence[str], *, environment: Mapping[str, str], limit_s: float
    ) -> None:
        self.ending: Ending | None = None
        self.folder = Path(tempfile.mkdtemp(prefix="mpimesh-"))
        self._mark = uuid.uuid4().hex
        self._limit_s = limit_s
        variables = {**environment, _MARK: self._mark, "TMPDIR": str(self.folder)}
        words = [word.replace("{folder}", str(self.folder)) for word in command]
        try:
            # To a file: a pipe that nobody reads while it fills would stop the program.
            with (self.folder / "output").open("wb") as output:
                self._process = subprocess.Popen(
                    words,
                    cwd=self.folder,
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        now_s = time.monotonic()
        self._term_at_s, self._kill_at_s = now_s + limit_s, now_s + limit_s + _GRACE_S
        self._told_to_end = False

    def test(self) -> bool:
        """Tell whether it has ended, and end it if its time is over."""
        if self.ending is not None:
            return True
        now_s = time.monotonic()
        if self._process.poll() is None and now_s < self._kill_at_s:
            if now_s >= self._term_at_s and not self._told_to_end:
                # The launcher is asked first: it knows how to clean up after its ranks.
                self._told_to_end = True
                self._process.terminate()
            return False
        self._kill_all()
        output = (self.folder / "output").read_text(errors="replace")
        self.ending = Ending(self._process.returncode, self._told_to_end, self._limit_s, output)
        return True

    def close(self) -> None:
        """End it if it still runs, and remove its folder. A second call does nothing."""
        self._kill_all()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _kill_all(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        for pid in _processes_with(f"{_MARK}={self._mark}".encode()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()


def _processes_with(variable: bytes) -> list[int]:
    """Return the processes that have `variable` in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        # A process may vanish while it is looked at, and others' are not ours to read.
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and variable in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found
