"""Multi-head self-attention in blocks: memory linear in the number of tokens.

The scores of all queries with all keys are never all in memory. For a block of queries, the keys
come block by block, and beside the weighted sum of the values so far only the largest score and
the sum of the exponentials are stored, and corrected when a larger score turns up: the online
softmax of Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018). Backward
computes the scores once more, block by block, from the logarithm of that sum, as in Dao, Fu,
Ermon, Rudra and Re, "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness"
(2022), with the queries in the outer loop, as in Dao, "FlashAttention-2" (2023).

Dropout of weights changes two things: what is summed up to the result is multiplied with the mask,
not what is summed up to divide by; and the mask is drawn again in backward, see
:mod:`mpimesh.nn.dropout`, so that memory stays linear.

Groups of query heads may share the key and value heads: Ainslie et al., "GQA" (2023). Query head h
reads key head ``h // (heads // kv_heads)``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from types import ModuleType
from typing import Any

import numpy as np

from mpimesh.arguments import as_flag
from mpimesh.arrays.dtypes import sum_dtype
from mpimesh.arrays.namespace import Array, Formula, fused, is_cupy, namespace
from mpimesh.errors import ModuleError, ShapeError
from mpimesh.layout.boxes import even_sizes
from mpimesh.nn import protocol
from mpimesh.nn.dropout import WeightDropout, check_share, key_at
from mpimesh.nn.embedding import RotaryEmbedding
from mpimesh.nn.linear import Linear, SplitLayer
from mpimesh.nn.protocol import Context, check_extent, check_mask, check_sequence, parted
from mpimesh.nn.split import AxisRun, RankGroup, SequenceSplit, Split, SplitRanks

__all__ = ["Attention", "BlockAttention", "ParallelAttention", "head_runs"]


class Attention(SplitLayer):
    """Self-attention of several heads, of Vaswani et al., "Attention Is All You Need" (2017).

    The tokens' queries, keys and values are linear in `x`; each head gives each token the mean of
    the values, weighted with the softmax of the products of its query and the keys; and the heads'
    results side by side go through one linear layer more. It is computed in blocks, so that memory
    is linear in the number of tokens; see :class:`BlockAttention`.

    In training a share `dropout` of the weights of that mean is dropped. Which ones depends on what
    a :class:`Dropout` depends on, and on the head, the token and the key: so no cut of the batch,
    the heads or the sequence changes it.

    The heads may be split over the ranks of a group. The weights then have the values that they
    have in the unsplit layer, and the same names, the weights that are dropped are the same, and
    forward and backward are collective over the group.

    Shapes:
        x: (batch, tokens, features), or that and a mask of shape (batch, tokens), in a tuple;
            True in it where there is a token, False where there is padding. With a group the same
            on every rank; with `sequence` this rank's places of both.
        result: (batch, tokens, features), without the mask. Where no token may be read, as if all
            heads gave 0. With a group the same on every rank; with `sequence` its places.
        query.weight: (num_heads * head_dim, features); head h has the rows from
            ``h * head_dim``. key.weight, value.weight: (num_kv_heads * head_dim, features).
        output.weight: (features, num_heads * head_dim).

    Cost:
        Saves `x`, the queries, keys, values and the heads' results, and one number for each head
        and token. Dropped weights are not saved: backward draws again which ones they are.
        With a group forward all-reduces the result, backward the gradient of `x`, while those of
        all weights are computed. With `sequence` forward gathers `x` and reduce-scatters the
        result; backward gathers `x` and the gradient of the result, and reduce-scatters that of
        `x`.

    Args:
        features: Length of the last axis of `x`.
        num_heads: Number of heads, over all ranks.
        num_kv_heads: Number of heads of the keys and values; as many query heads share each. None
            for `num_heads`.
        head_dim: Length of a head; None for ``features / num_heads``.
        causal: Whether a token reads only itself and those before it.
        rotary: Whether queries and keys are turned by :class:`RotaryEmbedding`; or the layer
            that does so.
        bias: Whether the linear layers have biases.
        dropout: The share of the weights to drop, in [0, 1), exact to 2^-32.
        group: The ranks to split over, such as ``mesh.group("tp")``; None for a whole layer.
        sequence: How `x` and the result are split along the sequence, if they are.

    Attributes:
        query: The :class:`Linear` layer of the queries. It and the next three may be replaced by
            other layers; there are as many heads as the first three return features for.
        key: The :class:`Linear` layer of the keys.
        value: The :class:`Linear` layer of the values.
        output: The :class:`Linear` layer that joins the heads' results.
        rotary: The :class:`RotaryEmbedding` of queries and keys, or None.

    Raises:
        ModuleError: If an extent is not a whole number of at least 1, or the heads do not divide
            the features, or the key heads the heads, or the rotary is for other heads, or the
            share is out of range; or a rank would have no head, or `sequence` is without `group`
            or is split over another one.
        GroupError: If this rank is not in the group.
    """

    linears = ("query", "key", "value", "output")
    _first_head: int = 0

    def __init__(
        self,
        features: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool = False,
        rotary: bool | RotaryEmbedding | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        group: RankGroup | None = None,
        sequence: SequenceSplit | None = None,
    ) -> None:
        self.features = check_extent("features", features)
        self.num_heads = check_extent("num_heads", num_heads)
        kv_heads = self.num_heads if num_kv_heads is None else num_kv_heads
        self.num_kv_heads = check_extent("num_kv_heads", kv_heads)
        if self.num_heads % self.num_kv_heads:
            raise ModuleError(
                f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}"
            )
        if head_dim is None and self.features % self.num_heads:
            raise ModuleError(
                f"num_heads must divide features, got {num_heads} and {features}; or give head_dim"
            )
        dim = self.features // self.num_heads if head_dim is None else head_dim
        self.head_dim = check_extent("head_dim", dim)
        turn = _rotary(rotary, self.head_dim)
        self.causal = as_flag(causal, "causal", ModuleError)
        self.dropout = check_share("dropout", dropout)
        inner, kv_inner = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.query: protocol.SupportsLayer = Linear(self.features, inner, bias=bias)
        self.key: protocol.SupportsLayer = Linear(self.features, kv_inner, bias=bias)
        self.value: protocol.SupportsLayer = Linear(self.features, kv_inner, bias=bias)
        self.rotary = turn
        self.output: protocol.SupportsLayer = Linear(inner, self.features, bias=bias)
        self._split_over(group, sequence)

    def set_split(self, split: Split) -> None:
        """Have some of the heads from now on, before there is memory. Local.

        With fewer key heads than ranks several ranks have the same key head, whose gradient is the
        sum over them, see :func:`mpimesh.parallel.sum_shared_gradients`.

        Raises:
            ModuleError: If layers within are no plain linear ones, or a rank would have no head.
            ModuleStateError: If the layer has memory.
        """
        super().set_split(split)
        queries, _ = self._heads_of(split.ranks.size)
        self._first_head = queries[split.ranks.rank][0] // self.head_dim

    def _runs(self, ranks: SplitRanks) -> list[Sequence[AxisRun] | None]:
        queries, keys = self._heads_of(ranks.size)
        return [queries, keys, keys]

    def _heads_of(self, size: int) -> tuple[list[AxisRun], list[AxisRun]]:
        return head_runs(self.num_heads, self.num_kv_heads, self.head_dim, size)

    def _run(self, x: Any, ctx: Context | None) -> Array:
        x, mask = parted(self, x, ctx)
        check_sequence(self, x, mask)
        q, k, v = (
            self._heads(layer.forward(x, ctx)) for layer in (self.query, self.key, self.value)
        )
        if self.rotary is not None:
            q, k = self.rotary.forward(q, ctx), self.rotary.forward(k, ctx)
        dropout = self._weight_dropout(ctx)
        core = BlockAttention(q, k, v, causal=self.causal, mask=mask, dropout=dropout)
        read, sums = core.forward()
        y = self.output.forward(_flat(read), ctx)
        return self._save(ctx, y, core, read, sums, mask is not None)

    def _run_back(self, dy: Array, ctx: Context) -> Any:
        core, read, sums, masked = self._take(dy, ctx)
        d_read = self._heads(self._back(self.output, dy, ctx))
        dq, dk, dv = core.backward(d_read, read, sums)
        if self.rotary is not None:
            # In the order opposite to forward's.
            dk = self.rotary.backward_input(dk, ctx)
            dq = self.rotary.backward_input(dq, ctx)
        parts = [
            self._back(layer, _flat(one), ctx)
            for layer, one in ((self.value, dv), (self.key, dk), (self.query, dq))
        ]
        dx = parts[0] + parts[1]
        dx += parts[2]
        return (dx, None) if masked else dx

    def _weight_dropout(self, ctx: Context | None) -> WeightDropout | None:
        """Return which weights are dropped in a pass; None if none are."""
        if not self.dropout or ctx is None or not ctx.training or not self.is_training():
            return None
        # A number more than a Dropout takes, so that none has the same bits, whatever its place.
        key = key_at(self, ctx.step, 0)
        return WeightDropout(self.dropout, key, ctx.first_row, self.num_heads, self._first_head)

    def _heads(self, x: Array) -> Array:
        """Return (batch, tokens, heads, head_dim), with as many heads as `x` is long for."""
        dim = self.head_dim
        if x.shape[-1] % dim:
            raise ShapeError(f"{self!r}: {x.shape[-1]} features are no whole heads of {dim}")
        return x.reshape(*x.shape[:-1], x.shape[-1] // dim, dim)

    def __repr__(self) -> str:
        grouped = self.num_kv_heads != self.num_heads
        options = [
            f"num_kv_heads={self.num_kv_heads}" if grouped else "",
            "causal=True" if self.causal else "",
            f"rotary={self.rotary!r}" if self.rotary is not None else "",
            f"dropout={self.dropout:g}" if self.dropout else "",
            Split.text(self.split).removeprefix(", "),
        ]
        inside = [str(self.features), str(self.num_heads), *filter(None, options)]
        return f"{type(self).__name__}({', '.join(inside)})"


class ParallelAttention(Attention):
    """An :class:`~mpimesh.nn.Attention` of which each rank of `group` has some heads.

    Raises:
        ModuleError: As that, and without `group`.
    """

    must_split = True


def head_runs(
    num_heads: int, num_kv_heads: int, head_dim: int, size: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return for each of `size` ranks the features of its query heads, and of its key heads.

    A rank has the query heads that read its key heads. With at least as many key heads as ranks,
    these are dealt to the ranks, the first ones getting one more. With fewer, the ranks are dealt
    to the key heads in the same way: the ranks of one key head all have it, and share the query
    heads that read it.

    Raises:
        ModuleError: If a rank would have no query head.
    """
    if size > num_heads:
        raise ModuleError(
            f"num_heads={num_heads} is too few for {size} ranks: attention is split by its heads, "
            f"and each rank needs at least one. Use num_heads of {size} or more, or a group of at "
            f"most {num_heads} {'rank' if num_heads == 1 else 'ranks'}"
        )
    per_kv = num_heads // num_kv_heads
    queries, keys = [], []
    if num_kv_heads >= size:
        ends = [0, *accumulate(even_sizes(num_kv_heads, size))]
        keys = [(start * head_dim, stop * head_dim) for start, stop in pairwise(ends)]
        return [(start * per_kv, stop * per_kv) for start, stop in keys], keys
    for head, ranks in enumerate(even_sizes(size, num_kv_heads)):
        keys += [(head * head_dim, (head + 1) * head_dim)] * ranks
        ends = [head * per_kv, *even_sizes(per_kv, ranks)]
        queries += [
            (start * head_dim, stop * head_dim) for start, stop in pairwise(accumulate(ends))
        ]
    return queries, keys


def _rotary(given: object, head_dim: int) -> RotaryEmbedding | None:
    """Return what turns heads of this length, if anything does.

    Raises:
        ModuleError: If it is for others, or is none.
    """
    turn = RotaryEmbedding(head_dim) if given is True else None if given is False else given
    if turn is None:
        return None
    if not isinstance(turn, RotaryEmbedding):
        raise ModuleError(f"rotary must be True, False or an nn.RotaryEmbedding, got {given!r}")
    if turn.head_dim != head_dim:
        raise ModuleError(f"{turn!r} does not turn heads of length {head_dim}")
    return turn


def _flat(x: Array) -> Array:
    """Return the heads of `x` side by side: (batch, tokens, heads * head_dim)."""
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3])


# -- in blocks ----------------------------------------------------------------------------------

_TOKENS = 128
_SCORES = 1 << 18
# On the host a block of scores, 1 MiB in float32, should stay in a cache of its core.
_DEVICE_TOKENS = 2048
_DEVICE_SCORES = 1 << 27
# On a device a block should be large enough to fill it.


class BlockAttention:
    """``softmax(q @ k.T / sqrt(head_dim)) @ v`` of each head, block by block.

    float16 is computed in float32. Where a query may read no key at all, the result is 0.

    Shapes:
        q: (batch, tokens, heads, head_dim).
        k, v: (batch, keys, kv_heads, head_dim), where kv_heads divides heads.
        mask: (batch, keys), True where there is a token, False where there is padding.

    Cost:
        A block is of ``block ** 2`` numbers for each head of one row of the batch, and of as many
        rows as 2^18 numbers are room for, one at least: 1 MiB in float32 with up to 16 heads and
        blocks of 128, half a MiB more for each 8 further heads.

    Args:
        q: The queries.
        k: The keys.
        v: The values.
        causal: Whether a query reads only the keys up to its own place, where the last query and
            the last key have the same place.
        mask: Which keys are tokens; None if all are.
        dropout: Which weights are dropped; None if none are.
        block: Most queries, and keys, of a block; None for what suits the library.

    Raises:
        ShapeError: If the shapes do not fit each other.
        DTypeError: If `mask` is not boolean.
        ModuleError: If `block` is not a whole number of at least 1.
    """

    # Arrays of rows have the axes (rows, kv heads, group, tokens, dim).

    def __init__(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        causal: bool = False,
        mask: Array | None = None,
        dropout: WeightDropout | None = None,
        block: int | None = None,
    ) -> None:
        shapes = [tuple(one.shape) for one in (q, k, v)]
        if any(len(shape) != 4 for shape in shapes) or shapes[1] != shapes[2]:
            raise ShapeError(
                "queries must have shape (batch, tokens, heads, head_dim), keys and values "
                f"(batch, keys, kv_heads, head_dim); got {', '.join(map(str, shapes))}"
            )
        (batch, tokens, heads, dim), (k_batch, num_keys, kv_heads, k_dim) = shapes[0], shapes[1]
        if batch != k_batch or dim != k_dim or not dim or not kv_heads or heads % kv_heads:
            raise ShapeError(
                "queries and keys must have the same batch and head_dim, and the heads of the "
                f"queries be a multiple of those of the keys; got {shapes[0]} and {shapes[1]}"
            )
        if causal and tokens > num_keys:
            raise ShapeError(
                f"with causal=True there must be a key for each query, got {tokens} queries and "
                f"{num_keys} keys"
            )
        if mask is not None:
            check_mask(mask, (batch, num_keys))
            # On a device the look would make the host wait.
            mask = None if isinstance(mask, np.ndarray) and mask.all() else mask
        self._q, self._k, self._v, self._mask = q, k, v, mask
        self._causal, self._dropout = causal, dropout
        self._xp = xp = namespace(q, k, v)
        self._wide = sum_dtype(q.dtype)
        self._tokens, self._num_keys, self._kv_heads = tokens, num_keys, kv_heads
        self._scale = 1.0 / math.sqrt(dim)
        usual, scores = (_TOKENS, _SCORES) if xp is np else (_DEVICE_TOKENS, _DEVICE_SCORES)
        self._block = block = usual if block is None else check_extent("block", block)
        each = heads * min(block, max(tokens, 1)) * min(block, max(num_keys, 1))
        rows = max(1, scores // max(each, 1))
        self._row_blocks = [slice(at, min(at + rows, batch)) for at in range(0, batch, rows)]

    def forward(self) -> tuple[Array, Array]:
        """Return the result, and what backward needs.

        Shapes:
            result: that of `q`; and (batch, heads, tokens), float32 at least, the logarithms of the
                sums of the exponentials of the scores, 0 where there are none.

        Cost:
            ``4 * batch * heads * tokens * keys * head_dim`` flops, half of that with `causal`, and
            a 64-bit hash for two weights with `dropout`. As memory the results, and about three
            blocks of scores.
        """
        xp, wide, dropout = self._xp, self._wide, self._dropout
        batch, tokens, heads, _ = self._q.shape
        out = xp.empty(self._q.shape, self._q.dtype)
        sums = xp.empty((batch, heads, tokens), wide)
        by_head = self._by_head(sums)
        for rows in self._row_blocks:
            out_rows, k_rows, v_rows = self._queries(out[rows]), *self._keys_of(rows)
            for part, place, scaled in self._query_blocks(rows):
                shape = (*scaled.shape[:-1], 1)
                top = xp.full(shape, -math.inf, wide)
                total = xp.zeros(shape, wide)
                mixed = xp.zeros(scaled.shape, wide)
                for keys in self._key_blocks(part):
                    scores = self._scores(scaled, k_rows, rows, part, keys)
                    higher = xp.maximum(top, scores.max(axis=-1, keepdims=True))
                    # -inf less -inf is no number: a query without any key so far counts from 0.
                    base = xp.where(higher == -math.inf, wide.type(0), higher)
                    scores = _exp_less(scores, base)
                    if keys.start:  # sums of the blocks before are rescaled to the new base
                        top -= base
                        fade = xp.exp(top, out=top)
                        total *= fade
                        mixed *= fade
                    total += scores.sum(axis=-1, keepdims=True)
                    if dropout is not None:
                        scores *= self._kept(dropout, scores, rows, part, keys)
                    mixed += scores @ v_rows[..., keys, :].astype(wide, copy=False)
                    top = higher
                none = total == 0
                total = xp.where(none, wide.type(1), total)
                mixed /= total
                if dropout is not None:
                    mixed *= wide.type(dropout.scale)
                out_rows[place] = mixed
                xp.log(total, out=total)
                total += xp.where(none, wide.type(0), top)
                by_head[rows][place] = total[..., 0]
        return out, sums

    def backward(self, dout: Array, out: Array, sums: Array) -> tuple[Array, Array, Array]:
        """Return the gradients of `q`, `k` and `v`, given that of the result of :meth:`forward`.

        With P the softmax, ``dP = dout @ v.T`` and D the sum of ``dout * out`` over a head, the
        gradient of the scores is ``P * (dP - D)``: D is the sum of ``P * dP`` over the keys, so no
        sum over all keys is needed. With a dropout dP is multiplied with its mask and scale, and D
        is still the sum of ``P * dP``.

        Shapes:
            dout, out, sums: those of what :meth:`forward` returned.
            result: those of `q`, `k` and `v`, and their dtype.

        Cost:
            ``10 * batch * heads * tokens * keys * head_dim`` flops, half of that with `causal`. As
            memory the results, those of keys and values in float32 at least for the rows of a
            block, and about four blocks of scores.
        """
        xp, wide, dropout = self._xp, self._wide, self._dropout
        dq, dk, dv = (xp.empty(one.shape, one.dtype) for one in (self._q, self._k, self._v))
        by_head = self._by_head(sums)
        for rows in self._row_blocks:
            dq_rows, k_rows, v_rows = self._queries(dq[rows]), *self._keys_of(rows)
            out_rows, dout_rows = self._queries(out[rows]), self._queries(dout[rows])
            dk_rows, dv_rows = xp.zeros(k_rows.shape, wide), xp.zeros(v_rows.shape, wide)
            for part, place, scaled in self._query_blocks(rows):
                d_part = dout_rows[place].astype(wide, copy=False)
                towards = (d_part * out_rows[place]).sum(axis=-1, keepdims=True)
                if dropout is not None:
                    d_part = d_part * wide.type(dropout.scale)
                base = by_head[rows][place][..., None]
                dq_part = xp.zeros(scaled.shape, wide)
                for keys in self._key_blocks(part):
                    weights = _exp_less(self._scores(scaled, k_rows, rows, part, keys), base)
                    v_part = v_rows[..., keys, :].astype(wide, copy=False)
                    slopes = d_part @ v_part.swapaxes(-1, -2)
                    if dropout is None:
                        read = weights
                    else:
                        kept = self._kept(dropout, slopes, rows, part, keys)
                        slopes *= kept
                        read = weights * kept
                    dv_rows[..., keys, :] += _over_group(read.swapaxes(-1, -2) @ d_part)
                    slopes -= towards
                    slopes *= weights
                    dq_part += slopes @ k_rows[..., keys, :].astype(wide, copy=False)
                    dk_rows[..., keys, :] += _over_group(slopes.swapaxes(-1, -2) @ scaled)
                dq_part *= self._scale
                dq_rows[place] = dq_part
            _by_kv_head(dk[rows])[...] = dk_rows
            _by_kv_head(dv[rows])[...] = dv_rows
        return dq, dk, dv

    def _query_blocks(self, rows: slice) -> Iterator[tuple[slice, tuple[slice, ...], Array]]:
        """Yield for each block of queries their places, these as an index, and them scaled."""
        q_rows = self._queries(self._q[rows])
        for first in range(0, self._tokens, self._block):
            part = slice(first, min(first + self._block, self._tokens))
            place = (slice(None), slice(None), slice(None), part)
            scaled = q_rows[place].astype(self._wide, order="C")
            scaled *= self._scale
            yield part, place, scaled

    def _key_blocks(self, part: slice) -> Iterator[slice]:
        """Yield the blocks of keys of which the queries of `part` may read any."""
        last = self._num_keys - self._tokens + part.stop if self._causal else self._num_keys
        for first in range(0, last, self._block):
            yield slice(first, min(first + self._block, last))

    def _keys_of(self, rows: slice) -> tuple[Array, Array]:
        """Return the keys and the values of `rows`, as (rows, kv heads, 1, keys, dim)."""
        return _by_kv_head(self._k[rows]), _by_kv_head(self._v[rows])

    def _queries(self, x: Array) -> Array:
        """Return `x`, queries or what has their shape, as (rows, kv heads, group, tokens, dim)."""
        rows, tokens, heads, dim = x.shape
        grouped = x.reshape(rows, tokens, self._kv_heads, heads // self._kv_heads, dim)
        return grouped.transpose(0, 2, 3, 1, 4)

    def _by_head(self, x: Array) -> Array:
        """Return `x`, one number for each head and query, as (rows, kv heads, group, tokens)."""
        rows, heads, tokens = x.shape
        return x.reshape(rows, self._kv_heads, heads // self._kv_heads, tokens)

    def _scores(self, scaled: Array, k: Array, rows: slice, part: slice, keys: slice) -> Array:
        """Return the scores of a block, new memory; -inf where a query may not read a key."""
        xp = self._xp
        block = k[..., keys, :].astype(scaled.dtype, copy=False)
        scores = scaled @ block.swapaxes(-1, -2)
        seen = None if self._mask is None else self._mask[rows, None, None, None, keys]
        offset = self._num_keys - self._tokens
        if self._causal and keys.stop > part.start + offset + 1:
            places = xp.arange(part.start + offset, part.stop + offset)
            earlier = xp.arange(keys.start, keys.stop) <= places[:, None]
            seen = earlier if seen is None else seen & earlier
        if seen is not None:
            scores = xp.where(seen, scores, scores.dtype.type(-math.inf))
        return scores

    def _kept(
        self, dropout: WeightDropout, like: Array, rows: slice, part: slice, keys: slice
    ) -> Array:
        """Return which weights of a block, of the shape of `like`, are not dropped."""
        starts = {"row": rows.start, "query": part.start, "key": keys.start}
        return dropout.kept(self._xp, like.shape, **starts, tokens=self._tokens)


def _by_kv_head(x: Array) -> Array:
    """Return `x`, keys or values, as (rows, kv heads, 1, keys, dim)."""
    return x.transpose(0, 2, 1, 3)[:, :, None]


def _exp_less(scores: Array, base: Array) -> Array:
    """Return ``exp(scores - base)``; `scores` is overwritten."""
    xp = namespace(scores)
    if is_cupy(scores):
        return fused(xp, exp_less)(scores, base)
    scores -= base
    return xp.exp(scores, out=scores)


def _over_group(x: Array) -> Array:
    """Return the sum over the query heads that share a key head; the axis stays."""
    return x if x.shape[2] == 1 else x.sum(axis=2, keepdims=True)


def exp_less(xp: ModuleType) -> Formula:
    """On CuPy, of scores and what to take off: the exponentials of a softmax."""

    def formula(scores: Any, base: Any) -> Any:
        return xp.exp(scores - base)

    return formula
