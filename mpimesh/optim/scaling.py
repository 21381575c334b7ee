"""Factors of gradients: clipping by their norm over all ranks, and the scale of a loss.

Gradients of float16 below 6e-8 are 0. So the loss is multiplied by a scale before the backward,
and the gradients are divided by it, in float32, before they change anything. As large as goes: the
scale is doubled when nothing has overflowed for a while, and where a gradient is infinite or
NaN, the step is left out and the scale halved.

Scales are powers of two, if they are left so: then scaling itself rounds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from mpimesh.arguments import as_flag, as_int, as_real, shown
from mpimesh.arrays.namespace import Array, namespace
from mpimesh.errors import ModuleError
from mpimesh.nn.parameter import Parameter, as_parameters
from mpimesh.optim.optimizer import check_number

__all__ = ["LossScaler", "clip_grad_norm", "sum_of_squares"]

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


class LossScaler:
    """The dynamic loss scale of mixed precision; what PyTorch calls a GradScaler.

    Local: it is a number and some counts. Whoever steps asks all ranks whether any gradient has
    overflowed and tells each rank's scaler the same, see
    :class:`~mpimesh.parallel.ParallelOptimizer`.

    Args:
        scale: The first scale.
        growth: What the scale is multiplied by after `growth_interval` good steps; 1 keeps it.
        backoff: What it is multiplied by after an overflow; 1 keeps it.
        growth_interval: Steps without an overflow in a row before it grows.
        min_scale: It gets no smaller.
        max_scale: It gets no larger.

    Attributes:
        scale: The scale now.
        good_steps: Steps in a row without an overflow since the scale last changed.
        skipped_steps: Steps that were left out, of all.

    Raises:
        ModuleError: If a number is out of range.

    Example:
        >>> scaler = optim.LossScaler(scale=8.0, growth_interval=2)
        >>> for overflowed in (False, False, True):
        ...     scaler.update(overflowed)
        ...     print(scaler.scale)
        8.0
        16.0
        8.0
        >>> scaler.skipped_steps
        1
    """

    __slots__ = (
        "backoff",
        "good_steps",
        "growth",
        "growth_interval",
        "max_scale",
        "min_scale",
        "scale",
        "skipped_steps",
    )

    def __init__(
        self,
        scale: float = 2.0**16,
        *,
        growth: float = 2.0,
        backoff: float = 0.5,
        growth_interval: int = 2000,
        min_scale: float = 1.0,
        max_scale: float = 2.0**32,
    ) -> None:
        self.growth = check_number("growth", growth)
        self.backoff = check_number("backoff", backoff)
        self.min_scale = check_number("min_scale", min_scale)
        self.max_scale = check_number("max_scale", max_scale)
        self.scale = check_number("scale", scale)
        self.growth_interval = growth_interval
        if not 0 < self.backoff <= 1 <= self.growth:
            raise ModuleError(
                f"an overflow makes the scale smaller and good steps make it larger: backoff must "
                f"be in (0, 1] and growth at least 1, got {backoff!r} and {growth!r}"
            )
        if not 0 < self.min_scale <= self.scale <= self.max_scale:
            raise ModuleError(
                f"a loss scale is above 0 and between min_scale and max_scale, got {scale!r}, "
                f"{min_scale!r} and {max_scale!r}"
            )
        if type(growth_interval) is not int or growth_interval < 1:
            raise ModuleError(
                f"growth_interval must be a whole number of at least 1, got {growth_interval!r}"
            )
        self.good_steps = 0
        self.skipped_steps = 0

    def update(self, overflowed: bool) -> None:
        """Take note of a step: that it was done, or left out because a gradient overflowed."""
        if as_flag(overflowed, "overflowed", ModuleError):
            self.skipped_steps += 1
            self.good_steps = 0
            self.scale = max(self.scale * self.backoff, self.min_scale)
            return
        self.good_steps += 1
        if self.good_steps >= self.growth_interval:
            self.good_steps = 0
            self.scale = min(self.scale * self.growth, self.max_scale)

    def state_dict(self) -> dict[str, float]:
        """Return the scale and the counts."""
        return {
            "scale": self.scale,
            "good_steps": self.good_steps,
            "skipped_steps": self.skipped_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave.

        Raises:
            ModuleError: If something is missing or out of range; then nothing is changed.
        """
        names = ("scale", "good_steps", "skipped_steps")
        if not isinstance(state, Mapping) or any(name not in state for name in names):
            raise ModuleError(
                f"state must be a dict of {', '.join(names)}, as state_dict() of a LossScaler "
                f"gives, got {shown(state)}"
            )
        scale = as_real(state["scale"], "scale in state", ModuleError, above=0)
        counts = [
            as_int(state[name], f"{name} in state", ModuleError, least=0) for name in names[1:]
        ]
        if not self.min_scale <= scale <= self.max_scale:
            raise ModuleError(
                f"the scale of this LossScaler is between {self.min_scale:g} and "
                f"{self.max_scale:g}, got {scale:g}"
            )
        self.scale = scale
        self.good_steps, self.skipped_steps = counts

    def __repr__(self) -> str:
        return f"LossScaler({self.scale:g}, {self.skipped_steps} steps skipped)"
