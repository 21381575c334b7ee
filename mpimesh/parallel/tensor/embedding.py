"""An embedding whose vectors are split over the ranks of a group."""

from __future__ import annotations

from typing import Self

import numpy as np

from mpimesh.arrays import Array, namespace
from mpimesh.errors import ModuleError
from mpimesh.layout import layout_of_runs
from mpimesh.nn import Context, Embedding
from mpimesh.nn.checks import check_integers, first_outside
from mpimesh.parallel.tensor.entrance import Entrance
from mpimesh.parallel.tensor.group import TensorGroup
from mpimesh.parallel.tensor.retyped import retyped
from mpimesh.parallel.tensor.sequence import SequenceSplit
from mpimesh.runtime import ProcessGroup

__all__ = ["VocabParallelEmbedding"]


class VocabParallelEmbedding(Embedding):
    """An :class:`~mpimesh.nn.Embedding` of which each rank of a group has some vectors.

    They have the values that they have in the unsplit layer. Forward is collective over the group.
    A :class:`ColumnParallelLinear` without bias, with as many outputs as there are vectors, may
    have the same weight: an output layer that is tied to the embedding.

    Shapes:
        x: any, integers in ``[0, num_embeddings)``, the same on every rank. With `sequence`
            (rows, places), all of them.
        result: (*x.shape, features), the same on every rank; with `sequence` this rank's places.
        weight: (this rank's vectors, features).

    Cost:
        Forward all-reduces the result, and backward moves nothing. With `sequence` forward
        reduce-scatters the result, and backward gathers its gradient.

    Args:
        num_embeddings: How many vectors there are, over all ranks.
        features: How long they are.
        group: The ranks, such as ``mesh.group("tp")``.
        std: Standard deviation of the first values.
        sequence: How the result is to be split along the sequence, if it is.

    Raises:
        ModuleError: If an extent is not a whole number of at least 1, or `std` is negative.
        GroupError: If this rank is not in the group.
    """

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        group: ProcessGroup | TensorGroup,
        std: float = 1.0,
        sequence: SequenceSplit | None = None,
    ) -> None:
        super().__init__(num_embeddings, features, std=std)
        self._split(group, sequence)

    @classmethod
    def of(
        cls, like: Embedding, group: ProcessGroup | TensorGroup, sequence: SequenceSplit | None
    ) -> Self:
        """Return `like`, an unsplit layer without memory, split over the ranks of `group`."""
        made = retyped(like, cls)
        made._split(group, sequence)
        return made

    def _split(self, group: ProcessGroup | TensorGroup, sequence: SequenceSplit | None) -> None:
        self.tensor = Entrance(group, sequence).tensor
        self.sequence = sequence
        self._start, self._stop = self.tensor.runs(self.num_embeddings)[self.tensor.rank]
        layout = layout_of_runs(self.weight.shape, 0, self.tensor.runs(self.num_embeddings))
        self.weight.set_layout(layout, self.tensor.rank)

    def forward(self, x: Array, ctx: Context | None = None) -> Array:
        """Return the vectors that `x` names. Collective over the group.

        Raises:
            DTypeError: If `x` does not hold integers.
            ModuleError: If an id is out of range; names the first such id.
            ModuleStateError: If the layer is not materialised.
        """
        weight = self.weight.value()
        self._check_ids(x)
        xp = namespace(weight)
        x = x.astype(np.int64, copy=False)  # this rank's first id may not fit into their dtype
        mine = (x >= self._start) & (x < self._stop)
        ids = xp.where(mine, x - self._start, 0)
        if self._start < self._stop:
            y = xp.take(weight, ids, axis=0)
            y[~mine] = 0
        else:
            y = xp.zeros((*x.shape, self.features), weight.dtype)
        if self.sequence is None:
            y = self.tensor.all_reduce(y, owned=True).resolve()
        else:
            y = self.sequence.reduce_scatter(y).resolve()
        if ctx is not None:
            ctx.save(self, y.shape, y.dtype, ids, mine)
        return y

    def backward_input(self, dy: Array, ctx: Context) -> None:
        """Keep what of `dy` belongs to this rank's vectors. Collective with `sequence`."""
        ids, mine = self._take(dy, ctx)
        if not self.weight.requires_grad:
            ctx.defer(self, None, None)
            return
        whole = dy if self.sequence is None else self.sequence.gather(dy).resolve()
        ctx.defer(self, ids[mine], whole[mine])

    def _check_ids(self, x: Array) -> None:
        check_integers(self, x)
        wrong = (x < 0) | (x >= self.num_embeddings)
        if wrong.any():
            raise ModuleError(
                f"{self!r}: ids must be in [0, {self.num_embeddings}), got "
                f"{first_outside(x, wrong)}"
            )

    def __repr__(self) -> str:
        group = self.tensor.group.name
        return f"VocabParallelEmbedding({self.num_embeddings}, {self.features}, group={group!r})"
