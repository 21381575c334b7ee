"""Dropout whose masks belong to the global batch, not to who computes them.

Random bits have numbers: nothing is drawn twice, or in an order. Each value has a row and a place
in it, on any rank and in any batch, and half a word of random bits belongs to these
two. So masks are the same for any cut of the batch, of the features, of a sequence or of heads; and
one that is needed again is drawn again, not saved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from mpimesh.arguments import as_real
from mpimesh.arrays.namespace import Array, namespace, zeros_where_not
from mpimesh.arrays.random_bits import key_of, random_words
from mpimesh.errors import ModuleError, ModuleStateError, ShapeError
from mpimesh.nn.module import Module
from mpimesh.nn.protocol import Context, FeaturePart, check_extent, check_floats
from mpimesh.nn.split import RankGroup, SplitRanks

__all__ = ["Dropout", "ParallelDropout", "WeightDropout", "check_share", "draw_kept", "key_at"]


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
    one's own :class:`mpimesh.parallel.ParallelDropout` is the one to take. On a sequence
    that is split over ranks, see `set_sequence`, each drops of its places what
    is dropped of the whole sequence.

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

    def set_part(self, part: FeaturePart | None) -> FeaturePart | None:
        """Take note of which features this rank has; see `Module.set_part`.

        Raises:
            ModuleError: If it has all features, of its places of a split sequence.
        """
        if part is not None and self.sequence is not None:
            raise ModuleError(
                f"{self!r} is for places of a split sequence with all features, but gets {part}; "
                "between layers that are split by features use ParallelDropout"
            )
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
        return self._save(ctx, y, mask)

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
        key = key_at(self, ctx.step)
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
            if self.sequence is None:
                return 0, size, size
            return self.sequence.first_place(x) * math.prod(x.shape[2:]), size, size
        if x.ndim < 2 or x.shape[-1] != part.size:
            raise ShapeError(
                f"{self!r}: x must have shape (rows, ..., {part.size}), which are features "
                f"{part.start} to {part.stop} of {part.extent}, got {tuple(x.shape)}. A layer "
                "before it that gives others has a method set_part that returns which, None for all"
            )
        return part.start, part.extent, part.size

    def __repr__(self) -> str:
        return f"Dropout({self.p:g})"


class ParallelDropout(Dropout):
    """A :class:`~mpimesh.nn.Dropout` that drops of split features what it drops of all. Local.

    For what stands between a :class:`ColumnParallelLinear` and a :class:`RowParallelLinear` in a
    layer of one's own. In a :class:`~mpimesh.nn.Sequential`, a model's stages or a
    :class:`~mpimesh.nn.FeedForward` a plain dropout learns its features, and does the same.

    Shapes:
        x, result: (rows, ..., this rank's features), the same.

    Args:
        p: The share to drop, in [0, 1), exact to 2^-32.
        features: Number of features, over all ranks.
        group: The ranks, such as ``mesh.group("tp")``.

    Raises:
        ModuleError: If `p` is out of range, or `features` not a whole number of at least 1.
        GroupError: If this rank is not in the group.

    Example:
        >>> tp = mesh.group("tp")
        >>> dropout = ParallelDropout(0.1, features=256, group=tp)
    """

    def __init__(self, p: float = 0.5, *, features: int, group: RankGroup) -> None:
        super().__init__(p)
        self.ranks = SplitRanks(group)
        self._part = self.ranks.part_of(check_extent("features", features))

    def set_part(self, part: FeaturePart | None) -> FeaturePart | None:
        """Return the features that it has.

        Raises:
            ModuleError: If they are others than those that it gets.
        """
        if part not in (None, self._part):
            raise ModuleError(f"{self!r} is made for {self._part}, but gets {part}")
        return self._part


# -- random bits -------------------------------------------------------------------------------

_BLOCK_WORDS = 1 << 13
# Words drawn at a time: 64 KiB, which stay in the fast caches.


def check_share(name: str, p: float) -> float:
    """Return the share to drop.

    Raises:
        ModuleError: If it is out of range.
    """
    return as_real(p, name, ModuleError, least=0, below=1)


def key_at(layer: Module, *numbers: int) -> int:
    """Return the key of the bits that belong to a layer and `numbers`, such as the step.

    Raises:
        ModuleStateError: If the layer has no place yet.
    """
    if layer._place is None:
        raise ModuleStateError(
            f"{layer!r}: its masks depend on the model's seed and its place in it: call "
            "materialize(seed=...) on it, or on the model or stage that holds it, first"
        )
    return key_of(*layer._place, *numbers)


def draw_kept(
    xp: ModuleType, out: Array, *, p: float, key: int, rows: Array, first: int | Array
) -> None:
    """Write to `out` which values stay when a share `p` is dropped.

    Shapes:
        out: (n, count), boolean.
        rows: (n,), uint64: the row of each.
        first: the place in the row of ``out[i, 0]``: a number; or (n,), uint64, one for each.
    """
    count = out.shape[1]
    if not out.size:
        return
    least = np.uint32(min(round(p * 2**32), 2**32 - 1))
    begins: Array = None if isinstance(first, int) else first
    shift = first % 2 if isinstance(first, int) else 1
    words = (shift + count + 1) // 2
    length = max(1, _BLOCK_WORDS // words) if xp is np else out.shape[0]
    for start in range(0, out.shape[0], length):
        part = slice(start, start + length)
        word = first // 2 if isinstance(first, int) else begins[part] // 2
        drawn = random_words(xp, key, rows[part], words, first=word)
        # Two values share a word: the lower half comes first, on any machine.
        halves = drawn.astype("<u8", copy=False).view("<u4")
        found = halves[:, shift : shift + count]
        if begins is not None:
            odd = (begins[part] % 2).astype(bool)[:, None]
            found = xp.where(odd, found, halves[:, :count])
        xp.greater_equal(found, least, out=out[part])


@dataclass(frozen=True, slots=True)
class WeightDropout:
    """The weights of an attention that are dropped, drawn for each query of each head by itself.

    Attributes:
        p: The share.
        key: To what the random bits belong.
        first_row: The index of the first row in the global batch.
        num_heads: Number of heads, over all ranks.
        first_head: Which of them is the first here.
    """

    p: float
    key: int
    first_row: int
    num_heads: int
    first_head: int = 0

    @property
    def scale(self) -> float:
        """Factor of the weights that stay."""
        return 1.0 / (1.0 - self.p)

    def kept(
        self, xp: ModuleType, shape: tuple[int, ...], *, row: int, query: int, key: int, tokens: int
    ) -> Array:
        """Return which weights of a block stay.

        Shapes:
            result: `shape`, which is (rows, kv heads, group, queries, keys).

        Args:
            xp: The array library.
            shape: That of the block.
            row: Its first row.
            query: Its first query.
            key: Its first key.
            tokens: Number of queries of a row, in all blocks.
        """
        rows, kv_heads, group, queries, keys = shape
        heads = xp.arange(kv_heads * group, dtype=xp.uint64) + np.uint64(self.first_head)
        batch = xp.arange(rows, dtype=xp.uint64) + np.uint64(self.first_row + row)
        numbers = batch[:, None] * np.uint64(self.num_heads) + heads
        places = xp.arange(queries, dtype=xp.uint64) + np.uint64(query)
        numbers = numbers[..., None] * np.uint64(tokens) + places
        mask = xp.empty((rows * kv_heads * group * queries, keys), bool)
        draw_kept(xp, mask, p=self.p, key=self.key, rows=numbers.reshape(-1), first=key)
        return mask.reshape(shape)
