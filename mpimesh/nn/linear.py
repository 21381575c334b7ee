"""The linear layer."""

from __future__ import annotations

import math

from mpimesh.arguments import as_flag
from mpimesh.arrays.namespace import namespace
from mpimesh.arrays.types import Array
from mpimesh.errors import ModuleError, ShapeError
from mpimesh.nn.checks import check_extent, check_features, check_floats, sum_dtype
from mpimesh.nn.context import Context
from mpimesh.nn.initializers import Uniform
from mpimesh.nn.module import Module
from mpimesh.nn.parameter import Parameter

__all__ = ["Linear"]


class Linear(Module):
    """``y = x @ weight.T + bias``, over the last axis of `x`.

    Weight and bias start uniform in ``±1/sqrt(in_features)``: He's uniform
    initialisation with the gain of a leaky ReLU of slope sqrt(5), which is what
    PyTorch does, so that learning rates carry over.

    Shapes:
        x: (..., in_features), with any leading axes, of any extents.
        result: (..., out_features).
        weight: (out_features, in_features). bias: (out_features,).

    Cost:
        With m the product of the leading extents, ``2 * m * in * out`` flops in
        forward and in each half of backward. Saves `x`, then `x` and `dy`, by
        reference.

    Args:
        in_features: Length of the last axis of `x`.
        out_features: Length of the last axis of the result.
        bias: Whether to add a bias.

    Raises:
        ModuleError: If an extent is not a whole number of at least 1.
    """

    mixes_features = True

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True) -> None:
        self.in_features = check_extent("in_features", in_features)
        self.out_features = check_extent("out_features", out_features)
        start = Uniform(1.0 / math.sqrt(self.in_features))
        self.weight = Parameter("weight", (self.out_features, self.in_features), start)
        with_bias = as_flag(bias, "bias", ModuleError)
        self.bias = Parameter("bias", (self.out_features,), start) if with_bias else None

    def forward(self, x: Array, ctx: Context | None = None) -> Array:
        """Return ``x @ weight.T + bias``.

        Raises:
            ShapeError: If the last axis of `x` is not `in_features` long, or the weight is that of
                another layer and does not fit.
            DTypeError: If `x` has another dtype than the weight.
            ModuleStateError: If the layer is not materialised.
        """
        weight = self.weight.value()
        if weight.shape != (self.out_features, self.in_features):
            raise ShapeError(
                f"{self!r}: weight must have shape {(self.out_features, self.in_features)}, got "
                f"{weight.shape}; a weight that is shared with another layer must fit both"
            )
        check_floats(self, x, weight.dtype)
        check_features(self, x, self.in_features)
        # One large product instead of one for each leading index.
        x2 = x.reshape(-1, self.in_features)
        y = self._product(x2, weight.T, (*x.shape[:-1], self.out_features), ctx)
        if self.bias is not None:
            y += self.bias.value()
        if ctx is not None:
            ctx.save(self, y.shape, y.dtype, x2, x.shape)
        return y

    def backward_input(self, dy: Array, ctx: Context) -> Array | None:
        """Return ``dy @ weight``, or None if `input_grad` is False."""
        x2, x_shape = self._take(dy, ctx)
        dy2 = dy.reshape(-1, self.out_features)
        # Frozen parameters keep nothing alive.
        kept = (
            x2 if self.weight.requires_grad else None,
            dy2 if any(p.requires_grad for p in self._own_parameters()) else None,
        )
        ctx.defer(self, *kept)
        return self._product(dy2, self.weight.value(), x_shape, ctx) if self.input_grad else None

    def backward_weight(self, ctx: Context) -> None:
        """Add ``dy.T @ x`` to the weight's gradient and the sum of `dy` to the bias's."""
        x2, dy2 = ctx.take_deferred(self)
        if self.bias is not None and self.bias.requires_grad:
            self.bias.accumulate(dy2.sum(axis=0, dtype=sum_dtype(dy2.dtype)), owned=True)
        if self.weight.requires_grad:
            self.weight.accumulate(dy2.T @ x2, owned=True)

    def _product(self, a: Array, b: Array, shape: tuple[int, ...], ctx: Context | None) -> Array:
        """Return ``a @ b`` as an array of `shape`, where the context wants it."""
        room = None if ctx is None else ctx.empty(self, shape, a.dtype)
        if room is None:
            return (a @ b).astype(a.dtype, copy=False).reshape(shape)  # of bfloat16 float32
        namespace(a).matmul(a, b, out=room.reshape(-1, shape[-1]), casting="same_kind")
        return room

    def __repr__(self) -> str:
        bias = "" if self.bias is not None else ", bias=False"
        return f"Linear({self.in_features}, {self.out_features}{bias})"
