"""The watch over waits: a line about a long one, and the watchdogs that end one that is too long.

A wait of 30 s gets one line (:class:`Notice`). Past ``MPIMESH_TIMEOUT_S`` the watchdog of the rank,
a thread, asks the threads of all other ranks what these are doing, writes one table, and ends the
job. Of several ranks that wait the lowest speaks. The same thread sleeps until a process of another
rank of the node ends; of one that had not said that it would, it says so and how, and ends the job.

Only waits in mpimesh are watched, among them the making and closing of a mesh: a rank that hangs
in a call of mpi4py, or in a loop of its own, is reported by the ranks that wait for it here. A rank
that waits at its end lets others work as long as they answer.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mpimesh.arguments import rank_names
from mpimesh.comm import Request, VirtualCommunicator, VirtualWorld
from mpimesh.comm.waiting import poll
from mpimesh.errors import CollectiveTimeoutError, on_all_ranks
from mpimesh.runtime.call import Call, call_site, site_text
from mpimesh.runtime.control import ControlChannel, ControlChannels, Tag
from mpimesh.runtime.failure import end_job
from mpimesh.runtime.processes import NodeProcesses
from mpimesh.runtime.progress import Progress, Wait
from mpimesh.runtime.tracebacks import (
    handled_exception,
    innermost_line,
    main_thread_stack,
    user_line,
    write_error,
)
from mpimesh.runtime.witness import how_it_ended, is_stopped

__all__ = [
    "EXIT_CODE",
    "Notice",
    "RankState",
    "VirtualWatchdog",
    "Watchdog",
    "missing_ranks",
    "operation_key",
    "wait_report",
]

EXIT_CODE = 124
"""Exit code of a job that the watchdog has ended; that of the command ``timeout``."""

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

_NOBODY = "nobody; ranks may wait for each other in other meshes or groups of one name"
_UNKNOWN = "unknown, for want of a way to ask"
_SILENT = "no answer (stopped, dead, or in a call that holds the interpreter)"
_LONGEST_TRACEBACK = 4000

_OTHERS_LATER_S = 60.0
_SPEAKERS = 16
"""Ranks of the job from this one on say nothing: where they wait, one of the first does, too."""
_MOST_PEERS = 4


# -- the state of a rank, and the report of all of them --------------------------------------------


@dataclass(frozen=True, slots=True)
class RankState:
    """The state of one rank.

    Attributes:
        operation: What it waits for, with its place; empty if it waits for nothing.
        key: Equal for the parts of several ranks in one operation.
        waited_s: How long it has waited.
        last: What it started last.
        at: The line that its program is at, outside mpimesh.
        ended: Whether its program has ended.
        inside: The line of a call that blocks, in a section of mpimesh that has such.
        failing: The traceback of the exception that its program deals with, as in a ``finally``.
    """

    operation: str = ""
    key: str = ""
    waited_s: float = 0.0
    last: str = ""
    at: str = ""
    ended: bool = False
    inside: str = ""
    failing: str = ""

    @classmethod
    def of(cls, progress: Progress, thread_id: int | None, *, ended: bool = False) -> RankState:
        """Look at a rank of this process that runs in the thread `thread_id`."""
        wait = progress.current
        last = str(progress.calls[-1]) if progress.calls else ""
        failing = handled_exception(thread_id)[-_LONGEST_TRACEBACK:]
        state = cls(last=last, at=user_line(thread_id), ended=ended, failing=failing)
        if wait is None:
            return state
        return replace(
            state,
            operation=str(wait.what),
            key=operation_key(wait.what),
            waited_s=time.monotonic() - wait.since_s,
            inside=innermost_line(thread_id) if wait.blocking else "",
        )

    def text(self) -> str:
        """Return the state without the time, so that ranks in one state can share a row."""
        if self.operation:
            return f"in {self.operation}" + (self.inside and f", inside {self.inside}")
        if self.ended:
            return "has ended its program"
        last = f"; started last: {self.last}" if self.last else ""
        return f"in no operation of mpimesh, at {self.at or 'an unknown place'}{last}"


def operation_key(what: object) -> str:
    """Return what is equal on all ranks in one operation."""
    if isinstance(what, Call):
        return f"{what.name}|{what.group}|{what.number}"
    return str(what)


def missing_ranks(
    wait: Wait, world_ranks: Any, states: Mapping[int, RankState | None]
) -> list[int]:
    """Return the ranks without which `wait` cannot end, and which are not in its operation.

    Args:
        wait: A wait of one of the ranks.
        world_ranks: The number in the job of each rank of the wait's communicator.
        states: The state of each rank by its number in the job; None if it gave no answer.
    """
    if wait.peers is not None:
        return sorted(world_ranks[peer] for peer in wait.peers)
    key = operation_key(wait.what)
    here = {rank for rank, state in states.items() if state is not None and state.key == key}
    return sorted(set(world_ranks) - here)


def wait_report(
    rank: int,
    wait: Wait,
    limit_s: float,
    missing: Collection[int] | None,
    states: Mapping[int, RankState | None],
    stopped: Collection[int] = (),
) -> str:
    """Return the report of `rank`, which has waited too long.

    Args:
        rank: The rank that reports.
        wait: Its wait.
        limit_s: The longest time that it may wait.
        missing: The ranks that it waits for; None if the others could not be asked.
        states: What each rank does; None for one that gave no answer.
        stopped: Those among the latter whose processes are stopped.
    """
    waited_s = time.monotonic() - wait.since_s
    rows: dict[str, list[int]] = {}
    for one in sorted(states):
        state = states[one]
        silent = f"{_SILENT}; its process is stopped" if one in stopped else _SILENT
        rows.setdefault(silent if state is None else state.text(), []).append(one)
    causes: dict[str, list[int]] = {}
    for one, state in sorted(states.items()):
        if state is not None and state.failing:
            causes.setdefault(state.failing, []).append(one)
    names = _UNKNOWN if missing is None else rank_names(missing) if missing else _NOBODY
    lines = [
        f"{rank_names(ranks)} got here while dealing with this exception:\n{text.rstrip()}"
        for text, ranks in causes.items()
    ]
    lines += [
        f"mpimesh: rank {rank} has waited {waited_s:.1f} s, longer than MPIMESH_TIMEOUT_S="
        f"{limit_s:g}, in {wait.what}",
        f"  missing: {names}",
    ]
    for text, ranks in rows.items():
        times = [state.waited_s for one in ranks if (state := states[one]) and state.operation]
        since = f", for {_span(times)} s" if times else ""
        lines.append(f"  {rank_names(ranks)}: {text}{since}")
    return "\n".join(lines)


def _span(times: list[float]) -> str:
    low, high = f"{min(times):.1f}", f"{max(times):.1f}"
    return low if low == high else f"{low} to {high}"


# -- a line about a long wait ----------------------------------------------------------------------


class Notice:
    """One line about a wait that is long, for who has not set a short ``MPIMESH_TIMEOUT_S``.

    A long wait may be right: another rank computes. So nothing is ended and nobody is asked; the
    line says where the rank stands, and how to learn more. It must not flood the output of a large
    job: of a group the first rank speaks, the others only a minute later, of the whole job a few
    ranks, each once for a wait, and again only for one that is twice as long.

    Args:
        rank: This rank in MPI's world.
        after_s: The shortest wait to speak about; 0 for none.
        write: Called with the rank and the line.
    """

    __slots__ = ("_after_s", "_noticed", "_rank", "_write")

    def __init__(
        self, rank: int, after_s: float, write: Callable[[int, str], None] = write_error
    ) -> None:
        self._rank = rank
        self._after_s = after_s if after_s and rank < _SPEAKERS else float("inf")
        self._write = write
        self._noticed: Wait | None = None

    def check(self, wait: Wait) -> None:
        """Speak if `wait` is long. Called by the thread that waits, every now and then."""
        waited_s = time.monotonic() - wait.since_s
        if waited_s < self._after_s or wait is self._noticed:
            return
        if wait.communicator.rank and waited_s < self._after_s + _OTHERS_LATER_S:
            return
        self._noticed = wait
        self._after_s *= 2
        place, peers, cause = _place_text(wait), _peers_text(wait), _cause_text()
        self._write(
            self._rank,
            f"mpimesh: has waited {waited_s:.0f} s in {place}{peers}{cause}. "
            "MPIMESH_TIMEOUT_S=60 ends such a wait after 60 s and says what each rank does; "
            "MPIMESH_NOTICE_S=0 ends these lines",
        )


def _place_text(wait: Wait) -> str:
    if isinstance(wait.what, Call):
        return str(wait.what)  # has its place
    return f"{wait.what} at {site_text(call_site())}"


def _peers_text(wait: Wait) -> str:
    """Say for whom it waits, where that is not all ranks of its group."""
    world_ranks = getattr(wait.communicator, "world_ranks", (-1,))
    if wait.peers is None or -1 in world_ranks:
        return ""
    ranks = [world_ranks[peer] for peer in wait.peers]
    return f", for {rank_names(ranks, _MOST_PEERS)} of the job"


def _cause_text() -> str:
    """Say which exception this thread deals with, as in a ``finally``: others do not know of it."""
    error = sys.exc_info()[1]
    return "" if error is None else f", while it deals with {type(error).__name__}: {error}"


# -- the watchdogs ---------------------------------------------------------------------------------


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
        channels: Those to the other ranks.
        processes: Those of the other ranks of the node.
    """

    def __init__(
        self,
        rank: int,
        limit_s: float,
        progress: Progress,
        channels: ControlChannels,
        processes: NodeProcesses,
    ) -> None:
        from mpi4py import MPI  # late: a world of virtual ranks has its watchdog without MPI

        self._mpi = MPI
        self._rank = rank
        self._limit_s = limit_s
        self._progress = progress
        self._channels = channels
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
        later_s = _STEP_S * min(processes.index_without(self._rank, rank), _LAST_STEP)
        end_s = time.monotonic() + later_s + (_WITNESS_S if processes.has_witness else 0.0)
        while not processes.another_reported and time.monotonic() < end_s:
            time.sleep(0.01)
        if processes.another_reported:
            time.sleep(_SENIOR_S)  # until it has ended this rank, too
        elif not self._stopped:
            processes.mark_reported()
            here = f"rank {self._rank} was {self._state().text()}"
            subject = "the job is ended" if processes.is_witnessed(rank) else gone
            write_error(self._rank, f"mpimesh: {subject}; {here}")
        end_job(exit_code, gone)

    def _look_into(self, wait: Wait) -> None:
        left, until_s = self._left_to_senior
        if left is wait and time.monotonic() < until_s:
            return
        communicator: Any = wait.communicator
        ranks: Collection[int] = communicator.world_ranks if communicator.kind == "mpi" else ()
        channel = self._channels.find(ranks)
        states: dict[int, RankState | None] = {self._rank: self._state()}
        asked = self._may_ask and channel is not None
        if asked and channel is not None:
            states |= self._ask(channel)
        else:
            # In the first mesh, before there is a channel: the first rank to speak ends the others.
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

    def _ask(self, channel: ControlChannel) -> dict[int, RankState | None]:
        """Return the states of the other ranks; None for who does not answer in time."""
        self._questions += 1
        self._sends += channel.send(Tag.WATCHDOG_QUESTION, self._questions, channel.world_ranks)
        others = [rank for rank in channel.world_ranks if rank != self._rank]
        states: dict[int, RankState | None] = dict.fromkeys(others)

        def all_answered() -> bool:
            # Whoever asks this rank meanwhile must not wait for it in vain.
            self._answer()
            for rank, (number, fields) in channel.receive(Tag.WATCHDOG_ANSWER):
                if number == self._questions:
                    states[rank] = RankState(**fields)
            return None not in states.values()

        patience_s = min(self._limit_s / 2, _MOST_PATIENCE_S) if self._ended else 0.0
        poll(all_answered, max(self._answer_s, patience_s))
        self._sends = [send for send in self._sends if not send.test()]
        return states

    def _answer(self) -> None:
        if not self._may_ask:
            return
        for channel in self._channels:
            for rank, number in channel.receive(Tag.WATCHDOG_QUESTION):
                answer = [number, asdict(self._state())]
                for send in channel.send(Tag.WATCHDOG_ANSWER, answer, [rank]):
                    if not poll(send.test, _ANSWER_S):
                        self._sends.append(send)  # MPI may still read the answer


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
