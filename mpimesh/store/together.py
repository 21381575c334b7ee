"""Ranks that do something with files together, or one process alone: agreements, and errors."""

from __future__ import annotations

from typing import Any

from mpimesh.arguments import shown
from mpimesh.errors import MpimeshError, StoreError
from mpimesh.runtime import Launch
from mpimesh.runtime.agreement import agree
from mpimesh.runtime.group_core import GroupCore
from mpimesh.runtime.world import current_world

__all__ = ["agreed", "as_store_error", "ranks_of_job"]


def ranks_of_job() -> int:
    """Return how many ranks run this program, without starting MPI. Local."""
    virtual = current_world().virtual
    return Launch.detect().size if virtual is None else virtual.size


def agreed(
    core: GroupCore | None, what: str, value: Any = None, *, problem: Exception | None = None
) -> list[Any]:
    """Return the values of all ranks, in rank order, or raise the same error on all. Collective.

    Args:
        core: The ranks; None for this process alone.
        what: In words what they do, the same on all.
        value: This rank's value, as JSON can say it.
        problem: Why this rank cannot do it.
    """
    if core is not None:
        return agree(core, what, value, problem=problem)
    if problem is not None:
        raise problem
    return [value]


def as_store_error(error: Exception, doing: str) -> MpimeshError:
    """Return an error as one of mpimesh's, which other ranks can be told.

    Args:
        error: An error, such as of the file system, or of a program's own function.
        doing: What it has prevented, as in "save to PATH".
    """
    if isinstance(error, MpimeshError):
        return error
    reason = error.strerror if isinstance(error, OSError) else None
    return StoreError(f"cannot {doing}: {reason or shown(error)}").with_traceback(
        error.__traceback__
    )
