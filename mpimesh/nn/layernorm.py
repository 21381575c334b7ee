"""Layer normalisation."""

from __future__ import annotations

from mpimesh.arrays.fused import fused
from mpimesh.arrays.namespace import is_cupy, namespace
from mpimesh.arrays.types import Array
from mpimesh.nn import kernels
from mpimesh.nn.checks import check_eps, check_extent, check_features, check_floats, sum_dtype
from mpimesh.nn.context import Context
from mpimesh.nn.initializers import Constant
from mpimesh.nn.module import Module
from mpimesh.nn.parameter import Parameter
from mpimesh.nn.rows import column_sum, row_mean

__all__ = ["LayerNorm"]


class LayerNorm(Module):
    """``y = (x - mean) / sqrt(variance + eps) * weight + bias``, over the last axis of `x`.

    The variance is the mean of the squared distances. Means and variances of
    float16 are computed in float32. The weight starts as 1, the bias as 0.

    Shapes:
        x, result: (..., features), with any leading axes, of any extents.
        weight, bias: (features,).

    Cost:
        Saves the normalised `x`, then that and `dy`, and one number for each
        leading index.

    Args:
        features: Length of the last axis of `x`.
        eps: Added to the variance; above 0.

    Raises:
        ModuleError: If `features` is not a whole number of at least 1, or `eps`
            not above 0.
    """

    mixes_features = True

    def __init__(self, features: int, *, eps: float = 1e-5) -> None:
        self.features = check_extent("features", features)
        self.eps = check_eps(eps)
        self.weight = Parameter("weight", (self.features,), Constant(1.0))
        self.bias = Parameter("bias", (self.features,), Constant(0.0))

    def forward(self, x: Array, ctx: Context | None = None) -> Array:
        """Return `x` normalised, scaled and shifted.

        Raises:
            ShapeError: If the last axis of `x` is not `features` long.
            DTypeError: If `x` has another dtype than the weight.
            ModuleStateError: If the layer is not materialised.
        """
        weight, bias = self.weight.value(), self.bias.value()
        check_floats(self, x, weight.dtype)
        check_features(self, x, self.features)
        wide = sum_dtype(x.dtype)
        # Twice over the data: the mean of squares less the square of the mean
        # would lose all digits where the mean is large.
        centred = x - x.mean(axis=-1, keepdims=True, dtype=wide)
        spread = row_mean(centred, centred)
        spread += self.eps
        scale = 1.0 / namespace(x).sqrt(spread)
        if is_cupy(x) and x.dtype == wide:
            steps = fused(namespace(x), kernels.scale_and_shift)
            normal, y = steps(centred, scale, weight, bias)
        else:
            centred *= scale
            normal = centred.astype(x.dtype, copy=False)
            y = normal * weight
            y += bias
        if ctx is not None:
            ctx.save(self, y.shape, y.dtype, normal, scale)
        return y

    def backward_input(self, dy: Array, ctx: Context) -> Array | None:
        """Return the gradient of `x`, or None if `input_grad` is False.

        With n the normalised `x` and ``g = dy * weight``, it is
        ``scale * (g - mean(g) - n * mean(g * n))``.
        """
        normal, scale = self._take(dy, ctx)
        ctx.defer(
            self,
            normal if self.weight.requires_grad else None,
            dy if self.weight.requires_grad or self.bias.requires_grad else None,
        )
        if not self.input_grad:
            return None
        g = namespace(dy).multiply(dy, self.weight.value(), dtype=scale.dtype)
        towards = row_mean(g, normal)
        g -= g.mean(axis=-1, keepdims=True)
        g -= normal * towards
        g *= scale
        return g.astype(dy.dtype, copy=False)

    def backward_weight(self, ctx: Context) -> None:
        """Add the sums of ``dy * normalised x`` and of `dy` to the gradients."""
        normal, dy = ctx.take_deferred(self)
        if self.bias.requires_grad:
            self.bias.accumulate(column_sum(dy), owned=True)
        if self.weight.requires_grad:
            product = namespace(dy).multiply(dy, normal, dtype=sum_dtype(dy.dtype))
            self.weight.accumulate(column_sum(product), owned=True)

    def __repr__(self) -> str:
        return f"LayerNorm({self.features}, eps={self.eps:g})"
