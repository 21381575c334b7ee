"""Layers that depend on a value's place, for activations that are split along the sequence."""

from __future__ import annotations

import math
from typing import Self

from mpimesh.arrays import Array, namespace
from mpimesh.errors import ModuleError, ShapeError
from mpimesh.nn import Context, Dropout, LearnedPositions
from mpimesh.nn.checks import check_features, check_floats, sum_dtype
from mpimesh.nn.protocol import FeaturePart
from mpimesh.parallel.tensor.retyped import retyped
from mpimesh.parallel.tensor.sequence import SequenceSplit, repeated

__all__ = ["SequenceDropout", "SequencePositions"]


class SequenceDropout(Dropout):
    """A :class:`~mpimesh.nn.Dropout` that drops of a split sequence what it drops of the whole.

    Shapes:
        x, result: (rows, this rank's places, ...), the same.

    Args:
        p: The share to drop, in [0, 1), exact to 2^-32.
        sequence: How the sequence is split.

    Raises:
        ModuleError: If `p` is out of range.
    """

    def __init__(self, p: float = 0.5, *, sequence: SequenceSplit) -> None:
        super().__init__(p)
        self.sequence = sequence

    def set_part(self, part: FeaturePart | None) -> FeaturePart | None:
        """Return that it has all features, of its places.

        Raises:
            ModuleError: If it gets a part of them.
        """
        if part is not None:
            raise ModuleError(
                f"{self!r} is for places of a split sequence with all features, but gets {part}; "
                "between layers that are split by features use ParallelDropout"
            )
        return None

    @classmethod
    def of(cls, like: Dropout, sequence: SequenceSplit) -> Self:
        """Return what `like` is on a split sequence."""
        made = retyped(like, cls)
        made.sequence = sequence
        return made

    def _runs(self, x: Array) -> tuple[int, int, int]:
        size = int(math.prod(x.shape[1:]))
        return self.sequence.first_place(x) * int(math.prod(x.shape[2:])), size, size


class SequencePositions(LearnedPositions):
    """A :class:`~mpimesh.nn.LearnedPositions` that adds to each rank's places their vectors.

    Each rank has the whole weight, and of its gradient the rows of its places.

    Shapes:
        x, result: (rows, this rank's places, features).
        weight: (max_tokens, features).

    Args:
        max_tokens: The longest sequence.
        features: Length of the last axis of `x`.
        sequence: How the sequence is split.
        std: Standard deviation of the first values.

    Raises:
        ModuleError: If an extent is not a whole number of at least 1.
    """

    def __init__(
        self, max_tokens: int, features: int, *, sequence: SequenceSplit, std: float = 0.02
    ) -> None:
        super().__init__(max_tokens, features, std=std)
        self._split(sequence)

    @classmethod
    def of(cls, like: LearnedPositions, sequence: SequenceSplit) -> Self:
        """Return what `like`, which has no memory yet, is on a split sequence."""
        made = retyped(like, cls)
        made._split(sequence)
        return made

    def _split(self, sequence: SequenceSplit) -> None:
        self.sequence = sequence
        self.weight = repeated(self.weight, sequence.tensor, partial=True)

    def forward(self, x: Array, ctx: Context | None = None) -> Array:
        """Return `x` with the vectors of its places added; raises as the unsplit layer. Local."""
        weight = self.weight.value()
        check_floats(self, x, weight.dtype)
        check_features(self, x, self.features)
        first = self.sequence.first_place(x)
        if x.ndim != 3 or first + x.shape[1] > self.max_tokens:
            raise ShapeError(
                f"{self!r}: x must have shape (rows, places, {self.features}) and end at place "
                f"{self.max_tokens}, got {tuple(x.shape)} from place {first} on"
            )
        y = x + weight[first : first + x.shape[1]]
        if ctx is not None:
            ctx.save(self, y.shape, y.dtype, first)
        return y

    def backward_input(self, dy: Array, ctx: Context) -> Array | None:
        """Return `dy`."""
        (first,) = self._take(dy, ctx)
        ctx.defer(self, dy if self.weight.requires_grad else None, first)
        return dy if self.input_grad else None

    def backward_weight(self, ctx: Context) -> None:
        """Add the sum of `dy` over the rows to the gradients of this rank's places."""
        dy, first = ctx.take_deferred(self)
        if dy is not None:
            places = namespace(dy).arange(first, first + dy.shape[1])
            self.weight.accumulate_rows(places, dy.sum(axis=0, dtype=sum_dtype(dy.dtype)))
