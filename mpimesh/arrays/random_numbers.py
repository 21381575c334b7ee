"""Random numbers by the number of each element: the same values on any rank that makes them.

An array has a key (`key_of(seed, stream)`), and element i of it takes word i of that key's stream,
whatever its dtype and however the array is cut up. Give each array a key of its own: two with the
same key have the same words behind their values.

Values depend on no library's idea of a random number or of a logarithm, so they are the same on all
machines, in all versions.

All functions of blocks take `key`, the array's; `shape`, the whole array's; `box`, the block's
place in it; and `dtype`. They raise DTypeError if `dtype` is not one of the function's.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, TypeAlias

import numpy as np

from mpimesh.arrays.namespace import DType, HostArray
from mpimesh.arrays.random_bits import WordStream, key_of, natural_log, normal_quantile
from mpimesh.errors import ArrayValueError, DTypeError
from mpimesh.layout.boxes import Box, extent, volume

__all__ = [
    "bernoulli_block",
    "block_pieces",
    "exponential_block",
    "integers_block",
    "normal_block",
    "permutation",
    "uniform_block",
]


_WORD_BITS = 64
_FLOATS = ("float64", "float32", "float16", "bfloat16")
_FINE = 52
# Bits of a value halfway between two multiples of 2^-52: never 0, never 1.
_PIECE = 1 << 14
# 128 KiB of words: a piece, its scratch and its offsets stay in the second cache.

Pieces: TypeAlias = tuple[HostArray, list[tuple[slice, int]]]


def block_pieces(shape: tuple[int, ...], box: Box) -> Pieces:
    """Cut a block into pieces of bounded size, in their order.

    At least a fourth of the bound is in the average piece, so there are few of them, whatever the
    shape.

    Returns:
        The numbers of the elements of a piece less that of its first one, uint64 (a shorter piece
        has the first of them); and for each piece its place in the flat block and the number of its
        first element.

    Example:
        >>> block_pieces((4, 6), ((1, 3), (4, 6)))
        (array([0, 1, 6, 7], dtype=uint64), [(slice(0, 4, None), 10)])
    """
    if not volume(box):  # its strides may be past 64 bits
        return np.zeros(0, np.uint64), []
    shape, box = shape or (1,), box or ((0, 1),)
    sizes, axis, inner = extent(box), len(shape) - 1, 1
    while axis > 0 and inner * sizes[axis] <= _PIECE:
        inner *= sizes[axis]
        axis -= 1
    rows = min(sizes[axis], max(1, _PIECE // inner))
    strides = [math.prod(shape[one + 1 :]) for one in range(len(shape))]
    offsets = np.zeros(1, np.uint64)
    for size, stride in zip((rows, *sizes[axis + 1 :]), strides[axis:], strict=True):
        along = np.arange(size, dtype=np.uint64) * np.uint64(stride)
        offsets = (offsets[:, None] + along).reshape(-1)
    corner = sum(start * stride for (start, _), stride in zip(box, strides, strict=True))
    places, place = [], 0
    for outer in product(*map(range, sizes[:axis])):
        base = corner + sum(map(operator.mul, outer, strides))
        for row in range(0, sizes[axis], rows):
            count = min(rows, sizes[axis] - row) * inner
            places.append((slice(place, place + count), base + row * strides[axis]))
            place += count
    return offsets, places


def uniform_block(
    key: int,
    low: float,
    high: float,
    shape: tuple[int, ...],
    box: Box,
    dtype: Any = np.float64,
) -> HostArray:
    """Return a block of random numbers spread evenly over [low, high).

    They are ``low + (high - low) * u`` with the words' first 53 bits as a fraction u, as Java's
    SplittableRandom makes it (Steele, Lea and Flood, OOPSLA 2014). One that rounds to `high`
    becomes the last number of `dtype` below it.

    If `high` equals `low`, they are all `low`. `dtype` is float64, float32, float16 or bfloat16.

    Raises:
        ArrayValueError: If `low` is above `high`, or one of them or their difference is not
            finite in `dtype`.

    Cost:
        One 64-bit hash for each value, and four passes; memory for 2^14 values beside the block.

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
    most = max(low, _last_below(high, wanted))

    def uniform(words: HostArray) -> HostArray:
        words >>= np.uint64(_WORD_BITS - 53)
        values = words.view(np.int64).astype(np.float64)
        values *= 2.0**-53
        values *= high - low
        values += low
        return np.minimum(values, most, out=values)

    return _block(key, shape, box, wanted, uniform)


def normal_block(
    key: int,
    shape: tuple[int, ...],
    box: Box,
    dtype: Any = np.float64,
    *,
    loc: float = 0.0,
    scale: float = 1.0,
) -> HostArray:
    """Return a block of random numbers of a normal distribution.

    A value is the normal quantile (Wichura's AS 241, see `normal_quantile`) of a fraction of
    52 random bits and a half, in float64, times `scale` plus `loc`, then rounded to `dtype`.
    The largest deviation that can come is 8.2 times `scale`.

    `loc` is the mean and `scale` the standard deviation. `dtype` is float64, float32, float16 or
    bfloat16.

    Raises:
        ArrayValueError: If `loc` or `scale` is not finite in `dtype`, `scale` is negative.

    Cost:
        One 64-bit hash and some 40 floating-point operations for each value.

    Example:
        >>> normal_block(7, (1000, 10), ((3, 4), (0, 10))).shape
        (1, 10)
    """
    wanted = _floats(dtype)
    loc, scale = _finite("loc", loc, wanted), _scale(scale, wanted)

    def normal(words: HostArray) -> HostArray:
        values = normal_quantile(_halfway(words, less=0.5))
        values *= scale
        values += loc
        return values

    return _block(key, shape, box, wanted, normal)


def exponential_block(
    key: int,
    shape: tuple[int, ...],
    box: Box,
    dtype: Any = np.float64,
    *,
    scale: float = 1.0,
) -> HostArray:
    """Return a block of random numbers of an exponential distribution.

    A value is ``-scale * log(u)`` with a fraction u of 52 random bits and a half: inversion
    (Devroye, "Non-Uniform Random Variate Generation", 1986, section II.2). In float64, then
    rounded to `dtype`. The largest value that can come is 36.7 times `scale`.

    `scale` is the mean. `dtype` is float64, float32, float16 or bfloat16.

    Raises:
        ArrayValueError: If `scale` is negative or not finite in `dtype`.

    Cost:
        One 64-bit hash and some 30 floating-point operations for each value.

    Example:
        >>> bool((exponential_block(7, (100,), ((0, 100),)) > 0).all())
        True
    """
    wanted = _floats(dtype)
    scale = _scale(scale, wanted)

    def exponential(words: HostArray) -> HostArray:
        values = natural_log(_halfway(words))
        values *= -scale
        return values

    return _block(key, shape, box, wanted, exponential)


def bernoulli_block(
    key: int,
    p: float,
    shape: tuple[int, ...],
    box: Box,
    dtype: Any = np.bool_,
) -> HostArray:
    """Return a block of random truth values, each of them true with probability `p`.

    A value is true if its word, a whole number below 2^64, is less than ``p * 2^64``.

    `p` is from 0 to 1, both included, and exact to 2^-64. `dtype` is bool, or any of numbers for 0
    and 1.

    Raises:
        ArrayValueError: If `p` is out of range.

    Cost:
        One 64-bit hash for each value.

    Example:
        >>> bernoulli_block(7, 1.0, (9, 9), ((4, 5), (1, 4)))
        array([[ True,  True,  True]])
    """
    if not 0 <= p <= 1:
        raise ArrayValueError(f"a probability is from 0 to 1, got {p!r}")
    end = int(p * 2.0**_WORD_BITS)

    def truths(words: HostArray) -> HostArray:
        # For p = 1 the end is 2^64, which is no word: all are less than that.
        return words < np.uint64(end) if p < 1 else np.ones(len(words), bool)

    return _block(key, shape, box, np.dtype(dtype), truths)


def _drawn_words(key: int, pieces: Pieces) -> Iterator[tuple[slice, HostArray, int]]:
    """Yield, for each piece, its place in the flat block, its words, and its first number.

    The words are memory that the next piece takes again.
    """
    offsets, places = pieces
    stream = WordStream.of(key)
    scaled = stream.scaled(offsets)
    words, scratch = np.empty_like(scaled), np.empty_like(scaled)
    for place, base in places:
        part = slice(0, place.stop - place.start)
        stream.fill(scaled[part], base, words[part], scratch[part])
        yield place, words[part], base


def _block(
    key: int, shape: tuple[int, ...], box: Box, dtype: DType, values_of: Callable[..., HostArray]
) -> HostArray:
    """Return a block of the values that a function makes of words, rounded to `dtype`."""
    block: HostArray = np.empty(extent(box), dtype)
    flat = block.reshape(-1)
    for place, words, _ in _drawn_words(key, block_pieces(shape, box)):
        values = values_of(words)
        # The smallest types by way of float32.
        is_narrow = values.dtype == np.float64 and dtype.itemsize < 4
        flat[place] = values.astype(np.float32) if is_narrow else values
    return block


def _halfway(words: HostArray, *, less: float = 0.0) -> HostArray:
    """Return odd multiples of 2^-53 in (0, 1), less `less`: exact for 0 and 0.5."""
    words >>= np.uint64(_WORD_BITS - _FINE)
    values = words.view(np.int64).astype(np.float64)
    values += 0.5 - less * 2.0**_FINE
    values *= 2.0**-_FINE
    return values


def _floats(dtype: Any) -> DType:
    """Return `dtype` if random values exist in it."""
    wanted: DType = np.dtype(dtype)
    if wanted.name not in _FLOATS:
        names = ", ".join(_FLOATS)
        raise DTypeError(
            f"random numbers come as {names}, got {wanted}; make one of these, then use astype"
        )
    return wanted


def _finite(name: str, value: float, dtype: DType) -> float:
    """Return `value` as Python's float if `dtype` holds it."""
    number = float(value)
    with np.errstate(over="ignore"):
        rounded = float(np.array(number).astype(dtype))
    if not math.isfinite(rounded):
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


_ALL_WORDS = 1 << 64
_LOW_HALF = np.uint64((1 << 32) - 1)
_HALF = np.uint64(32)


def integers_block(
    key: int,
    low: int,
    high: int,
    shape: tuple[int, ...],
    box: Box,
    dtype: Any = np.int64,
    *,
    endpoint: bool = False,
) -> HostArray:
    """Return a block of random integers from `low` on and below `high`, all equally likely.

    The method is Lemire's, "Fast random integer generation in an interval", ACM Transactions
    on Modeling and Computer Simulation 29 (2019): with n integers to choose from, the upper
    half of the 128-bit product ``word * n``; where its lower half is less than
    ``2^64 mod n``, the word is refused. Element i then tries word i of the key's second
    stream, then of its third, so that its value still depends on no other element.

    With `endpoint`, `high` is one of the values. `dtype` is any of integers, or bool.

    Raises:
        DTypeError: If `dtype` is none of integers.
        ArrayValueError: If there is no integer in the range, `dtype` cannot hold all of them,
            a bound is no integer.

    Cost:
        One 64-bit hash and three multiplications for each value, five for more than 2^32
        integers to choose from; at the worst every second word is refused.

    Example:
        >>> dice = integers_block(7, 1, 6, (100,), ((20, 40),), np.int8, endpoint=True)
        >>> bool(((dice >= 1) & (dice <= 6)).all())
        True
    """
    wanted: DType = np.dtype(dtype)
    low, last = _bounds(low, high, endpoint, wanted)
    block: HostArray = np.empty(extent(box), wanted)
    flat = block.reshape(-1)
    choices = last - low + 1
    refused_below = _ALL_WORDS % choices
    pieces = block_pieces(shape, box)
    for place, words, base in _drawn_words(key, pieces):
        values = _upper_product(words, choices)
        if refused_below:
            words *= np.uint64(choices)
            refused = np.flatnonzero(words < np.uint64(refused_below))
            if refused.size:
                numbers = pieces[0][refused] + np.uint64(base)
                values[refused] = _retried(key, numbers, choices, refused_below)
        values += np.uint64(low % _ALL_WORDS)
        flat[place] = values.view(np.int64) if wanted.kind == "i" else values
    return block


def permutation(key: int, n: int) -> HostArray:
    """Return the numbers from 0 to n - 1 in a random order, whole, the same on every rank.

    They are put in the order of their words. No two words of a stream are equal, so there
    are no ties, and every way of sorting gives the same result (sorting by random keys: Knuth,
    "The Art of Computer Programming", volume 2, section 3.4.2).

    Shapes:
        result: (n,), int64.

    Args:
        key: The permutation's, from `key_of`.
        n: How many numbers.

    Cost:
        A sort of n words, and memory for twice as many.

    Example:
        >>> sorted(permutation(7, 5).tolist())
        [0, 1, 2, 3, 4]
    """
    words = np.empty(n, np.uint64)
    for place, part, _ in _drawn_words(key, block_pieces((n,), ((0, n),))):
        words[place] = part
    return np.argsort(words)


def _bounds(low: int, high: int, endpoint: bool, dtype: DType) -> tuple[int, int]:
    """Return the least and the largest value, if `dtype` holds both."""
    if dtype.kind not in "iub":
        raise DTypeError(f"random integers have a dtype of integers or bool, got {dtype}")
    try:
        first, last = operator.index(low), operator.index(high) - (not endpoint)
    except TypeError:
        raise ArrayValueError(f"low and high are integers, got {low!r} and {high!r}") from None
    if first > last:
        raise ArrayValueError(
            f"there is no integer from {low} on and {'up to' if endpoint else 'below'} {high}"
        )
    least, most = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    if first < least or last > most:
        raise ArrayValueError(
            f"{dtype} holds integers from {least} to {most}; they are to be from {first} to {last}"
        )
    return first, last


def _retried(key: int, numbers: HostArray, choices: int, refused_below: int) -> HostArray:
    """Return values for the elements with `numbers`, whose first words were refused."""
    values = np.empty_like(numbers)
    waiting = np.arange(numbers.size, dtype=np.int64)
    attempt = 0
    while waiting.size:
        attempt += 1
        words = WordStream.of(key_of(key, attempt)).words(numbers[waiting])
        values[waiting] = _upper_product(words, choices)
        words *= np.uint64(choices)
        waiting = waiting[words < np.uint64(refused_below)]
    return values


def _upper_product(words: HostArray, choices: int) -> HostArray:
    """Return the upper 64 bits of ``words * choices``, which are below `choices`."""
    if choices == _ALL_WORDS:
        return words
    upper, lower = words >> _HALF, words & _LOW_HALF
    above, below = np.uint64(choices >> 32), np.uint64(choices) & _LOW_HALF
    if not above:
        upper *= below
        lower *= below
        lower >>= _HALF
        upper += lower
        upper >>= _HALF
        return upper
    # No sum here is past 64 bits: (2^32 - 1)^2 + 2 (2^32 - 1) = 2^64 - 1.
    middle = lower * below
    middle >>= _HALF
    middle += upper * below
    crossed = lower * above
    upper *= above
    upper += crossed >> _HALF
    crossed &= _LOW_HALF
    middle += crossed
    middle >>= _HALF
    upper += middle
    return upper
