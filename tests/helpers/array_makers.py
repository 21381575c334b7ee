"""Every function that makes a block of a random array, or of any shape, by a name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from mpimesh.arrays.random_numbers import (
    bernoulli_block,
    exponential_block,
    integers_block,
    normal_block,
    uniform_block,
)
from mpimesh.layout import Box

KEY = 0x0123456789ABCDEF

RANDOM: dict[str, Callable[..., Any]] = {
    "random": lambda s, b: random_block(KEY, s, b),
    "uniform": lambda s, b: uniform_block(KEY, -3.0, 7.5, s, b),
    "uniform float16": lambda s, b: uniform_block(KEY, -3.0, 7.5, s, b, np.float16),
    "normal": lambda s, b: normal_block(KEY, s, b, loc=2.0, scale=3.0),
    "normal float32": lambda s, b: normal_block(KEY, s, b, np.float32),
    "normal bfloat16": lambda s, b: normal_block(KEY, s, b, ml_dtypes.bfloat16),
    "exponential": lambda s, b: exponential_block(KEY, s, b, scale=0.5),
    "bernoulli": lambda s, b: bernoulli_block(KEY, 0.3, s, b),
    "bernoulli float32": lambda s, b: bernoulli_block(KEY, 1.0, s, b, np.float32),
    "dice": lambda s, b: integers_block(KEY, 1, 6, s, b, np.int8, endpoint=True),
    "all integers": lambda s, b: integers_block(KEY, -(2**63), 2**63, s, b),
    # Every fourth word is refused.
    "refused": lambda s, b: integers_block(KEY, 5, 5 + 3 * 2**62, s, b, np.uint64),
}
"""Functions of a shape and a box."""


def random_block(key: int, shape: tuple[int, ...], box: Box) -> Any:
    """Return a block of numbers spread evenly over [0, 1)."""
    return uniform_block(key, 0.0, 1.0, shape, box)


def whole(make: Any, shape: tuple[int, ...]) -> Any:
    """Return the whole array."""
    return make(shape, everything(shape))


def everything(shape: tuple[int, ...]) -> Box:
    """Return the box that is the whole array."""
    return tuple((0, extent) for extent in shape)


def slices(box: Box) -> tuple[slice, ...]:
    """Return what takes a box out of the whole array."""
    return tuple(slice(start, stop) for start, stop in box)
