"""An array that may come with a padding mask, as a tuple of both."""

from __future__ import annotations

from typing import Any

from mpimesh.arrays.types import Array
from mpimesh.errors import ModuleError, ShapeError
from mpimesh.nn.attend import check_mask
from mpimesh.nn.checks import check_context, check_floats

__all__ = ["check_sequence", "joined", "parted"]


def parted(
    layer: object, x: Any, ctx: object = None, *, what: str = "x"
) -> tuple[Array, Array | None]:
    """Return the array and the mask of ``(array, mask)``, or an array alone and None.

    Args:
        layer: Who was given `x`.
        x: What was given.
        ctx: What was given beside it: it may be the mask.
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
