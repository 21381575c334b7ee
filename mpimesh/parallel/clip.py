"""Clipping of gradients by their norm over all stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from mpimesh.nn import Parameter
from mpimesh.optim import clip_grad_norm as clip_local
from mpimesh.runtime import ProcessGroup

__all__ = ["clip_grad_norm", "sum_over_dims"]


def clip_grad_norm(
    parameters: Iterable[Parameter],
    max_norm: float,
    *,
    group: ProcessGroup,
    copies: Iterable[Parameter] = (),
    inner_sum: Callable[[float], float] | None = None,
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
        inner_sum: Adds a sum of squares up over the ranks that share a stage, before `group`
            does over the stages; collective over them. None if each stage has one rank.

    Returns:
        The norm before clipping, the same on every rank. Where it is infinite or NaN, the
        gradients are left as they are.

    Raises:
        ModuleError: If `max_norm` is not above 0.

    Cost:
        One all-reduce of 8 bytes, and what `inner_sum` takes.
    """

    def all_sum(squares: float) -> float:
        if inner_sum is not None:
            squares = inner_sum(squares)
        if group.size == 1:
            return squares
        return float(group.all_reduce(np.array(squares)).resolve())

    summed = None if group.size == 1 and inner_sum is None else all_sum
    return clip_local(parameters, max_norm, all_sum=summed, copies=copies)


def sum_over_dims(
    number: float,
    dims: Sequence[ProcessGroup | None],
    *,
    repeats: Sequence[ProcessGroup] = (),
    scope: ProcessGroup,
) -> float:
    """Return the sum of a number over all ranks along several dims at once. Collective.

    Args:
        number: This rank's.
        dims: The groups of this rank along the dims; None is this rank alone.
        repeats: Its groups along dims whose ranks have the same number, which counts once.
        scope: The ranks along all of these dims together, and maybe along others.

    Cost:
        One all-reduce of 8 bytes: over one dim alone, or over `scope` if it has no other dims. Else
        one for each dim.
    """
    given = [group for group in dims if group is not None and group.size > 1]
    together = math.prod(group.size for group in (*given, *repeats))
    if len(given) > 1 and together == scope.size:
        # Of ranks that repeat each other the first one counts.
        number = 0.0 if any(group.rank for group in repeats) else number
        given = [scope]
    for group in given:
        number = float(group.all_reduce(np.array(number), label="norm").resolve())
    return number
