"""Random bits by number, and functions with the same bits on every machine and device.

A row is a stream of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014; the constants of its mixing function are Stafford's variant 13 of
MurmurHash3's): word j of a stream is ``mix(start + (j + 1) * GAMMA)``, whatever the words before
it. The start of a row is mixed from a key and its number in the same way.

An array is one long stream, with a word for each element. Such streams have a step ("gamma") of
their own in place of the golden ratio, drawn as the paper draws it: two streams may meet in single
words, never run along each other.

Libraries of mathematics differ in their last bits, one processor's from another's. The logarithm
and the normal quantile here take only steps that IEEE 754 rounds in one way (add, subtract,
multiply, divide, square root), each as an array operation of its own, so that no compiler joins two
of them.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from mpimesh.arrays.namespace import Array, HostArray
from mpimesh.errors import ArrayValueError

__all__ = ["WordStream", "key_of", "natural_log", "normal_quantile", "random_words"]


_WORD = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB

_FEWEST_CHANGES = 24
_FLIPPED_BITS = 0xAAAAAAAAAAAAAAAA


def key_of(*numbers: int) -> int:
    """Return a key of 64 bits that depends on all `numbers` and their order.

    Raises:
        ArrayValueError: If a number is negative, which has no end of digits, or no integer.

    Example:
        >>> key_of(0, 7) == key_of(7, 0)
        False
    """
    key = 0
    for number in map(_whole, numbers):
        # All 64-bit digits, and how many: large seeds count to their last bit.
        digits = [number & _WORD]
        while number := number >> 64:
            digits.append(number & _WORD)
        for digit in (len(digits), *digits):
            key = _mixed(((key ^ digit) + _GAMMA) & _WORD)
    return key


def random_words(
    xp: ModuleType, key: int, rows: Array, count: int, *, first: int | Array = 0
) -> Array:
    """Return `count` words of the streams of `rows`, from word `first` on.

    Shapes:
        rows: (n,), uint64.
        first: a number; or (n,), uint64, one for each row.
        result: (n, count), uint64.
    """
    gamma = np.uint64(_GAMMA)
    starts = rows * gamma
    starts += np.uint64(key)
    _mix(xp, starts, xp.empty_like(starts))
    if not isinstance(first, int):
        starts += first * gamma
        first = 0
    steps = xp.arange(first + 1, first + count + 1, dtype=xp.uint64)
    steps *= gamma
    words = starts[:, None] + steps
    _mix(xp, words, xp.empty_like(words))
    return words


@dataclass(frozen=True, slots=True)
class WordStream:
    """A stream of 2^64 words, no two of them equal, each computed from its number.

    Attributes:
        start: What the numbers count from.
        gamma: The odd step from one word's state to the next one's.

    Example:
        >>> stream = WordStream.of(key_of(7, 0))
        >>> numbers = np.array([3, 2**64 - 1], np.uint64)
        >>> bool((stream.words(numbers)[1:] == stream.words(numbers[1:])).all())
        True
    """

    start: int
    gamma: int

    @classmethod
    def of(cls, key: int) -> WordStream:
        """Return the stream that belongs to `key`, a number of 64 bits.

        The step is odd and has no long runs of equal bits, by the rule of Steele et al.

        Raises:
            ArrayValueError: If `key` is no such number.
        """
        key = _whole(key)
        if key > _WORD:
            raise ArrayValueError(
                f"a key is a number of 64 bits, got {key}; key_of(seed, stream) makes one"
            )
        gamma = _mixed((key + _GAMMA) & _WORD) | 1
        if (gamma ^ (gamma >> 1)).bit_count() < _FEWEST_CHANGES:
            gamma ^= _FLIPPED_BITS
        return cls(key, gamma)

    def words(self, numbers: HostArray) -> HostArray:
        """Return the words with `numbers`, any uint64.

        Shapes:
            numbers, result: any, the same; uint64.

        Cost:
            Two multiplications and nine other passes over memory of the size of `numbers`.
        """
        words = self.scaled(numbers)
        self.fill(words, 0, words, np.empty_like(words))
        return words

    def scaled(self, numbers: HostArray) -> HostArray:
        """Return what `fill` takes for `numbers`; made once for many bases."""
        return numbers * np.uint64(self.gamma)

    def fill(self, scaled: HostArray, base: int, out: HostArray, scratch: HostArray) -> None:
        """Write the words with the numbers ``base + numbers`` to `out`.

        Shapes:
            scaled, out, scratch: any, the same; uint64. `out` may be `scaled`.
        """
        state = (self.start + (base + 1) * self.gamma) & _WORD
        np.add(scaled, np.uint64(state), out=out)
        _mix(np, out, scratch)


def _whole(number: int) -> int:
    """Return `number`, be it Python's or NumPy's, as Python's."""
    try:
        whole = operator.index(number)
    except TypeError:
        whole = -1
    if whole < 0:
        raise ArrayValueError(
            f"seeds, keys and numbers of streams are integers from 0 on, got {number!r}"
        )
    return whole


def _mix(xp: ModuleType, words: Array, scratch: Array) -> None:
    """Mix each of `words` in place."""
    xp.right_shift(words, np.uint64(30), out=scratch)
    words ^= scratch
    words *= np.uint64(_FIRST)
    xp.right_shift(words, np.uint64(27), out=scratch)
    words ^= scratch
    words *= np.uint64(_SECOND)
    xp.right_shift(words, np.uint64(31), out=scratch)
    words ^= scratch


def _mixed(word: int) -> int:
    """Return what `_mix` makes of one word."""
    word = ((word ^ (word >> 30)) * _FIRST) & _WORD
    word = ((word ^ (word >> 27)) * _SECOND) & _WORD
    return word ^ (word >> 31)


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


def natural_log(x: HostArray) -> HostArray:
    """Return the natural logarithm of `x`, right to within one unit in the last place.

    The method is that of ``e_log.c`` in Sun's fdlibm (1993): x is ``2^k (1 + f)``, and with
    ``s = f / (2 + f)``, ``log(1 + f)`` is a polynomial in the square of s.

    Shapes:
        x, result: any, the same; float64. C-contiguous.

    Args:
        x: Positive, finite, and not less than 2^-1022. This is not checked.

    Cost:
        Some 30 passes over memory of the size of `x`.

    Example:
        >>> natural_log(np.array([1.0, 2.0]))
        array([0.        , 0.69314718])
    """
    bits = x.view(np.int64)
    power = bits - _HALF_ROOT_BITS
    power >>= _MANTISSA_BITS
    f = (bits - power * (1 << _MANTISSA_BITS)).view(np.float64)
    f -= 1.0
    exponent = power.astype(np.float64)
    s = f + 2.0
    np.divide(f, s, out=s)
    square = s * s
    series = _polynomial(_LOG, square)
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


def normal_quantile(q: HostArray) -> HostArray:
    """Return where the standard normal distribution function is ``0.5 + q``.

    The method is Wichura's, "Algorithm AS 241: The percentage points of the normal
    distribution", Applied Statistics 37 (1988), function PPND16: three rational functions,
    right to about one part in 10^16.

    Shapes:
        q, result: (n,), float64, C-contiguous.

    Args:
        q: Between -0.5 and 0.5, both excluded; a multiple of 2^-54. This is not checked.

    Cost:
        Some 30 passes over memory of the size of `q`, and as many over the outer
        15 % of the values, with their logarithms.

    Example:
        >>> normal_quantile(np.array([0.0, 0.475])).round(4)
        array([0.  , 1.96])
    """
    r = q * q
    np.subtract(0.180625, r, out=r)
    x = _ratio(_A, _B, r)
    x *= q
    distance = np.abs(q)
    outer = np.flatnonzero(distance > _CENTRE)
    if outer.size:
        tail = 0.5 - distance[outer]
        root = natural_log(tail)
        np.negative(root, out=root)
        np.sqrt(root, out=root)
        values = _ratio(_C, _D, root - 1.6)
        far = np.flatnonzero(root > _FAR)
        if far.size:
            values[far] = _ratio(_E, _F, root[far] - _FAR)
        x[outer] = np.copysign(values, q[outer])
    return x


def _ratio(above: tuple[float, ...], below: tuple[float, ...], x: HostArray) -> HostArray:
    """Return the quotient of two polynomials at `x`."""
    value = _polynomial(above, x)
    value /= _polynomial(below, x)
    return value


def _polynomial(coefficients: tuple[float, ...], x: HostArray) -> HostArray:
    """Return a polynomial at `x`, by Horner's rule; the highest coefficient comes first."""
    value = x * coefficients[0]
    for coefficient in coefficients[1:-1]:
        value += coefficient
        value *= x
    value += coefficients[-1]
    return value
