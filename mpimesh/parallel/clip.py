"""Clipping of gradients by their norm over all stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from mpimesh.nn import Parameter
from mpimesh.optim import clip_grad_norm as clip_local
from mpimesh.runtime import ProcessGroup

__all__ = ["clip_grad_norm"]


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
