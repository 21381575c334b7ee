"""Clipping of gradients by their norm over all stages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

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

    def all_sum(squares: float) -> float:
        return float(group.all_reduce(np.array(squares)).resolve())

    return clip_local(
        parameters, max_norm, all_sum=all_sum if group.size > 1 else None, copies=copies
    )


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
