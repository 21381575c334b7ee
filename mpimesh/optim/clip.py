"""Clipping of gradients by their norm over all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np

from mpimesh.arguments import as_real, shown
from mpimesh.arrays.namespace import namespace
from mpimesh.arrays.types import Array
from mpimesh.errors import ModuleError
from mpimesh.nn.parameter import Parameter, as_parameters

__all__ = ["clip_grad_norm", "sum_of_squares"]

_BLOCK_ELEMENTS = 1 << 14


def clip_grad_norm(
    params: Iterable[Parameter],
    max_norm: float,
    *,
    all_sum: Callable[[float], float] | None = None,
    copies: Iterable[Parameter] = (),
) -> float:
    """Scale all gradients so that their common norm is at most `max_norm`.

    The norm is that of all gradients laid end to end, computed in float64.
    Where it is infinite or NaN, **the gradients stay as they are**: scaling
    would turn them all to 0 or NaN. The caller sees it in the result, the same
    on every rank, and leaves out the step.

    Collective if `all_sum` is: it is called once, also where there are no
    parameters.

    Args:
        params: Parameters; one that stands twice counts once, one without a
            gradient, or frozen, not at all.
        max_norm: The limit, above 0; ``math.inf`` only measures.
        all_sum: Adds a number up over the ranks that hold *different*
            parameters (pipeline stages). Data-parallel ranks hold the same
            gradients once they are reduced and must not be added.
        copies: Of `params`, those that another rank of `all_sum` counts: their
            gradients are scaled, too, but not part of this rank's sum.

    Returns:
        The norm before clipping.

    Raises:
        ModuleError: If `max_norm` is not above 0.
    """
    max_norm = as_real(max_norm, "max_norm", ModuleError, above=0, finite=False)
    params, copies = as_parameters(params, "parameters"), as_parameters(copies, "copies")
    if all_sum is not None and not callable(all_sum):
        raise ModuleError(f"all_sum must be a function of a number, or None, got {shown(all_sum)}")
    elsewhere = {id(parameter) for parameter in copies}
    trained = {
        id(parameter): parameter
        for parameter in params
        if parameter.requires_grad and parameter.grad is not None
    }
    grads = [parameter.grad for parameter in trained.values()]
    # Added up where the gradients live: a device is waited for once, not for each.
    squares = float(
        sum(
            (sum_of_squares(one.grad) for key, one in trained.items() if key not in elsewhere),
            start=0.0,
        )
    )
    if all_sum is not None:
        squares = float(all_sum(squares))
    norm = math.sqrt(squares) if squares >= 0 else math.nan
    if max_norm < norm < math.inf:
        factor = float(max_norm) / norm
        for grad in grads:
            grad *= factor
    return norm


def sum_of_squares(grad: Array) -> Array:
    """Return the sum of squares as a float64 of the array's library."""
    xp = namespace(grad)
    flat = grad.reshape(-1)
    length = _BLOCK_ELEMENTS if xp is np else max(flat.size, 1)
    total = xp.zeros((), xp.float64)
    for start in range(0, flat.size, length):
        block = flat[start : start + length].astype(xp.float64, copy=False)
        total += xp.dot(block, block)
    return total
