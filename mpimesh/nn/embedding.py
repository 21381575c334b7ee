"""Tokens and their places as vectors: the entrance of a transformer."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from mpimesh.arguments import as_flag, as_real, shape_of
from mpimesh.arrays.dtypes import sum_dtype
from mpimesh.arrays.namespace import Array, DType, is_cupy, namespace
from mpimesh.errors import ModuleError, ShapeError
from mpimesh.nn.dropout import Dropout, check_share
from mpimesh.nn.initializers import Normal
from mpimesh.nn.module import Composite, Module
from mpimesh.nn.norms import LayerNorm
from mpimesh.nn.parameter import Parameter
from mpimesh.nn.protocol import (
    Context,
    check_extent,
    check_features,
    check_floats,
    check_integers,
    check_mask,
    first_outside,
    joined,
    parted,
)
from mpimesh.nn.split import RankGroup, SequenceSplit, Split

__all__ = [
    "BertEmbedding",
    "Embedding",
    "PositionalEmbedding",
    "RotaryEmbedding",
    "VocabParallelEmbedding",
]


class Embedding(Module):
    """``y[...] = weight[x[...]]``. Its input has no gradient: backward returns None.

    The weight starts normally distributed. It may be split over the ranks of a group: each rank
    then has some of the vectors, with the values that they have in the unsplit layer, and forward
    is collective over the group. A :class:`ColumnParallelLinear` without bias, with as many outputs
    as there are vectors, may have the same weight: an output layer that is tied to the embedding.

    Shapes:
        x: any, integers in ``[0, num_embeddings)``. With a group the same on every rank; with
            `sequence` (rows, places), all of them.
        result: ``(*x.shape, features)``. With a group the same on every rank; with `sequence` this
            rank's places.
        weight: (num_embeddings, features), of these this rank's vectors.

    Cost:
        Saves `x`, then `x` and `dy`, by reference. Backward sorts `x` and touches
        only the rows of the gradient that occur in it. On a GPU equal ids are
        added in no fixed order, so the last bits of a gradient may vary.
        With a group forward all-reduces the result, and backward moves nothing; with `sequence`
        forward reduce-scatters the result, and backward gathers its gradient.

    Args:
        num_embeddings: How many vectors there are, over all ranks.
        features: How long they are.
        std: Standard deviation of the first values.
        group: The ranks to split over, such as ``mesh.group("tp")``; None for a whole layer.
        sequence: How the result is to be split along the sequence, if it is.

    Attributes:
        weight: The :class:`Parameter` of the vectors.

    Raises:
        ModuleError: If an extent is not a whole number of at least 1, or `std`
            is negative, or `sequence` is without `group` or is split over another one.
        GroupError: If this rank is not in the group.
    """

    split: Split | None = None
    must_split: ClassVar[bool] = False

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        std: float = 1.0,
        group: RankGroup | None = None,
        sequence: SequenceSplit | None = None,
    ) -> None:
        self.num_embeddings = check_extent("num_embeddings", num_embeddings)
        self.features = check_extent("features", features)
        shape = (self.num_embeddings, self.features)
        self.weight = Parameter("weight", shape, Normal(std))
        split = Split.over(self, group, sequence, must=self.must_split)
        if split is not None:
            self.set_split(split)

    def set_split(self, split: Split) -> None:
        """Have some of the vectors from now on, before there is memory. Local.

        Raises:
            ModuleStateError: If the layer has memory.
        """
        split.ranks.lay(self.weight, 0)
        self.split = split

    def forward(self, x: Array, ctx: Context | None = None) -> Array:
        """Return the vectors that `x` names. Collective over the group if the layer is split.

        Raises:
            DTypeError: If `x` does not hold integers.
            ModuleError: If an id is out of range; names the first such id.
            ModuleStateError: If the layer is not materialised.
        """
        weight = self.weight.value()
        check_integers(self, x)
        wrong = (x < 0) | (x >= self.num_embeddings)
        if wrong.any():
            raise ModuleError(
                f"{self!r}: ids must be in [0, {self.num_embeddings}), got "
                f"{first_outside(x, wrong)}"
            )
        xp, mine = namespace(weight), None
        if self.split is None:
            y = xp.take(weight, x, axis=0)
        else:
            start, stop = self.weight.box[0]
            x = x.astype(np.int64, copy=False)  # this rank's first id may not fit into their dtype
            mine = (x >= start) & (x < stop)
            x = xp.where(mine, x - start, 0)
            if start < stop:
                y = xp.take(weight, x, axis=0)
                y[~mine] = 0
            else:
                y = xp.zeros((*x.shape, self.features), weight.dtype)
            y = self.split.join(y)
        return self._save(ctx, y, x, mine)

    def backward_input(self, dy: Array, ctx: Context) -> None:
        """Keep what of `dy` is for the weight; integers have no gradient.

        Collective with a sequence.
        """
        x, mine = self._take(dy, ctx)
        if not self.weight.requires_grad:
            ctx.defer(self, None, None)
        elif self.split is None:
            ctx.defer(self, x, dy)
        else:
            ctx.defer(self, x[mine], self.split.whole(dy)[mine])

    def backward_weight(self, ctx: Context) -> None:
        """Add each row of `dy` to the row of the gradient that its id names."""
        x, dy = ctx.take_deferred(self)
        if x is None:
            return
        rows = dy.reshape(-1, self.features)
        add_up = _add_up_scattered if is_cupy(dy) else _add_up_sorted
        self.weight.accumulate_rows(*add_up(x.reshape(-1), rows))

    def __repr__(self) -> str:
        group = Split.text(self.split)
        return f"{type(self).__name__}({self.num_embeddings}, {self.features}{group})"


class VocabParallelEmbedding(Embedding):
    """An :class:`~mpimesh.nn.Embedding` of which each rank of `group` has some vectors.

    Raises:
        ModuleError: As that, and without `group`.
    """

    must_split = True


class PositionalEmbedding(Module):
    """``y[..., t, :] = x[..., t, :] + weight[t]``.

    The weight starts normally distributed. On a sequence that is split over ranks, see
    `set_sequence`, t counts the places of the whole one.

    Shapes:
        x, result: (..., tokens, features), with at most `max_tokens` tokens.
        weight: (max_tokens, features).

    Cost:
        Saves nothing, then `dy` by reference.

    Args:
        max_tokens: The longest sequence.
        features: Length of the last axis of `x`.
        std: Standard deviation of the first values.

    Attributes:
        weight: The :class:`Parameter` of the places' vectors.

    Raises:
        ModuleError: If an extent is not a whole number of at least 1.
    """

    mixes_features = True

    def __init__(self, max_tokens: int, features: int, *, std: float = 0.02) -> None:
        self.max_tokens = check_extent("max_tokens", max_tokens)
        self.features = check_extent("features", features)
        self.weight = Parameter("weight", (self.max_tokens, self.features), Normal(std))

    def forward(self, x: Array, ctx: Context | None = None) -> Array:
        """Return `x` with the vectors of the places added.

        Raises:
            ShapeError: If `x` has other features or more tokens.
            DTypeError: If `x` has another dtype than the weight.
            ModuleStateError: If the layer is not materialised.
        """
        weight = self.weight.value()
        check_floats(self, x, weight.dtype)
        check_features(self, x, self.features)
        first = 0
        if self.sequence is not None:
            first = self.sequence.first_place(x)
            if x.ndim != 3 or first + x.shape[1] > self.max_tokens:
                raise ShapeError(
                    f"{self!r}: x must have shape (rows, places, {self.features}) and end at place "
                    f"{self.max_tokens}, got {tuple(x.shape)} from place {first} on"
                )
        elif x.ndim < 2 or x.shape[-2] > self.max_tokens:
            raise ShapeError(
                f"{self!r}: x must have shape (..., tokens, {self.features}) with at most "
                f"{self.max_tokens} tokens, got {tuple(x.shape)}"
            )
        y = x + weight[first : first + x.shape[-2]]
        return self._save(ctx, y, first)

    def backward_input(self, dy: Array, ctx: Context) -> Array | None:
        """Return `dy`."""
        (first,) = self._take(dy, ctx)
        ctx.defer(self, dy if self.weight.requires_grad else None, first)
        return dy if self.input_grad else None

    def backward_weight(self, ctx: Context) -> None:
        """Add the sum of `dy` over the leading axes to the gradients of the places that occur."""
        dy, first = ctx.take_deferred(self)
        if dy is not None:
            tokens = dy.shape[-2]
            rows = math.prod(dy.shape[:-2])  # -1 is ambiguous where there are no tokens
            g = dy.reshape(rows, tokens, self.features).sum(axis=0, dtype=sum_dtype(dy.dtype))
            self.weight.accumulate_rows(namespace(dy).arange(first, first + tokens), g)

    def __repr__(self) -> str:
        return f"PositionalEmbedding({self.max_tokens}, {self.features})"


class RotaryEmbedding(Module):
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
        return self._save(ctx, self._turned(x, 1.0))

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
        narrow, x = x.dtype, x.astype(wide, copy=False)
        y = xp.empty(x.shape, wide)
        y[..., first] = x[..., first] * cos - x[..., second] * sin
        y[..., second] = x[..., second] * cos + x[..., first] * sin
        return y.astype(narrow, copy=False)

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
            if xp is np:
                for table in found:
                    table.flags.writeable = False  # no state, so that no copies are kept of it
            self._tables[key] = found
        return found[0][:tokens], found[1][:tokens]

    def __repr__(self) -> str:
        kind = ", interleaved=True" if self.interleaved else ""
        return f"RotaryEmbedding({self.head_dim}, base={self.base:g}{kind})"


class BertEmbedding(Composite):
    """``y = norm(words[ids] + positions + types[type_ids])``. Its input has no gradient.

    Shapes:
        ids: (batch, tokens), integers in ``[0, vocabulary)``; or a tuple of it and a mask, of
            that shape, True where there is a token; or of both and the type ids, integers in
            ``[0, token_types)``, which are 0 where they are not given.
        result: (batch, tokens, features); with a mask, a tuple of it and the mask.

    Args:
        vocabulary: How many different tokens there are.
        max_tokens: The longest sequence.
        features: Length of a token's vector.
        token_types: How many types of tokens there are, such as those of two sentences.
        eps: Of the norm.
        dropout: In training, the share of the result to drop.

    Attributes:
        words: The :class:`Embedding` of the tokens.
        positions: The :class:`PositionalEmbedding`.
        types: The :class:`Embedding` of the tokens' types.
        norm: The :class:`LayerNorm` of their sum.
        dropout: The :class:`Dropout` after it.

    Raises:
        ModuleError: If an extent is not a whole number of at least 1.
    """

    def __init__(
        self,
        vocabulary: int,
        max_tokens: int,
        features: int,
        *,
        token_types: int = 2,
        eps: float = 1e-12,
        dropout: float = 0.0,
    ) -> None:
        self.words = Embedding(check_extent("vocabulary", vocabulary), features, std=0.02)
        self.positions = PositionalEmbedding(max_tokens, features)
        self.types = Embedding(check_extent("token_types", token_types), features, std=0.02)
        self.norm = LayerNorm(features, eps=eps)
        self.dropout = Dropout(check_share("dropout", dropout))

    def forward(self, x: Any, ctx: Context | None = None) -> Any:
        """Return the tokens' vectors.

        Raises:
            ShapeError: If the ids are not of shape (batch, tokens), the mask or the type ids are
                of another, or there are more tokens than `max_tokens`.
            DTypeError: If ids are no integers, or the mask is not boolean.
            ModuleError: If an id is out of range.
            ModuleStateError: If the layer is not materialised.
        """
        types = None
        if isinstance(x, tuple) and len(x) == 3:
            types, x = x[2], x[:2]
        ids, mask = parted(self, x, ctx)
        shape = shape_of(ids) or ()
        if len(shape) != 2:
            raise ShapeError(f"{self!r}: ids must have shape (batch, tokens), got {shape}")
        if mask is not None:
            check_mask(mask, shape)
        if types is None:
            types = namespace(ids).zeros_like(ids)
        elif shape_of(types) != shape:
            raise ShapeError(
                f"{self!r}: type ids must have the shape of the ids, {shape}, got "
                f"{shape_of(types) or ()}"
            )
        y = self.positions.forward(self.words.forward(ids, ctx), ctx)
        y += self.types.forward(types, ctx)
        y = self.dropout.forward(self.norm.forward(y, ctx), ctx)
        return joined(y, mask)

    def backward_input(self, dy: Any, ctx: Context) -> None:
        """Keep the gradients of the sum for the tables; integers have none."""
        dy, _ = parted(self, dy, what="the gradient")
        d_sum = self._back(self.norm, self._back(self.dropout, dy, ctx), ctx)
        self.types.backward_input(d_sum, ctx)
        self.words.backward_input(self._back(self.positions, d_sum, ctx), ctx)

    def __repr__(self) -> str:
        return (
            f"BertEmbedding({self.words.num_embeddings}, {self.positions.max_tokens}, "
            f"{self.words.features})"
        )


def _add_up_sorted(ids: Array, rows: Array) -> tuple[Array, Array]:
    """Return the different ids, and the sum of the rows of each."""
    xp = namespace(rows)
    order = xp.argsort(ids, kind="stable")
    ordered = ids[order]
    is_first = xp.ones(ids.size, bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    firsts = xp.flatnonzero(is_first)
    sums = xp.add.reduceat(rows[order], firsts, axis=0, dtype=sum_dtype(rows.dtype))
    return ordered[firsts], sums


def _add_up_scattered(ids: Array, rows: Array) -> tuple[Array, Array]:
    """As `_add_up_sorted`, for CuPy, which adds to scattered places in parallel."""
    xp = namespace(rows)
    different, place = xp.unique(ids, return_inverse=True)
    sums = xp.zeros((different.size, rows.shape[1]), sum_dtype(rows.dtype))
    xp.add.at(sums, place.reshape(-1), rows.astype(sums.dtype, copy=False))
    return different, sums
