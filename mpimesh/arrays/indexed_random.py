"""Random floats by the number of each element: the same values whoever works them out.

An array has a key (`key_of(seed, stream)`), and element i of it takes word i of that
key's stream, whatever its dtype and however the array is cut up. Give each array a key
of its own: two with the same key have the same words behind their values.

Values depend on no library's idea of a random number or of a logarithm, so they
are the same for NumPy and CuPy, on all machines, in all versions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np

from mpimesh.arrays.boxes import Box, Pieces, block_for
from mpimesh.arrays.counter_bits import WordStream
from mpimesh.arrays.exact_math import natural_log, normal_quantile
from mpimesh.arrays.types import Array, DType
from mpimesh.errors import ArrayValueError, DTypeError

__all__ = [
    "bernoulli_block",
    "drawn_words",
    "exponential_block",
    "normal_block",
    "random_block",
    "uniform_block",
]

_WORD_BITS = 64
_DIGITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}
# Binary digits of each type: so many random bits make a value, none of which rounds to 1.
_FINE = 52
# Bits of a value that is to lie halfway between two multiples of 2^-52: never 0, never 1.


def random_block(
    key: int,
    shape: tuple[int, ...],
    box: Box,
    dtype: Any = np.float64,
    *,
    xp: ModuleType = np,
    out: Array | None = None,
) -> Array:
    """Return a block of random numbers spread evenly over [0, 1).

    They are the words' first 53, 24, 11 or 8 bits as a fraction, for float64, float32,
    float16 and bfloat16: so that a narrow type has the wide one's values, cut off. That is
    how Java's SplittableRandom makes them (Steele, Lea and Flood, OOPSLA 2014).

    Shapes:
        out, result: that of `box`.

    Args:
        key: The array's, from `key_of`.
        shape: The whole array's.
        box: The block's place in it.
        dtype: float64, float32, float16 or bfloat16.
        xp: Whose array to make, where there is no `out`.
        out: Where the block is written to, C-contiguous.

    Raises:
        ShapeError: If the box is not in the array, or `out` does not fit it.
        DTypeError: If `dtype` is another one, or not that of `out`.
        ArrayValueError: If `key` is no number of 64 bits.

    Cost:
        One 64-bit hash for each value; memory for 2^14 values beside the block (2^20 on a
        device).

    Example:
        >>> whole = random_block(7, (4, 6), ((0, 4), (0, 6)))
        >>> block = random_block(7, (4, 6), ((1, 3), (4, 6)))
        >>> bool((block == whole[1:3, 4:6]).all())
        True
    """
    wanted = _floats(dtype)
    xp, block = block_for(shape, box, wanted, xp, out)
    flat = block.reshape(-1)
    digits = _DIGITS[wanted.name]
    for place, words, _ in drawn_words(xp, key, Pieces.of(shape, box, xp=xp)):
        words >>= np.uint64(_WORD_BITS - digits)
        target = flat[place]
        if wanted.itemsize >= 4:
            target[...] = words.view(np.int64)
            target *= 2.0**-digits
        else:
            # NumPy is slow in half types, and others have no integers in them.
            values = words.view(np.int64).astype(np.float32)
            values *= 2.0**-digits
            target[...] = values
    return block


def uniform_block(
    key: int,
    low: float,
    high: float,
    shape: tuple[int, ...],
    box: Box,
    dtype: Any = np.float64,
    *,
    xp: ModuleType = np,
    out: Array | None = None,
) -> Array:
    """Return a block of random numbers spread evenly over [low, high).

    They are ``low + (high - low) * u`` with the float64 values u of `random_block`. One that
    rounds to `high` becomes the last number of `dtype` below it.

    Shapes:
        out, result: that of `box`.

    Args:
        key: The array's, from `key_of`.
        low: The least value.
        high: What all values are below; if it equals `low`, they are all `low`.
        shape: The whole array's.
        box: The block's place in it.
        dtype: float64, float32, float16 or bfloat16.
        xp: Whose array to make, where there is no `out`.
        out: Where the block is written to, C-contiguous.

    Raises:
        ShapeError: If the box is not in the array, or `out` does not fit it.
        DTypeError: If `dtype` is another one, or not that of `out`.
        ArrayValueError: If `low` is above `high`, or one of them or their difference is not
            finite in `dtype`, or `key` is no number of 64 bits.

    Cost:
        That of `random_block`, and three passes.

    Example:
        >>> block = uniform_block(7, -1, 1, (1000,), ((10, 20),))
        >>> bool((abs(block) <= 1).all())
        True
    """
    wanted = _floats(dtype)
    low, high = _finite("low", low, wanted), _finite("high", high, wanted)
    _finite("high - low", high - low, np.dtype(np.float64))
    if low > high:
        raise ArrayValueError(f"low must not be above high, got {low} and {high}")
    xp, block = block_for(shape, box, wanted, xp, out)
    flat = block.reshape(-1)
    most = max(low, _last_below(high, wanted))
    for place, words, _ in drawn_words(xp, key, Pieces.of(shape, box, xp=xp)):
        words >>= np.uint64(_WORD_BITS - 53)
        values = words.view(np.int64).astype(np.float64)
        values *= 2.0**-53
        values *= high - low
        values += low
        xp.minimum(values, most, out=values)
        _round_to(values, flat[place])
    return block


def normal_block(
    key: int,
    shape: tuple[int, ...],
    box: Box,
    dtype: Any = np.float64,
    *,
    loc: float = 0.0,
    scale: float = 1.0,
    xp: ModuleType = np,
    out: Array | None = None,
) -> Array:
    """Return a block of random numbers of a normal distribution.

    A value is the normal quantile (Wichura's AS 241, see `normal_quantile`) of a fraction of
    52 random bits and a half, in float64, times `scale` plus `loc`, then rounded to `dtype`.
    The largest deviation that can come is 8.2 times `scale`.

    Shapes:
        out, result: that of `box`.

    Args:
        key: The array's, from `key_of`.
        shape: The whole array's.
        box: The block's place in it.
        dtype: float64, float32, float16 or bfloat16.
        loc: The mean.
        scale: The standard deviation.
        xp: Whose array to make, where there is no `out`.
        out: Where the block is written to, C-contiguous.

    Raises:
        ShapeError: If the box is not in the array, or `out` does not fit it.
        DTypeError: If `dtype` is another one, or not that of `out`.
        ArrayValueError: If `loc` or `scale` is not finite in `dtype`, `scale` is negative, or
            `key` is no number of 64 bits.

    Cost:
        One 64-bit hash and some 40 floating-point operations for each value.

    Example:
        >>> normal_block(7, (1000, 10), ((3, 4), (0, 10))).shape
        (1, 10)
    """
    wanted = _floats(dtype)
    loc, scale = _finite("loc", loc, wanted), _scale(scale, wanted)
    xp, block = block_for(shape, box, wanted, xp, out)
    flat = block.reshape(-1)
    for place, words, _ in drawn_words(xp, key, Pieces.of(shape, box, xp=xp)):
        values = normal_quantile(xp, _halfway(words, less=0.5))
        values *= scale
        values += loc
        _round_to(values, flat[place])
    return block


def exponential_block(
    key: int,
    shape: tuple[int, ...],
    box: Box,
    dtype: Any = np.float64,
    *,
    scale: float = 1.0,
    xp: ModuleType = np,
    out: Array | None = None,
) -> Array:
    """Return a block of random numbers of an exponential distribution.

    A value is ``-scale * log(u)`` with a fraction u of 52 random bits and a half: inversion
    (Devroye, "Non-Uniform Random Variate Generation", 1986, section II.2). In float64, then
    rounded to `dtype`. The largest value that can come is 36.7 times `scale`.

    Shapes:
        out, result: that of `box`.

    Args:
        key: The array's, from `key_of`.
        shape: The whole array's.
        box: The block's place in it.
        dtype: float64, float32, float16 or bfloat16.
        scale: The mean.
        xp: Whose array to make, where there is no `out`.
        out: Where the block is written to, C-contiguous.

    Raises:
        ShapeError: If the box is not in the array, or `out` does not fit it.
        DTypeError: If `dtype` is another one, or not that of `out`.
        ArrayValueError: If `scale` is negative or not finite in `dtype`, or `key` is no number
            of 64 bits.

    Cost:
        One 64-bit hash and some 30 floating-point operations for each value.

    Example:
        >>> bool((exponential_block(7, (100,), ((0, 100),)) > 0).all())
        True
    """
    wanted = _floats(dtype)
    scale = _scale(scale, wanted)
    xp, block = block_for(shape, box, wanted, xp, out)
    flat = block.reshape(-1)
    for place, words, _ in drawn_words(xp, key, Pieces.of(shape, box, xp=xp)):
        values = natural_log(xp, _halfway(words))
        values *= -scale
        _round_to(values, flat[place])
    return block


def bernoulli_block(
    key: int,
    p: float,
    shape: tuple[int, ...],
    box: Box,
    dtype: Any = np.bool_,
    *,
    xp: ModuleType = np,
    out: Array | None = None,
) -> Array:
    """Return a block of random truth values, each of them true with probability `p`.

    A value is true if its word, a whole number below 2^64, is less than ``p * 2^64``.

    Shapes:
        out, result: that of `box`.

    Args:
        key: The array's, from `key_of`.
        p: From 0 to 1, both included; exact to 2^-64.
        shape: The whole array's.
        box: The block's place in it.
        dtype: bool, or any type of numbers for 0 and 1.
        xp: Whose array to make, where there is no `out`.
        out: Where the block is written to, C-contiguous.

    Raises:
        ShapeError: If the box is not in the array, or `out` does not fit it.
        DTypeError: If `dtype` is not that of `out`.
        ArrayValueError: If `p` is out of range, or `key` is no number of 64 bits.

    Cost:
        One 64-bit hash for each value.

    Example:
        >>> bernoulli_block(7, 1.0, (9, 9), ((4, 5), (1, 4)))
        array([[ True,  True,  True]])
    """
    if not 0 <= p <= 1:
        raise ArrayValueError(f"a probability is from 0 to 1, got {p!r}")
    xp, block = block_for(shape, box, dtype, xp, out)
    flat = block.reshape(-1)
    end = int(p * 2.0**_WORD_BITS)
    # For p = 1 the end is 2^64, which is no word: all are less than that.
    for place, words, _ in drawn_words(xp, key, Pieces.of(shape, box, xp=xp)):
        flat[place] = words < np.uint64(end) if p < 1 else 1
    return block


def drawn_words(xp: ModuleType, key: int, pieces: Pieces) -> Iterator[tuple[slice, Array, int]]:
    """Yield, for each piece, its place in the flat block, its words, and its first number.

    The words are memory that the next piece takes again.

    Raises:
        ArrayValueError: If `key` is no number of 64 bits.
    """
    stream = WordStream.of(key)
    scaled = stream.scaled(pieces.offsets)
    words, scratch = xp.empty_like(scaled), xp.empty_like(scaled)
    for place, base in pieces:
        part = slice(0, place.stop - place.start)
        stream.fill(xp, scaled[part], base, words[part], scratch[part])
        yield place, words[part], base


def _halfway(words: Array, *, less: float = 0.0) -> Array:
    """Return odd multiples of 2^-53 in (0, 1), less `less`: exact for 0 and 0.5."""
    words >>= np.uint64(_WORD_BITS - _FINE)
    values = words.view(np.int64).astype(np.float64)
    values += 0.5 - less * 2.0**_FINE
    values *= 2.0**-_FINE
    return values


def _round_to(values: Array, target: Array) -> None:
    """Write float64 `values` to `target`; the smallest types by way of float32."""
    target[...] = values.astype(np.float32) if target.dtype.itemsize < 4 else values


def _floats(dtype: Any) -> DType:
    """Return `dtype` if random values exist in it."""
    wanted: DType = np.dtype(dtype)
    if wanted.name not in _DIGITS:
        names = ", ".join(_DIGITS)
        raise DTypeError(
            f"random numbers come as {names}, got {wanted}; make one of these, then use astype"
        )
    return wanted


def _finite(name: str, value: float, dtype: DType) -> float:
    """Return `value` as Python's float if `dtype` holds it."""
    number = float(value)
    with np.errstate(over="ignore"):
        held = float(np.array(number).astype(dtype))
    if not math.isfinite(held):
        raise ArrayValueError(f"{name} must be finite in {dtype}, got {value!r}")
    return number


def _scale(value: float, dtype: DType) -> float:
    """Return `value` as Python's float if it is a scale."""
    scale = _finite("scale", value, dtype)
    if scale < 0:
        raise ArrayValueError(f"scale must not be negative, got {value!r}")
    return scale


def _last_below(limit: float, dtype: DType) -> float:
    """Return the largest number of `dtype` below `limit`."""
    nearest = np.array(limit).astype(dtype)
    if float(nearest) >= limit:
        nearest = np.nextafter(nearest, np.array(-np.inf).astype(dtype))
    return float(nearest)
