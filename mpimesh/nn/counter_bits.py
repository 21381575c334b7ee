"""Random bits by number: any word of any row at once, without those before it.

A row is a stream of SplitMix64 (Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014; the constants of its mixing
function are Stafford's variant 13 of MurmurHash3's): word j of a stream is
``mix(start + (j + 1) * GAMMA)``. What a row starts with is mixed from a key and
its number in the same way.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np

from mpimesh.arrays.types import Array

__all__ = ["key_of", "random_words"]

_WORD = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def key_of(*numbers: int) -> int:
    """Return a key of 64 bits that depends on all `numbers` and their order."""
    key = 0
    for number in numbers:
        # All 64-bit digits, and how many: large seeds count to their last bit.
        digits = [number & _WORD]
        while number := number >> 64:
            digits.append(number & _WORD)
        for digit in (len(digits), *digits):
            key = _mixed(((key ^ digit) + _GAMMA) & _WORD)
    return key


def random_words(xp: ModuleType, key: int, rows: Array, count: int) -> Array:
    """Return the first `count` words of the streams of `rows`.

    Shapes:
        rows: (n,), uint64.
        result: (n, count), uint64.
    """
    gamma = np.uint64(_GAMMA)
    starts = rows * gamma
    starts += np.uint64(key)
    _mix(xp, starts)
    steps = xp.arange(1, count + 1, dtype=xp.uint64)
    steps *= gamma
    words = starts[:, None] + steps
    _mix(xp, words)
    return words


def _mix(xp: ModuleType, words: Array) -> None:
    """Mix each of `words` in place."""
    shifted = words >> np.uint64(30)
    words ^= shifted
    words *= np.uint64(_FIRST)
    xp.right_shift(words, np.uint64(27), out=shifted)
    words ^= shifted
    words *= np.uint64(_SECOND)
    xp.right_shift(words, np.uint64(31), out=shifted)
    words ^= shifted


def _mixed(word: int) -> int:
    """Return what `_mix` makes of one word."""
    word = ((word ^ (word >> 30)) * _FIRST) & _WORD
    word = ((word ^ (word >> 27)) * _SECOND) & _WORD
    return word ^ (word >> 31)
