"""The state of a rank, as another thread sees it, and the table of all of them."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mpimesh.arguments import rank_names
from mpimesh.runtime.call import Call
from mpimesh.runtime.progress import Progress, Wait
from mpimesh.runtime.tracebacks import handled_exception, innermost_line, user_line

__all__ = ["RankState", "missing_ranks", "operation_key", "wait_report"]

_NOBODY = "nobody; ranks may wait for each other in other meshes or groups of one name"
_UNKNOWN = "unknown, for want of a way to ask"
_SILENT = "no answer (stopped, dead, or in a call that holds the interpreter)"
_LONGEST_TRACEBACK = 4000


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
