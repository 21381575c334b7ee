"""One line about a wait that is long, for who has not set a short ``MPIMESH_TIMEOUT_S``.

A long wait may be right: another rank computes. So nothing is ended and nobody is asked; the
line says where the rank stands, and how to learn more. It must not flood the output of a
large job: of a group the first rank speaks, the others only a minute later, of the whole job
a few ranks, each once for a wait, and again only for one that is twice as long.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from mpimesh.arguments import rank_names
from mpimesh.runtime.call import Call, call_site, site_text
from mpimesh.runtime.progress import Wait
from mpimesh.runtime.tracebacks import write_error

__all__ = ["Notice"]

_OTHERS_LATER_S = 60.0
_SPEAKERS = 16
"""Ranks of the job from this one on say nothing: where they wait, one of the first does, too."""
_MOST_PEERS = 4


class Notice:
    """The notices of one rank about its own long waits.

    Args:
        rank: This rank in MPI's world.
        after_s: The shortest wait to speak about; 0 for none.
        tell: Called with the rank and the line.
    """

    __slots__ = ("_after_s", "_rank", "_tell", "_told")

    def __init__(
        self, rank: int, after_s: float, tell: Callable[[int, str], None] = write_error
    ) -> None:
        self._rank = rank
        self._after_s = after_s if after_s and rank < _SPEAKERS else float("inf")
        self._tell = tell
        self._told: Wait | None = None

    def look(self, wait: Wait) -> None:
        """Speak if `wait` is long. Called by the thread that waits, every now and then."""
        waited_s = time.monotonic() - wait.since_s
        if waited_s < self._after_s or wait is self._told:
            return
        if wait.communicator.rank and waited_s < self._after_s + _OTHERS_LATER_S:
            return
        self._told = wait
        self._after_s *= 2
        self._tell(
            self._rank,
            f"mpimesh: has waited {waited_s:.0f} s in {_place(wait)}{_peers(wait)}{_cause()}. "
            "MPIMESH_TIMEOUT_S=60 ends such a wait after 60 s and says what each rank does; "
            "MPIMESH_NOTICE_S=0 ends these lines",
        )


def _place(wait: Wait) -> str:
    if isinstance(wait.what, Call):
        return str(wait.what)  # has its place
    return f"{wait.what} at {site_text(call_site())}"


def _peers(wait: Wait) -> str:
    """Say for whom it waits, where that is not all ranks of its group."""
    world_ranks = getattr(wait.communicator, "world_ranks", (-1,))
    if wait.peers is None or -1 in world_ranks:
        return ""
    ranks = [world_ranks[peer] for peer in wait.peers]
    return f", for {rank_names(ranks, _MOST_PEERS)} of the job"


def _cause() -> str:
    """Say which exception this thread deals with, as in a ``finally``: others do not know of it."""
    error = sys.exc_info()[1]
    return "" if error is None else f", while it deals with {type(error).__name__}: {error}"
