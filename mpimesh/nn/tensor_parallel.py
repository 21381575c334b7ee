"""Models split over the ranks of a group, layer by layer, and the layers of a GPT."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

from mpimesh.arguments import as_flag, as_int, shown
from mpimesh.errors import ModuleError
from mpimesh.nn.activations import GELU, ReLU, SiLU, Tanh
from mpimesh.nn.attention import Attention
from mpimesh.nn.containers import Checkpoint, Sequential
from mpimesh.nn.dropout import Dropout, ParallelDropout, check_share
from mpimesh.nn.embedding import Embedding, PositionalEmbedding
from mpimesh.nn.linear import ColumnParallelLinear, Linear
from mpimesh.nn.module import Module, leaves
from mpimesh.nn.norms import LayerNorm, RMSNorm
from mpimesh.nn.protocol import FeaturePart, Visited, check_extent, is_layer, set_part
from mpimesh.nn.split import RankGroup, SequenceSplit, Split, SplitRanks
from mpimesh.nn.transformer import BertBlock, FeedForward, GptBlock, SwiGLU

__all__ = ["gpt_layers", "split_groups", "tensor_parallel"]

L = TypeVar("L", bound=Module)

_SPLIT = (Attention, FeedForward, SwiGLU, Embedding)
# Of these each rank has a part.

_OF_PLACES = (LayerNorm, RMSNorm, Linear, Dropout, PositionalEmbedding)
# These learn which places of a split sequence they treat.

_PLACEWISE = (GELU, ReLU, SiLU, Tanh, BertBlock, GptBlock, Checkpoint)
# With a split sequence these need no change, or only of the layers within.


def tensor_parallel(model: L, group: RankGroup, *, sequence: SequenceSplit | None = None) -> L:
    """Split the layers of `model` over the ranks of a group, and return it. Local.

    To be done on every rank of the group, before the model has memory. Numbers of layers and names
    of parameters stay, so that first values, dropout and states are those of the unsplit model.

    :class:`~mpimesh.nn.Attention`, :class:`~mpimesh.nn.FeedForward`, :class:`~mpimesh.nn.SwiGLU`
    and :class:`~mpimesh.nn.Embedding` are split, wherever they stand; all else is done by every
    rank. With `sequence` each rank does that for its places, if the layer is one of this library
    that treats each place by itself. A linear layer by itself is not split: use
    :class:`ColumnParallelLinear` for an output layer, before a
    :class:`VocabParallelCrossEntropy`. Layers that are split already stay as they are; what stands
    in a Sequential between a :class:`ColumnParallelLinear` and a :class:`RowParallelLinear` is told
    which features it gets, so that dropout there is that of the unsplit model, too.

    Args:
        model: The model; its layers are split in place.
        group: The ranks, such as ``mesh.group("tp")``.
        sequence: How activations between split layers are split along the sequence, if they are.
            What enters the model must be so then, unless an embedding comes first.

    Raises:
        ModuleError: If `model` is no layer, such as a :class:`~mpimesh.DataParallel`; it has
            parameters, but no layer that can be split; a rank would have no head, a parameter
            stands in layers that are split and in others that are not, with `sequence` a layer is
            not known to treat each place by itself, or a layer that needs all features stands
            where ranks have a part of them.
        ModuleStateError: If a layer has memory.
        GroupError: If this rank is not in the group.

    Example:
        >>> tp = mesh.group("tp")
        >>> blocks = [tensor_parallel(nn.GptBlock(64, 8), tp) for _ in range(12)]
    """
    split = Split(group, sequence)
    if not is_layer(model):
        one: object = model
        got = f"the class {one.__name__}" if isinstance(one, type) else type(one).__name__
        raise ModuleError(
            f"tensor_parallel splits a layer, such as a Sequential of all layers, got {got}: split "
            "the layers first, then give them to DataParallel or to stages, which make their "
            "memory"
        )
    _split(model, split, Visited())
    for layer in leaves(model):
        if not isinstance(layer, Module) or _is_split(layer):
            continue
        for parameter in layer._own_parameters():
            if parameter.layout is not None:
                raise ModuleError(
                    f"parameter {parameter.name!r} of shape {parameter.global_shape} stands in "
                    f"several layers of which some are split and {layer!r} is not; give each layer "
                    "one of its own, or see gpt_layers(tied=True). The model is half split now: "
                    "make another"
                )
    if model.parameters() and not split_groups(model):
        names = ", ".join(kind.__name__ for kind in _SPLIT)
        raise ModuleError(
            f"nothing of {model!r} can be split over group {group.name!r}: what is split is "
            f"{names}, wherever they stand. For a Linear, use "
            "ColumnParallelLinear or RowParallelLinear in its place; what is to stay whole on each "
            "rank needs no tensor_parallel"
        )
    return model


def split_groups(*layers: object) -> list[RankGroup]:
    """Return the groups over which `layers`, and those under them, are split. Local."""
    found: dict[RankGroup, None] = {}
    for top in layers:
        for layer in leaves(top):
            for value in getattr(layer, "__dict__", {}).values():
                ranks = value if isinstance(value, SplitRanks) else getattr(value, "ranks", None)
                if isinstance(ranks, SplitRanks):
                    found[ranks.group] = None
    return list(found)


def _is_split(layer: object) -> bool:
    """Tell whether a layer itself is split, or on a split sequence, and not just layers in it."""
    return bool(getattr(layer, "split", None) or getattr(layer, "sequence", None))


def _split(layer: Any, split: Split, visited: Visited, part: FeaturePart | None = None) -> None:
    """Split `layer` and what is within it, once.

    Args:
        layer: The layer.
        split: The ranks, and how activations between split layers are split.
        visited: The layers that had their turn.
        part: Which features it gets, None for all. Those of layers that the user has split: a
            layer between them stays as it is, and sees all places of a sequence.

    Raises:
        ModuleError: If it cannot be split, or not be used between split layers.
    """
    sequence = split.sequence
    if isinstance(layer, Sequential):
        for one in layer.layers:
            _split(one, split, visited, part)
            part = set_part(one, part)
        return
    if part is not None or layer in visited or isinstance(layer, ParallelDropout):
        return
    visited.add(layer)
    if _is_split(layer):
        _check_sequence(layer, sequence)
    elif type(layer) in _SPLIT:
        layer.set_split(Split(split.ranks.group, sequence))
    elif sequence is not None and type(layer) in _OF_PLACES:
        layer.set_sequence(sequence)
    elif sequence is not None and not isinstance(layer, _PLACEWISE):
        raise ModuleError(
            f"{layer!r}: it is not known whether it treats each place of a sequence by itself, so "
            "it cannot be used between split layers; leave it out, or give none of sequence"
        )
    elif isinstance(layer, Module):
        for _, child in layer.named_children():
            _split(child, split, visited)


def _check_sequence(layer: Any, sequence: SequenceSplit | None) -> None:
    """Refuse a layer that the user has split if it is for sequences that are split otherwise.

    Raises:
        ModuleError: If it is.
    """
    split = getattr(layer, "split", None)
    own = layer.sequence if split is None else split.sequence
    alike = (own is None) == (sequence is None)
    if own is not None and sequence is not None:
        alike = own.ranks.group is sequence.ranks.group and own.length == sequence.length
    if not alike:
        raise ModuleError(
            f"{layer!r} is split already, with sequence={own!r}, but the layers around it are "
            f"to be split with sequence={sequence!r}: give it the same"
        )


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
    tp: RankGroup | None = None,
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
        rotary: Whether positions are encoded by rotation.
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
    if tp is not None and not isinstance(tp, RankGroup):
        raise ModuleError(f"tp must be a group of ranks, as mesh.group('tp'), got {shown(tp)}")
    if tokens is not None:
        check_extent("tokens", tokens)
    if as_flag(sequence_parallel, "sequence_parallel", ModuleError) and tp is None:
        raise ModuleError("sequence_parallel splits over the ranks of tp, which is None")
    embedding = Embedding(vocab_size, features, std=0.02)
    layers: list[Module] = [embedding]
    if not rotary:
        layers.append(PositionalEmbedding(max_tokens, features))
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
        head = Linear(features, vocab_size, bias=False)
    else:
        sequence = SequenceSplit(tp, length=tokens) if sequence_parallel else None
        tensor_parallel(Sequential(layers), tp, sequence=sequence)
        head = ColumnParallelLinear(features, vocab_size, group=tp, bias=False, sequence=sequence)
    if tied:
        head.weight = dict(layers[0].named_parameters())["weight"]
    return [*layers, head]
