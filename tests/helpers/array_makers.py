"""Every function that makes a block of a random array, or of any shape, by a name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from mpimesh.arrays.indexed import flat_indices, full_block
from mpimesh.arrays.random_numbers import (
    bernoulli_block,
    exponential_block,
    integers_block,
    normal_block,
    random_block,
    uniform_block,
)
from mpimesh.layout import Box

KEY = 0x0123456789ABCDEF

RANDOM: dict[str, Callable[..., Any]] = {
    "random": lambda s, b, **o: random_block(KEY, s, b, **o),
    "random float32": lambda s, b, **o: random_block(KEY, s, b, np.float32, **o),
    "random float16": lambda s, b, **o: random_block(KEY, s, b, np.float16, **o),
    "random bfloat16": lambda s, b, **o: random_block(KEY, s, b, ml_dtypes.bfloat16, **o),
    "uniform": lambda s, b, **o: uniform_block(KEY, -3.0, 7.5, s, b, **o),
    "uniform float16": lambda s, b, **o: uniform_block(KEY, -3.0, 7.5, s, b, np.float16, **o),
    "normal": lambda s, b, **o: normal_block(KEY, s, b, loc=2.0, scale=3.0, **o),
    "normal float32": lambda s, b, **o: normal_block(KEY, s, b, np.float32, **o),
    "normal bfloat16": lambda s, b, **o: normal_block(KEY, s, b, ml_dtypes.bfloat16, **o),
    "exponential": lambda s, b, **o: exponential_block(KEY, s, b, scale=0.5, **o),
    "bernoulli": lambda s, b, **o: bernoulli_block(KEY, 0.3, s, b, **o),
    "bernoulli float32": lambda s, b, **o: bernoulli_block(KEY, 1.0, s, b, np.float32, **o),
    "dice": lambda s, b, **o: integers_block(KEY, 1, 6, s, b, np.int8, endpoint=True, **o),
    "all integers": lambda s, b, **o: integers_block(KEY, -(2**63), 2**63, s, b, **o),
    # Every fourth word is refused.
    "refused": lambda s, b, **o: integers_block(KEY, 5, 5 + 3 * 2**62, s, b, np.uint64, **o),
}
"""Functions of a shape, a box, and options."""

ANY_SHAPE: dict[str, Callable[..., Any]] = {
    **RANDOM,
    "numbers": flat_indices,
    "full": lambda s, b, **o: full_block(7, s, b, np.int16, **o),
}
"""Those, and the others that take any shape."""


def whole(make: Any, shape: tuple[int, ...], **options: Any) -> Any:
    """Return the whole array."""
    return make(shape, everything(shape), **options)


def everything(shape: tuple[int, ...]) -> Box:
    """Return the box that is the whole array."""
    return tuple((0, extent) for extent in shape)


def slices(box: Box) -> tuple[slice, ...]:
    """Return what takes a box out of the whole array."""
    return tuple(slice(start, stop) for start, stop in box)
