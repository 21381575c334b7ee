"""The layers of a model with the weights of its file, of which each rank reads what it holds."""

from __future__ import annotations

from collections.abc import Callable

from mpimesh import nn
from mpimesh.arrays import Array
from mpimesh.errors import ModelError
from mpimesh.layout.boxes import slices
from mpimesh.models.config import BertConfig
from mpimesh.models.forward_only import ForwardOnly
from mpimesh.models.weights import Weights
from mpimesh.nn import Context
from mpimesh.nn.split import Ranks, Split
from mpimesh.nn.tensor_parallel import split_layers

__all__ = ["Part", "check_ranks", "load_block", "load_embedding"]


class Part(ForwardOnly):
    """A layer of the model, or what stands for it on the ranks of other stages.

    Args:
        layer: The layer.
        ranks: The ranks that share it, whom a step then keeps from waiting for one that failed.

    Attributes:
        seen: Called with the number of rows that have come through, if not None.
        ranks: As given.
    """

    def __init__(self, layer: nn.SupportsLayer, ranks: Ranks) -> None:
        self._layer = layer
        self.ranks = ranks
        self.seen: Callable[[int], None] | None = None

    def forward(self, x: Array, ctx: Context | None = None) -> Array:
        """Return what the layer gives; nothing is saved."""
        y = self._layer.forward(x)
        if self.seen is not None:
            self.seen(len(y[0] if isinstance(y, tuple) else y))
        return y

    def __repr__(self) -> str:
        return f"Part({self._layer!r})"


def check_ranks(config: BertConfig, size: int) -> None:
    """Refuse more ranks than can share a block. Local.

    Raises:
        ModelError: If there are more ranks than heads, or than columns of the mlp.
    """
    if size > min(config.num_heads, config.hidden):
        raise ModelError(
            f"{config.num_heads} heads and {config.hidden} columns cannot be dealt to {size} "
            "ranks: make the dim of the tensor parallel ranks smaller"
        )


def load_embedding(weights: Weights, config: BertConfig, ranks: Ranks) -> nn.SupportsLayer:
    """Return the layer that the ids enter by, whose forward is then collective over `ranks`.

    Each rank has some of the words. Making it is local.

    Raises:
        ModelError: If the file is not that of the model.
    """
    layer = nn.BertEmbedding(
        config.vocabulary,
        config.max_tokens,
        config.features,
        token_types=config.token_types,
        eps=config.eps,
    )
    if ranks.size > 1:
        layer.words.set_split(Split(ranks.group))
    _load(weights, "embeddings.word_embeddings", layer.words)
    _load(weights, "embeddings.token_type_embeddings", layer.types)
    layer.positions.weight.data = weights.read(
        "embeddings.position_embeddings.weight",
        (config.max_positions, config.features),
        (slice(0, config.max_tokens), slice(None)),
    )
    _load(weights, "embeddings.LayerNorm", layer.norm)
    return layer


def load_block(weights: Weights, config: BertConfig, number: int, ranks: Ranks) -> nn.SupportsLayer:
    """Return a block, or a rank's part of it, whose forward is then collective over `ranks`.

    Making it is local.

    Args:
        weights: The file.
        config: The sizes.
        number: Of the block, from 0.
        ranks: The ranks that compute it together.

    Raises:
        ModelError: If the file is not that of the model.
    """
    block = nn.BertBlock(config.features, config.num_heads, hidden=config.hidden, eps=config.eps)
    attention, mlp = block.attention, block.mlp
    mlp.activation = config.activation_layer()
    if ranks.size > 1:
        split_layers(block, Split(ranks.group))
    layers = {
        "attention.self.query": attention.query,
        "attention.self.key": attention.key,
        "attention.self.value": attention.value,
        "attention.output.dense": attention.output,
        "attention.output.LayerNorm": block.attention_norm,
        "intermediate.dense": mlp.up,
        "output.dense": mlp.down,
        "output.LayerNorm": block.mlp_norm,
    }
    for name, layer in layers.items():
        _load(weights, f"encoder.layer.{number}.{name}", layer)
    return block


def _load(weights: Weights, name: str, layer: nn.SupportsLayer) -> None:
    """Read what this rank holds of the parameters of one layer."""
    for parameter in layer.parameters():
        parameter.data = weights.read(
            f"{name}.{parameter.name}", parameter.global_shape, slices(parameter.box)
        )
