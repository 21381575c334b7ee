"""The watchdogs: they report a rank that waits too long or is gone, and end the job.

A thread of each rank looks at the rank's current wait. Past ``MPIMESH_TIMEOUT_S`` it asks the
threads of all other ranks what these are doing, writes one table, and ends the job. Of several
ranks that wait the lowest speaks. The same thread sleeps until a process of another rank of the
node ends; of one that had not said that it would, it says so and how, and ends the job.

Only waits in mpimesh are watched, among them the making and closing of a mesh: a rank that hangs
in a call of mpi4py, or in a loop of its own, is reported by the ranks that wait for it here. A rank
that waits at its end lets others work as long as they answer.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from mpimesh.errors import CollectiveTimeoutError, on_all_ranks
from mpimesh.runtime.failure import end_job
from mpimesh.runtime.lines import Line, Lines
from mpimesh.runtime.processes import NodeProcesses
from mpimesh.runtime.progress import Progress, Wait
from mpimesh.runtime.rank_state import RankState, missing_ranks, wait_report
from mpimesh.runtime.tracebacks import main_thread_stack, write_error
from mpimesh.runtime.witness import how_it_ended, is_stopped
from mpimesh.transport import Request, VirtualCommunicator, VirtualWorld
from mpimesh.transport.waiting import poll

if TYPE_CHECKING:
    # Importing it starts MPI.
    from mpimesh.transport.mpi import MPICommunicator

__all__ = ["EXIT_CODE", "VirtualWatchdog", "Watchdog"]

EXIT_CODE = 124
"""Exit code of a job that the watchdog has ended; that of the command ``timeout``."""

_QUESTION_TAG = 2
_ANSWER_TAG = 3
_SHORTEST_TICK_S = 0.1
_LONGEST_TICK_S = 1.0
_TICKS = 20
"""Number of looks within a limit: the longer that is, the less a rank is disturbed."""
_ANSWER_S = 1.0
_MOST_PATIENCE_S = 10.0
_WITNESS_S = 0.2
"""Seconds for which a rank leaves it to the witness to say who has gone."""
_STEP_S = 0.4
"""Longer than an abort takes: Open MPI's launcher can hang if two ranks abort at once."""
_LAST_STEP = 8
_SENIOR_S = 2.0
"""Seconds for which a rank leaves the report to a lower one."""


def _tick_s(limit_s: float) -> float:
    if not limit_s:
        return _LONGEST_TICK_S
    return min(max(limit_s / _TICKS, _SHORTEST_TICK_S), _LONGEST_TICK_S, limit_s / 4)


class Watchdog:
    """The watchdog of one MPI process.

    Args:
        rank: This rank in MPI's world.
        limit_s: The longest time that it may wait; 0 for no limit.
        progress: Its waits.
        lines: Ways to the other ranks.
        processes: Those of the other ranks of the node.
    """

    def __init__(
        self,
        rank: int,
        limit_s: float,
        progress: Progress,
        lines: Lines,
        processes: NodeProcesses,
    ) -> None:
        from mpi4py import MPI  # late: a world of virtual ranks has its watchdog without MPI

        self._mpi = MPI
        self._rank = rank
        self._limit_s = limit_s
        self._progress = progress
        self._lines = lines
        self._processes = processes
        # MPI may be called by this thread and the program's at once, or not at all by this one.
        self._may_ask = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._tick_s = _tick_s(limit_s)
        self._answer_s = _ANSWER_S + self._tick_s
        self._stopped = False
        self._ended = False
        self._questions = 0
        self._steps = 0
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
        self._stopped = True
        self._processes.wake()
        self._thread.join(_ANSWER_S)

    def _run(self) -> None:
        while not self._stopped:
            gone = self._processes.wait(self._tick_s)
            if self._stopped or self._mpi.Is_finalized():
                return
            for rank, file in gone:
                self._report_gone(rank, file)
            self._answer()
            wait = self._progress.current
            if wait is None or not self._limit_s:
                continue
            if wait.blocking and self._progress.steps != self._steps:
                # A section of many calls, such as one that measures: no single one hangs.
                self._steps, wait.since_s = self._progress.steps, time.monotonic()
            if time.monotonic() - wait.since_s > self._limit_s:
                self._look_into(wait)

    def _report_gone(self, rank: int, file: int) -> None:
        """End the job, in which a rank of the node is no more."""
        pid = self._processes.pids[rank]
        how, exit_code = how_it_ended(pid, file)
        processes = self._processes
        gone = f"rank {rank} (process {pid}) {how}, without ending MPI"
        # Of several that see it, the lowest speaks; and whoever has aborted the job spoke before.
        later_s = _STEP_S * min(processes.place_without(self._rank, rank), _LAST_STEP)
        end_s = time.monotonic() + later_s + (_WITNESS_S if processes.has_witness else 0.0)
        while not processes.told and time.monotonic() < end_s:
            time.sleep(0.01)
        if processes.told:
            time.sleep(_SENIOR_S)  # until it has ended this rank, too
        elif not self._stopped:
            processes.say_told()
            here = f"rank {self._rank} was {self._state().text()}"
            subject = "the job is ended" if processes.is_named(rank) else gone
            write_error(self._rank, f"mpimesh: {subject}; {here}")
        end_job(exit_code, gone)

    def _look_into(self, wait: Wait) -> None:
        left, until_s = self._left_to_senior
        if left is wait and time.monotonic() < until_s:
            return
        communicator: Any = wait.communicator
        ranks: Collection[int] = communicator.world_ranks if communicator.kind == "mpi" else ()
        line = self._lines.find(ranks)
        states: dict[int, RankState | None] = {self._rank: self._state()}
        asked = self._may_ask and line is not None
        if asked and line is not None:
            states |= self._ask(line)
        else:
            # In the first mesh, before there is a line: the first rank to speak ends the others.
            time.sleep(_STEP_S * min(self._rank, _LAST_STEP))
        if self._progress.current is not wait or self._stopped:
            return  # it came to an end meanwhile
        answers = [state for state in states.values() if state is not None]
        if self._ended and len(answers) == len(states) and not all(s.ended for s in answers):
            # Others are at work, and those that wait for something have watchdogs of their own;
            # a rank that says nothing has stopped.
            self._left_to_senior = (wait, time.monotonic() + self._limit_s)
            return
        waiting = [r for r, s in states.items() if s is not None and s.waited_s > self._limit_s / 2]
        if left is not wait and min(waiting, default=self._rank) < self._rank:
            self._left_to_senior = (wait, time.monotonic() + _SENIOR_S)
            return
        missing = missing_ranks(wait, ranks, states) if asked else None
        stopped = [r for r, s in states.items() if s is None and self._is_stopped(r)]
        report = wait_report(self._rank, wait, self._limit_s, missing, states, stopped)
        write_error(self._rank, f"{report}\nrank {self._rank} is at:\n{main_thread_stack()}")
        end_job(EXIT_CODE, report)

    def _is_stopped(self, rank: int) -> bool:
        pid = self._processes.pids.get(rank)
        return pid is not None and is_stopped(pid)

    def _state(self) -> RankState:
        return RankState.of(self._progress, threading.main_thread().ident, ended=self._ended)

    # -- questions and answers ---------------------------------------------------------

    def _ask(self, line: Line) -> dict[int, RankState | None]:
        """Return the states of the other ranks of `line`; None for who does not answer in time."""
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

        patience_s = min(self._limit_s / 2, _MOST_PATIENCE_S) if self._ended else 0.0
        poll(all_answered, max(self._answer_s, patience_s))
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
                send = line.communicator.isend(answer, source, _ANSWER_TAG)
                if not poll(send.test, _ANSWER_S):
                    self._sends.append(send)  # MPI may still read the answer


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
            alive[0].join(_tick_s(self._limit_s))
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
