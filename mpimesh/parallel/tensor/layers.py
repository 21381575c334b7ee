"""The layers of `mpimesh.nn` under the names that say how they are split over ranks."""

from __future__ import annotations

from mpimesh.errors import ModuleError
from mpimesh.nn import Attention, Dropout, Embedding, FeedForward, Linear, Rotary, SwiGLU
from mpimesh.nn.checks import check_extent
from mpimesh.nn.protocol import FeaturePart, SupportsLayer
from mpimesh.nn.split import RankGroup, Ranks, SequenceSplit, Split

__all__ = [
    "ColumnParallelLinear",
    "ParallelAttention",
    "ParallelDropout",
    "ParallelFeedForward",
    "ParallelSwiGLU",
    "RowParallelLinear",
    "VocabParallelEmbedding",
]


class ColumnParallelLinear(Linear):
    """A :class:`~mpimesh.nn.Linear` whose outputs are split over the ranks of a group: "S0".

    Each rank has some rows of the weight, and some of the bias, with the values that they have
    in the unsplit layer. Forward and backward are collective over the group.

    Shapes:
        x: (..., in_features), the same on every rank; with `sequence` this rank's places.
        result: (..., this rank's features), or (..., out_features) with `gather_output`.
        weight: (this rank's features, in_features). bias: (this rank's features,).

    Cost:
        Forward moves nothing without `sequence`; backward all-reduces the gradient of `x`, while
        the weight's is computed. With `sequence` forward gathers `x`; backward gathers it again,
        so that only this rank's places are kept, and reduce-scatters its gradient.

    Args:
        in_features: Length of the last axis of `x`.
        out_features: Length of the last axis of the result, over all ranks.
        group: The ranks, such as ``mesh.group("tp")``.
        bias: Whether to add a bias.
        sequence: How `x` is split along the sequence, if it is.
        gather_output: Give every rank the whole result.

    Raises:
        ModuleError: If an extent is not a whole number of at least 1, or `sequence` is split over
            another group.
        GroupError: If this rank is not in the group.

    Example:
        >>> tp = mesh.group("tp")
        >>> mlp = nn.Sequential(ColumnParallelLinear(64, 256, group=tp), nn.GELU(),
        ...                     RowParallelLinear(256, 64, group=tp))
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: RankGroup,
        bias: bool = True,
        sequence: SequenceSplit | None = None,
        gather_output: bool = False,
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            bias=bias,
            weight="S0",
            group=group,
            sequence=sequence,
            gather_output=gather_output,
        )


class RowParallelLinear(Linear):
    """A :class:`~mpimesh.nn.Linear` whose inputs are split over the ranks of a group: "S1".

    Each rank has some columns of the weight, with the values that they have in the unsplit
    layer, and the whole bias. Forward and backward are collective over the group.

    Shapes:
        x: (..., this rank's features), as a :class:`ColumnParallelLinear` gives them.
        result: (..., out_features), the same on every rank; with `sequence` this rank's places.
        weight: (out_features, this rank's features). bias: (out_features,).

    Cost:
        Forward all-reduces the result, backward moves nothing. With `sequence` forward
        reduce-scatters the result, and backward gathers its gradient.

    Args:
        in_features: Length of the last axis of `x`, over all ranks.
        out_features: Length of the last axis of the result.
        group: The ranks, such as ``mesh.group("tp")``.
        bias: Whether to add a bias.
        sequence: How the result is to be split along the sequence, if it is.

    Raises:
        ModuleError: If an extent is not a whole number of at least 1, or `sequence` is split over
            another group.
        GroupError: If this rank is not in the group.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: RankGroup,
        bias: bool = True,
        sequence: SequenceSplit | None = None,
    ) -> None:
        super().__init__(
            in_features, out_features, bias=bias, weight="S1", group=group, sequence=sequence
        )


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
        group: RankGroup,
        std: float = 1.0,
        sequence: SequenceSplit | None = None,
    ) -> None:
        super().__init__(num_embeddings, features, std=std)
        self.set_split(Split(group, sequence))


class ParallelAttention(Attention):
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
        group: RankGroup,
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
        self.set_split(Split(group, sequence))


class ParallelFeedForward(FeedForward):
    """A :class:`~mpimesh.nn.FeedForward` of which each rank of a group has some hidden values.

    The weights have the values that they have in the unsplit layer, and the same names. Forward and
    backward are collective over the group.

    Shapes:
        x, result: (..., features), the same on every rank; with `sequence` (rows, this rank's
            places, features).

    Cost:
        That of :class:`ParallelAttention`.

    Args:
        features: Length of the last axis of `x`.
        hidden: Length of what is between, over all ranks.
        group: The ranks, such as ``mesh.group("tp")``.
        activation: The layer between, which treats each value alone; None for GELU. A dropout in
            it drops what it drops in the unsplit layer.
        bias: Whether the linear layers have biases.
        sequence: How `x` and the result are split along the sequence, if they are.

    Raises:
        ModuleError: If an extent is not a whole number of at least 1, or the activation needs all
            hidden values.
        GroupError: If this rank is not in the group.
    """

    def __init__(
        self,
        features: int,
        hidden: int,
        *,
        group: RankGroup,
        activation: SupportsLayer | None = None,
        bias: bool = True,
        sequence: SequenceSplit | None = None,
    ) -> None:
        super().__init__(features, hidden, activation=activation, bias=bias)
        self.set_split(Split(group, sequence))


class ParallelSwiGLU(SwiGLU):
    """A :class:`~mpimesh.nn.SwiGLU` of which each rank of a group has some hidden values.

    All else is as in :class:`ParallelFeedForward`.

    Shapes:
        x, result: (..., features), the same on every rank; with `sequence` (rows, this rank's
            places, features).

    Args:
        features: Length of the last axis of `x`.
        hidden: Length of what is between, over all ranks.
        group: The ranks, such as ``mesh.group("tp")``.
        bias: Whether the linear layers have biases.
        sequence: How `x` and the result are split along the sequence, if they are.

    Raises:
        ModuleError: If an extent is not a whole number of at least 1.
        GroupError: If this rank is not in the group.
    """

    def __init__(
        self,
        features: int,
        hidden: int,
        *,
        group: RankGroup,
        bias: bool = False,
        sequence: SequenceSplit | None = None,
    ) -> None:
        super().__init__(features, hidden, bias=bias)
        self.set_split(Split(group, sequence))


class ParallelDropout(Dropout):
    """A :class:`~mpimesh.nn.Dropout` that drops of split features what it drops of all. Local.

    For what stands between a :class:`ColumnParallelLinear` and a :class:`RowParallelLinear` in a
    layer of one's own. In a :class:`~mpimesh.nn.Sequential`, a model's stages or a
    :class:`ParallelFeedForward` a plain dropout is told its features, and does the same.

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
        self.ranks = Ranks(group)
        self._part = self.ranks.part_of(check_extent("features", features))

    def set_part(self, part: FeaturePart | None) -> FeaturePart | None:
        """Return the features that it has.

        Raises:
            ModuleError: If they are others than those that it gets.
        """
        if part not in (None, self._part):
            raise ModuleError(f"{self!r} is made for {self._part}, but gets {part}")
        return self._part
