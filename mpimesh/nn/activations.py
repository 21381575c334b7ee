"""Activations: elementwise, without parameters.

The error function, which NumPy does not have:

- ``|x| <= 0.84375``: the Maclaurin series, ``2/sqrt(pi) * sum((-1)^n x^(2n+1) / (n! (2n+1)))``,
  of which 17 terms reach below float64's resolution. The first term is taken
  as ``x + (2/sqrt(pi) - 1) * x``, so that its larger part is exact.
- above: ``sign(x) * (1 - exp(-x^2) * C(|x|) / D(|x|))``, with the polynomials of
  W. J. Cody, "Rational Chebyshev approximations for the error function",
  Mathematics of Computation 23 (1969), 631-637. Cody made them for 0.46875 to
  4, and others for beyond, where what is taken from 1 is below 2e-8. That much
  of it needs a few digits only, so they serve up to 6, from where erf is 1.

float32 needs fewer terms in both: a polynomial of degree 5 in the square, and a quotient of
degrees 2 and 3, fitted for this file to ``erf(x) / x - 1`` and to ``exp(x^2) * erfc(x)`` by
weighted least squares. Their errors, relative to erf, are at most 6e-9 and 6e-10, where half a
unit in the last place is 3e-8.

The error is at most 2 units in the last place, in float64 and in float32.
"""

from __future__ import annotations

import importlib
import math
from abc import abstractmethod
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal

import numpy as np

from mpimesh.arguments import shown
from mpimesh.arrays.dtypes import sum_dtype
from mpimesh.arrays.namespace import Array, Formula, fused, is_cupy, namespace, zeros_where_not
from mpimesh.errors import ModuleError
from mpimesh.nn.module import Module
from mpimesh.nn.protocol import Context, check_floats

__all__ = ["GELU", "ReLU", "SiLU", "Tanh", "erf", "sigmoid", "silu_slope"]

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
        return self._save(ctx, y, y)

    def backward_input(self, dy: Array, ctx: Context) -> Array | None:
        """Return `dy` where the output was positive, 0 elsewhere."""
        (y,) = self._take(dy, ctx)
        # No product: a gradient that overflowed must not turn 0 into NaN.
        return zeros_where_not(y > 0, dy)


class _Smooth(Module):
    """An activation of which forward computes the derivative, too."""

    def forward(self, x: Array, ctx: Context | None = None) -> Array:
        """Return the activation of each element.

        Raises:
            DTypeError: If `x` is no float array.
        """
        check_floats(self, x)
        y, derivative = _in_blocks(self._compute, x, ctx is not None)
        return self._save(ctx, y, derivative)

    def backward_input(self, dy: Array, ctx: Context) -> Array | None:
        """Return `dy` times the derivative."""
        (derivative,) = self._take(dy, ctx)
        # The derivative's memory is not shared: it becomes the result.
        derivative *= dy
        return derivative

    @abstractmethod
    def _compute(self, x: Array, derivative: bool) -> tuple[Array, Array | None]:
        """Return the activation of `x`, float32 or wider, and its derivative, if wanted."""


class GELU(_Smooth):
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

    def _compute(self, x: Array, derivative: bool) -> tuple[Array, Array | None]:
        return (_by_tanh if self.approximate == "tanh" else _by_erf)(x, derivative)

    def __repr__(self) -> str:
        return f"GELU(approximate={self.approximate!r})"


class SiLU(_Smooth):
    """``y = x * sigmoid(x)``, also called swish.

    float16 is computed in float32.

    Shapes:
        x, result: any, the same.

    Cost:
        Saves the derivative, one array like `x`, instead of `x`: backward is one product.
    """

    def _compute(self, x: Array, derivative: bool) -> tuple[Array, Array | None]:
        share = sigmoid(x)
        return x * share, silu_slope(x, share) if derivative else None


class Tanh(_Smooth):
    """``y = tanh(x)``.

    float16 is computed in float32.

    Shapes:
        x, result: any, the same.

    Cost:
        Saves the derivative, one array like `x`, instead of `x`: backward is one product.
    """

    def _compute(self, x: Array, derivative: bool) -> tuple[Array, Array | None]:
        y = namespace(x).tanh(x)
        return y, 1.0 - y * y if derivative else None


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
            both: tuple[Array, Array] = fused(xp, gelu_slope)(x, phi_sum)
            return both
        return fused(xp, gelu)(x, phi_sum), None
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
            both: tuple[Array, Array] = fused(xp, gelu_tanh_slope)(x)
            return both
        return fused(xp, gelu_tanh)(x), None
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


# -- formulas that run as one kernel each on CuPy's arrays ------------------------------------


def gelu(xp: ModuleType) -> Formula:
    """Of x and the error function of x / sqrt(2): GELU."""

    def formula(x: Any, erf: Any) -> Any:
        return x * ((erf + 1.0) * 0.5)

    return formula


def gelu_slope(xp: ModuleType) -> Formula:
    """Of x and the error function of x / sqrt(2): GELU and its derivative."""

    def formula(x: Any, erf: Any) -> Any:
        share = (erf + 1.0) * 0.5
        density = xp.exp(xp.square(x) * -0.5) * (1.0 / math.sqrt(2.0 * math.pi))
        return x * share, share + density * x

    return formula


def gelu_tanh(xp: ModuleType) -> Formula:
    """Of x: GELU by tanh."""
    scale, cubic = math.sqrt(2.0 / math.pi), 0.044715

    def formula(x: Any) -> Any:
        tanh = xp.tanh((xp.square(x) * (scale * cubic) + scale) * x)
        return (tanh + 1.0) * x * 0.5

    return formula


def gelu_tanh_slope(xp: ModuleType) -> Formula:
    """Of x: GELU by tanh and its derivative."""
    scale, cubic = math.sqrt(2.0 / math.pi), 0.044715

    def formula(x: Any) -> Any:
        square = xp.square(x)
        tanh = xp.tanh((square * (scale * cubic) + scale) * x)
        inner = square * (3.0 * scale * cubic) + scale
        slope = xp.subtract(1.0, xp.square(tanh)) * inner * x + tanh
        return (tanh + 1.0) * x * 0.5, (slope + 1.0) * 0.5

    return formula


# -- the error function ------------------------------------------------------------------------

_C = (
    2.15311535474403846e-8,
    5.64188496988670089e-1,
    8.88314979438837594e00,
    6.61191906371416295e01,
    2.98635138197400131e02,
    8.81952221241769090e02,
    1.71204761263407058e03,
    2.05107837782607147e03,
    1.23033935479799725e03,
)
_D = (
    1.0,
    1.57449261107098347e01,
    1.17693950891312499e02,
    5.37181101862009858e02,
    1.62138957456669019e03,
    3.29079923573345963e03,
    4.36261909014324716e03,
    3.43936767414372164e03,
    1.23033935480374942e03,
)
_SERIES = tuple(
    2.0 / math.sqrt(math.pi) * (-1) ** n / (math.factorial(n) * (2 * n + 1))
    for n in reversed(range(1, 17))
)
_FIRST_LESS_ONE = 0.128379167095512573896  # 2/sqrt(pi) - 1, not rounded as the difference would be
_NEAR_32 = (
    -6.342921118405e-4,
    5.055622698128e-3,
    -2.680510418015e-2,
    1.128277560268e-1,
    -3.761257640520e-1,
    1.283791607933e-1,
)
_C_32 = (2.321095321662e-1, 7.412769004674e-1, 1.000608167372)
_D_32 = (4.098506870122e-1, 1.332868076290, 1.873909900627, 1.0)
_SMALL = 0.84375
_ONE_FROM = 6.0


def erf(x: Array) -> Array:
    """Return the error function of each element of `x`, a new array of its dtype.

    Shapes:
        x, result: any, the same; float32 or float64.
    """
    xp = namespace(x)
    if xp is not np:
        try:
            return importlib.import_module("cupyx.scipy.special").erf(x)
        except ImportError:  # it may want a SciPy; what follows does not
            pass
    y = xp.empty(x.shape, x.dtype)
    source, target = x.reshape(-1), y.reshape(-1)
    length = _BLOCK_ELEMENTS if xp is np else max(source.size, 1)
    for start in range(0, source.size, length):
        block = slice(start, start + length)
        _erf_block(xp, source[block], target[block])
    return y


def _erf_block(xp: ModuleType, x: Array, out: Array) -> None:
    """Write erf of `x`, one axis, to `out`."""
    size = xp.abs(x)
    small = size <= _SMALL
    # Both everywhere, as picking out the elements of each costs more.
    near = _series(xp, xp.clip(x, -_SMALL, _SMALL))
    xp.minimum(size, _ONE_FROM, out=size)
    above, below = (_C, _D) if x.dtype.itemsize > 4 else (_C_32, _D_32)
    tail = _horner(above, size)
    tail /= _horner(below, size)
    xp.square(size, out=size)
    xp.negative(size, out=size)
    xp.exp(size, out=size)
    tail *= size
    xp.subtract(1.0, tail, out=tail)
    xp.copysign(tail, x, out=out)
    xp.copyto(out, near, where=small)


def _series(xp: ModuleType, x: Array) -> Array:
    square = xp.square(x)
    wide = x.dtype.itemsize > 4
    rest = _horner((*_SERIES, _FIRST_LESS_ONE) if wide else _NEAR_32, square)
    rest *= x
    rest += x
    return rest


def _horner(coefficients: tuple[float, ...], t: Array) -> Array:
    """Return the polynomial at `t`, its highest coefficient first."""
    value = t * coefficients[0]
    for coefficient in coefficients[1:-1]:
        value += coefficient
        value *= t
    value += coefficients[-1]
    return value
