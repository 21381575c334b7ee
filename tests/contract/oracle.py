"""Results of each operation, worked out by NumPy from all ranks' inputs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

_UFUNCS = {
    "sum": np.add,
    "mean": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}


def reduced(inputs: Sequence[Any], op: str) -> Any:
    """Reduce arrays of one dtype element by element; halves in float32."""
    dtype = np.asarray(inputs[0]).dtype
    half = dtype.itemsize < 4 and (dtype.kind == "f" or dtype.type.__module__ == "ml_dtypes")
    wide = np.dtype("f4") if half else dtype.newbyteorder("=")
    stacked = np.stack([np.asarray(x).astype(wide) for x in inputs])
    with np.errstate(all="ignore"):
        total = _UFUNCS[op].reduce(stacked, axis=0, dtype=wide)
        total = total / len(inputs) if op == "mean" else total
        return np.asarray(total).astype(dtype)


def joined(inputs: Sequence[Any], axis: int = 0) -> Any:
    """Join arrays of one dtype."""
    dtype = np.asarray(inputs[0]).dtype  # NumPy alone would turn the bytes of '>f8'
    return np.concatenate([np.atleast_1d(x) for x in inputs], axis=axis).astype(dtype, copy=False)


def cut(x: Any, axis: int, sizes: Sequence[int]) -> list[Any]:
    """Cut an array into blocks of these sizes."""
    x = np.asarray(x)
    before = (slice(None),) * (axis % x.ndim)
    return [
        x[(*before, slice(end - size, end))]
        for size, end in zip(sizes, accumulate(sizes), strict=True)
    ]


def equal_sizes(total: int, parts: int) -> list[int]:
    """Sizes of equal blocks."""
    assert total % parts == 0
    return [total // parts] * parts


def uneven(parts: int, seed: int = 0) -> list[int]:
    """Block sizes that differ, 0 among them from two parts on."""
    return [(2 * part + seed) % 3 for part in range(parts)]
