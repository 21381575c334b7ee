"""Means along rows and sums over rows, which the normalising layers share."""

from __future__ import annotations

from mpimesh.arrays.types import Array
from mpimesh.nn.checks import sum_dtype

__all__ = ["column_sum", "row_mean"]


def row_mean(a: Array, b: Array) -> Array:
    """Return the mean of ``a * b`` along the last axis, which stays, in the wider dtype."""
    return (a * b).mean(axis=-1, keepdims=True)


def column_sum(x: Array) -> Array:
    """Return the sum of `x` over all axes but the last."""
    return x.reshape(-1, x.shape[-1]).sum(axis=0, dtype=sum_dtype(x.dtype))
