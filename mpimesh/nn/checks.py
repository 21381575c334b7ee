"""Checks and their messages that several layers share, and the dtype in which layers add up."""

from __future__ import annotations

import sys
from types import FunctionType
from typing import Any

import numpy as np

from mpimesh.arguments import as_int, as_real
from mpimesh.arrays.namespace import Array, DType
from mpimesh.errors import DTypeError, ModuleError, ShapeError
from mpimesh.nn.parameter import FLOAT_NAMES, is_float_dtype
from mpimesh.nn.protocol import Context

__all__ = [
    "check_context",
    "check_eps",
    "check_extent",
    "check_features",
    "check_floats",
    "check_integers",
    "check_mask",
    "check_sequence",
    "first_outside",
    "joined",
    "layer_advice",
    "loss_advice",
    "parted",
    "sum_dtype",
    "tensor_advice",
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
    found = getattr(x, "dtype", None)
    # NumPy takes None for float64, also in a comparison.
    if found is None or not is_float_dtype(found):
        got = type(x).__name__ if found is None else found
        raise DTypeError(
            f"{layer!r}: {name} must be an array of {FLOAT_NAMES}, got {got}"
            f"{tensor_advice(name, x)}"
        )
    if not x.shape:
        raise ShapeError(f"{layer!r}: {name} must have rows, that is shape (rows, ...), got ()")
    if dtype is not None and found != dtype:
        raise DTypeError(
            f"{layer!r}: {name} must be {dtype} like the parameters, got {found}; "
            f"use {name}.astype('{dtype}'), or make the model with dtype='{found}'"
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


def parted(
    layer: object, x: Any, ctx: object = None, *, what: str = "x"
) -> tuple[Array, Array | None]:
    """Return the array and the mask of ``(array, mask)``, or an array alone and None.

    Args:
        layer: The layer, for messages.
        x: The argument.
        ctx: The second argument, which may be the mask by mistake.
        what: What `x` is called.

    Raises:
        ModuleError: If `x` is a tuple of something else, or `ctx` is no Context.
    """
    check_context(layer, ctx)
    if not isinstance(x, tuple):
        return x, None
    if len(x) != 2:
        raise ModuleError(
            f"{layer!r}: {what} must be an array, or the tuple (array, mask), got {len(x)} items"
        )
    return x


def joined(x: Array, mask: object) -> Any:
    """Return what goes on behind a layer: `x` with what stands for its mask, if it has one."""
    return x if mask is None else (x, mask)


def check_mask(mask: Array, shape: tuple[int, int]) -> None:
    """Refuse a mask that is not boolean or of another shape.

    Raises:
        ShapeError: If its shape differs.
        DTypeError: If it is not boolean.
    """
    if getattr(mask, "dtype", None) != np.dtype(bool):
        got = getattr(mask, "dtype", type(mask).__name__)
        raise DTypeError(
            "a mask must be a boolean array, True where there is a token, False where there is "
            f"padding, got {got}; use mask != 0 on one of numbers"
        )
    if tuple(mask.shape) != shape:
        raise ShapeError(f"the mask must have shape (batch, keys), {shape}, got {mask.shape}")


def check_sequence(layer: object, x: Array, mask: Array | None) -> None:
    """Refuse what is no batch of sequences of vectors, or a mask that is not its.

    Raises:
        ShapeError: If `x` is not of shape (batch, tokens, features), or the mask does not fit.
        DTypeError: If `x` is no float array, or the mask not boolean.
    """
    check_floats(layer, x)
    if x.ndim != 3:
        raise ShapeError(f"{layer!r}: x must have shape (batch, tokens, features), got {x.shape}")
    if mask is not None:
        check_mask(mask, tuple(x.shape[:2]))


def layer_advice(one: object) -> str:
    """Return what to do with a module that is no layer; nothing if it is not PyTorch's."""
    return _if_torch(one, "; for a module of PyTorch, use mpimesh.interop.torch.wrap")


def loss_advice(one: object) -> str:
    """Return what to do with a module that is no loss; nothing if it is not PyTorch's."""
    return _if_torch(one, "; for a loss of PyTorch, use mpimesh.interop.torch.wrap_loss") or (
        "; for a function of PyTorch's tensors, use mpimesh.interop.torch.wrap_loss"
        if isinstance(one, FunctionType) and "torch" in sys.modules
        else ""
    )


def tensor_advice(name: str, one: object) -> str:
    """Return what to do with the tensor called `name`; nothing if it is not PyTorch's."""
    return _if_torch(one, f"; for a tensor of PyTorch, use {name}.numpy()")


def _if_torch(one: object, advice: str) -> str:
    # Any class that PyTorch has made, or that derives from one; or a function or a class of its.
    return advice if any(_package(this) == "torch" for this in (one, *type(one).__mro__)) else ""


def _package(one: object) -> str:
    return str(getattr(one, "__module__", "")).partition(".")[0]
