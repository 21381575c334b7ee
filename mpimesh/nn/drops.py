"""Which values a dropout keeps, from random bits by number: nothing is drawn twice, or in an order.

Each value has a row and a place in it, whoever computes it and with which others, and half a word
of random bits belongs to these two. So masks are the same for any cut of the batch, of the
features, of a sequence or of heads; and one that is needed again is drawn again, not kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import numpy as np

from mpimesh.arguments import as_real
from mpimesh.arrays.counter_bits import key_of, random_words
from mpimesh.arrays.types import Array
from mpimesh.errors import ModuleError, ModuleStateError

__all__ = ["Place", "WeightDropout", "check_share", "draw_kept", "key_at"]

_BLOCK_WORDS = 1 << 13
# Words drawn at a time: 64 KiB, which stay in the fast caches.

Place = tuple[int, int]
"""The model's seed, and a layer's place in its numbering."""


def check_share(name: str, p: float) -> float:
    """Return the share to drop.

    Raises:
        ModuleError: If it is out of range.
    """
    return as_real(p, name, ModuleError, least=0, below=1)


def key_at(layer: object, place: Place | None, *numbers: int) -> int:
    """Return the key of the bits that belong to a layer and `numbers`, such as the step.

    Raises:
        ModuleStateError: If the layer was not told its place.
    """
    if place is None:
        raise ModuleStateError(
            f"{layer!r}: its masks depend on the model's seed and its place in it: call "
            "materialize(seed=...) on it, or on the model or stage that holds it, first"
        )
    return key_of(*place, *numbers)


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
    """Which weights of an attention are dropped: those of each query of each head by itself.

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
