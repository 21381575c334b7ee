"""Random bits by number: any word of any row at once, without those before it.

A row is a stream of SplitMix64 (Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014; the constants of its mixing
function are Stafford's variant 13 of MurmurHash3's): word j of a stream is
``mix(start + (j + 1) * GAMMA)``. What a row starts with is mixed from a key and
its number in the same way.

An array is one long stream, with a word for each element. Such streams have a
step ("gamma") of their own in place of the golden ratio, drawn as the paper
draws it: two streams may meet in single words, never run along each other.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from mpimesh.arrays.types import Array
from mpimesh.errors import ArrayValueError

__all__ = ["WordStream", "key_of", "random_words"]

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
    """A stream of 2^64 words, no two of them equal, each found by its number.

    Attributes:
        start: What the numbers count from.
        gamma: The odd step from one word's state to the next one's.

    Example:
        >>> stream = WordStream.of(key_of(7, 0))
        >>> numbers = np.array([3, 2**64 - 1], np.uint64)
        >>> bool((stream.words(np, numbers)[1:] == stream.words(np, numbers[1:])).all())
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

    def words(self, xp: ModuleType, numbers: Array) -> Array:
        """Return the words with `numbers`, any uint64.

        Shapes:
            numbers, result: any, the same; uint64.

        Cost:
            Two multiplications and nine other passes over memory of the size of `numbers`.
        """
        words = self.scaled(numbers)
        self.fill(xp, words, 0, words, xp.empty_like(words))
        return words

    def scaled(self, numbers: Array) -> Array:
        """Return what `fill` takes for `numbers`; made once for many bases."""
        return numbers * np.uint64(self.gamma)

    def fill(self, xp: ModuleType, scaled: Array, base: int, out: Array, scratch: Array) -> None:
        """Write the words with the numbers ``base + numbers`` to `out`.

        Shapes:
            scaled, out, scratch: any, the same; uint64. `out` may be `scaled`.
        """
        state = (self.start + (base + 1) * self.gamma) & _WORD
        xp.add(scaled, np.uint64(state), out=out)
        _mix(xp, out, scratch)


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
