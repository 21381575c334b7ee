"""Attention whose heads are split over the ranks of a group."""

from __future__ import annotations

from typing import Self

from mpimesh.errors import ModuleError
from mpimesh.nn import Attention, Linear, Rotary
from mpimesh.nn.protocol import SupportsLayer
from mpimesh.parallel.microbatch import replica_rows
from mpimesh.parallel.tensor.entrance import Entered, Entrance
from mpimesh.parallel.tensor.group import Run, TensorGroup
from mpimesh.parallel.tensor.part import ColumnPart, RowPart
from mpimesh.parallel.tensor.retyped import retyped
from mpimesh.parallel.tensor.sequence import SequenceSplit
from mpimesh.runtime import ProcessGroup

__all__ = ["ParallelAttention", "head_parts"]


def head_parts(
    num_heads: int, num_kv_heads: int, head_dim: int, size: int
) -> tuple[list[Run], list[Run]]:
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
    queries: list[Run] = []
    keys: list[Run] = []
    for rank in range(size):
        if num_kv_heads >= size:
            kv = replica_rows(num_kv_heads, size, rank)
            heads = slice(kv.start * per_kv, kv.stop * per_kv)
        else:
            ranks = [replica_rows(size, num_kv_heads, head) for head in range(num_kv_heads)]
            head = next(i for i, those in enumerate(ranks) if rank < those.stop)
            kv = slice(head, head + 1)
            those = ranks[head]
            shared = replica_rows(per_kv, those.stop - those.start, rank - those.start)
            heads = slice(head * per_kv + shared.start, head * per_kv + shared.stop)
        queries.append((heads.start * head_dim, heads.stop * head_dim))
        keys.append((kv.start * head_dim, kv.stop * head_dim))
    return queries, keys


class ParallelAttention(Entered, Attention):
    """An :class:`~mpimesh.nn.Attention` of which each rank of a group has some heads.

    The weights have the values that they have in the unsplit layer, and the same names. With fewer
    key heads than ranks, several ranks have the same key head; its gradient is the sum over
    them, which training makes once a step, see :func:`sum_shared_gradients`. Forward and backward
    are collective over the group.

    Shapes:
        x: (batch, tokens, features), the same on every rank, or that and a mask of shape (batch,
            tokens) in a tuple; with `sequence` this rank's places of both.
        result: (batch, tokens, features), the same on every rank; with `sequence` its places.

    Cost:
        Forward all-reduces the result, backward the gradient of `x`, while those of all weights
        are computed. With `sequence` forward gathers `x` and reduce-scatters the result; backward
        gathers `x` and the gradient of the result, and reduce-scatters that of `x`.

    Args:
        features: Length of the last axis of `x`.
        num_heads: Number of heads, over all ranks.
        group: The ranks, such as ``mesh.group("tp")``.
        num_kv_heads: Number of heads of the keys and values, over all ranks; None for `num_heads`.
        head_dim: Length of a head; None for ``features / num_heads``.
        causal: Whether a token reads only itself and those before it.
        rotary: Whether queries and keys are turned; or the layer that does so.
        bias: Whether the linear layers have biases.
        dropout: The share of the weights to drop: those that the unsplit layer drops.
        sequence: How `x` and the result are split along the sequence, if they are.

    Raises:
        ModuleError: As the unsplit layer, or if a rank would have no head.
        GroupError: If this rank is not in the group.
    """

    def __init__(
        self,
        features: int,
        num_heads: int,
        *,
        group: ProcessGroup | TensorGroup,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool = False,
        rotary: bool | Rotary | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        sequence: SequenceSplit | None = None,
    ) -> None:
        super().__init__(
            features,
            num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            causal=causal,
            rotary=rotary,
            bias=bias,
            dropout=dropout,
        )
        self._split(Entrance(group, sequence))

    @classmethod
    def of(cls, like: Attention, entrance: Entrance) -> Self:
        """Return `like`, an unsplit layer without memory, with its heads split.

        Raises:
            ModuleError: If its layers are no plain linear ones, or a rank would have no head.
            ModuleStateError: If it has memory.
        """
        made = retyped(like, cls)
        made._split(entrance)
        return made

    def _split(self, entrance: Entrance) -> None:
        self.entrance = entrance
        tensor = entrance.tensor
        queries, keys = head_parts(self.num_heads, self.num_kv_heads, self.head_dim, tensor.size)
        self._first_head = queries[tensor.rank][0] // self.head_dim
        self.query = ColumnPart(plain(self, self.query), tensor, queries)
        self.key = ColumnPart(plain(self, self.key), tensor, keys)
        self.value = ColumnPart(plain(self, self.value), tensor, keys)
        self.output = RowPart(plain(self, self.output), tensor, entrance.sequence, queries)


def plain(layer: object, inner: SupportsLayer) -> Linear:
    """Return a layer within `layer` if it can be split.

    Raises:
        ModuleError: If it is something else than a Linear.
    """
    if type(inner) is not Linear:
        raise ModuleError(
            f"{type(layer).__name__}: only plain Linear layers within can be split, got {inner!r}"
        )
    return inner
