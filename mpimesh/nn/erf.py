"""The error function of an array, which NumPy does not have.

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
from types import ModuleType

import numpy as np

from mpimesh.arrays.namespace import namespace
from mpimesh.arrays.types import Array

__all__ = ["erf"]

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
_BLOCK_ELEMENTS = 1 << 15
# Elements computed at a time: their few temporaries stay in the fast caches.


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
