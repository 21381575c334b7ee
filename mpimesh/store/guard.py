"""Jobs that come back: a stop that the batch system asks for, agreed on by all ranks."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterable
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self
from weakref import WeakKeyDictionary

from mpimesh.arguments import as_int, as_items, as_time, shown
from mpimesh.errors import MeshError, on_all_ranks
from mpimesh.runtime.agreement import PlannedMax
from mpimesh.runtime.device_mesh import DeviceMesh
from mpimesh.runtime.world import MeshContext, exit_all
from mpimesh.trace.log import log

__all__ = ["RunGuard", "run_guard"]

_DEFAULTS = tuple(getattr(signal, name) for name in ("SIGUSR1", "SIGTERM") if hasattr(signal, name))
_NOTES = {getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name)}
"""Signals that mean what the program says: however often they come, they only take note."""
_SAME_S = 1.0
"""A launcher may send a signal to a process that has it from the batch system already."""

# What the ranks compare: 0, the number of a signal, or one of these; the largest is the reason.
_BY_PROGRAM = 254
_BY_TIME = 255
_REASONS = {_BY_PROGRAM: "the program", _BY_TIME: "the time limit"}


class RunGuard:
    """A request to stop that comes to some rank and stops all of them after the same step.

    Made by :func:`run_guard`. A batch system asks by a signal, to one rank or to all of them at
    different moments; the handler only takes note. A context manager: at its end the signals have
    their old handlers.
    """

    def __init__(
        self,
        signals: Iterable[int] = _DEFAULTS,
        *,
        margin_s: float | None = None,
        limit_s: float | None = None,
        code: int = 85,
    ) -> None:
        try:
            numbers = [_as_signal(one) for one in as_items(signals, "signals", MeshError)]
            self._margin_s = as_time(margin_s, "margin_s", MeshError)
            limit_s = as_time(limit_s, "limit_s", MeshError)
            self._requeue = as_int(code, "code", least=1)
            if self._requeue > 255:
                raise MeshError(f"code must be from 1 to 255, got {shown(code)}")
            if numbers and not _in_main_thread():
                raise MeshError(
                    "only the main thread gets signals: make the guard there, before virtual ranks "
                    "or threads start, and let them use it; or with signals=() here"
                )
        except MeshError as error:
            raise on_all_ranks(error) from None
        ends_s = [] if limit_s is None else [time.time() + limit_s]
        told = os.environ.get("SLURM_JOB_END_TIME", "")
        if told.isdecimal():
            ends_s.append(float(told))
        self._end_s = min(ends_s, default=float("inf"))
        self._note = 0
        self._stopped = 0
        self._first_s: dict[int, float] = {}
        self._answers: WeakKeyDictionary[MeshContext, PlannedMax] = WeakKeyDictionary()
        self._previous: dict[int, Any] = {}
        try:
            for number in numbers:
                self._previous[number] = signal.signal(number, self._on_signal)
        except (OSError, ValueError) as error:
            self.close()
            name = _name(number)
            raise on_all_ranks(MeshError(f"signals: {name} cannot be handled ({error})")) from error

    def stopping(self, mesh: DeviceMesh) -> bool:
        """Tell whether to stop after this step: the same answer on all ranks of the mesh.

        Collective over the mesh: call it once in each step, at the same place. The answer is about
        what any rank had noted at its last call, so that a step hides the messages; the first call
        waits for them. Once it is True it stays so.

        Cost:
            One planned all-reduce of a byte, started here and taken at the next call.

        Raises:
            MpimeshError: As an all-reduce over the mesh.
        """
        group = mesh.group()
        context = group._core.context
        answer = self._answers.get(context)
        if answer is None:
            answer = self._answers[context] = PlannedMax(group.all_reduce_init, "stopping?")
            context.before_close.append(lambda: self._drop(context))
            answer.start(self._noted())
        reason = answer.resolve()
        if reason:
            self._stopped = reason
            log(logging.INFO, mesh.rank, "all ranks stop after this step: %s", self.reason)
            return True
        answer.start(self._noted())
        return False

    def stop(self) -> None:
        """Ask all ranks to stop, as a signal to this rank would. Local."""
        self._note = max(self._note, _BY_PROGRAM)

    @property
    def stopped(self) -> bool:
        """True if the ranks have agreed to stop."""
        return bool(self._stopped)

    @property
    def reason(self) -> str:
        """Why they stop, alike on all ranks: ``"SIGUSR1"``, ``"the time limit"``; else empty."""
        return _REASONS.get(self._stopped) or (_name(self._stopped) if self._stopped else "")

    @property
    def time_left_s(self) -> float:
        """Seconds until the job's time is up, never below 0; infinite if no limit is known. Local.

        The batch system's limit is that of the job's start, from ``SLURM_JOB_END_TIME``.
        """
        return max(0.0, self._end_s - time.time())

    @property
    def code(self) -> int:
        """The exit code to end with: that for requeueing if the ranks were stopped, else 0."""
        return self._requeue if self._stopped else 0

    def exit(self) -> NoReturn:
        """End all ranks with :attr:`code`, after MPI is finalized. Collective, as :func:`exit_all`.

        From here on the signals are ignored: when the first rank has left, ``srun -K`` sends the
        others SIGTERM. On virtual ranks, and in a forked child, it raises SystemExit.
        """
        if _in_main_thread():
            for number in self._previous:
                signal.signal(number, signal.SIG_IGN)
        exit_all(self.code)

    def close(self) -> None:
        """Give the signals their old handlers back; a second call does nothing. Local."""
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._on_signal:  # else somebody has it by now
                # None: a handler that Python does not know, and cannot set again.
                signal.signal(number, signal.SIG_DFL if previous is None else previous)
        self._previous.clear()

    def __enter__(self) -> Self:
        """Return the guard."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give the signals their old handlers back."""
        self.close()

    def __repr__(self) -> str:
        """Show what it listens to and how far it is. Local."""
        signals = ", ".join(map(_name, self._previous)) or "no signals"
        state = f", stopped by {self.reason}" if self._stopped else ""
        return f"<RunGuard of {signals}{state}>"

    def _noted(self) -> int:
        """Return this rank's reason to stop; 0 for none."""
        if self._margin_s is not None and self._end_s - time.time() < self._margin_s:
            return _BY_TIME
        return self._note

    def _drop(self, context: MeshContext) -> None:
        """Resolve what is under way on a mesh that closes."""
        self._answers.pop(context).resolve()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._note = max(self._note, number)
        now_s = time.monotonic()
        again = now_s - self._first_s.setdefault(number, now_s) > _SAME_S
        previous = self._previous.get(number)
        if number in _NOTES or not again or previous == signal.SIG_IGN:
            return
        # Who asks for the second time does not want to wait.
        if callable(previous):
            previous(number, frame)
            return
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


def run_guard(
    signals: Iterable[int] = _DEFAULTS,
    *,
    margin_s: float | None = None,
    limit_s: float | None = None,
    code: int = 85,
) -> RunGuard:
    """Take note of SIGUSR1 and SIGTERM from here on, so that the ranks can stop together. Local.

    Call it first, before a mesh is made: a signal that comes before ends the process. The second
    SIGTERM, a second or more after the first, ends it as ever.

    Args:
        signals: Those that are taken note of; none for programs that stop by time or by themselves.
        margin_s: Ask to stop when less of the job's time is left: what saving takes, and two steps.
            None leaves that to signals.
        limit_s: The job's time from now on, where no batch system says it, or it is to be less;
            see :attr:`RunGuard.time_left_s`.
        code: The exit code that says: saved, start me again. ``slurm/job.sbatch`` takes 85 so.

    Returns:
        The guard, one for each process: virtual ranks share that of the main thread.

    Raises:
        MeshError: On every rank, if an argument is wrong, or this is not the main thread. It is a
            `ValueError`.

    Example:
        >>> guard = mm.run_guard()
        >>> with mm.DeviceMesh("dp=-1") as mesh:
        ...     for step in range(first, last):
        ...         train(step)
        ...         if guard.stopping(mesh):
        ...             save(step)
        ...             break
        >>> guard.exit()
    """
    return RunGuard(signals, margin_s=margin_s, limit_s=limit_s, code=code)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _as_signal(value: Any) -> int:
    number = as_int(value, "a signal", least=1)
    try:
        return int(signal.Signals(number))
    except ValueError:
        raise MeshError(f"signals must be of this system's, got {shown(value)}") from None


def _name(number: int) -> str:
    return signal.Signals(number).name
