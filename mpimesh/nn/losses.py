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

import numpy as np

from mpimesh.arguments import as_int, as_real, shown
from mpimesh.arrays.dtypes import is_half, sum_dtype
from mpimesh.arrays.namespace import Array, namespace
from mpimesh.errors import DTypeError, ModuleError, ShapeError, tell_elsewhere
from mpimesh.nn.protocol import (
    FeaturePart,
    check_extent,
    check_floats,
    first_outside,
    tensor_advice,
)
from mpimesh.nn.split import RankGroup, SplitRanks

__all__ = [
    "CrossEntropy",
    "Loss",
    "LossValue",
    "MeanSquaredError",
    "VocabParallelCrossEntropy",
    "cross_entropy",
    "mse_loss",
]


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

    ranks: SplitRanks | None = None
    _part: FeaturePart | None = None  # the classes of this rank, where ranks have some each

    def __init__(self, *, ignore_index: int | None = None) -> None:
        if ignore_index is not None:
            ignore_index = as_int(ignore_index, "ignore_index", ModuleError)
        self.ignore_index = ignore_index

    def count(self, target: Array) -> float:
        """Return the rows' worth of targets that are not ignored."""
        rows = _rows(self, target)
        if self.ignore_index is None or not target.size:
            return float(rows)
        counted = int((target != self.ignore_index).sum())
        return counted * rows / int(target.size)

    def _check(self, y: Array, target: Array) -> None:
        check_floats(self, y, name="y")
        _rows(self, target)
        part, size = self._part, int(y.shape[-1]) if y.ndim > 1 else 0
        fits = size > 0 if part is None else y.ndim > 1 and size == part.size
        if not fits or tuple(target.shape) != y.shape[:-1]:
            classes = (
                "classes)" if part is None else f"{part.size}), which are this rank's classes,"
            )
            one_hot = tuple(target.shape) == tuple(y.shape)
            raise ShapeError(
                f"{self!r}: y must have shape (rows, ..., {classes} and target (rows, ...), "
                f"got {tuple(y.shape)} and {tuple(target.shape)}"
                + ("; target holds class numbers, as of target.argmax(axis=-1)" * one_hot)
            )
        num_classes = size if part is None else part.extent
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
        xp, wide, part = namespace(y), sum_dtype(y.dtype), self._part
        logits = y.reshape(math.prod(y.shape[:-1]), y.shape[-1]).astype(wide, copy=False)
        picked = target.reshape(-1)
        counted = None if self.ignore_index is None else picked != self.ignore_index
        here = counted  # the targets whose classes this rank has; None for all
        if part is not None:
            # This rank's first class may not fit into their dtype.
            picked = picked.astype(np.int64, copy=False) - part.start
            here = (picked >= 0) & (picked < part.size)
            here = here if counted is None else here & counted
        columns = picked if here is None else xp.where(here, picked, 0)
        every = xp.arange(picked.size)
        # Less the largest of all ranks, so that exp cannot overflow. A rank may have no classes.
        some = logits.shape[1] > 0
        largest = logits.max(axis=1) if some else xp.full(picked.size, -math.inf, wide)
        if self.ranks is not None:
            largest = self.ranks.start("all_reduce", largest, op="max", out=largest).resolve()
        softmax = logits - largest[:, None]
        of_target = softmax[every, columns] if some else xp.zeros(picked.size, wide)
        softmax = xp.exp(softmax, out=softmax)
        total = softmax.sum(axis=1)
        if self.ranks is not None:
            known = xp.stack([total, xp.where(here, of_target, wide.type(0))])
            total, of_target = self.ranks.start("all_reduce", known, op="sum", out=known).resolve()
        losses = xp.log(total) - of_target
        if counted is not None:
            losses[~counted] = 0
        scale = 1.0 / (denominator * _inner_size(target.shape))
        value = _sum(xp, losses) * scale
        if not grad:
            return value, None
        softmax /= total[:, None]
        if some:
            softmax[every, columns] -= 1 if here is None else here.astype(wide)
        if counted is not None:
            softmax[~counted] = 0
        softmax *= scale
        return value, softmax.reshape(y.shape).astype(y.dtype, copy=False)

    def __repr__(self) -> str:
        option = "" if self.ignore_index is None else f"ignore_index={self.ignore_index}"
        return f"CrossEntropy({option})"


class VocabParallelCrossEntropy(CrossEntropy):
    """:class:`~mpimesh.nn.CrossEntropy` of what a :class:`ColumnParallelLinear` gives.

    Logits are never gathered: each rank has those of its classes, and the gradient by them. All
    ranks get the same value. Collective over the group. float16 is computed in float32.

    Shapes:
        y: (rows, ..., this rank's classes), not normalised.
        target: (rows, ...), integers in ``[0, num_classes)``, the same on every rank.

    Cost:
        An all-reduce of one number for each target, their largest logits, and one of two: the sum
        of the exponentials, and the target's logit, which its owner knows.

    Args:
        num_classes: The number of classes, over all ranks.
        group: The ranks, such as ``mesh.group("tp")``.
        ignore_index: As in :class:`~mpimesh.nn.CrossEntropy`.

    Raises:
        ModuleError: If `num_classes` is not a whole number of at least 1.
        GroupError: If this rank is not in the group.
    """

    def __init__(
        self, num_classes: int, *, group: RankGroup, ignore_index: int | None = None
    ) -> None:
        super().__init__(ignore_index=ignore_index)
        self.num_classes = check_extent("num_classes", num_classes)
        self.ranks: SplitRanks = SplitRanks(group)
        mine = self.ranks.runs(self.num_classes)[self.ranks.rank]
        self._part = FeaturePart(*mine, self.num_classes)

    def __repr__(self) -> str:
        option = "" if self.ignore_index is None else f", ignore_index={self.ignore_index}"
        group = self.ranks.group.name
        return f"VocabParallelCrossEntropy({self.num_classes}, group={group!r}{option})"


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

mse_loss = MeanSquaredError()
"""Mean squared error."""
