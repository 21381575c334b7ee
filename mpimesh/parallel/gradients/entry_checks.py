"""Refusals of buckets: gradients at the wrong time, and parameters that changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mpimesh.errors import ModuleError, ModuleStateError
from mpimesh.nn import Parameter
from mpimesh.parallel.gradients.entries import Entry
from mpimesh.runtime import ProcessGroup

__all__ = ["check_addition", "check_frozen", "check_quiet", "registered"]


def registered(entry: Entry | None, parameter: Parameter, group: ProcessGroup) -> Entry:
    """Return what is counted for a parameter.

    Raises:
        ModuleError: If nothing is.
    """
    if entry is None:
        raise ModuleError(
            f"rank {group.world_rank}: {parameter!r} is not registered with these buckets"
        )
    return entry


def check_addition(entry: Entry, *, is_open: bool, group: ProcessGroup) -> None:
    """Check that a gradient may be added to now.

    Raises:
        ModuleStateError: If no cycle was begun, or the gradient is being reduced already.
    """
    if not is_open:
        raise ModuleStateError(
            f"rank {group.world_rank}: a gradient was added to parameter {entry.name!r} "
            "after the sums over the replicas; call zero_grad() or begin() of the buckets before "
            "the next backward"
        )
    if entry.bucket is not None and entry.bucket.handle is not None:
        raise ModuleStateError(
            f"rank {group.world_rank}: gradient {entry.count + 1} of parameter "
            f"{entry.name!r} came while its bucket is being reduced; earlier cycles had "
            f"{entry.uses} for each backward. Make the buckets with overlap=False for a model "
            "whose layers run in some steps and not in others"
        )


def check_frozen(
    entries: Iterable[Entry], frozen: Sequence[tuple[str, Parameter]], group: ProcessGroup
) -> None:
    """Check that the parameters to train are still those to train.

    Raises:
        ModuleStateError: If one was frozen or unfrozen.
    """
    changed = [entry.name for entry in entries if not entry.parameter.requires_grad]
    changed += [name for name, parameter in frozen if parameter.requires_grad]
    if changed:
        raise ModuleStateError(
            f"rank {group.world_rank}: parameters {changed} were frozen or unfrozen "
            "after the buckets were made; make them anew"
        )


def check_quiet(started: int, group: ProcessGroup) -> None:
    """Check that no buckets are being reduced.

    Raises:
        ModuleStateError: If some are.
    """
    if started:
        raise ModuleStateError(
            f"rank {group.world_rank}: zeros would be written into {started} "
            "buckets that are being reduced; call synchronize() first"
        )
