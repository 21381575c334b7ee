"""Multi-head self-attention."""

from __future__ import annotations

from itertools import accumulate, pairwise
from types import ModuleType
from typing import Any

import numpy as np

from mpimesh.arguments import as_flag
from mpimesh.arrays.types import Array
from mpimesh.errors import ModuleError, ShapeError
from mpimesh.layout.cuts import even_sizes
from mpimesh.nn import protocol
from mpimesh.nn.attend import attend, attend_backward
from mpimesh.nn.checks import check_extent
from mpimesh.nn.composite import SplitLayer
from mpimesh.nn.context import Context
from mpimesh.nn.drops import Place, WeightDropout, check_share, key_at
from mpimesh.nn.linear import Linear
from mpimesh.nn.masked import check_sequence, parted
from mpimesh.nn.rotary import Rotary
from mpimesh.nn.split import Split

__all__ = ["Attention", "head_runs"]


class Attention(SplitLayer):
    """Self-attention of several heads, of Vaswani et al., "Attention Is All You Need" (2017).

    The tokens' queries, keys and values are linear in `x`; each head gives each token the mean of
    the values, weighted with the softmax of the products of its query and the keys; and the heads'
    results side by side go through one linear layer more. It is computed in blocks, so that memory
    is linear in the number of tokens; see :mod:`mpimesh.nn.attend`.

    In training a share `dropout` of the weights of that mean is dropped. Which ones depends on what
    a :class:`Dropout` depends on, and on the head, the token and the key: so no cut of the batch,
    the heads or the sequence changes it.

    `query`, `key`, `value` and `output` may be replaced by other layers: there are as many heads
    as the first three give features for. Its heads may be split over the ranks of a group, by
    :meth:`set_split` or as a :class:`mpimesh.ParallelAttention`.

    Shapes:
        x: (batch, tokens, features), or that and a mask of shape (batch, tokens), in a tuple;
            True in it where there is a token, False where there is padding.
        result: (batch, tokens, features), without the mask. Where no token may be read, as if all
            heads gave 0.
        query.weight: (num_heads * head_dim, features); head h has the rows from
            ``h * head_dim``. key.weight, value.weight: (num_kv_heads * head_dim, features).
        output.weight: (features, num_heads * head_dim).

    Cost:
        Saves `x`, the queries, keys, values and the heads' results, and one number for each head
        and token. Dropped weights are not saved: backward draws again which ones they are.

    Args:
        features: Length of the last axis of `x`.
        num_heads: Number of heads.
        num_kv_heads: Number of heads of the keys and values; as many query heads share each. None
            for `num_heads`.
        head_dim: Length of a head; None for ``features / num_heads``.
        causal: Whether a token reads only itself and those before it.
        rotary: Whether queries and keys are turned by :class:`Rotary`; or the layer that does so.
        bias: Whether the linear layers have biases.
        dropout: The share of the weights to drop, in [0, 1), exact to 2^-32.

    Raises:
        ModuleError: If an extent is not a whole number of at least 1, or the heads do not divide
            the features, or the key heads the heads, or the rotary is for other heads, or the
            share is out of range.
    """

    _place: Place | None = None
    _first_head: int = 0

    def __init__(
        self,
        features: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool = False,
        rotary: bool | Rotary | None = None,
        bias: bool = True,
        dropout: float = 0.0,
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

    def materialize(
        self, *, seed: int, dtype: Any = np.float32, xp: ModuleType = np, index: int = 0
    ) -> None:
        """Give the layers within memory, and note what masks depend on; see `Module.materialize`.

        Raises:
            DTypeError: If `dtype` is not a float one.
            ModuleError: If `seed` or `index` is negative.
        """
        super().materialize(seed=seed, dtype=dtype, xp=xp, index=index)
        self._place = (seed, index)

    def set_place(self, *, seed: int, index: int) -> None:
        """Take note of the model's seed and of the layer's place; see `Module.set_place`."""
        super().set_place(seed=seed, index=index)
        self._place = (seed, index)

    def set_split(self, split: Split) -> None:
        """Have some of the heads from now on, before there is memory. Local.

        With fewer key heads than ranks several ranks have the same key head; see
        :func:`head_runs`.

        Raises:
            ModuleError: If layers within are no plain linear ones, or a rank would have no head.
            ModuleStateError: If the layer has memory.
        """
        query, key, value, output = self._plain(self.query, self.key, self.value, self.output)
        size, rank = split.ranks.size, split.ranks.rank
        queries, keys = head_runs(self.num_heads, self.num_kv_heads, self.head_dim, size)
        for layer, runs in ((query, queries), (key, keys), (value, keys)):
            layer.set_split(split, 0, runs, within=True)
        output.set_split(split, 1, queries)
        self._first_head = queries[rank][0] // self.head_dim
        self.split = split

    def _run(self, x: Any, ctx: Context | None) -> Array:
        x, mask = parted(self, x, ctx)
        check_sequence(self, x, mask)
        q, k, v = (
            self._heads(layer.forward(x, ctx)) for layer in (self.query, self.key, self.value)
        )
        if self.rotary is not None:
            q, k = self.rotary.forward(q, ctx), self.rotary.forward(k, ctx)
        dropout = self._weight_dropout(ctx)
        read, sums = attend(q, k, v, causal=self.causal, mask=mask, dropout=dropout)
        y = self.output.forward(_flat(read), ctx)
        if ctx is not None:
            ctx.save(self, y.shape, y.dtype, q, k, v, read, sums, mask, dropout)
        return y

    def _run_back(self, dy: Array, ctx: Context) -> Any:
        q, k, v, read, sums, mask, dropout = self._take(dy, ctx)
        d_flat = self._back(self.output, dy, ctx)
        d_read = self._heads(d_flat)
        dq, dk, dv = attend_backward(
            d_read, q, k, v, read, sums, causal=self.causal, mask=mask, dropout=dropout
        )
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
        return dx if mask is None else (dx, None)

    def _weight_dropout(self, ctx: Context | None) -> WeightDropout | None:
        """Return which weights are dropped in a pass; None if none are."""
        if not self.dropout or ctx is None or not ctx.training or not self.is_training():
            return None
        # A number more than a Dropout takes, so that none has the same bits, whatever its place.
        key = key_at(self, self._place, ctx.step, 0)
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


def _rotary(given: object, head_dim: int) -> Rotary | None:
    """Return what turns heads of this length, if anything does.

    Raises:
        ModuleError: If it is for others, or is none.
    """
    turn = Rotary(head_dim) if given is True else None if given is False else given
    if turn is None:
        return None
    if not isinstance(turn, Rotary):
        raise ModuleError(f"rotary must be True, False or an nn.Rotary, got {given!r}")
    if turn.head_dim != head_dim:
        raise ModuleError(f"{turn!r} does not turn heads of length {head_dim}")
    return turn


def _flat(x: Array) -> Array:
    """Return the heads of `x` side by side: (batch, tokens, heads * head_dim)."""
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3])
