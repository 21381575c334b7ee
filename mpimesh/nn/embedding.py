"""A table of vectors, looked up by integers."""

from __future__ import annotations

import numpy as np

from mpimesh.arrays.namespace import is_cupy, namespace
from mpimesh.arrays.types import Array
from mpimesh.errors import ModuleError
from mpimesh.nn.checks import check_extent, check_integers, first_outside, sum_dtype
from mpimesh.nn.context import Context
from mpimesh.nn.initializers import Normal
from mpimesh.nn.module import Module
from mpimesh.nn.parameter import Parameter
from mpimesh.nn.split import Split

__all__ = ["Embedding"]


class Embedding(Module):
    """``y[...] = weight[x[...]]``. Its input has no gradient: backward returns None.

    The weight starts normally distributed. It may be split over the ranks of a group, by
    :meth:`set_split` or as a :class:`mpimesh.VocabParallelEmbedding`: each rank then has some of
    the vectors, and forward is collective over the group.

    Shapes:
        x: any, integers in ``[0, num_embeddings)``.
        result: (*x.shape, features).
        weight: (num_embeddings, features).

    Cost:
        Saves `x`, then `x` and `dy`, by reference. Backward sorts `x` and touches
        only the rows of the gradient that occur in it. On a GPU equal ids are
        added in no fixed order, so the last bits of a gradient may vary.

    Args:
        num_embeddings: How many vectors there are.
        features: How long they are.
        std: Standard deviation of the first values.

    Raises:
        ModuleError: If an extent is not a whole number of at least 1, or `std`
            is negative.
    """

    split: Split | None = None

    def __init__(self, num_embeddings: int, features: int, *, std: float = 1.0) -> None:
        self.num_embeddings = check_extent("num_embeddings", num_embeddings)
        self.features = check_extent("features", features)
        shape = (self.num_embeddings, self.features)
        self.weight = Parameter("weight", shape, Normal(std))

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
        if ctx is not None:
            ctx.save(self, y.shape, y.dtype, x, mine)
        return y

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
