"""Checks that several layers share, and the dtype in which they add up."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpimesh.arguments import as_int, as_real
from mpimesh.arrays.types import Array, DType
from mpimesh.errors import DTypeError, ModuleError, ShapeError
from mpimesh.nn.context import Context
from mpimesh.nn.foreign import tensor_advice
from mpimesh.nn.parameter import FLOAT_NAMES, is_float_dtype

__all__ = [
    "check_context",
    "check_eps",
    "check_extent",
    "check_features",
    "check_floats",
    "check_integers",
    "first_outside",
    "sum_dtype",
]


def check_context(layer: object, ctx: object) -> None:
    """Refuse a context that is none, such as a mask given beside `x`.

    Raises:
        ModuleError: If `ctx` is refused.
    """
    if ctx is not None and not isinstance(ctx, Context):
        raise ModuleError(
            f"{layer!r}: beside x a layer takes an nn.Context, or None for inference, got "
            f"{type(ctx).__name__}; a mask goes with x, in a tuple: (x, mask)"
        )


def check_floats(layer: object, x: Array, dtype: DType | None = None, *, name: str = "x") -> None:
    """Refuse an input that is no float array of rows, or not of the layer's dtype.

    Raises:
        DTypeError: If `x` is refused for its dtype.
        ShapeError: If it has no axis.
    """
    given = getattr(x, "dtype", None)
    # NumPy takes None for float64, also in a comparison.
    if given is None or not is_float_dtype(given):
        got = type(x).__name__ if given is None else given
        raise DTypeError(
            f"{layer!r}: {name} must be an array of {FLOAT_NAMES}, got {got}"
            f"{tensor_advice(name, x)}"
        )
    if not x.shape:
        raise ShapeError(f"{layer!r}: {name} must have rows, that is shape (rows, ...), got ()")
    if dtype is not None and given != dtype:
        raise DTypeError(
            f"{layer!r}: {name} must be {dtype} like the parameters, got {given}; "
            f"use {name}.astype('{dtype}'), or make the model with dtype='{given}'"
        )


def check_integers(layer: object, x: Array) -> None:
    """Refuse an input that is no array of integers.

    Raises:
        DTypeError: If `x` is refused.
    """
    dtype = getattr(x, "dtype", None)
    # A dtype of another library has no kind.
    if getattr(dtype, "kind", "") not in ("i", "u"):
        got = type(x).__name__ if dtype is None else dtype
        raise DTypeError(
            f"{layer!r}: x must be an array of integers, got {got}{tensor_advice('x', x)}"
        )


def check_features(layer: object, x: Array, features: int) -> None:
    """Refuse an input whose last axis is not `features` long.

    Raises:
        ShapeError: If `x` is refused.
    """
    if x.ndim == 0 or x.shape[-1] != features:
        raise ShapeError(f"{layer!r}: x must have shape (..., {features}), got {tuple(x.shape)}")


def check_extent(name: str, value: Any) -> int:
    """Return `value` as an int of at least 1.

    Raises:
        ModuleError: If it is none.
    """
    return as_int(value, name, ModuleError, least=1)


def check_eps(value: Any) -> float:
    """Return `value` as a float above 0.

    Raises:
        ModuleError: If it is none.
    """
    return as_real(value, "eps", ModuleError, above=0)


def first_outside(values: Array, wrong: Array) -> str:
    """Return text on the first of `values` where `wrong` holds, with its place."""
    flat = int(wrong.reshape(-1).argmax())
    place = tuple(int(i) for i in np.unravel_index(flat, values.shape))
    return f"{int(values.reshape(-1)[flat])} at {place}"


def sum_dtype(dtype: DType) -> DType:
    """Return the dtype in which values of `dtype` are added up: float32 at least."""
    return np.dtype(np.float32) if dtype.itemsize < 4 else np.dtype(dtype)
