"""Normalisation by the root of the mean square."""

from __future__ import annotations

from mpimesh.arrays.namespace import namespace
from mpimesh.arrays.types import Array
from mpimesh.nn.checks import check_eps, check_extent, check_features, check_floats, sum_dtype
from mpimesh.nn.context import Context
from mpimesh.nn.initializers import Constant
from mpimesh.nn.module import Module
from mpimesh.nn.parameter import Parameter
from mpimesh.nn.rows import column_sum, row_mean

__all__ = ["RMSNorm"]


class RMSNorm(Module):
    """``y = x / sqrt(mean(x**2) + eps) * weight``, over the last axis of `x`.

    Of Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019): a layer norm
    without the mean and without a bias. Mean squares of float16 are computed in float32. The
    weight starts as 1.

    Shapes:
        x, result: (..., features), with any leading axes, of any extents.
        weight: (features,).

    Cost:
        Saves the normalised `x`, then that and `dy`, and one number for each leading index.

    Args:
        features: Length of the last axis of `x`.
        eps: Added to the mean square; above 0.

    Raises:
        ModuleError: If `features` is not a whole number of at least 1, or `eps` not above 0.
    """

    mixes_features = True

    def __init__(self, features: int, *, eps: float = 1e-6) -> None:
        self.features = check_extent("features", features)
        self.eps = check_eps(eps)
        self.weight = Parameter("weight", (self.features,), Constant(1.0))

    def forward(self, x: Array, ctx: Context | None = None) -> Array:
        """Return `x` normalised and scaled.

        Raises:
            ShapeError: If the last axis of `x` is not `features` long.
            DTypeError: If `x` has another dtype than the weight.
            ModuleStateError: If the layer is not materialised.
        """
        weight = self.weight.value()
        check_floats(self, x, weight.dtype)
        check_features(self, x, self.features)
        wide = x.astype(sum_dtype(x.dtype), copy=False)
        spread = row_mean(wide, wide)
        spread += self.eps
        scale = 1.0 / namespace(x).sqrt(spread)
        normal = (wide * scale).astype(x.dtype, copy=False)
        y = normal * weight
        if ctx is not None:
            ctx.save(self, y.shape, y.dtype, normal, scale)
        return y

    def backward_input(self, dy: Array, ctx: Context) -> Array | None:
        """Return the gradient of `x`, or None if `input_grad` is False.

        With n the normalised `x` and ``g = dy * weight``, it is ``scale * (g - n * mean(g * n))``.
        """
        normal, scale = self._take(dy, ctx)
        ctx.defer(self, *((normal, dy) if self.weight.requires_grad else (None, None)))
        if not self.input_grad:
            return None
        g = namespace(dy).multiply(dy, self.weight.value(), dtype=scale.dtype)
        g -= normal * row_mean(g, normal)
        g *= scale
        return g.astype(dy.dtype, copy=False)

    def backward_weight(self, ctx: Context) -> None:
        """Add the sum of ``dy * normalised x`` to the gradient."""
        normal, dy = ctx.take_deferred(self)
        if normal is not None:
            product = namespace(dy).multiply(dy, normal, dtype=sum_dtype(dy.dtype))
            self.weight.accumulate(column_sum(product), owned=True)

    def __repr__(self) -> str:
        return f"RMSNorm({self.features}, eps={self.eps:g})"
