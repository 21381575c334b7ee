"""The watchdog: it reports a rank that waits too long, says for whom, and ends the job.

Off unless ``MPIMESH_TIMEOUT_S`` is set. Then a thread of each rank looks at the
rank's current wait. Past the limit it asks the threads of all other ranks what
these are doing, writes one table, and ends the job. Of several ranks that wait
the lowest speaks.

Only waits in mpimesh are watched: a rank that hangs in a call of mpi4py, or in a
loop of its own, is reported by the ranks that wait for it here.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict

import numpy as np
from mpi4py import MPI

from mpimesh.runtime.abort import end_job, write_error
from mpimesh.runtime.lines import Line, Lines
from mpimesh.runtime.progress import Progress, Wait
from mpimesh.runtime.rank_state import RankState, missing_ranks, wait_report
from mpimesh.transport import Request
from mpimesh.transport.mpi import MPICommunicator
from mpimesh.transport.waiting import poll

__all__ = ["EXIT_CODE", "Watchdog"]

EXIT_CODE = 124
"""Exit code of a job that the watchdog has ended; that of the command ``timeout``."""

_QUESTION_TAG = 2
_ANSWER_TAG = 3
_LONGEST_TICK_S = 0.1
_ANSWER_S = 1.0
_STEP_S = 0.4
"""Longer than an abort takes: Open MPI's launcher can hang if two ranks abort at once."""
_LAST_STEP = 8
_SENIOR_S = 2.0
"""How long a rank leaves the report to a lower one."""


class Watchdog:
    """The watchdog of one MPI process.

    Args:
        rank: This rank in MPI's world.
        limit_s: The longest time that it may wait.
        progress: Its waits.
        lines: Ways to the other ranks.
    """

    def __init__(self, rank: int, limit_s: float, progress: Progress, lines: Lines) -> None:
        self._rank = rank
        self._limit_s = limit_s
        self._progress = progress
        self._lines = lines
        # MPI may be called by this thread and the program's at once, or not at all by this one.
        self._may_ask = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._stopped = threading.Event()
        self._ended = False
        self._questions = 0
        self._sends: list[Request] = []
        self._left_to_senior: tuple[Wait | None, float] = (None, 0.0)
        self._thread = threading.Thread(target=self._run, name="mpimesh watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def note_end(self) -> None:
        """The program has ended; answer questions as long as others have not."""
        self._ended = True

    def stop(self) -> None:
        """End the thread, before MPI ends."""
        self._stopped.set()
        self._thread.join(_ANSWER_S)

    def _run(self) -> None:
        while not self._stopped.wait(min(_LONGEST_TICK_S, self._limit_s / 4)):
            if MPI.Is_finalized():
                return
            self._answer()
            wait = self._progress.current
            if wait is not None and time.monotonic() - wait.since_s > self._limit_s:
                self._look_into(wait)

    def _look_into(self, wait: Wait) -> None:
        left, until_s = self._left_to_senior
        if left is wait and time.monotonic() < until_s:
            return
        communicator = wait.communicator
        ranks: Collection[int] = (
            communicator.world_ranks if isinstance(communicator, MPICommunicator) else ()
        )
        line = self._lines.find(ranks)
        states: dict[int, RankState | None] = {self._rank: self._state()}
        asked = self._may_ask and line is not None
        if asked and line is not None:
            states |= self._ask(line)
        else:
            # In the first mesh, before there is a line: the first rank to speak ends the others.
            time.sleep(_STEP_S * min(self._rank, _LAST_STEP))
        if self._progress.current is not wait or self._stopped.is_set():
            return  # it came to an end meanwhile
        waiting = [r for r, s in states.items() if s is not None and s.waited_s > self._limit_s / 2]
        if left is not wait and min(waiting, default=self._rank) < self._rank:
            self._left_to_senior = (wait, time.monotonic() + _SENIOR_S)
            return
        missing = missing_ranks(wait, ranks, states) if asked else None
        report = wait_report(self._rank, wait, self._limit_s, missing, states)
        write_error(self._rank, f"{report}\nrank {self._rank} is at:\n{_stack()}")
        end_job(EXIT_CODE)

    def _state(self) -> RankState:
        return RankState.of(self._progress, threading.main_thread().ident, ended=self._ended)

    # -- questions and answers ---------------------------------------------------------

    def _ask(self, line: Line) -> dict[int, RankState | None]:
        """Return the states of the other ranks of `line`; None for who does not answer in 1 s."""
        communicator = line.communicator
        self._questions += 1
        question = np.array([self._questions])
        peers = [peer for peer in range(communicator.size) if peer != communicator.rank]
        self._sends += [communicator.isend(question, peer, _QUESTION_TAG) for peer in peers]
        states: dict[int, RankState | None] = {line.world_ranks[peer]: None for peer in peers}

        def all_answered() -> bool:
            # Whoever asks this rank meanwhile must not wait for it in vain.
            self._answer()
            for source, message in _messages(communicator, _ANSWER_TAG):
                number, fields = json.loads(bytes(message))
                if number == self._questions:
                    states[line.world_ranks[source]] = RankState(**fields)
            return None not in states.values()

        poll(all_answered, _ANSWER_S)
        self._sends = [send for send in self._sends if not send.test()]
        return states

    def _answer(self) -> None:
        if not self._may_ask:
            return
        for line in self._lines:
            for source, message in _messages(line.communicator, _QUESTION_TAG):
                number = int(message.view(np.int64)[0])
                text = json.dumps([number, asdict(self._state())]).encode()
                answer = np.frombuffer(text, np.uint8).copy()
                poll(line.communicator.isend(answer, source, _ANSWER_TAG).test, _ANSWER_S)


def _messages(
    communicator: MPICommunicator, tag: int
) -> list[tuple[int, np.ndarray[tuple[int], np.dtype[np.uint8]]]]:
    """Take in all messages that have come."""
    messages = []
    while (found := communicator.probe(tag)) is not None:
        source, size = found
        message = np.empty(size, np.uint8)
        poll(communicator.irecv(message, source, tag).test)
        messages.append((source, message))
    return messages


def _stack() -> str:
    with suppress(KeyError):
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        return "".join(traceback.format_stack(frame))
    return ""
