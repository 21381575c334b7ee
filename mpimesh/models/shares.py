"""A block's heads and columns that belong to one rank, with the weights for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mpimesh import nn
from mpimesh.arrays import Array
from mpimesh.errors import ModelError
from mpimesh.models.config import BertConfig
from mpimesh.models.forward_only import ForwardOnly
from mpimesh.models.weights import Weights
from mpimesh.nn import Context
from mpimesh.nn.split import Ranks
from mpimesh.parallel import VocabParallelEmbedding
from mpimesh.parallel.microbatch import replica_rows

__all__ = ["Part", "Share", "load_block", "load_embedding"]


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's share of each block: some of the heads, some of the columns of the mlp.

    Both are dealt to the ranks in order; where they cannot be dealt evenly the first ranks get
    one more.

    Attributes:
        heads: The heads.
        columns: The columns.
        first: Whether the rank is the first: it adds the biases of the sums.
    """

    heads: slice
    columns: slice
    first: bool

    @classmethod
    def of(cls, config: BertConfig, size: int, rank: int) -> Share:
        """Return the share of `rank` among `size` ranks.

        Raises:
            ModelError: If there are more ranks than heads, or than columns.
        """
        if size > min(config.num_heads, config.hidden):
            raise ModelError(
                f"{config.num_heads} heads and {config.hidden} columns cannot be dealt to {size} "
                "ranks: make the dim of the tensor parallel ranks smaller"
            )
        heads = replica_rows(config.num_heads, size, rank)
        return cls(heads, replica_rows(config.hidden, size, rank), rank == 0)


class Part(ForwardOnly):
    """A layer of the model, or what stands for it on the ranks of other stages.

    Args:
        layer: The layer.
        tensor: The ranks that share it, whom a step then keeps from waiting for one that failed.

    Attributes:
        seen: Called with the number of rows that have come through, if not None.
        tensor: As given.
    """

    def __init__(self, layer: nn.SupportsLayer, tensor: Ranks) -> None:
        self._layer = layer
        self.tensor = tensor
        self.seen: Callable[[int], None] | None = None

    def forward(self, x: Array, ctx: Context | None = None) -> Array:
        """Return what the layer gives; nothing is saved."""
        y = self._layer.forward(x)
        if self.seen is not None:
            self.seen(len(y[0] if isinstance(y, tuple) else y))
        return y

    def __repr__(self) -> str:
        return f"Part({self._layer!r})"


class _Summed(ForwardOnly):
    """A layer whose results are added up over the ranks of a group. Collective over it."""

    def __init__(self, layer: nn.SupportsLayer, tensor: Ranks) -> None:
        self._layer = layer
        self._tensor = tensor

    def forward(self, x: Array, ctx: Context | None = None) -> Array:
        return self._tensor.all_reduce(self._layer.forward(x), owned=True).resolve()

    def __repr__(self) -> str:
        return f"Summed({self._layer!r})"


def load_embedding(weights: Weights, config: BertConfig, tensor: Ranks) -> nn.SupportsLayer:
    """Return the layer that the ids enter by, whose forward is then collective over `tensor`.

    Each rank has some of the words. Making it is local.

    Raises:
        ModelError: If the file is not that of the model.
    """
    features = config.features
    layer = nn.BertEmbedding(
        config.vocabulary,
        config.max_tokens,
        features,
        token_types=config.token_types,
        eps=config.eps,
    )
    tables = "embeddings.{}_embeddings.weight"
    rows = slice(0, config.vocabulary)
    if tensor.size > 1:
        layer.words = VocabParallelEmbedding(config.vocabulary, features, group=tensor.group)
        rows = replica_rows(config.vocabulary, tensor.size, tensor.rank)
    layer.words.weight.data = weights.read(
        tables.format("word"), (config.vocabulary, features), (rows, slice(None))
    )
    layer.types.weight.data = weights.read(
        tables.format("token_type"), (config.token_types, features)
    )
    layer.positions.weight.data = weights.read(
        tables.format("position"),
        (config.max_positions, features),
        (slice(0, config.max_tokens), slice(None)),
    )
    _load_norm(weights, "embeddings.LayerNorm", layer.norm)
    return layer


def load_block(
    weights: Weights, config: BertConfig, number: int, share: Share, tensor: Ranks
) -> nn.SupportsLayer:
    """Return a block, or a rank's share of it, whose forward is then collective over `tensor`.

    Making it is local.

    Args:
        weights: The file.
        config: The sizes.
        number: Of the block, from 0.
        share: What of it this rank computes.
        tensor: The ranks that compute it together.

    Raises:
        ModelError: If the file is not that of the model.
    """
    features, dim = config.features, config.features // config.num_heads
    block = nn.BertBlock(features, config.num_heads, hidden=config.hidden, eps=config.eps)
    before = f"encoder.layer.{number}"
    heads = slice(share.heads.start * dim, share.heads.stop * dim)
    attention, mlp = block.attention, block.mlp
    mlp.activation = config.activation_layer()
    for name in ("query", "key", "value"):
        layer = _load_columns(weights, f"{before}.attention.self.{name}", heads, features, features)
        setattr(attention, name, layer)
    mlp.up = _load_columns(
        weights, f"{before}.intermediate.dense", share.columns, config.hidden, features
    )
    output = _load_rows(
        weights, f"{before}.attention.output.dense", heads, features, features, bias=share.first
    )
    down = _load_rows(
        weights, f"{before}.output.dense", share.columns, features, config.hidden, bias=share.first
    )
    attention.output = _Summed(output, tensor) if tensor.size > 1 else output
    mlp.down = _Summed(down, tensor) if tensor.size > 1 else down
    _load_norm(weights, f"{before}.attention.output.LayerNorm", block.attention_norm)
    _load_norm(weights, f"{before}.output.LayerNorm", block.mlp_norm)
    return block


def _load_norm(weights: Weights, name: str, norm: nn.LayerNorm) -> None:
    norm.weight.data = weights.read(f"{name}.weight", norm.weight.shape)
    norm.bias.data = weights.read(f"{name}.bias", norm.bias.shape)


def _load_columns(
    weights: Weights, name: str, part: slice, out_features: int, in_features: int
) -> nn.Linear:
    """Return the part of a linear layer that gives some of the features."""
    layer = nn.Linear(in_features, part.stop - part.start)
    layer.weight.data = weights.read(
        f"{name}.weight", (out_features, in_features), (part, slice(None))
    )
    if layer.bias is not None:
        layer.bias.data = weights.read(f"{name}.bias", (out_features,), (part,))
    return layer


def _load_rows(
    weights: Weights, name: str, part: slice, out_features: int, in_features: int, *, bias: bool
) -> nn.Linear:
    """Return the part of a linear layer that reads some of the features: a term of the sum."""
    layer = nn.Linear(part.stop - part.start, out_features, bias=bias)
    layer.weight.data = weights.read(
        f"{name}.weight", (out_features, in_features), (slice(None), part)
    )
    if layer.bias is not None:
        layer.bias.data = weights.read(f"{name}.bias", (out_features,))
    return layer
