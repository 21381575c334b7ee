"""One vector for a sequence, and vectors of length 1."""

from __future__ import annotations

from typing import Any

from mpimesh.arrays.namespace import namespace
from mpimesh.arrays.types import Array
from mpimesh.nn.checks import check_eps, check_floats, sum_dtype
from mpimesh.nn.context import Context
from mpimesh.nn.masked import check_sequence, parted
from mpimesh.nn.module import Module

__all__ = ["MeanPool", "Normalize"]


class MeanPool(Module):
    """The mean of a sequence's vectors, without those of padding; 0 where there is no token.

    Shapes:
        x: (batch, tokens, features), or that and a mask of shape (batch, tokens), True where
            there is a token, in a tuple.
        result: (batch, features).

    Cost:
        Saves the mask.
    """

    def forward(self, x: Any, ctx: Context | None = None) -> Array:
        """Return the means.

        Raises:
            ShapeError: If `x` has another shape, or the mask does not fit it.
            DTypeError: If `x` is no float array, or the mask not boolean.
            ModuleError: If `x` is a tuple of something else.
        """
        x, mask = parted(self, x, ctx)
        check_sequence(self, x, mask)
        share = self._share(x.shape, mask, sum_dtype(x.dtype), namespace(x))
        y = (x * share[..., None]).sum(axis=1, dtype=share.dtype).astype(x.dtype, copy=False)
        if ctx is not None:
            ctx.save(self, y.shape, y.dtype, share, mask is not None)
        return y

    def backward_input(self, dy: Array, ctx: Context) -> Any:
        """Return to each token its share of `dy`; with a mask, a tuple of that and None."""
        share, masked = self._take(dy, ctx)
        dx = (share[..., None] * dy[:, None]).astype(dy.dtype, copy=False)
        return (dx, None) if masked else dx

    @staticmethod
    def _share(shape: tuple[int, ...], mask: Array | None, wide: Any, xp: Any) -> Array:
        """Return what each token's vector counts in the mean: (batch, tokens)."""
        if mask is None:
            return xp.full(shape[:2], 1.0 / max(shape[1], 1), wide)
        share = mask.astype(wide)
        share /= xp.maximum(share.sum(axis=1, keepdims=True), wide.type(1))
        return share


class Normalize(Module):
    """``y = x / max(norm(x), eps)``, over the last axis of `x`: vectors of length 1.

    Shapes:
        x, result: (..., features).

    Cost:
        Saves `y`, and one number for each leading index.

    Args:
        eps: The least to divide by; above 0.

    Raises:
        ModuleError: If `eps` is not above 0.
    """

    mixes_features = True

    def __init__(self, *, eps: float = 1e-12) -> None:
        self.eps = check_eps(eps)

    def forward(self, x: Array, ctx: Context | None = None) -> Array:
        """Return `x` with vectors of length 1.

        Raises:
            DTypeError: If `x` is no float array.
        """
        check_floats(self, x)
        xp, wide = namespace(x), sum_dtype(x.dtype)
        norm = xp.sqrt(xp.square(x.astype(wide, copy=False)).sum(axis=-1, keepdims=True))
        y = (x / xp.maximum(norm, wide.type(self.eps))).astype(x.dtype, copy=False)
        if ctx is not None:
            ctx.save(self, y.shape, y.dtype, y, norm)
        return y

    def backward_input(self, dy: Array, ctx: Context) -> Array | None:
        """Return ``(dy - y * (y . dy)) / norm``; where the norm is below `eps`, ``dy / eps``."""
        y, norm = self._take(dy, ctx)
        xp, wide = namespace(dy), norm.dtype
        towards = (y.astype(wide, copy=False) * dy).sum(axis=-1, keepdims=True)
        towards = xp.where(norm > self.eps, towards, wide.type(0))
        dx = (dy - y * towards) / xp.maximum(norm, wide.type(self.eps))
        return dx.astype(dy.dtype, copy=False)

    def __repr__(self) -> str:
        return f"Normalize(eps={self.eps:g})"
