"""Layers that normalise the vectors along the last axis."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from mpimesh.arguments import as_real
from mpimesh.arrays.dtypes import sum_dtype
from mpimesh.arrays.namespace import Array, Formula, fused, is_cupy, namespace
from mpimesh.errors import ModuleError
from mpimesh.nn.initializers import Constant
from mpimesh.nn.module import Module
from mpimesh.nn.parameter import Parameter
from mpimesh.nn.protocol import Context, check_extent, check_features, check_floats

__all__ = ["LayerNorm", "Normalize", "RMSNorm"]


class _Norm(Module):
    """A layer norm with a bias, or one by the root of the mean square without."""

    mixes_features = True
    bias: Parameter | None = None

    def __init__(self, features: int, eps: float) -> None:
        self.features = check_extent("features", features)
        self.eps = as_real(eps, "eps", ModuleError, above=0)
        self.weight = Parameter("weight", (self.features,), Constant(1.0))

    def forward(self, x: Array, ctx: Context | None = None) -> Array:
        """Return `x` normalised and scaled; by a layer norm shifted, too.

        Raises:
            ShapeError: If the last axis of `x` is not `features` long.
            DTypeError: If `x` has another dtype than the weight.
            ModuleStateError: If the layer is not materialised.
        """
        xp, weight = namespace(x), self.weight.value()
        bias = None if self.bias is None else self.bias.value()
        check_floats(self, x, weight.dtype)
        check_features(self, x, self.features)
        wide = sum_dtype(x.dtype)
        # A layer norm goes twice over the data: the mean of squares less the square of the mean
        # would lose all digits where the mean is large.
        centred = (
            x.astype(wide, copy=False)
            if bias is None
            else x - x.mean(axis=-1, keepdims=True, dtype=wide)
        )
        spread = _row_mean(centred, centred)
        spread += self.eps
        scale = 1.0 / xp.sqrt(spread)
        if bias is not None and is_cupy(x) and x.dtype == wide:
            normal, y = fused(xp, scale_and_shift)(centred, scale, weight, bias)
        else:
            room = None if bias is None and x.dtype == wide else centred  # that may be x's memory
            normal = xp.multiply(centred, scale, out=room).astype(x.dtype, copy=False)
            y = normal * weight
            if bias is not None:
                y += bias
        return self._save(ctx, y, normal, scale)

    def backward_input(self, dy: Array, ctx: Context) -> Array | None:
        """Return the gradient of `x`, or None if `input_grad` is False.

        With n the normalised `x` and ``g = dy * weight``, it is ``scale * (g - n * mean(g * n))``;
        of a layer norm ``scale * (g - mean(g) - n * mean(g * n))``.
        """
        normal, scale = self._take(dy, ctx)
        trains_weight = self.weight.requires_grad
        trains_bias = self.bias is not None and self.bias.requires_grad
        ctx.defer(
            self, normal if trains_weight else None, dy if trains_weight or trains_bias else None
        )
        if not self.input_grad:
            return None
        g = namespace(dy).multiply(dy, self.weight.value(), dtype=scale.dtype)
        towards = _row_mean(g, normal)
        if self.bias is not None:
            g -= g.mean(axis=-1, keepdims=True)
        g -= normal * towards
        g *= scale
        return g.astype(dy.dtype, copy=False)

    def backward_weight(self, ctx: Context) -> None:
        """Add the sums of ``dy * normalised x`` and, for a bias, of `dy` to the gradients."""
        normal, dy = ctx.take_deferred(self)
        if self.bias is not None and self.bias.requires_grad:
            self.bias.accumulate(_column_sum(dy), owned=True)
        if self.weight.requires_grad:
            product = namespace(dy).multiply(dy, normal, dtype=sum_dtype(dy.dtype))
            self.weight.accumulate(_column_sum(product), owned=True)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.features}, eps={self.eps:g})"


class RMSNorm(_Norm):
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

    Attributes:
        weight: The :class:`Parameter` of the factors.

    Raises:
        ModuleError: If `features` is not a whole number of at least 1, or `eps` not above 0.
    """

    def __init__(self, features: int, *, eps: float = 1e-6) -> None:
        super().__init__(features, eps)


class LayerNorm(_Norm):
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

    Attributes:
        weight: The :class:`Parameter` of the factors.
        bias: The :class:`Parameter` of the summands.

    Raises:
        ModuleError: If `features` is not a whole number of at least 1, or `eps`
            not above 0.
    """

    bias: Parameter

    def __init__(self, features: int, *, eps: float = 1e-5) -> None:
        super().__init__(features, eps)
        self.bias = Parameter("bias", (self.features,), Constant(0.0))


class Normalize(Module):
    """``y = x / max(norm(x), eps)``, over the last axis of `x`: vectors of length 1.

    Shapes:
        x, result: (..., features).

    Cost:
        Saves `y`, and one number for each leading index.

    Args:
        eps: The least to divide by; above 0.

    Raises:
        ModuleError: If `eps` is not above 0.
    """

    mixes_features = True

    def __init__(self, *, eps: float = 1e-12) -> None:
        self.eps = as_real(eps, "eps", ModuleError, above=0)

    def forward(self, x: Array, ctx: Context | None = None) -> Array:
        """Return `x` with vectors of length 1.

        Raises:
            DTypeError: If `x` is no float array.
        """
        check_floats(self, x)
        xp, wide = namespace(x), sum_dtype(x.dtype)
        norm = xp.sqrt(xp.square(x.astype(wide, copy=False)).sum(axis=-1, keepdims=True))
        y = (x / xp.maximum(norm, wide.type(self.eps))).astype(x.dtype, copy=False)
        return self._save(ctx, y, y, norm)

    def backward_input(self, dy: Array, ctx: Context) -> Array | None:
        """Return ``(dy - y * (y . dy)) / norm``; where the norm is below `eps`, ``dy / eps``."""
        y, norm = self._take(dy, ctx)
        xp, wide = namespace(dy), norm.dtype
        towards = (y.astype(wide, copy=False) * dy).sum(axis=-1, keepdims=True)
        towards = xp.where(norm > self.eps, towards, wide.type(0))
        dx = (dy - y * towards) / xp.maximum(norm, wide.type(self.eps))
        return dx.astype(dy.dtype, copy=False)

    def __repr__(self) -> str:
        return f"Normalize(eps={self.eps:g})"


def _row_mean(a: Array, b: Array) -> Array:
    """Return the mean of ``a * b`` along the last axis, which stays, in the wider dtype."""
    return (a * b).mean(axis=-1, keepdims=True)


def _column_sum(x: Array) -> Array:
    """Return the sum of `x` over all axes but the last."""
    return x.reshape(-1, x.shape[-1]).sum(axis=0, dtype=sum_dtype(x.dtype))


def scale_and_shift(xp: ModuleType) -> Formula:
    """On CuPy, of rows without mean, scales, weight and bias: a layer norm, in two steps."""

    def formula(centred: Any, scale: Any, weight: Any, bias: Any) -> Any:
        normal = centred * scale
        return normal, normal * weight + bias

    return formula
