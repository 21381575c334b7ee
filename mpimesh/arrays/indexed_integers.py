"""Random integers and permutations by the number of each element; see `indexed_random`."""

from __future__ import annotations

import operator
from types import ModuleType
from typing import Any

import numpy as np

from mpimesh.arrays.boxes import Box, Pieces, block_for
from mpimesh.arrays.counter_bits import WordStream, key_of
from mpimesh.arrays.indexed_random import drawn_words
from mpimesh.arrays.types import Array, DType
from mpimesh.errors import ArrayValueError, DTypeError

__all__ = ["integers_block", "permutation"]

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
    xp: ModuleType = np,
    out: Array | None = None,
) -> Array:
    """Return a block of random integers from `low` on and below `high`, all equally likely.

    The method is Lemire's, "Fast random integer generation in an interval", ACM Transactions
    on Modeling and Computer Simulation 29 (2019): with n integers to choose from, the upper
    half of the 128-bit product ``word * n``; where its lower half is less than
    ``2^64 mod n``, the word is refused. Element i then tries word i of the key's second
    stream, then of its third, so that its value still depends on no other element.

    Shapes:
        out, result: that of `box`.

    Args:
        key: The array's, from `key_of`.
        low: The least value.
        high: What all values are below, or, with `endpoint`, the largest value.
        shape: The whole array's.
        box: The block's place in it.
        dtype: Any of integers, or bool.
        endpoint: Whether `high` is one of the values.
        xp: Whose array to make, where there is no `out`.
        out: Where the block is written to, C-contiguous.

    Raises:
        ShapeError: If the box is not in the array, or `out` does not fit it.
        DTypeError: If `dtype` is none of integers, or not that of `out`.
        ArrayValueError: If there is no integer in the range, `dtype` cannot hold all of them,
            a bound is no integer, or `key` is no number of 64 bits.

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
    xp, block = block_for(shape, box, wanted, xp, out)
    flat = block.reshape(-1)
    choices = last - low + 1
    refused_below = _ALL_WORDS % choices
    pieces = Pieces.of(shape, box, xp=xp)
    for place, words, base in drawn_words(xp, key, pieces):
        values = _upper_product(words, choices)
        if refused_below:
            words *= np.uint64(choices)
            refused = xp.flatnonzero(words < np.uint64(refused_below))
            if refused.size:
                numbers = pieces.offsets[refused] + np.uint64(base)
                values[refused] = _retried(xp, key, numbers, choices, refused_below)
        values += np.uint64(low % _ALL_WORDS)
        flat[place] = values.view(np.int64) if wanted.kind == "i" else values
    return block


def permutation(key: int, n: int, *, xp: ModuleType = np) -> Array:
    """Return the numbers from 0 to n - 1 in a random order, whole, the same on every rank.

    They are put in the order of their words. No two words of a stream are equal, so there
    are no ties, and every way of sorting gives the same result (sorting by random keys: Knuth,
    "The Art of Computer Programming", volume 2, section 3.4.2).

    Shapes:
        result: (n,), int64.

    Args:
        key: The permutation's, from `key_of`.
        n: How many numbers.
        xp: Whose array to make.

    Raises:
        ArrayValueError: If `n` is negative, or `key` is no number of 64 bits.

    Cost:
        A sort of n words, and memory for twice as many.

    Example:
        >>> sorted(permutation(7, 5).tolist())
        [0, 1, 2, 3, 4]
    """
    if n < 0:
        raise ArrayValueError(f"a permutation has a length from 0 on, got {n}")
    words = xp.empty(n, np.uint64)
    for place, part, _ in drawn_words(xp, key, Pieces.of((n,), ((0, n),), xp=xp)):
        words[place] = part
    return xp.argsort(words)


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


def _retried(xp: ModuleType, key: int, numbers: Array, choices: int, refused_below: int) -> Array:
    """Return values for the elements with `numbers`, whose first words were refused."""
    values = xp.empty_like(numbers)
    waiting = xp.arange(numbers.size, dtype=np.int64)
    attempt = 0
    while waiting.size:
        attempt += 1
        words = WordStream.of(key_of(key, attempt)).words(xp, numbers[waiting])
        values[waiting] = _upper_product(words, choices)
        words *= np.uint64(choices)
        waiting = waiting[words < np.uint64(refused_below)]
    return values


def _upper_product(words: Array, choices: int) -> Array:
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
