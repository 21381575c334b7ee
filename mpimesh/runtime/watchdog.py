"""The watch over the waits and the end of a process, and the watchdogs that end a wait too long.

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
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import NamedTuple

from mpimesh.arguments import rank_names, ranks_by_value
from mpimesh.comm import Communicator, VirtualCommunicator, VirtualWorld
from mpimesh.comm.engine import poll
from mpimesh.comm.signatures import last_started
from mpimesh.errors import CollectiveTimeoutError, on_all_ranks
from mpimesh.runtime.call import Call, call_site, last_words, site_text
from mpimesh.runtime.control import (
    ControlChannel,
    ControlChannels,
    Survey,
    Tag,
    awaited_ranks,
    job_ranks,
)
from mpimesh.runtime.deadlock import DeadlockSearch
from mpimesh.runtime.failure import TOGETHER_S, end_job, install, is_of_another
from mpimesh.runtime.progress import Progress, Wait
from mpimesh.runtime.tracebacks import (
    handled_exception,
    innermost_line,
    main_thread_stack,
    readable,
    user_line,
    write_error,
)
from mpimesh.runtime.witness import how_it_ended, is_stopped
from mpimesh.settings import DEFAULT_TIMEOUT_S, Settings

__all__ = [
    "EXIT_CODE",
    "Notice",
    "RankState",
    "Watchdog",
    "join_virtual_ranks",
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

_NOTICE_S = 30.0
"""Seconds after which a rank that waits, or has ended and waits for the others, says so."""
_OTHERS_LATER_S = 60.0
_KEPT_S = 0.5
"""Seconds for which a rank that has failed leaves it to all ranks to raise its error."""
_SPEAKERS = 16
"""Ranks of the job from this one on say nothing: where they wait, one of the first does, too."""
_UNNOTICED_S = 0.2
"""Ranks that end within this time of each other tell each other nothing."""
_MOST_PEERS = 4


# -- the state of a rank, and the report of all of them --------------------------------------------


class RankState(NamedTuple):
    """The state of one rank.

    Attributes:
        operation: What it waits for, with its place; empty if it waits for nothing.
        key: Equal for the parts of several ranks in one operation.
        waited_s: How long it has waited.
        last: What it started last.
        at: The line that its program is at, outside mpimesh.
        ended: Whether its program has ended.
        inside: The line of a call that blocks, in a section of mpimesh that has such.
        failing: The traceback of the error that it has yet to tell the others, or of the exception
            that its program deals with, as in a ``finally``.
        written: Bytes that its threads have written to files so far; -1 if none does.
    """

    operation: str = ""
    key: str = ""
    waited_s: float = 0.0
    last: str = ""
    at: str = ""
    ended: bool = False
    inside: str = ""
    failing: str = ""
    written: int = -1

    @classmethod
    def of(cls, progress: Progress, thread_id: int | None, *, ended: bool = False) -> RankState:
        """Look at a rank of this process that runs in the thread `thread_id`."""
        wait = progress.current
        last = str(progress.calls[-1]) if progress.calls else ""
        kept = progress.kept
        if kept is None:
            failing = handled_exception(thread_id)
        else:
            failing = "" if kept.is_shown else readable(kept.error)
        failing = failing[-_LONGEST_TRACEBACK:]
        writing = [one.nbytes for one in progress.background if not one.done]
        state = cls(
            last=last,
            at=user_line(thread_id),
            ended=ended,
            failing=failing,
            written=sum(writing) if writing else -1,
        )
        if wait is None:
            return state
        return state._replace(
            operation=str(wait.what),
            key=operation_key(wait.what),
            waited_s=time.monotonic() - wait.since_s,
            inside=innermost_line(thread_id) if wait.blocking else "",
        )

    def text(self) -> str:
        """Return the state without the time, so that ranks in one state can share a row."""
        if self.operation:
            writing = ", writing files" if self.written >= 0 else ""
            return f"in {self.operation}" + (self.inside and f", inside {self.inside}") + writing
        if self.ended:
            return "has ended its program"
        last = f"; started last: {self.last}" if self.last else ""
        return f"in no operation of mpimesh, at {self.at or 'an unknown place'}{last}"


class Writing:
    """The files that ranks write in the background, as a sign of life for those who wait for them.

    Args:
        limit_s: How long nothing may be written.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._written: list[int] = []
        self._until_s = 0.0

    def goes_on(self, wait: Wait, states: Mapping[int, RankState | None]) -> bool:
        """Tell whether some rank writes, and has written within the limit, while all answer."""
        if any(states.get(rank, wait) is None for rank in awaited_ranks(wait)):
            return False
        written = [one.written for one in states.values() if one is not None and one.written >= 0]
        now_s = time.monotonic()
        if written != self._written:
            self._written, self._until_s = written, now_s + self._limit_s
        return bool(written) and now_s < self._until_s


def operation_key(what: object) -> str:
    """Return what is equal on all ranks in one operation."""
    if isinstance(what, Call):
        return f"{what.name}|{what.group}|{what.number}"
    return str(what)


def missing_ranks(wait: Wait, states: Mapping[int, RankState | None]) -> list[int]:
    """Return the ranks without which `wait` cannot end, and which are not in its operation.

    Args:
        wait: A wait of one of the ranks.
        states: The state of each rank by its number in the job; None if it gave no answer.
    """
    if wait.peers is not None:
        return sorted(awaited_ranks(wait))
    key = operation_key(wait.what)
    here = {rank for rank, state in states.items() if state is not None and state.key == key}
    return sorted(set(awaited_ranks(wait)) - here)


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

    def row(rank: int, state: RankState | None) -> str:
        if state is not None:
            return state.text()
        return f"{_SILENT}; its process is stopped" if rank in stopped else _SILENT

    rows = ranks_by_value((one, row(one, states[one])) for one in sorted(states))
    causes = ranks_by_value(
        (one, state.failing) for one, state in sorted(states.items()) if state and state.failing
    )
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
    line says where the rank stands, how to learn more, and which ranks of the node have not come
    and what they have started instead, as far as memory shows that the ranks of the node share. It
    must not flood the output of a large job: of a group the first rank speaks, the others only a
    minute later, of the whole job a few ranks, each once for a wait, and again only for one that is
    twice as long.

    Args:
        rank: This rank in MPI's world.
        after_s: The shortest wait to speak about; 0 for none.
        write: Called with the rank and the line.
        progress: This rank's, with the communicators on which others may be ahead; None for none.
    """

    __slots__ = ("_after_s", "_noticed", "_progress", "_rank", "_write")

    def __init__(
        self,
        rank: int,
        after_s: float,
        write: Callable[[int, str], None] = write_error,
        progress: Progress | None = None,
    ) -> None:
        self._rank = rank
        self._progress = progress
        self._after_s = after_s if after_s and rank < _SPEAKERS else float("inf")
        self._write = write
        self._noticed: weakref.ref[Wait] | None = None

    def check(self, wait: Wait) -> None:
        """Speak if `wait` is long. Called by the thread that waits, every now and then."""
        waited_s = time.monotonic() - wait.since_s
        if waited_s < self._after_s or (self._noticed is not None and self._noticed() is wait):
            return
        if wait.communicator.rank and waited_s < self._after_s + _OTHERS_LATER_S:
            return
        self._noticed = weakref.ref(wait)
        self._after_s *= 2
        text = str(wait.what)
        if not isinstance(wait.what, Call):  # which has its place
            text += f" at {site_text(call_site())}"
        if wait.peers is not None and job_ranks(wait.communicator):
            text += f", for {rank_names(awaited_ranks(wait), _MOST_PEERS)} of the job"
        error = sys.exc_info()[1]
        if error is not None:  # as in a ``finally``: others do not know of it
            text += f", while it deals with {type(error).__name__}: {error}"
        self._write(
            self._rank,
            f"mpimesh: has waited {waited_s:.0f} s in {text}. "
            "MPIMESH_TIMEOUT_S=60 ends such a wait after 60 s and says what each rank does"
            f"{self._others(wait)}",
        )

    def _others(self, wait: Wait) -> str:
        """Return what is known here of the ranks that `wait` takes, as a sentence. Never waits."""
        communicator, ranks = wait.communicator, job_ranks(wait.communicator)
        title, states = "Elsewhere", {}
        if wait.peers is not None:
            states = {rank: self._elsewhere(rank) for rank in awaited_ranks(wait)}
        elif communicator.node is not None and ranks:
            number = wait.number or getattr(wait.what, "number", 0)
            started = _last_started(communicator)
            if not 0 < number <= started[communicator.rank][0]:
                return ""  # with checks on, ranks tell each other by messages what they start
            title = "Missing"
            states = {
                ranks[one]: self._elsewhere(ranks[one]) or f"last here: {text or 'nothing'}"
                for one, (last, text) in started.items()
                if last < number
            }
            if not states:
                return ". All its ranks on this node have started it"
        rows = ranks_by_value((rank, state) for rank, state in sorted(states.items()) if state)
        texts = [f"{rank_names(who, _MOST_PEERS)} ({state})" for state, who in rows.items()]
        return f". {title}, of the job: {', '.join(texts[:_MOST_PEERS])}" if texts else ""

    def _elsewhere(self, rank: int) -> str:
        """Return what a rank of the job has started that this one has not; empty if not known."""
        ledgers = [] if self._progress is None else list(self._progress.ledgers.values())
        for one in ledgers:
            if rank in one.ranks:
                last, text = _last_started(one.communicator).get(one.ranks.index(rank), (0, ""))
                if last > one.started:
                    group = one.name.rpartition("/")[2]
                    return f"in {text} on group {group!r}, which this rank has not started"
        return ""


def _last_started(communicator: Communicator) -> dict[int, tuple[int, str]]:
    """Return the number and text of the last call of each rank of this node, 0 for none."""
    node = communicator.node
    if node is None:
        return {}
    return dict(zip(communicator.node_ranks, last_started(node), strict=True))


# -- the watchdogs ---------------------------------------------------------------------------------


def _tick_s(limit_s: float) -> float:
    if not limit_s:
        return _LONGEST_TICK_S
    return min(max(limit_s / _TICKS, _SHORTEST_TICK_S), _LONGEST_TICK_S, limit_s / 4)


class Watchdog:
    """The watch over one process of a job of several, from its first mesh to its end.

    Args:
        progress: Its waits.
        channels: Those to the other ranks.
        settings: Those of its first mesh.
        threads_may_fail: See :class:`~.failure.JobEnd`.
    """

    def __init__(
        self,
        progress: Progress,
        channels: ControlChannels,
        settings: Settings,
        threads_may_fail: Callable[[], bool],
    ) -> None:
        from mpi4py import MPI  # late: a world of virtual ranks has its watchdog without MPI

        self._mpi = MPI
        self._rank = rank = MPI.COMM_WORLD.rank
        self._limit_s = limit_s = settings.timeout_s
        self._progress = progress
        self._channels = channels
        self._processes = channels.processes
        self.threads_may_fail = threads_may_fail
        if settings.record_dir:
            from mpimesh.runtime.flight import Recorder  # late: most jobs have none

            progress.recorder = Recorder(settings.record_dir, rank, MPI.COMM_WORLD.size)
        # The watchdog's report says more, where it comes soon.
        notice_s = 0.0 if 0 < limit_s < DEFAULT_TIMEOUT_S else _NOTICE_S
        self._notice = Notice(rank, notice_s, progress=progress)
        self._deadlocks = DeadlockSearch(rank, progress, channels) if settings.checks else None
        # MPI may be called by this thread and the program's at once, or not at all by this one.
        self._may_ask = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._survey = Survey(
            channels,
            Tag.WATCHDOG_QUESTION,
            Tag.WATCHDOG_ANSWER,
            lambda: self._state()._asdict(),
            delivery_s=_ANSWER_S,
        )
        self._tick_s = _tick_s(limit_s)
        self._stopped = False
        self._ended = False
        self._steps = 0
        self._left_to_senior: tuple[Wait | None, float] = (None, 0.0)
        self._writing = Writing(limit_s)
        self._patient_until_s = 0.0
        self._thread = threading.Thread(target=self._run, name="mpimesh watchdog", daemon=True)
        self._thread.start()
        progress.on_idle = self._check
        install(self)
        # Whoever finalizes MPI, this comes first: it frees MPI's own communicators then.
        on_finalize = MPI.Comm.Create_keyval(delete_fn=lambda *_: self._stop())
        MPI.COMM_SELF.Set_attr(on_finalize, None)

    def _check(self, wait: Wait) -> None:
        """Look after a wait of this rank, every now and then."""
        self._show_kept()
        self._channels.check(wait)
        if self._deadlocks is not None:
            self._deadlocks.check(wait)
        self._notice.check(wait)

    def _show_kept(self, *, at_once: bool = False) -> None:
        """Show the error that this rank has yet to tell, if others end the job or come late."""
        kept = self._progress.kept
        if kept is None or kept.is_shown:
            return
        waits_s = time.monotonic() - kept.since_s
        if is_of_another(kept.error):
            show = waits_s > 8 * _KEPT_S  # the one where it began speaks first
        else:
            show = at_once or waits_s > _KEPT_S or self._channels.somebody_leaves()
        if show:
            kept.is_shown = True
            why = "has failed, and waits for the other ranks to say so"
            write_error(self._rank, f"mpimesh: {why}:\n{readable(kept.error)}")

    # -- the end of the program; see failure.JobEnd ------------------------------------

    @property
    def channel(self) -> ControlChannel | None:
        """A channel to the ranks of the first mesh; None before it is made."""
        return next(iter(self._channels), None)

    def leave(self, why: str, exit_code: int) -> bool:
        """Wait until all ranks have ended; False if the job must not wait for that."""
        self._ended = True
        barriers = [channel.native.Ibarrier() for channel in self._channels]

        def all_here() -> bool:
            return all(barrier.Test() for barrier in barriers)

        what, communicator = "the end of the program", self._channels.communicator
        progress = self._progress
        with nullcontext() if communicator is None else progress.watched(what, communicator):
            together = poll(all_here, _UNNOTICED_S, progress.advance)
            if not together:
                self._channels.leave(why, exit_code)
                together = self._wait_for_all(all_here, TOGETHER_S if exit_code else None)
                self._channels.poll()  # so that no message is left
        if together:
            self._stop()
        return together

    def _wait_for_all(self, all_here: Callable[[], bool], timeout_s: float | None) -> bool:
        start_s = time.monotonic()
        warn_s = _NOTICE_S if self._rank < _SPEAKERS else float("inf")
        warned = False

        def idle() -> None:
            nonlocal warned
            # Others may still need what this rank has started.
            self._progress.advance()
            self._channels.poll()
            if not warned and time.monotonic() - start_s > warn_s:
                warned = True
                write_error(
                    self._rank,
                    f"mpimesh: ended {warn_s:g} s ago and waits for ranks that have not",
                )

        return poll(all_here, timeout_s, idle)

    def _stop(self) -> None:
        """Say that this rank ends in peace, and end the thread, before MPI ends."""
        self._stopped = True
        self._processes.mark_finished()
        self._thread.join(_ANSWER_S)

    def before_abort(self, ending: str) -> None:
        """Leave the record of this rank, and let those of the node know that it ends the job."""
        with suppress(Exception):
            recorder, current = self._progress.recorder, self._progress.current
            if recorder is None:
                if self._progress.calls:
                    write_error(self._rank, last_words(self._progress.calls))
            else:
                if current is not None:
                    recorder.wait(current)
                recorder.finish(failed=True, ending=ending)
        with suppress(Exception):
            self._processes.mark_reported()

    def close_record(self) -> None:
        """Keep the record of a program that ends by an exception; else it has ended well."""
        with suppress(Exception):
            if self._progress.recorder is not None:
                error = getattr(sys, "last_value", None)
                ending = "" if error is None else f"{type(error).__name__}: {error}"
                self._progress.recorder.finish(failed=error is not None, ending=ending)

    # -- the thread --------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopped:
            gone = self._processes.wait(self._tick_s)
            if self._stopped or self._mpi.Is_finalized():
                return
            for rank, file in gone:
                self._report_gone(rank, file)
            if self._may_ask:
                self._survey.poll()
            if self._limit_s:
                self._look_at_wait()

    def _look_at_wait(self) -> None:
        # A function of its own: its variables end with it. A wait refers to its work and arrays,
        # which would stay for a tick after they are let go.
        wait = self._progress.current
        if wait is None:
            return
        if wait.blocking and self._progress.steps != self._steps:
            # A section of many calls, such as one that measures: no single one hangs.
            self._steps, wait.since_s = self._progress.steps, time.monotonic()
        if time.monotonic() - wait.since_s > self._limit_s:
            self._look_into(wait)

    def _report_gone(self, rank: int, file: int) -> None:
        """End the job, in which a rank of the node is no more."""
        self._show_kept(at_once=True)
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
        now_s = time.monotonic()
        if (left is wait and now_s < until_s) or now_s < self._patient_until_s:
            return
        ranks = job_ranks(wait.communicator) if wait.communicator.kind == "mpi" else ()
        channel = self._channels.find(ranks) if self._may_ask else None
        states: dict[int, RankState | None] = {self._rank: self._state()}
        if channel is not None:
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
        if self._writing.goes_on(wait, states):
            self._patient_until_s = time.monotonic() + self._limit_s
            return
        waiting = [r for r, s in states.items() if s is not None and s.waited_s > self._limit_s / 2]
        if left is not wait and min(waiting, default=self._rank) < self._rank:
            self._left_to_senior = (wait, time.monotonic() + _SENIOR_S)
            return
        missing = None if channel is None else missing_ranks(wait, states)
        stopped = [r for r, s in states.items() if s is None and self._is_stopped(r)]
        report = wait_report(self._rank, wait, self._limit_s, missing, states, stopped)
        write_error(self._rank, f"{report}\nrank {self._rank} is at:\n{main_thread_stack()}")
        end_job(EXIT_CODE, report)

    def _is_stopped(self, rank: int) -> bool:
        pid = self._processes.pids.get(rank)
        return pid is not None and is_stopped(pid)

    def _state(self) -> RankState:
        return RankState.of(self._progress, threading.main_thread().ident, ended=self._ended)

    def _ask(self, channel: ControlChannel) -> dict[int, RankState | None]:
        """Return the states of the other ranks; None for who does not answer in time."""
        self._survey.ask(channel)

        def all_answered() -> bool:
            self._survey.poll()  # whoever asks this rank meanwhile must not wait for it in vain
            return self._survey.is_answered

        patience_s = min(self._limit_s / 2, _MOST_PATIENCE_S) if self._ended else 0.0
        poll(all_answered, max(_ANSWER_S + self._tick_s, patience_s))
        answers = self._survey.answers
        return {
            rank: RankState(**answers[rank]) if rank in answers else None
            for rank in channel.world_ranks
            if rank != self._rank
        }


def join_virtual_ranks(
    world: VirtualWorld, ranks: Sequence[tuple[Progress, threading.Thread]], limit_s: float
) -> None:
    """Wait until all virtual ranks have ended, or one has waited too long and all waits are ended.

    A rank that does not wait then cannot be ended; it goes on as a daemon thread.

    Args:
        world: The virtual job.
        ranks: Each rank's waits and thread.
        limit_s: The longest time that a rank may wait; 0 for no limit.
    """
    writing = Writing(limit_s)
    while alive := [thread for _, thread in ranks if thread.is_alive()]:
        alive[0].join(_tick_s(limit_s) if limit_s else None)
        report = limit_s and world.failure is None and _virtual_report(ranks, limit_s, writing)
        if report:
            world.fail(-1, on_all_ranks(CollectiveTimeoutError(report)))
            for thread in [thread for progress, thread in ranks if progress.current is not None]:
                thread.join(limit_s)
            return


def _virtual_report(
    ranks: Sequence[tuple[Progress, threading.Thread]], limit_s: float, writing: Writing
) -> str:
    """Return the report of the first rank that has waited too long; empty if none has."""
    for rank, (progress, _) in enumerate(ranks):
        wait = progress.current
        if wait is None or time.monotonic() - wait.since_s <= limit_s:
            continue
        if isinstance(wait.communicator, VirtualCommunicator):
            states = {
                one: RankState.of(progress, thread.ident, ended=not thread.is_alive())
                for one, (progress, thread) in enumerate(ranks)
            }
            if not writing.goes_on(wait, states):
                return wait_report(rank, wait, limit_s, missing_ranks(wait, states), states)
    return ""
