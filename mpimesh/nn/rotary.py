"""Positions told by rotation."""

from __future__ import annotations

from types import ModuleType

import numpy as np

from mpimesh.arguments import as_flag, as_real
from mpimesh.arrays.namespace import namespace
from mpimesh.arrays.types import Array, DType
from mpimesh.errors import ModuleError, ShapeError
from mpimesh.nn.checks import check_extent, check_floats, sum_dtype
from mpimesh.nn.context import Context
from mpimesh.nn.module import Module

__all__ = ["Rotary"]


class Rotary(Module):
    """Turn each pair of values of a head by an angle that grows with the place of its token.

    Of Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021): pair i
    of the token at place t is turned by ``t * base**(-2 * i / head_dim)``, so that the product of
    a query and a key depends on their distance only. Angles are computed in float64, and float16
    is turned in float32.

    Shapes:
        x, result: (batch, tokens, heads, head_dim).

    Cost:
        Saves nothing: backward turns back. Keeps the sines and cosines of the longest input.

    Args:
        head_dim: Length of a head; even.
        base: Of the angles; above 0.
        interleaved: Whether the values ``2 * i`` and ``2 * i + 1`` are a pair, as in the paper;
            else ``i`` and ``i + head_dim / 2``, as in most models whose weights are published.

    Raises:
        ModuleError: If `head_dim` is not even and at least 2, or `base` not above 0.
    """

    mixes_features = True

    def __init__(self, head_dim: int, *, base: float = 10000.0, interleaved: bool = False) -> None:
        self.head_dim = check_extent("head_dim", head_dim)
        if self.head_dim % 2:
            raise ModuleError(f"head_dim must be even to be cut into pairs, got {head_dim}")
        self.base = as_real(base, "base", ModuleError, above=0)
        self.interleaved = as_flag(interleaved, "interleaved", ModuleError)
        self._tables: dict[tuple[str, str], tuple[Array, Array]] = {}

    def forward(self, x: Array, ctx: Context | None = None) -> Array:
        """Return `x` turned.

        Raises:
            ShapeError: If `x` has another shape.
            DTypeError: If `x` is no float array.
        """
        check_floats(self, x)
        if x.ndim != 4 or x.shape[-1] != self.head_dim:
            raise ShapeError(
                f"{self!r}: x must have shape (batch, tokens, heads, {self.head_dim}), "
                f"got {tuple(x.shape)}"
            )
        y = self._turned(x, 1.0)
        if ctx is not None:
            ctx.save(self, y.shape, y.dtype)
        return y

    def backward_input(self, dy: Array, ctx: Context) -> Array | None:
        """Return `dy` turned back."""
        self._take(dy, ctx)
        return self._turned(dy, -1.0)

    def _turned(self, x: Array, sense: float) -> Array:
        xp, wide = namespace(x), sum_dtype(x.dtype)
        cos, sin = self._table(xp, wide, x.shape[1])
        sin = sin * wide.type(sense)
        half = self.head_dim // 2
        first, second = (
            (slice(0, None, 2), slice(1, None, 2))
            if self.interleaved
            else (slice(0, half), slice(half, None))
        )
        given, x = x.dtype, x.astype(wide, copy=False)
        y = xp.empty(x.shape, wide)
        y[..., first] = x[..., first] * cos - x[..., second] * sin
        y[..., second] = x[..., second] * cos + x[..., first] * sin
        return y.astype(given, copy=False)

    def _table(self, xp: ModuleType, wide: DType, tokens: int) -> tuple[Array, Array]:
        """Return the cosines and sines as (tokens, 1, head_dim / 2)."""
        key = (xp.__name__, str(wide))
        found = self._tables.get(key)
        if found is None or found[0].shape[0] < tokens:
            speeds = self.base ** (-np.arange(0, self.head_dim, 2) / self.head_dim)
            angles = (np.arange(tokens)[:, None] * speeds)[:, None]
            found = (
                xp.asarray(np.cos(angles).astype(wide)),
                xp.asarray(np.sin(angles).astype(wide)),
            )
            self._tables[key] = found
        return found[0][:tokens], found[1][:tokens]

    def __repr__(self) -> str:
        kind = ", interleaved=True" if self.interleaved else ""
        return f"Rotary({self.head_dim}, base={self.base:g}{kind})"
