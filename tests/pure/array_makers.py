"""Every function that makes a block of a random array, or of any shape, by a name."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpimesh.arrays.boxes import Box, flat_indices
from mpimesh.arrays.indexed import full_block
from mpimesh.arrays.indexed_integers import integers_block
from mpimesh.arrays.indexed_random import (
    bernoulli_block,
    exponential_block,
    normal_block,
    random_block,
    uniform_block,
)

KEY = 0x0123456789ABCDEF

RANDOM = {
    "random": lambda *a, **o: random_block(KEY, *a, **o),
    "random float32": lambda *a, **o: random_block(KEY, *a, np.float32, **o),
    "random float16": lambda *a, **o: random_block(KEY, *a, np.float16, **o),
    "uniform": lambda *a, **o: uniform_block(KEY, -3.0, 7.5, *a, **o),
    "uniform float16": lambda *a, **o: uniform_block(KEY, -3.0, 7.5, *a, np.float16, **o),
    "normal": lambda *a, **o: normal_block(KEY, *a, loc=2.0, scale=3.0, **o),
    "normal float32": lambda *a, **o: normal_block(KEY, *a, np.float32, **o),
    "exponential": lambda *a, **o: exponential_block(KEY, *a, scale=0.5, **o),
    "bernoulli": lambda *a, **o: bernoulli_block(KEY, 0.3, *a, **o),
    "bernoulli float32": lambda *a, **o: bernoulli_block(KEY, 1.0, *a, np.float32, **o),
    "dice": lambda *a, **o: integers_block(KEY, 1, 6, *a, np.int8, endpoint=True, **o),
    "all integers": lambda *a, **o: integers_block(KEY, -(2**63), 2**63, *a, **o),
    # Every fourth word is refused.
    "refused": lambda *a, **o: integers_block(KEY, 5, 5 + 3 * 2**62, *a, np.uint64, **o),
}
"""Functions of a shape, a box, and options."""

ANY_SHAPE = {
    **RANDOM,
    "numbers": flat_indices,
    "full": lambda *a, **o: full_block(7, *a, np.int16, **o),
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
