"""Cross-entropy of logits that are split over the ranks of a group, and stay so."""

from __future__ import annotations

import math

import numpy as np

from mpimesh.arrays import Array, namespace
from mpimesh.errors import ShapeError
from mpimesh.nn import CrossEntropy
from mpimesh.nn.checks import check_extent, check_floats, sum_dtype
from mpimesh.nn.split import Ranks
from mpimesh.runtime import ProcessGroup

__all__ = ["VocabParallelCrossEntropy"]


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
        self,
        num_classes: int,
        *,
        group: ProcessGroup,
        ignore_index: int | None = None,
    ) -> None:
        super().__init__(ignore_index=ignore_index)
        self.num_classes = check_extent("num_classes", num_classes)
        self.ranks = Ranks(group)
        self._start, self._stop = self.ranks.runs(self.num_classes)[self.ranks.rank]

    def _check(self, y: Array, target: Array) -> None:
        check_floats(self, y, name="y")
        mine = self._stop - self._start
        if y.ndim < 2 or tuple(target.shape) != y.shape[:-1] or y.shape[-1] != mine:
            raise ShapeError(
                f"{self!r}: y must have shape (rows, ..., {mine}), which are this rank's classes, "
                f"and target (rows, ...), got {tuple(y.shape)} and {tuple(target.shape)}"
            )
        self._check_targets(target, self.num_classes)

    def _compute(
        self, y: Array, target: Array, denominator: float, *, grad: bool
    ) -> tuple[float, Array]:
        xp = namespace(y)
        wide = sum_dtype(y.dtype)
        logits = y.reshape(math.prod(y.shape[:-1]), y.shape[-1]).astype(wide, copy=False)
        # This rank's first class may not fit into their dtype.
        picked = target.reshape(-1).astype(np.int64, copy=False)
        kept = None if self.ignore_index is None else picked != self.ignore_index
        mine = (picked >= self._start) & (picked < self._stop)
        if kept is not None:
            mine &= kept
        every = xp.arange(picked.size)
        columns = xp.where(mine, picked - self._start, 0)
        # Less the largest of all ranks, so that exp cannot overflow. A rank may have no classes.
        none = xp.full(picked.size, -math.inf, wide)
        largest = logits.max(axis=1) if logits.shape[1] else none
        largest = self.ranks.all_reduce(largest, "max", owned=True).resolve()
        softmax = logits - largest[:, None]
        known = xp.zeros((2, picked.size), wide)
        if logits.shape[1]:
            known[1] = xp.where(mine, softmax[every, columns], 0)
        softmax = xp.exp(softmax, out=softmax)
        softmax.sum(axis=1, out=known[0])
        total, of_target = self.ranks.all_reduce(known, owned=True).resolve()
        losses = xp.log(total) - of_target
        if kept is not None:
            losses[~kept] = 0
        scale = 1.0 / (denominator * max(1, math.prod(target.shape[1:])))
        value = float(losses.sum(dtype=xp.float64)) * scale
        if not grad:
            return value, None
        softmax /= total[:, None]
        if logits.shape[1]:
            softmax[every, columns] -= mine.astype(wide)
        if kept is not None:
            softmax[~kept] = 0
        softmax *= scale
        return value, softmax.reshape(y.shape).astype(y.dtype, copy=False)

    def __repr__(self) -> str:
        option = "" if self.ignore_index is None else f", ignore_index={self.ignore_index}"
        group = self.ranks.group.name
        return f"VocabParallelCrossEntropy({self.num_classes}, group={group!r}{option})"
