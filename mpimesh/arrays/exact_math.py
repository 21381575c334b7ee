"""Logarithm and normal quantile with the same bits on every machine and device.

Libraries of mathematics differ in their last bits, one processor's from another's, and
CuPy's from NumPy's. These functions take only steps that IEEE 754 rounds in one way (add,
subtract, multiply, divide, square root), each as an array operation of its own, so
that no compiler joins two of them.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np

from mpimesh.arrays.types import Array

__all__ = ["natural_log", "normal_quantile"]

_MANTISSA_BITS = 52
_HALF_ROOT_BITS = int(np.float64(0.5**0.5).view(np.int64))
# The bits of sqrt(1/2): a mantissa from there to twice that is close to 1 on both sides.

_LN2_HIGH = 6.93147180369123816490e-01
_LN2_LOW = 1.90821492927058770002e-10
_LOG = (
    1.479819860511658591e-01,
    1.531383769920937332e-01,
    1.818357216161805012e-01,
    2.222219843214978396e-01,
    2.857142874366239149e-01,
    3.999999999940941908e-01,
    6.666666666666735130e-01,
)

_CENTRE = 0.425
_FAR = 5.0
_A = (
    2.5090809287301226727e3,
    3.3430575583588128105e4,
    6.7265770927008700853e4,
    4.5921953931549871457e4,
    1.3731693765509461125e4,
    1.9715909503065514427e3,
    1.3314166789178437745e2,
    3.3871328727963666080e0,
)
_B = (
    5.2264952788528545610e3,
    2.8729085735721942674e4,
    3.9307895800092710610e4,
    2.1213794301586595867e4,
    5.3941960214247511077e3,
    6.8718700749205790830e2,
    4.2313330701600911252e1,
    1.0,
)
_C = (
    7.74545014278341407640e-4,
    2.27238449892691845833e-2,
    2.41780725177450611770e-1,
    1.27045825245236838258e0,
    3.64784832476320460504e0,
    5.76949722146069140550e0,
    4.63033784615654529590e0,
    1.42343711074968357734e0,
)
_D = (
    1.05075007164441684324e-9,
    5.47593808499534494600e-4,
    1.51986665636164571966e-2,
    1.48103976427480074590e-1,
    6.89767334985100004550e-1,
    1.67638483018380384940e0,
    2.05319162663775882187e0,
    1.0,
)
_E = (
    2.01033439929228813265e-7,
    2.71155556874348757815e-5,
    1.24266094738807843860e-3,
    2.65321895265761230930e-2,
    2.96560571828504891230e-1,
    1.78482653991729133580e0,
    5.46378491116411436990e0,
    6.65790464350110377720e0,
)
_F = (
    2.04426310338993978564e-15,
    1.42151175831644588870e-7,
    1.84631831751005468180e-5,
    7.86869131145613259100e-4,
    1.48753612908506148525e-2,
    1.36929880922735805310e-1,
    5.99832206555887937690e-1,
    1.0,
)


def natural_log(xp: ModuleType, x: Array) -> Array:
    """Return the natural logarithm of `x`, right to within one unit in the last place.

    The method is that of ``e_log.c`` in Sun's fdlibm (1993): x is ``2^k (1 + f)``, and with
    ``s = f / (2 + f)``, ``log(1 + f)`` is a polynomial in the square of s.

    Shapes:
        x, result: any, the same; float64. C-contiguous.

    Args:
        xp: The library of `x`.
        x: Positive, finite, and not less than 2^-1022. This is not checked.

    Cost:
        Some 30 passes over memory of the size of `x`.

    Example:
        >>> natural_log(np, np.array([1.0, 2.0]))
        array([0.        , 0.69314718])
    """
    bits = x.view(np.int64)
    power = bits - _HALF_ROOT_BITS
    power >>= _MANTISSA_BITS
    f = (bits - power * (1 << _MANTISSA_BITS)).view(np.float64)
    f -= 1.0
    exponent = power.astype(np.float64)
    s = f + 2.0
    xp.divide(f, s, out=s)
    square = s * s
    series = _polynomial(xp, _LOG, square)
    series *= square
    half = f * f
    half *= 0.5
    # k ln2_high - ((half - (s (half + series) + k ln2_low)) - f), as fdlibm orders it.
    series += half
    series *= s
    series += exponent * _LN2_LOW
    half -= series
    half -= f
    exponent *= _LN2_HIGH
    exponent -= half
    return exponent


def normal_quantile(xp: ModuleType, q: Array) -> Array:
    """Return where the standard normal distribution function is ``0.5 + q``.

    The method is Wichura's, "Algorithm AS 241: The percentage points of the normal
    distribution", Applied Statistics 37 (1988), function PPND16: three rational functions,
    right to about one part in 10^16.

    Shapes:
        q, result: (n,), float64, C-contiguous.

    Args:
        xp: The library of `q`.
        q: Between -0.5 and 0.5, both excluded; a multiple of 2^-54. This is not checked.

    Cost:
        Some 30 passes over memory of the size of `q`, and as many over the outer
        15 % of the values, with their logarithms.

    Example:
        >>> normal_quantile(np, np.array([0.0, 0.475])).round(4)
        array([0.  , 1.96])
    """
    r = q * q
    xp.subtract(0.180625, r, out=r)
    x = _ratio(xp, _A, _B, r)
    x *= q
    distance = xp.abs(q)
    outer = xp.flatnonzero(distance > _CENTRE)
    if outer.size:
        tail = 0.5 - distance[outer]
        root = natural_log(xp, tail)
        xp.negative(root, out=root)
        xp.sqrt(root, out=root)
        values = _ratio(xp, _C, _D, root - 1.6)
        far = xp.flatnonzero(root > _FAR)
        if far.size:
            values[far] = _ratio(xp, _E, _F, root[far] - _FAR)
        x[outer] = xp.copysign(values, q[outer])
    return x


def _ratio(xp: ModuleType, above: tuple[float, ...], below: tuple[float, ...], x: Array) -> Array:
    """Return the quotient of two polynomials at `x`."""
    value = _polynomial(xp, above, x)
    value /= _polynomial(xp, below, x)
    return value


def _polynomial(xp: ModuleType, coefficients: tuple[float, ...], x: Array) -> Array:
    """Return a polynomial at `x`, by Horner's rule; the highest coefficient comes first."""
    value = x * coefficients[0]
    for coefficient in coefficients[1:-1]:
        value += coefficient
        value *= x
    value += coefficients[-1]
    return value
