"""Positions told by a vector that is learned for each place."""

from __future__ import annotations

import math

from mpimesh.arrays.namespace import namespace
from mpimesh.arrays.types import Array
from mpimesh.errors import ShapeError
from mpimesh.nn.checks import check_extent, check_features, check_floats, sum_dtype
from mpimesh.nn.context import Context
from mpimesh.nn.initializers import Normal
from mpimesh.nn.module import Module
from mpimesh.nn.parameter import Parameter

__all__ = ["LearnedPositions"]


class LearnedPositions(Module):
    """``y[..., t, :] = x[..., t, :] + weight[t]``.

    The weight starts normally distributed. On a sequence that is split over ranks, see
    `set_sequence`, t counts the places of the whole one.

    Shapes:
        x, result: (..., tokens, features), with at most `max_tokens` tokens.
        weight: (max_tokens, features).

    Cost:
        Saves nothing, then `dy` by reference.

    Args:
        max_tokens: The longest sequence.
        features: Length of the last axis of `x`.
        std: Standard deviation of the first values.

    Raises:
        ModuleError: If an extent is not a whole number of at least 1.
    """

    mixes_features = True

    def __init__(self, max_tokens: int, features: int, *, std: float = 0.02) -> None:
        self.max_tokens = check_extent("max_tokens", max_tokens)
        self.features = check_extent("features", features)
        self.weight = Parameter("weight", (self.max_tokens, self.features), Normal(std))

    def forward(self, x: Array, ctx: Context | None = None) -> Array:
        """Return `x` with the vectors of the places added.

        Raises:
            ShapeError: If `x` has other features or more tokens.
            DTypeError: If `x` has another dtype than the weight.
            ModuleStateError: If the layer is not materialised.
        """
        weight = self.weight.value()
        check_floats(self, x, weight.dtype)
        check_features(self, x, self.features)
        first = 0
        if self.sequence is not None:
            first = self.sequence.first_place(x)
            if x.ndim != 3 or first + x.shape[1] > self.max_tokens:
                raise ShapeError(
                    f"{self!r}: x must have shape (rows, places, {self.features}) and end at place "
                    f"{self.max_tokens}, got {tuple(x.shape)} from place {first} on"
                )
        elif x.ndim < 2 or x.shape[-2] > self.max_tokens:
            raise ShapeError(
                f"{self!r}: x must have shape (..., tokens, {self.features}) with at most "
                f"{self.max_tokens} tokens, got {tuple(x.shape)}"
            )
        y = x + weight[first : first + x.shape[-2]]
        if ctx is not None:
            ctx.save(self, y.shape, y.dtype, first)
        return y

    def backward_input(self, dy: Array, ctx: Context) -> Array | None:
        """Return `dy`."""
        (first,) = self._take(dy, ctx)
        ctx.defer(self, dy if self.weight.requires_grad else None, first)
        return dy if self.input_grad else None

    def backward_weight(self, ctx: Context) -> None:
        """Add the sum of `dy` over the leading axes to the gradients of the places that occur."""
        dy, first = ctx.take_deferred(self)
        if dy is not None:
            tokens = dy.shape[-2]
            rows = math.prod(dy.shape[:-2])  # -1 cannot be told where there are no tokens
            g = dy.reshape(rows, tokens, self.features).sum(axis=0, dtype=sum_dtype(dy.dtype))
            self.weight.accumulate_rows(namespace(dy).arange(first, first + tokens), g)

    def __repr__(self) -> str:
        return f"LearnedPositions({self.max_tokens}, {self.features})"
