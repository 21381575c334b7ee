"""Dropout whose masks belong to the global batch, not to who computes them."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from mpimesh.arrays.counter_bits import key_of, random_words
from mpimesh.arrays.namespace import namespace
from mpimesh.arrays.types import Array
from mpimesh.errors import ModuleError, ModuleStateError, ShapeError
from mpimesh.nn.checks import check_floats
from mpimesh.nn.context import Context
from mpimesh.nn.module import Module

__all__ = ["Dropout"]

_BLOCK_WORDS = 1 << 13
# Words drawn at a time: 64 KiB, which stay in the fast caches.


class Dropout(Module):
    """Set a share `p` of the values to 0 and divide the others by ``1 - p``.

    Active only in training: with a context whose `training` is set, and while
    the module `is_training`. Otherwise the identity.

    Whether a value stays depends on the model's seed, the layer's global index,
    ``ctx.step``, the global index of its row (``ctx.first_row + i``) and its place
    in the row, and on nothing else: any cut of the batch into microbatches and
    ranks drops the same values. A layer that is used twice in one pass drops the
    same places twice.

    Shapes:
        x, result: (rows, ...), the same.

    Cost:
        One 64-bit hash for two values. Saves one byte for each value.

    Args:
        p: The share to drop, in [0, 1), exact to 2^-32.

    Raises:
        ModuleError: If `p` is out of range.
    """

    def __init__(self, p: float = 0.5) -> None:
        if not 0 <= p < 1:
            raise ModuleError(f"p must be in [0, 1), got {p!r}")
        self.p = float(p)
        self._place: tuple[int, int] | None = None

    def materialize(
        self, *, seed: int, dtype: Any = np.float32, xp: ModuleType = np, index: int = 0
    ) -> None:
        """Take note of the model's seed and of the layer's place; see `Module.materialize`."""
        super().materialize(seed=seed, dtype=dtype, xp=xp, index=index)
        self._place = (seed, index)

    def forward(self, x: Array, ctx: Context | None = None) -> Array:
        """Return `x` with a share dropped, or in inference `x` itself.

        Raises:
            ShapeError: If `x` has no rows to number, that is no axis.
            ModuleStateError: If the layer is to drop and is not materialised.
        """
        check_floats(self, x)
        if ctx is None:
            return x
        mask = None
        y = x
        if self.p and ctx.training and self.is_training():
            mask = self._mask(x, ctx)
            y = self._apply(x, mask)
        ctx.save(self, y.shape, y.dtype, mask)
        return y

    def backward_input(self, dy: Array, ctx: Context) -> Array | None:
        """Return `dy` with the same share dropped."""
        (mask,) = self._take(dy, ctx)
        return dy if mask is None else self._apply(dy, mask)

    def _apply(self, x: Array, mask: Array) -> Array:
        y = namespace(x).where(mask, x, x.dtype.type(0))
        y *= 1.0 / (1.0 - self.p)
        return y

    def _mask(self, x: Array, ctx: Context) -> Array:
        """Return which values of `x` stay."""
        if x.ndim == 0:
            raise ShapeError(f"{self!r}: x must have shape (rows, ...), got ()")
        if self._place is None:
            raise ModuleStateError(
                f"{self!r}: its masks depend on the model's seed and its place in it: call "
                "materialize(seed=...) on it, or on the model or stage that holds it, first"
            )
        xp = namespace(x)
        mask = xp.empty(x.shape, bool)
        if not x.size:
            return mask
        rows = mask.reshape(x.shape[0], -1)
        first, odd = divmod(self._first_value(x), 2)
        words = (odd + rows.shape[1] + 1) // 2
        key = key_of(*self._place, ctx.step)
        least = np.uint32(min(round(self.p * 2**32), 2**32 - 1))
        length = max(1, _BLOCK_WORDS // words) if xp is np else rows.shape[0]
        for start in range(0, rows.shape[0], length):
            block = rows[start : start + length]
            numbers = xp.arange(block.shape[0], dtype=xp.uint64)
            numbers += np.uint64(ctx.first_row + start)
            # Two values share a word: the lower half comes first, on any machine.
            drawn = random_words(xp, key, numbers, words, first=first)
            halves = drawn.astype("<u8", copy=False).view("<u4")
            xp.greater_equal(halves[:, odd : odd + block.shape[1]], least, out=block)
        return mask

    def _first_value(self, x: Array) -> int:
        """Return the place in the whole row of the first value of each row of `x`."""
        return 0

    def __repr__(self) -> str:
        return f"Dropout({self.p:g})"
