"""The layers of a GPT, whole or split over the ranks of a group."""

from __future__ import annotations

from typing import Literal

from mpimesh.arguments import as_flag, as_int, shown
from mpimesh.errors import ModuleError
from mpimesh.nn import (
    Dropout,
    Embedding,
    GptBlock,
    LayerNorm,
    LearnedPositions,
    Linear,
    Module,
    RMSNorm,
)
from mpimesh.nn.checks import check_extent
from mpimesh.nn.drops import check_share
from mpimesh.nn.split import SequenceSplit, Split
from mpimesh.parallel.tensor.layers import ColumnParallelLinear
from mpimesh.parallel.tensor.split import split_layers
from mpimesh.runtime import ProcessGroup

__all__ = ["gpt_layers"]

MOST_LAYERS = 1 << 16


def gpt_layers(
    vocab_size: int,
    features: int,
    num_layers: int,
    num_heads: int,
    *,
    max_tokens: int,
    num_kv_heads: int | None = None,
    hidden: int | None = None,
    norm: Literal["layer", "rms"] = "layer",
    mlp: Literal["gelu", "swiglu"] = "gelu",
    rotary: bool = False,
    bias: bool = True,
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
    tied: bool = True,
    tp: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    tokens: int | None = None,
) -> list[Module]:
    """Return the layers of a GPT in order, to be put into a Sequential or dealt to stages. Local.

    They are embedding, learned positions (unless `rotary`), dropout, the blocks, a norm, and an
    output layer without bias. With `tp` they are split over that group, and give the same results
    up to rounding as without: the same seed gives the same weights, and states fit both.

    Where all logits are wanted, as for sampling, put this rank's part and those of the others
    together: ``tp.all_gather(y, axis=y.ndim - 1, sizes=...)``, with the sizes that the ranks have:
    ``vocab_size // tp.size``, and one more on the first ``vocab_size % tp.size`` ranks. Gather just
    the places that are needed.

    Shapes:
        x: (rows, tokens), integers in ``[0, vocab_size)``.
        result: (rows, tokens, vocab_size); with `tp` this rank's part of the last axis, for
            :class:`VocabParallelCrossEntropy`.

    Args:
        vocab_size: Number of different tokens.
        features: Length of a token's vector.
        num_layers: Number of blocks.
        num_heads: Number of heads.
        max_tokens: The longest sequence; nothing depends on it with `rotary`.
        num_kv_heads: As in :class:`~mpimesh.nn.GptBlock`, and so are `hidden`, `norm`, `mlp`,
            `rotary` and `bias`.
        hidden: Length of what is inside an mlp.
        norm: The kind of norms.
        mlp: The kind of mlps.
        rotary: Whether positions are told by rotation.
        bias: Whether the linear layers of the blocks have biases.
        dropout: The share that is dropped behind the embedding and in the blocks.
        attention_dropout: The share of the attentions' weights that is dropped.
        tied: Whether the output layer has the embedding's weight.
        tp: The ranks to split over, such as ``mesh.group("tp")``; None for whole layers.
        sequence_parallel: Whether activations between split layers are split along the sequence.
        tokens: The length of all sequences, where the ranks cannot share it evenly.

    Raises:
        ModuleError: If an extent is not a whole number of at least 1, the heads do not divide the
            features or a rank would have none, or a number or a name is out of range; or there
            is `sequence_parallel` without `tp`.
        GroupError: If this rank is not in the group.

    Example:
        >>> tp = mesh.group("tp")
        >>> layers = gpt_layers(50257, 768, 12, 12, max_tokens=1024, tp=tp)
        >>> stages = PipelineParallel.partition(layers, mesh.dim_size("pp"), mesh=mesh, times=times)
        >>> model = PipelineParallel(stages, 8, mesh=mesh)
        >>> loss = VocabParallelCrossEntropy(50257, group=tp)
        >>> model.train_step(ids, target, loss=loss)
        >>> y = model.forward(ids, everywhere=True)[:, -1]  # of the next token, this rank's part
        >>> sizes = [len(part) for part in np.array_split(np.arange(50257), tp.size)]
        >>> logits = tp.all_gather(y, axis=1, sizes=sizes).resolve()
    """
    vocab_size = check_extent("vocab_size", vocab_size)
    max_tokens = check_extent("max_tokens", max_tokens)
    rotary = as_flag(rotary, "rotary", ModuleError)
    tied = as_flag(tied, "tied", ModuleError)
    if tp is not None and not isinstance(tp, ProcessGroup):
        raise ModuleError(f"tp must be a group of ranks, as mesh.group('tp'), got {shown(tp)}")
    if tokens is not None:
        check_extent("tokens", tokens)
    if as_flag(sequence_parallel, "sequence_parallel", ModuleError) and tp is None:
        raise ModuleError("sequence_parallel splits over the ranks of tp, which is None")
    embedding = Embedding(vocab_size, features, std=0.02)
    layers: list[Module] = [embedding]
    if not rotary:
        layers.append(LearnedPositions(max_tokens, features))
    layers.append(Dropout(check_share("dropout", dropout)))
    blocks = [
        GptBlock(
            features,
            num_heads,
            num_kv_heads=num_kv_heads,
            hidden=hidden,
            norm=norm,
            mlp=mlp,
            rotary=rotary,
            bias=bias,
            dropout=dropout,
            attention_dropout=attention_dropout,
        )
        for _ in range(as_int(num_layers, "num_layers", ModuleError, least=1, most=MOST_LAYERS))
    ]
    eps = blocks[-1].mlp_norm.eps
    last = LayerNorm(features, eps=eps) if norm == "layer" else RMSNorm(features, eps=eps)
    layers += [*blocks, last]
    if tp is None:
        head: Linear | ColumnParallelLinear = Linear(features, vocab_size, bias=False)
    else:
        sequence = SequenceSplit(tp, length=tokens) if sequence_parallel else None
        split = Split(tp, sequence)
        for layer in layers:
            split_layers(layer, split)
        head = ColumnParallelLinear(features, vocab_size, group=tp, bias=False, sequence=sequence)
    if tied:
        head.weight = dict(layers[0].named_parameters())["weight"]
    return [*layers, head]
