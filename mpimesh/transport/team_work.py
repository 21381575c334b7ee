"""Work on memory that ranks share, in pieces that no signal handler can come into.

A handler that raises, as Ctrl-C does, ends a test of a request anywhere, and the next
test has to go on. What a sum is written over cannot be added up again. So a
piece of work and the note that it is done are one call into C: Python runs handlers
between its own instructions only, and there are none in there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from operator import call
from typing import Any, TypeAlias

import numpy as np

from mpimesh.arrays.types import HostArray
from mpimesh.transport.team import Team

__all__ = ["FUNCTIONS", "Work", "copying", "do_at_once", "reducing"]

Work: TypeAlias = tuple[Callable[[], object], ...]
"""Calls of NumPy, none of which runs Python."""

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sum": np.add,
    "mean": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}


def reducing(
    team: Team, op: str, sources: Sequence[HostArray], targets: Sequence[HostArray], first: int = 0
) -> Work:
    """Return what reduces `sources` in their order into all `targets`.

    Args:
        team: Lends memory for what comes in between.
        op: Which reduction.
        sources: At least one.
        targets: May be the sources themselves, each at its place.
        first: Which of them the result is written into as it is made; the others get copies, while
            it is in cache.
    """
    function, own = FUNCTIONS[op], targets[first]
    work: list[Callable[[], object]] = []
    total = sources[0]
    if len(sources) == 1:
        work += copying(total, own)
    else:
        if len(sources) > 2:
            # Not into a target before the end: it may be a source that is still to come.
            scratch = team.scratch(own.nbytes).view(own.dtype)
            for source in sources[1:-1]:
                work.append(partial(function, total, source, out=scratch))
                total = scratch
        work.append(partial(function, total, sources[-1], out=own))
    if op == "mean":
        work.append(partial(np.divide, own, len(sources), out=own))
    for place, target in enumerate(targets):
        if place != first:
            work += copying(own, target)
    return tuple(work)


def copying(source: HostArray, target: HostArray) -> Work:
    """Return what copies `source`."""
    return (partial(target.__setitem__, ..., source),)


def do_at_once(quietly: Callable[..., object], work: Work, note: Callable[[], object]) -> None:
    """Do all of `work` and then `note`, or nothing; overflow and NaN pass silently, as in MPI."""
    quietly(deque, map(call, (*work, note)), 0)
