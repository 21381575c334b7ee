"""Losses: a number for a prediction and its target, and its gradient.

A *row* is ``y[i]``. The loss of a row is the mean over what it holds, and a
loss is the mean over rows, so that ``loss(y, target)`` is the mean over
everything. A global batch may be cut into parts anyhow: each part calls
`value_and_grad` with the same `denominator`, the number of rows of the whole,
and the sum over the parts is the loss and the gradient of the whole.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from types import ModuleType
from typing import Protocol

from mpimesh.arguments import as_int, as_real, shown
from mpimesh.arrays.namespace import namespace
from mpimesh.arrays.reduction import is_half
from mpimesh.arrays.types import Array
from mpimesh.errors import DTypeError, ModuleError, ShapeError, tell_elsewhere
from mpimesh.nn.checks import check_floats, first_outside, sum_dtype
from mpimesh.nn.foreign import tensor_advice

__all__ = ["CrossEntropy", "Loss", "LossValue", "MeanSquaredError", "cross_entropy", "mse"]


class LossValue(float):
    """A float that is a loss; it knows no graph, and gradients come by another way."""

    def item(self) -> float:
        """Return the number, as a tensor's method of this name does."""
        return float(self)


tell_elsewhere(
    LossValue,
    {
        "backward": "it is a number: train_step(x, target, loss=...) of a model does forward and "
        "backward, and by hand loss.value_and_grad gives the gradient for model.backward",
        "detach": "it is a number, which holds nothing of the step",
        "cpu": "it is a number of Python, on every rank",
    },
)


class Loss(Protocol):
    """A loss that training can use: an object with these methods, not a plain function.

    A loss may also have ``count(target)``: what its sum over `target` is to be divided by, such as
    the rows that are not ignored. Without it, rows count.

    Example:
        >>> class Absolute:
        ...     def __call__(self, y, target):
        ...         return float(np.abs(y - target).sum() / len(y))
        ...
        ...     def value_and_grad(self, y, target, *, denominator):
        ...         error = y - target
        ...         return float(np.abs(error).sum() / denominator), np.sign(error) / denominator
    """

    def __call__(self, y: Array, target: Array) -> float:
        """Return the mean over the rows."""
        ...

    def value_and_grad(self, y: Array, target: Array, *, denominator: float) -> tuple[float, Array]:
        """Return the sum over the rows divided by `denominator`, and its gradient by `y`."""
        ...


class _RowLoss(ABC):
    """The part that the losses here share."""

    def __call__(self, y: Array, target: Array) -> float:
        """Return the mean over the rows.

        Raises:
            ShapeError: If the shapes do not fit, or there is no row.
            DTypeError: If a dtype does not fit.
            ModuleError: If a target is out of range, or all are ignored.
        """
        self._check(y, target)
        rows = self.count(target)
        if not rows:
            raise ShapeError(
                f"{self!r}: the mean over no rows does not exist; y has shape {tuple(y.shape)}. "
                "For an empty part of a batch, use value_and_grad with the whole's denominator"
            )
        return LossValue(self._compute(y, target, rows, grad=False)[0])

    def value_and_grad(self, y: Array, target: Array, *, denominator: float) -> tuple[float, Array]:
        """Return the sum over the rows divided by `denominator`, and its gradient by `y`.

        Shapes:
            grad: that of `y`, and its dtype.

        Args:
            y: The prediction; may have no rows.
            target: What it should be.
            denominator: `count` of the whole batch that this is a part of.

        Raises:
            ShapeError: If the shapes do not fit.
            DTypeError: If a dtype does not fit.
            ModuleError: If a target is out of range, or `denominator` is not positive.
        """
        self._check(y, target)
        whole = as_real(denominator, f"{self!r}: denominator", ModuleError, above=0)
        value, grad = self._compute(y, target, whole, grad=True)
        return value, grad

    def count(self, target: Array) -> float:
        """Return what `target` adds to the denominator: its rows."""
        return float(_rows(self, target))

    @abstractmethod
    def _check(self, y: Array, target: Array) -> None: ...

    @abstractmethod
    def _compute(
        self, y: Array, target: Array, denominator: float, *, grad: bool
    ) -> tuple[float, Array]: ...


class CrossEntropy(_RowLoss):
    """Cross-entropy of the softmax of `y` with integer targets.

    float16 is computed in float32.

    Shapes:
        y: (rows, ..., classes), not normalised.
        target: (rows, ...), integers in ``[0, classes)``.

    Args:
        ignore_index: A target that counts for nothing: no loss, no gradient. The
            mean is then over the other targets only, and `count` gives the
            share of them, in rows, to add up to the denominator of a batch in
            parts. None (the default) ignores nothing.
    """

    def __init__(self, *, ignore_index: int | None = None) -> None:
        if ignore_index is not None:
            ignore_index = as_int(ignore_index, "ignore_index", ModuleError)
        self.ignore_index = ignore_index

    def count(self, target: Array) -> float:
        """Return the rows' worth of targets that are not ignored."""
        rows = _rows(self, target)
        if self.ignore_index is None or not target.size:
            return float(rows)
        kept = int((target != self.ignore_index).sum())
        return kept * rows / int(target.size)

    def _check(self, y: Array, target: Array) -> None:
        check_floats(self, y, name="y")
        _rows(self, target)
        if y.ndim < 2 or tuple(target.shape) != y.shape[:-1] or not y.shape[-1]:
            raise ShapeError(
                f"{self!r}: y must have shape (rows, ..., classes) and target (rows, ...), "
                f"got {tuple(y.shape)} and {tuple(target.shape)}"
            )
        self._check_targets(target, int(y.shape[-1]))

    def _check_targets(self, target: Array, num_classes: int) -> None:
        if getattr(target.dtype, "kind", "") not in ("i", "u"):
            advice = tensor_advice("target", target)
            raise DTypeError(f"{self!r}: target must be integers, got {target.dtype}{advice}")
        wrong = (target < 0) | (target >= num_classes)
        if self.ignore_index is not None:
            wrong &= target != self.ignore_index
        if wrong.any():
            raise ModuleError(
                f"{self!r}: each target must be in [0, {num_classes}), the number of classes, got "
                f"{first_outside(target, wrong)}"
            )

    def _compute(
        self, y: Array, target: Array, denominator: float, *, grad: bool
    ) -> tuple[float, Array]:
        xp = namespace(y)
        wide = sum_dtype(y.dtype)
        logits = y.reshape(-1, y.shape[-1]).astype(wide, copy=False)
        picked = target.reshape(-1)
        if self.ignore_index is not None:
            ignored = picked == self.ignore_index
            picked = xp.where(ignored, 0, picked)
        every = xp.arange(picked.size)
        # Less the largest, so that exp cannot overflow.
        shifted = logits - logits.max(axis=1, keepdims=True)
        of_target = shifted[every, picked]
        softmax = xp.exp(shifted, out=shifted)
        total = softmax.sum(axis=1, keepdims=True)
        losses = xp.log(total[:, 0]) - of_target
        if self.ignore_index is not None:
            losses[ignored] = 0
        scale = 1.0 / (denominator * _inner_size(target.shape))
        value = _sum(xp, losses) * scale
        if not grad:
            return value, None
        softmax /= total
        softmax[every, picked] -= 1
        if self.ignore_index is not None:
            softmax[ignored] = 0
        softmax *= scale
        return value, softmax.reshape(y.shape).astype(y.dtype, copy=False)

    def __repr__(self) -> str:
        option = "" if self.ignore_index is None else f"ignore_index={self.ignore_index}"
        return f"CrossEntropy({option})"


class MeanSquaredError(_RowLoss):
    """Mean of the squared differences. float16 is computed in float32.

    Shapes:
        y, target: (rows, ...), the same; nothing is broadcast.
    """

    def _check(self, y: Array, target: Array) -> None:
        check_floats(self, y, name="y")
        _rows(self, target)
        if y.ndim == 0 or tuple(target.shape) != y.shape:
            raise ShapeError(
                f"{self!r}: y and target must have the same shape (rows, ...), "
                f"got {tuple(y.shape)} and {tuple(target.shape)}"
            )
        if target.dtype.kind not in "fiu" and not is_half(target.dtype):
            raise DTypeError(f"{self!r}: target must be real numbers, got {target.dtype}")

    def _compute(
        self, y: Array, target: Array, denominator: float, *, grad: bool
    ) -> tuple[float, Array]:
        xp = namespace(y)
        wide = sum_dtype(y.dtype)
        difference = y.astype(wide)
        difference -= target.astype(wide, copy=False)
        scale = 1.0 / (denominator * _inner_size(y.shape))
        value = _sum(xp, xp.square(difference)) * scale
        if not grad:
            return value, None
        difference *= 2.0 * scale
        return value, difference.astype(y.dtype, copy=False)

    def __repr__(self) -> str:
        return "MeanSquaredError()"


def _rows(loss: object, target: Array) -> int:
    """Return the rows of what a prediction is compared with.

    Raises:
        ShapeError: If it is no array, or has none.
    """
    if not getattr(target, "shape", None) or not hasattr(target, "dtype"):
        raise ShapeError(
            f"{loss!r}: target must be an array of shape (rows, ...), got {shown(target)}"
        )
    return int(target.shape[0])


def _inner_size(shape: tuple[int, ...]) -> int:
    """Return how many values a row has; 1 at least, as an empty row adds nothing."""
    return max(1, math.prod(shape[1:]))


def _sum(xp: ModuleType, values: Array) -> float:
    return float(values.sum(dtype=xp.float64))


cross_entropy = CrossEntropy()
"""Softmax cross-entropy with integer targets, ignoring none."""

mse = MeanSquaredError()
"""Mean squared error."""
