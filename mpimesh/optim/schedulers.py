"""Learning rates that depend on the step.

A schedule is a value, and a pure function of the step: it gives the share of an optimizer's own
rate that step t, counted from 0, is done with. So replicas have the same rate without telling each
other, and a run that goes on has that of the run before. An :class:`LRScheduler` counts the steps
and sets the rates; what it knows is two numbers and a text for each optimizer.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeAlias

from mpimesh.arguments import as_int, as_real, shape_of, shown
from mpimesh.errors import ModuleError, tell_elsewhere
from mpimesh.optim.optimizer import Optimizer, check_number

__all__ = [
    "ConstantLR",
    "CosineLR",
    "LRSchedule",
    "LRScheduler",
    "LinearLR",
    "OneCycleLR",
    "WarmupLR",
]


_MOST_STEPS = 1 << 53
"""Exact as a float."""


class LRSchedule(ABC):
    """Share of an optimizer's own learning rate as a function of the step.

    Its steps are whole numbers, of which there is at least one; its other numbers are shares, not
    negative. The text form of a schedule parses back.

    Raises:
        ModuleError: If a number is out of range.
    """

    __slots__ = ()

    @abstractmethod
    def __call__(self, step: int) -> float:
        """Return the share for a step, counted from 0."""


def _check(schedule: Any, *, least_steps: int = 1) -> None:
    """Check the numbers of a schedule, and keep them as those of Python."""
    for field in fields(schedule):
        value = getattr(schedule, field.name)
        name = f"{field.name} of {type(schedule).__name__}"
        if field.name == "steps":
            value = as_int(value, name, ModuleError, least=least_steps, most=_MOST_STEPS)
        elif field.name != "then":
            value = as_real(value, name, ModuleError, least=0)
        object.__setattr__(schedule, field.name, value)


@dataclass(frozen=True, slots=True)
class ConstantLR(LRSchedule):
    """``share`` at every step.

    Attributes:
        share: What the rate is multiplied by.
    """

    share: float = 1.0

    def __post_init__(self) -> None:
        _check(self)

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

    def __post_init__(self) -> None:
        _check(self)

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

    def __post_init__(self) -> None:
        _check(self)

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
    """

    steps: int
    then: LRSchedule = ConstantLR()
    start: float = 0.0

    def __post_init__(self) -> None:
        _check(self, least_steps=0)
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
    """

    steps: int
    warmup: float = 0.3
    start: float = 1 / 25
    end: float = 1 / 250_000

    def __post_init__(self) -> None:
        _check(self)
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
        ...


Scheduled: TypeAlias = "Optimizer | SupportsOptimizers"


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

    __slots__ = ("_base_lrs", "_optimizers", "num_steps", "schedule")

    def __init__(
        self, optimizer: Scheduled | Iterable[Scheduled], schedule: Callable[[int], float]
    ) -> None:
        self._optimizers = _optimizers_of(optimizer)
        if not callable(schedule) or isinstance(schedule, type):
            raise ModuleError(
                "schedule must be a function of the step, such as optim.CosineLR(1000), got "
                f"{shown(schedule)}"
            )
        self.schedule = schedule
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
        names = ("num_steps", "base_lrs", "schedule")
        if not isinstance(state, Mapping) or any(name not in state for name in names):
            raise ModuleError(
                f"state must be a dict of {', '.join(names)}, as state_dict() of an LRScheduler "
                f"gives, got {shown(state)}"
            )
        text, own = str(state["schedule"]), _text_of(self.schedule)
        if text != own:
            raise ModuleError(
                f"the state is of the schedule {text}, and this LRScheduler has {own}: make it "
                "with the same one"
            )
        num_steps = as_int(state["num_steps"], "num_steps in state", ModuleError, least=0)
        try:
            base_lrs = [check_number("base_lrs in state", lr) for lr in state["base_lrs"]]
        except TypeError:
            base_lrs = []
        if len(base_lrs) != len(self._optimizers):
            raise ModuleError(
                f"base_lrs in state must hold a rate for each of {len(self._optimizers)} "
                f"optimizers, got {shown(state['base_lrs'])}"
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
