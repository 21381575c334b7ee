"""The scale of a loss, so that small gradients do not vanish in a small dtype.

Gradients of float16 below 6e-8 are 0. So the loss is multiplied by a scale before the backward,
and the gradients are divided by it, in float32, before they change anything. As large as goes: the
scale is doubled when nothing has overflowed for a while, and where a gradient is infinite or
NaN, the step is left out and the scale halved.

Scales are powers of two, if they are left so: then scaling itself rounds nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpimesh.arguments import as_flag, as_int, as_real, shown
from mpimesh.errors import ModuleError
from mpimesh.optim.optimizer import check_number

__all__ = ["LossScaler"]


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
