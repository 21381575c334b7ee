"""Factors of rates and gradients: schedules by the step, clipping by a norm, the scale of a loss.

A schedule is a value, and a pure function of the step: it gives the share of an optimizer's own
rate that step t, counted from 0, is done with. So replicas have the same rate without telling each
other, and a run that goes on has that of the run before. An :class:`LRScheduler` counts the steps
and sets the rates; what it knows is two numbers and a text for each optimizer.

Gradients of float16 below 6e-8 are 0. So the loss is multiplied by a scale before the backward,
and the gradients are divided by it, in float32, before they change anything. As large as goes: the
scale is doubled when nothing has overflowed for a while, and where a gradient is infinite or
NaN, the step is left out and the scale halved. Scales are powers of two, if they are left so: then
scaling itself rounds nothing.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np

from mpimesh.arguments import as_flag, as_int, as_real, shape_of, shown
from mpimesh.arrays.namespace import Array, namespace
from mpimesh.errors import ModuleError, tell_elsewhere
from mpimesh.nn.parameter import Parameter, as_parameters
from mpimesh.optim.optimizer import Optimizer, check_number

__all__ = [
    "ConstantLR",
    "CosineLR",
    "LRSchedule",
    "LRScheduler",
    "LinearLR",
    "LossScaler",
    "OneCycleLR",
    "WarmupLR",
    "clip_grad_norm",
    "sum_of_squares",
]

_MOST_STEPS = 1 << 53
"""Exact as a float."""

_BLOCK_ELEMENTS = 1 << 14


# -- clipping, and the scale of a loss -----------------------------------------------------------


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
    # Added up where the gradients live: a device is waited for once, not for each.
    counted = (one.grad for key, one in trained.items() if key not in elsewhere)
    squares = float(sum(map(sum_of_squares, counted), start=0.0))
    if all_sum is not None:
        squares = float(all_sum(squares))
    norm = math.sqrt(squares) if squares >= 0 else math.nan
    if max_norm < norm < math.inf:
        factor = max_norm / norm
        for grad in [one.grad for one in trained.values()]:
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
        self.growth_interval = as_int(growth_interval, "growth_interval", ModuleError, least=1)
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
        scale, *counts = _entries(state, "scale", "good_steps", "skipped_steps", of="a LossScaler")
        scale = as_real(scale, "scale in state", ModuleError, above=0)
        good_steps = as_int(counts[0], "good_steps in state", ModuleError, least=0)
        skipped_steps = as_int(counts[1], "skipped_steps in state", ModuleError, least=0)
        if not self.min_scale <= scale <= self.max_scale:
            raise ModuleError(
                f"the scale of this LossScaler is between {self.min_scale:g} and "
                f"{self.max_scale:g}, got {scale:g}"
            )
        self.scale, self.good_steps, self.skipped_steps = scale, good_steps, skipped_steps

    def __repr__(self) -> str:
        return f"LossScaler({self.scale:g}, {self.skipped_steps} steps skipped)"


def _entries(state: object, *names: str, of: str) -> list[Any]:
    """Return the entries of a state, if it has all of these."""
    if not isinstance(state, Mapping) or any(name not in state for name in names):
        raise ModuleError(
            f"state must be a dict of {', '.join(names)}, as state_dict() of {of} gives, got "
            f"{shown(state)}"
        )
    return [state[name] for name in names]


# -- learning rates that depend on the step ------------------------------------------------------


class LRSchedule(ABC):
    """Share of an optimizer's own learning rate as a function of the step; a dataclass.

    Its steps are whole numbers, of which there is at least one; its other numbers are shares, not
    negative. The text form of a schedule parses back.

    Raises:
        ModuleError: If a number is out of range.
    """

    __slots__ = ()
    _least_steps: ClassVar[int] = 1

    def __post_init__(self) -> None:
        # Checked numbers become those of Python.
        for name in [field.name for field in fields(self)]:  # type: ignore[arg-type]
            value, what = getattr(self, name), f"{name} of {type(self).__name__}"
            if name == "steps":
                value = as_int(value, what, ModuleError, least=self._least_steps, most=_MOST_STEPS)
            elif name != "then":
                value = as_real(value, what, ModuleError, least=0)
            object.__setattr__(self, name, value)

    @abstractmethod
    def __call__(self, step: int) -> float:
        """Return the share for a step, counted from 0."""


@dataclass(frozen=True, slots=True)
class ConstantLR(LRSchedule):
    """``share`` at every step.

    Attributes:
        share: What the rate is multiplied by.
    """

    share: float = 1.0

    def __call__(self, step: int) -> float:
        """Return the share for a step, counted from 0."""
        return self.share


@dataclass(frozen=True, slots=True)
class LinearLR(LRSchedule):
    """From `start` to `end` evenly in `steps` steps, then `end`.

    ``start + (end - start) * min(t, steps) / steps``, as PyTorch's LinearLR.

    Attributes:
        steps: The step from which it is `end`.
        start: Share at step 0.
        end: Share in the end.
    """

    steps: int
    start: float = 1.0
    end: float = 0.0

    def __call__(self, step: int) -> float:
        """Return the share for a step, counted from 0."""
        return self.start + (self.end - self.start) * (min(step, self.steps) / self.steps)


@dataclass(frozen=True, slots=True)
class CosineLR(LRSchedule):
    """From 1 to `end` along half a cosine in `steps` steps, then `end`.

    ``end + (1 - end) * (1 + cos(pi * t / steps)) / 2``, as PyTorch's CosineAnnealingLR with
    ``eta_min = end * lr``, which climbs again after the last step, where this one stays.

    Attributes:
        steps: The step from which it is `end`.
        end: Share in the end.
    """

    steps: int
    end: float = 0.0

    def __call__(self, step: int) -> float:
        """Return the share for a step, counted from 0."""
        return _cosine(1.0, self.end, min(step, self.steps) / self.steps)


@dataclass(frozen=True, slots=True)
class WarmupLR(LRSchedule):
    """A linear rise in `steps` steps to the first rate of another schedule, which follows.

    Before step `steps` it is ``then(0) * (start + (1 - start) * t / steps)``, and from there on
    ``then(t - steps)``: PyTorch's SequentialLR of a LinearLR and another.

    Attributes:
        steps: The step at which `then` begins; 0 is no warm-up.
        then: The schedule after it.
        start: Share of the first rate of `then` at step 0. With 0 the first step changes nothing.

    Raises:
        ModuleError: If `steps` or `start` is no number of at least 0, or `then` no schedule.
    """

    steps: int
    then: LRSchedule = ConstantLR()
    start: float = 0.0

    _least_steps: ClassVar[int] = 0

    def __post_init__(self) -> None:
        LRSchedule.__post_init__(self)
        if not isinstance(self.then, LRSchedule):
            raise ModuleError(
                "WarmupLR: then must be a schedule, such as optim.CosineLR(1000), got "
                f"{shown(self.then)}"
            )

    def __call__(self, step: int) -> float:
        """Return the share for a step, counted from 0."""
        if step >= self.steps:
            return self.then(step - self.steps)
        return self.then(0) * (self.start + (1.0 - self.start) * step / self.steps)


@dataclass(frozen=True, slots=True)
class OneCycleLR(LRSchedule):
    """From `start` up to 1 and down to `end` in `steps` steps, along half cosines; then `end`.

    As PyTorch's OneCycleLR, where the optimizer's rate is ``max_lr``, ``start = 1 / div_factor``
    and ``end = start / final_div_factor``: 1 is reached at ``t = warmup * steps - 1``, `end` at
    ``t = steps - 1``. Momentum stays as it is (``cycle_momentum=False``).

    Attributes:
        steps: Number of steps in all.
        warmup: Share of the steps in which it rises, at most 1.
        start: Share of the rate at step 0.
        end: Share of the rate at the last step.

    Raises:
        ModuleError: If one is no number of at least 0, or `warmup` is more than 1.
    """

    steps: int
    warmup: float = 0.3
    start: float = 1 / 25
    end: float = 1 / 250_000

    def __post_init__(self) -> None:
        LRSchedule.__post_init__(self)
        if self.warmup > 1:
            raise ModuleError(f"OneCycleLR: warmup is a share of the steps, got {self.warmup!r}")

    def __call__(self, step: int) -> float:
        """Return the share for a step, counted from 0."""
        last = self.steps - 1
        top = self.warmup * self.steps - 1
        if step >= last > top:
            return self.end
        if step < top:
            return _cosine(self.start, 1.0, step / top)
        return 1.0 if top >= last else _cosine(1.0, self.end, (step - top) / (last - top))


class SupportsOptimizers(Protocol):
    """An object that steps optimizers, as a :class:`~mpimesh.ParallelOptimizer` does."""

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers."""


Scheduled: TypeAlias = Optimizer | SupportsOptimizers


class LRScheduler:
    """Sets the learning rates of optimizers by a schedule. Local.

    It sets ``lr`` of each optimizer to the optimizer's own rate, which is the one that it has when
    this is made, times the share of the schedule: that of step 0 at first, and the next at each
    :meth:`step`, which is called after that of the optimizer. All ranks do the same, so all
    replicas have the same rates. A step that is left out because a gradient overflowed counts, too,
    if :meth:`step` is called for it.

    Args:
        optimizer: What to set the rate of: an optimizer, a :class:`~mpimesh.ParallelOptimizer`, or
            several of them.
        schedule: A :class:`LRSchedule`, or another function of the step, pure as these are.
        any_schedule: Whether it takes states of other schedules, too, and goes on by its own from
            the step that they have reached: for a run that is to train longer than it was planned.

    Attributes:
        num_steps: Steps that are done.

    Raises:
        ModuleError: If `optimizer` is none, or the schedule gives no number of at least 0.

    Example:
        >>> sgd = optim.SGD([], lr=0.5)
        >>> schedule = optim.WarmupLR(2, optim.LinearLR(4, end=0.5))
        >>> scheduler = optim.LRScheduler(sgd, schedule)
        >>> rates = []
        >>> for _ in range(7):
        ...     sgd.step()
        ...     rates.append(sgd.lr)
        ...     scheduler.step()
        >>> rates
        [0.0, 0.25, 0.5, 0.4375, 0.375, 0.3125, 0.25]
    """

    __slots__ = ("_any_schedule", "_base_lrs", "_optimizers", "num_steps", "schedule")

    def __init__(
        self,
        optimizer: Scheduled | Iterable[Scheduled],
        schedule: Callable[[int], float],
        *,
        any_schedule: bool = False,
    ) -> None:
        self._optimizers = _optimizers_of(optimizer)
        if not callable(schedule) or isinstance(schedule, type):
            raise ModuleError(
                "schedule must be a function of the step, such as optim.CosineLR(1000), got "
                f"{shown(schedule)}"
            )
        self.schedule = schedule
        self._any_schedule = as_flag(any_schedule, "any_schedule", ModuleError)
        self._base_lrs = [one.lr for one in self._optimizers]
        self.num_steps = 0
        self._set(0, self._base_lrs)

    @property
    def lrs(self) -> list[float]:
        """The rates now, one for each optimizer."""
        return [one.lr for one in self._optimizers]

    def step(self) -> None:
        """Set the rates for the next step.

        Raises:
            ModuleError: If the schedule gives no number of at least 0; then nothing is changed.
        """
        self._set(self.num_steps + 1, self._base_lrs)

    def state_dict(self) -> dict[str, Any]:
        """Return numbers and a text: the steps, each optimizer's own rate, and the schedule.

        JSON and ``np.savez`` write it.
        """
        return {
            "num_steps": self.num_steps,
            "base_lrs": [*self._base_lrs],
            "schedule": _text_of(self.schedule),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave, and set the rates.

        Raises:
            ModuleError: If something is missing or out of range, or if it is of another schedule
                or number of optimizers; then nothing is changed.
        """
        num_steps, rates, schedule = _entries(
            state, "num_steps", "base_lrs", "schedule", of="an LRScheduler"
        )
        text, own = str(schedule), _text_of(self.schedule)
        if text != own and not self._any_schedule:
            raise ModuleError(
                f"the state is of the schedule {text}, and this LRScheduler has {own}: make it "
                "with the same one, or with any_schedule=True to go on by its own"
            )
        num_steps = as_int(num_steps, "num_steps in state", ModuleError, least=0)
        try:
            base_lrs = [check_number("base_lrs in state", lr) for lr in rates]
        except TypeError:
            base_lrs = []
        if len(base_lrs) != len(self._optimizers):
            raise ModuleError(
                f"base_lrs in state must hold a rate for each of {len(self._optimizers)} "
                f"optimizers, got {shown(rates)}"
            )
        self._set(num_steps, base_lrs)

    def _set(self, num_steps: int, base_lrs: list[float]) -> None:
        share = check_number(f"share of the rate at step {num_steps}", self.schedule(num_steps))
        rates = [check_number(f"lr at step {num_steps}", lr * share) for lr in base_lrs]
        for one, lr in zip(self._optimizers, rates, strict=True):
            one.lr = lr
        self.num_steps, self._base_lrs = num_steps, base_lrs

    def __repr__(self) -> str:
        return f"LRScheduler({_text_of(self.schedule)}, step {self.num_steps}, rates {self.lrs})"


tell_elsewhere(
    LRScheduler,
    {
        "get_last_lr": "the rates stand in lrs, one for each optimizer",
        "get_lr": "the rates stand in lrs, one for each optimizer",
        "last_epoch": "the steps that it has taken are num_steps",
        "base_lrs": "they stand in state_dict()",
    },
)


def _cosine(start: float, end: float, done: float) -> float:
    return end + (start - end) * (1.0 + math.cos(math.pi * done)) / 2.0


def _optimizers_of(source: Any) -> list[Optimizer]:
    """Return the optimizers in what an LRScheduler is made for."""
    if isinstance(source, Optimizer):
        return [source]
    inside = getattr(source, "optimizers", source)
    if (
        not isinstance(inside, Iterable)
        or isinstance(inside, str | bytes | Mapping)
        or shape_of(inside) is not None
    ):
        raise ModuleError(
            f"optimizer must be an Optimizer, a ParallelOptimizer, or several, got {shown(source)}"
        )
    found = [one for each in inside for one in _optimizers_of(each)]
    if len({id(one) for one in found}) < len(found):
        raise ModuleError("an LRScheduler takes each optimizer once, got one twice")
    return found


def _text_of(schedule: Callable[[int], float]) -> str:
    if isinstance(schedule, LRSchedule):
        return repr(schedule)
    return str(getattr(schedule, "__qualname__", type(schedule).__qualname__))
