"""A whole model split over the ranks of a group, layer by layer."""

from __future__ import annotations

from typing import Any, TypeVar

from mpimesh.errors import ModuleError
from mpimesh.nn import (
    GELU,
    Attention,
    BertBlock,
    Checkpoint,
    Dropout,
    Embedding,
    FeedForward,
    GptBlock,
    LayerNorm,
    LearnedPositions,
    Linear,
    Module,
    ReLU,
    RMSNorm,
    Sequential,
    SiLU,
    SwiGLU,
)
from mpimesh.nn.protocol import FeaturePart, SupportsLayer, is_layer, set_part
from mpimesh.nn.split import SequenceSplit, Split
from mpimesh.parallel.first_values import leaves
from mpimesh.parallel.tensor.layers import ParallelDropout
from mpimesh.parallel.tensor.model import tensor_groups
from mpimesh.runtime import ProcessGroup

__all__ = ["split_layers", "split_sequence", "tensor_parallel"]

L = TypeVar("L", bound=Module)

_SPLIT = (Attention, FeedForward, SwiGLU, Embedding)
# Of these each rank has a part.

_OF_PLACES = (LayerNorm, RMSNorm, Linear, Dropout, LearnedPositions)
# These are told which places of a split sequence they treat.

_PLACEWISE = (GELU, ReLU, SiLU, BertBlock, GptBlock, Checkpoint)
# With a split sequence these need no change, or only of the layers within.


def tensor_parallel(model: L, group: ProcessGroup, *, sequence: SequenceSplit | None = None) -> L:
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
    split_layers(model, split)
    if model.parameters() and not tensor_groups(model):
        names = ", ".join(kind.__name__ for kind in _SPLIT)
        raise ModuleError(
            f"nothing of {model!r} can be split over group {group.name!r}: what is split is "
            f"{names}, wherever they stand. For a Linear, use "
            "ColumnParallelLinear or RowParallelLinear in its place; what is to stay whole on each "
            "rank needs no tensor_parallel"
        )
    return model


def split_layers(model: SupportsLayer, split: Split) -> None:
    """Do what :func:`tensor_parallel` does, also for a layer that stays whole. Local.

    Raises:
        ModuleError: As that, where a layer cannot be as it is among split ones.
        ModuleStateError: If a layer has memory.
    """
    _Splitter(split).visit(model)
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


def split_sequence(layer: L, sequence: SequenceSplit) -> L:
    """Let `layer`, such as a LayerNorm, work on a split sequence; returns it. Local.

    For layers that treat each place by itself. All parameters under it become such whose
    gradients are summed over the ranks; see :meth:`mpimesh.nn.Module.set_sequence`.

    Args:
        layer: The layer, whose parameters have no memory yet.
        sequence: How sequences are split.

    Raises:
        ModuleError: If a parameter has memory, or is split already.
    """
    layer.set_sequence(sequence)
    return layer


def _is_split(layer: object) -> bool:
    """Tell whether a layer itself is split, or on a split sequence, and not just layers in it."""
    return bool(getattr(layer, "split", None) or getattr(layer, "sequence", None))


class _Splitter:
    """A visit to all layers of a model, to split them.

    Args:
        split: The ranks, and how activations between split layers are split.
    """

    def __init__(self, split: Split) -> None:
        self._split = split
        # The layers themselves, so that no other one gets the id of one.
        self._visited: dict[int, Any] = {}

    def visit(self, layer: Any, part: FeaturePart | None = None) -> None:
        """Split `layer` and what is within it, once.

        Args:
            layer: The layer.
            part: Which features it gets, None for all. Those of layers that the user has split: a
                layer between them stays as it is, and sees all places of a sequence.
        """
        if isinstance(layer, Sequential):
            for one in layer.layers:
                self.visit(one, part)
                part = set_part(one, part)
        elif part is None and id(layer) not in self._visited:
            self._visited[id(layer)] = layer
            self._split_once(layer)

    def _split_once(self, layer: Any) -> None:
        sequence = self._split.sequence
        if isinstance(layer, ParallelDropout):
            return
        if _is_split(layer):
            self._check_sequence(layer)
        elif type(layer) in _SPLIT:
            layer.set_split(Split(self._split.ranks.group, sequence))
        elif sequence is not None and type(layer) in _OF_PLACES:
            layer.set_sequence(sequence)
        elif sequence is not None and not isinstance(layer, _PLACEWISE):
            raise ModuleError(
                f"{layer!r}: it is not known whether it treats each place of a sequence by itself, "
                "so it cannot be used between split layers; leave it out, or give none of sequence"
            )
        elif isinstance(layer, Module):
            for _, child in layer.named_children():
                self.visit(child)

    def _check_sequence(self, layer: Any) -> None:
        """Refuse a layer that the user has split if it is for sequences that are split otherwise.

        Raises:
            ModuleError: If it is.
        """
        split = getattr(layer, "split", None)
        own = layer.sequence if split is None else split.sequence
        given = self._split.sequence
        alike = (own is None) == (given is None)
        if own is not None and given is not None:
            alike = own.ranks.group is given.ranks.group and own.length == given.length
        if not alike:
            raise ModuleError(
                f"{layer!r} is split already, with sequence={own!r}, but the layers around it are "
                f"to be split with sequence={given!r}: give it the same"
            )
