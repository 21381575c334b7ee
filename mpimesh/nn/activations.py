"""Activations: elementwise, without parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from mpimesh.arguments import shown
from mpimesh.arrays.fused import fused
from mpimesh.arrays.namespace import is_cupy, namespace, zeros_where_not
from mpimesh.arrays.types import Array
from mpimesh.errors import ModuleError
from mpimesh.nn import kernels
from mpimesh.nn.checks import check_floats, sum_dtype
from mpimesh.nn.context import Context
from mpimesh.nn.erf import erf
from mpimesh.nn.module import Module

__all__ = ["GELU", "ReLU", "SiLU", "sigmoid", "silu_slope"]

_BLOCK_ELEMENTS = 1 << 15
# What is computed on the way, 128 KiB each in float32, should stay in a cache of the core.


class ReLU(Module):
    """``y = max(x, 0)``, with the derivative 0 at 0.

    Shapes:
        x, result: any, the same.

    Cost:
        Saves `y` by reference, which a linear layer behind it keeps anyway.
    """

    def forward(self, x: Array, ctx: Context | None = None) -> Array:
        """Return ``max(x, 0)``; NaN stays NaN."""
        check_floats(self, x)
        room = None if ctx is None else ctx.empty(self, x.shape, x.dtype)
        y = namespace(x).maximum(x, 0, out=room)
        if ctx is not None:
            ctx.save(self, y.shape, y.dtype, y)
        return y

    def backward_input(self, dy: Array, ctx: Context) -> Array | None:
        """Return `dy` where the output was positive, 0 elsewhere."""
        (y,) = self._take(dy, ctx)
        # No product: a gradient that overflowed must not turn 0 into NaN.
        return zeros_where_not(y > 0, dy)


class GELU(Module):
    """``y = x * Phi(x)``, with Phi the normal distribution function.

    float16 is computed in float32.

    Shapes:
        x, result: any, the same.

    Cost:
        Saves the derivative, one array like `x`, instead of `x`: backward is one product.

    Args:
        approximate: "none" for Phi by the error function, or "tanh" for
            ``Phi(x) ~ (1 + tanh(sqrt(2/pi) * (x + 0.044715 * x**3))) / 2``.

    Raises:
        ModuleError: If `approximate` is something else.
    """

    def __init__(self, *, approximate: Literal["none", "tanh"] = "none") -> None:
        if not isinstance(approximate, str) or approximate not in ("none", "tanh"):
            raise ModuleError(f"approximate must be 'none' or 'tanh', got {shown(approximate)}")
        self.approximate = approximate

    def forward(self, x: Array, ctx: Context | None = None) -> Array:
        """Return ``x * Phi(x)``."""
        check_floats(self, x)
        compute = _by_tanh if self.approximate == "tanh" else _by_erf
        y, derivative = _in_blocks(compute, x, ctx is not None)
        if ctx is not None:
            ctx.save(self, y.shape, y.dtype, derivative)
        return y

    def backward_input(self, dy: Array, ctx: Context) -> Array | None:
        """Return `dy` times the derivative."""
        (derivative,) = self._take(dy, ctx)
        # The derivative's memory is nobody else's: it becomes the result.
        derivative *= dy
        return derivative

    def __repr__(self) -> str:
        return f"GELU(approximate={self.approximate!r})"


class SiLU(Module):
    """``y = x * sigmoid(x)``, also called swish.

    float16 is computed in float32.

    Shapes:
        x, result: any, the same.

    Cost:
        Saves the derivative, one array like `x`, instead of `x`: backward is one product.
    """

    def forward(self, x: Array, ctx: Context | None = None) -> Array:
        """Return ``x * sigmoid(x)``."""
        check_floats(self, x)
        wide = x.astype(sum_dtype(x.dtype), copy=False)
        share = sigmoid(wide)
        y = (wide * share).astype(x.dtype, copy=False)
        if ctx is not None:
            ctx.save(self, y.shape, y.dtype, silu_slope(wide, share).astype(x.dtype, copy=False))
        return y

    def backward_input(self, dy: Array, ctx: Context) -> Array | None:
        """Return `dy` times the derivative."""
        (derivative,) = self._take(dy, ctx)
        # The derivative's memory is nobody else's: it becomes the result.
        derivative *= dy
        return derivative


def sigmoid(x: Array) -> Array:
    """Return ``1 / (1 + exp(-x))``, a new array; no exponential of it overflows."""
    xp = namespace(x)
    e = xp.abs(x)
    xp.negative(e, out=e)
    xp.exp(e, out=e)
    share = xp.where(x >= 0, x.dtype.type(1), e)
    e += 1.0
    share /= e
    return share


def silu_slope(x: Array, share: Array) -> Array:
    """Return the derivative of SiLU at `x`, of which `share` is the sigmoid, a new array."""
    slope = 1.0 - share
    slope *= x
    slope += 1.0
    slope *= share
    return slope


def _in_blocks(
    compute: Callable[[Array, bool], tuple[Array, Array | None]], x: Array, derivative: bool
) -> tuple[Array, Array | None]:
    """Return what `compute` gives for `x` in the wider dtype, in the dtype of `x`."""
    xp, wide = namespace(x), sum_dtype(x.dtype)
    # A device has no use for blocks: each would cost its own launches.
    length = x.size if is_cupy(x) else _BLOCK_ELEMENTS
    if x.size <= length:
        y, slope = compute(x.astype(wide, copy=False), derivative)
        slope = None if slope is None else slope.astype(x.dtype, copy=False)
        return y.astype(x.dtype, copy=False), slope
    flat, y = x.reshape(-1), xp.empty(x.size, x.dtype)
    slope = xp.empty(x.size, x.dtype) if derivative else None
    for start in range(0, x.size, length):
        block = slice(start, start + length)
        y[block], of_block = compute(flat[block].astype(wide, copy=False), derivative)
        if slope is not None:
            slope[block] = of_block
    return y.reshape(x.shape), None if slope is None else slope.reshape(x.shape)


def _by_erf(x: Array, derivative: bool) -> tuple[Array, Array | None]:
    """Return x * Phi(x), and Phi(x) + x * phi(x) if wanted; phi is the density."""
    xp = namespace(x)
    phi_sum = erf(x * math.sqrt(0.5))
    if is_cupy(x):
        if derivative:
            both: tuple[Array, Array] = fused(xp, kernels.gelu_slope)(x, phi_sum)
            return both
        return fused(xp, kernels.gelu)(x, phi_sum), None
    phi_sum += 1.0
    phi_sum *= 0.5
    y = x * phi_sum
    if not derivative:
        return y, None
    density = xp.square(x)
    density *= -0.5
    xp.exp(density, out=density)
    density *= 1.0 / math.sqrt(2.0 * math.pi)
    density *= x
    phi_sum += density
    return y, phi_sum


def _by_tanh(x: Array, derivative: bool) -> tuple[Array, Array | None]:
    """Return x * Phi(x) and, if wanted, its derivative, with u the tanh's argument.

    y = x * (1 + tanh u) / 2
    y' = (1 + tanh u) / 2 + x * (1 - tanh(u)^2) / 2 * u'
    """
    xp = namespace(x)
    if is_cupy(x):
        if derivative:
            both: tuple[Array, Array] = fused(xp, kernels.gelu_tanh_slope)(x)
            return both
        return fused(xp, kernels.gelu_tanh)(x), None
    scale, cubic = math.sqrt(2.0 / math.pi), 0.044715
    square = xp.square(x)
    u = square * (scale * cubic)
    u += scale
    u *= x
    tanh = xp.tanh(u, out=u)
    y = tanh + 1.0
    y *= x
    y *= 0.5
    if not derivative:
        return y, None
    square *= 3.0 * scale * cubic
    square += scale
    slope = xp.square(tanh)
    xp.subtract(1.0, slope, out=slope)
    slope *= square
    slope *= x
    slope += tanh
    slope += 1.0
    slope *= 0.5
    return y, slope
