"""Clipping of gradients by their norm over all stages."""

from __future__ import annotations

from collections.abc import Iterable

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

    summed = None if group.size == 1 else all_sum
    return clip_local(parameters, max_norm, all_sum=summed, copies=copies)
