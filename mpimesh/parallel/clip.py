"""Clipping of gradients by their norm over all stages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from mpimesh.arguments import as_real, check_kind
from mpimesh.errors import ModuleError, ModuleStateError, MpimeshError
from mpimesh.nn import Parameter
from mpimesh.optim import clip_grad_norm as clip_local
from mpimesh.runtime import ProcessGroup
from mpimesh.runtime.agreement import agree
from mpimesh.runtime.call import Call

__all__ = ["agreed_squares", "clip_grad_norm", "problem_with_norm"]


def clip_grad_norm(
    parameters: Iterable[Parameter],
    max_norm: float,
    *,
    group: ProcessGroup,
    copies: Iterable[Parameter] = (),
) -> float:
    """Scale all gradients so that their common norm over all stages is at most `max_norm`.

    Collective over `group`.

    Args:
        parameters: This rank's parameters; there may be none.
        max_norm: The limit, above 0; ``math.inf`` only measures.
        group: Ranks that hold *different* parameters: the stages of a pipeline. Replicas hold the
            same gradients, once they are reduced, and must not be in it.
        copies: Of `parameters`, those that another rank of the group holds, too, and counts: here
            they are only scaled.

    Returns:
        The norm before clipping, the same on every rank. Where it is infinite or NaN, the
        gradients are left as they are.

    Raises:
        ModuleError: If `max_norm` is not above 0.

    Cost:
        One all-reduce of 8 bytes.
    """
    wanted = "the ranks of the stages, as mesh.group('pp') gives"
    check_kind(group, ProcessGroup, "group", ModuleError, wanted=wanted)

    def all_sum(squares: float) -> float:
        return float(group.all_reduce(np.array(squares)).resolve())

    return clip_local(
        parameters, max_norm, all_sum=all_sum if group.size > 1 else None, copies=copies
    )


def problem_with_norm(max_norm: object) -> ModuleError | None:
    """Return what is wrong with the limit of a norm, None if nothing is. Local."""
    try:
        as_real(max_norm, "max_norm", ModuleError, above=0, finite=False)
    except ModuleError as error:
        return error
    return None


def agreed_squares(
    squares: float,
    problem: MpimeshError | None,
    dims: Sequence[ProcessGroup | None],
    *,
    repeats: Sequence[ProcessGroup],
    scope: ProcessGroup,
    sums: bool = True,
    limit: float | None = None,
) -> float:
    """Return the sum of a number over all ranks along several dims, if none refuses. Collective.

    Args:
        squares: This rank's.
        problem: Why this rank refuses, if it does.
        dims: The groups of this rank along the dims; None is this rank alone.
        repeats: Its groups along dims whose ranks have the same number, which counts once.
        scope: The ranks that step together: those along all of these dims, and maybe along others.
        sums: Whether this rank has sums of gradients, which all have or none.
        limit: What the norm is to be at most, if that is to be compared.

    Raises:
        MpimeshError: On every rank, if any refuses.
        ModuleStateError: On every rank, if only some have sums.
        MismatchError: On every rank, if the limits differ.

    Cost:
        One all-reduce of 24 bytes, if `scope` has no other dims; else one more for each dim.
    """
    groups = [group for group in dims if group is not None and group.size > 1]
    together = math.prod(group.size for group in (*groups, *repeats)) == scope.size
    # Of ranks that repeat each other the first one counts.
    counts = together and not any(group.rank for group in repeats)
    mine = np.array([squares if counts else 0.0, problem is not None, not sums])
    total, refused, without = scope.all_reduce(mine, label="norm").resolve().tolist()
    if refused or 0 < without < scope.size:
        if problem is None and not refused and not sums:
            problem = ModuleStateError(
                "there are no sums of gradients here, and on other ranks there are; call "
                "zero_grad() on all ranks or on none"
            )
        agree(scope._core, "refused norms", problem=problem)
    if limit is not None:
        call = Call("clip_grad_norm", scope.name, rule=f"max_norm {float(limit)!r}")
        agree(scope._core, call)
    if together:
        return float(total)
    for group in groups:
        squares = float(group.all_reduce(np.array(squares), label="norm").resolve())
    return squares
