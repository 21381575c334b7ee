"""Dropout whose masks belong to the global batch, not to who computes them."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import numpy as np

from mpimesh.arrays.namespace import namespace, zeros_where_not
from mpimesh.arrays.types import Array
from mpimesh.errors import ShapeError
from mpimesh.nn.checks import check_floats
from mpimesh.nn.context import Context
from mpimesh.nn.drops import Place, check_share, draw_kept, key_at
from mpimesh.nn.module import Module
from mpimesh.nn.protocol import FeaturePart

__all__ = ["Dropout"]


class Dropout(Module):
    """Set a share `p` of the values to 0 and divide the others by ``1 - p``.

    Active only in training: with a context whose `training` is set, and while
    the module `is_training`. Otherwise the identity.

    Whether a value stays depends on the model's seed, the layer's global index,
    ``ctx.step``, the global index of its row (``ctx.first_row + i``) and its place
    in the row, and on nothing else: any cut of the batch into microbatches and
    ranks drops the same values. A layer that is used twice in one pass drops the
    same places twice.

    Where a rank has some features only, behind a layer that is split by its
    outputs, a :class:`Sequential` tells the dropout which ones; in a layer of
    one's own :class:`mpimesh.ParallelDropout` is the one to take.

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
        self.p = check_share("p", p)
        self._place: Place | None = None

    def materialize(
        self, *, seed: int, dtype: Any = np.float32, xp: ModuleType = np, index: int = 0
    ) -> None:
        """Take note of the model's seed and of the layer's place; see `Module.materialize`."""
        super().materialize(seed=seed, dtype=dtype, xp=xp, index=index)
        self._place = (seed, index)

    def set_part(self, part: FeaturePart | None) -> FeaturePart | None:
        """Take note of which features this rank has; see `Module.set_part`."""
        self._part = part
        return part

    def forward(self, x: Array, ctx: Context | None = None) -> Array:
        """Return `x` with a share dropped, or in inference `x` itself.

        Raises:
            ShapeError: If `x` has no rows to number, that is no axis; or other features than those
                that this rank was said to have.
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
        y = zeros_where_not(mask, x)
        y *= 1.0 / (1.0 - self.p)
        return y

    def _mask(self, x: Array, ctx: Context) -> Array:
        """Return which values of `x` stay."""
        if x.ndim == 0:
            raise ShapeError(f"{self!r}: x must have shape (rows, ...), got ()")
        key = key_at(self, self._place, ctx.step)
        xp = namespace(x)
        mask = xp.empty(x.shape, bool)
        if not x.size:
            return mask
        first, stride, width = self._runs(x)
        runs = mask.reshape(-1, width)
        per_row = runs.shape[0] // x.shape[0]
        rows = xp.arange(x.shape[0], dtype=xp.uint64)
        rows += np.uint64(ctx.first_row)
        begin: int | Array = first
        if per_row > 1:
            rows = xp.repeat(rows, per_row)
            begin = xp.arange(first, first + per_row * stride, stride, dtype=xp.uint64)
            begin = xp.tile(begin, x.shape[0])
        draw_kept(xp, runs, p=self.p, key=key, rows=rows, first=begin)
        return mask

    def _runs(self, x: Array) -> tuple[int, int, int]:
        """Return where the values of each row of `x` lie in the whole row.

        That is: the place of the first, and by how much runs of how many follow each other.
        """
        part = self._part
        if part is None:
            size = math.prod(x.shape[1:])
            return 0, size, size
        if x.ndim < 2 or x.shape[-1] != part.size:
            raise ShapeError(
                f"{self!r}: x must have shape (rows, ..., {part.size}), which are features "
                f"{part.start} to {part.stop} of {part.extent}, got {tuple(x.shape)}. A layer "
                "before it that gives others has a method set_part that returns which, None for all"
            )
        return part.start, part.extent, part.size

    def __repr__(self) -> str:
        return f"Dropout({self.p:g})"
