"""A whole model split over the ranks of a group, layer by layer."""

from __future__ import annotations

from collections.abc import Callable
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
    Parameter,
    ReLU,
    RMSNorm,
    Sequential,
    SiLU,
    SwiGLU,
)
from mpimesh.nn.protocol import FeaturePart, SupportsLayer, is_layer, set_part
from mpimesh.parallel.first_values import leaves
from mpimesh.parallel.tensor.attention import ParallelAttention
from mpimesh.parallel.tensor.dropout import ParallelDropout
from mpimesh.parallel.tensor.embedding import VocabParallelEmbedding
from mpimesh.parallel.tensor.entrance import Around, Entered, Entrance
from mpimesh.parallel.tensor.feedforward import ParallelFeedForward, ParallelSwiGLU
from mpimesh.parallel.tensor.group import TensorGroup
from mpimesh.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from mpimesh.parallel.tensor.model import tensor_groups
from mpimesh.parallel.tensor.retyped import retyped
from mpimesh.parallel.tensor.sequence import SequenceSplit, split_sequence
from mpimesh.parallel.tensor.sequence_layers import SequenceDropout, SequencePositions
from mpimesh.runtime import ProcessGroup

__all__ = ["split_layers", "tensor_parallel"]

L = TypeVar("L", bound=Module)


class ParallelGptBlock(Around, GptBlock):
    """A :class:`~mpimesh.nn.GptBlock` with split layers within."""


class ParallelBertBlock(Around, BertBlock):
    """A :class:`~mpimesh.nn.BertBlock` with split layers within."""


_AROUND: dict[type, type[Module]] = {GptBlock: ParallelGptBlock, BertBlock: ParallelBertBlock}


def tensor_parallel(
    model: L, group: ProcessGroup | TensorGroup, *, sequence: SequenceSplit | None = None
) -> L:
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
        model: The model; its layers are replaced in place. If it is itself a layer that is split,
            or a block, the result is another one.
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
    tensor = TensorGroup(group)
    if not is_layer(model):
        one: object = model
        got = f"the class {one.__name__}" if isinstance(one, type) else type(one).__name__
        raise ModuleError(
            f"tensor_parallel splits a layer, such as a Sequential of all layers, got {got}: split "
            "the layers first, then give them to DataParallel or to stages, which make their "
            "memory"
        )
    split = split_layers(model, tensor, sequence)
    if split.parameters() and not tensor_groups(split):
        raise ModuleError(
            f"nothing of {model!r} can be split over group {tensor.group.name!r}: what is split is "
            f"{', '.join(kind.__name__ for kind in _HELD)}, wherever they stand. For a Linear, use "
            "ColumnParallelLinear or RowParallelLinear in its place; what is to stay whole on each "
            "rank needs no tensor_parallel"
        )
    return split


def split_layers(model: L, tensor: TensorGroup, sequence: SequenceSplit | None) -> L:
    """Do what :func:`tensor_parallel` does, also for a layer that stays whole. Local.

    Raises:
        ModuleError: As that, where a layer cannot be as it is among split ones.
        ModuleStateError: If a layer has memory.
    """
    before = _places(model)
    split: L = _Splitter(tensor, sequence).split(model)
    after = _places(split)
    for number, (parameter, count) in before.items():
        if 0 < after.get(number, (parameter, 0))[1] < count:
            raise ModuleError(
                f"parameter {parameter.name!r} of shape {parameter.shape} stands in several layers "
                "of which some are split and some are not; give each layer one of its own, or see "
                "gpt_layers(tied=True). The model is half split now: make another"
            )
    return split


def _places(model: Any) -> dict[int, tuple[Parameter, int]]:
    """Return in how many layers each parameter stands."""
    found: dict[int, tuple[Parameter, int]] = {}
    seen: dict[int, Any] = {}
    for layer in leaves(model):
        if id(layer) in seen or not isinstance(layer, Module):
            continue
        seen[id(layer)] = layer
        for parameter in layer._own_parameters():
            found[id(parameter)] = parameter, found.get(id(parameter), (parameter, 0))[1] + 1
    return found


class _Splitter:
    """A maker of split layers from unsplit ones.

    Args:
        tensor: The ranks.
        sequence: How activations between split layers are split, if they are.
    """

    def __init__(self, tensor: TensorGroup, sequence: SequenceSplit | None) -> None:
        self._tensor = tensor
        self._sequence = sequence
        # With the layer itself, so that no other one gets its id.
        self._known: dict[int, tuple[Any, Any]] = {}

    def split(self, layer: Any, part: FeaturePart | None = None) -> Any:
        """Return what `layer` is when it is split: one that stands twice, the same again.

        Args:
            layer: The layer.
            part: Which features it gets, None for all. Those of layers that the user has split: a
                layer between them stays as it is, and sees all places of a sequence.
        """
        if part is None and id(layer) in self._known:
            return self._known[id(layer)][1]
        if isinstance(layer, Sequential):
            if part is None:
                self._known[id(layer)] = layer, layer
            layers: list[SupportsLayer] = layer._layers
            for place, one in enumerate(layers):
                layers[place] = self.split(one, part)
                part = set_part(layers[place], part)
            return layer
        if part is not None:
            return layer
        made = self._split_once(layer)
        self._known[id(layer)] = layer, made
        return made

    def _split_once(self, layer: Any) -> Any:
        sequence = self._sequence
        make = _MAKE.get(type(layer))
        if make is not None:
            return make(layer, self._tensor, sequence)
        if isinstance(layer, _SPLIT):
            self._check_sequence(layer)
            return layer
        if type(layer) in _AROUND:
            layer = retyped(layer, _AROUND[type(layer)])
        if sequence is not None and not isinstance(layer, _PLACEWISE):
            raise ModuleError(
                f"{layer!r}: it is not known whether it treats each place of a sequence by itself, "
                "so it cannot be used between split layers; leave it out, or give none of sequence"
            )
        if not isinstance(layer, Module):
            return layer
        for name, value in vars(layer).items():
            if is_layer(value):
                setattr(layer, name, self.split(value))
            elif isinstance(value, list | tuple) and any(map(is_layer, value)):
                row = (self.split(one) if is_layer(one) else one for one in value)
                setattr(layer, name, type(value)(row))
        return layer

    def _check_sequence(self, layer: Any) -> None:
        """Refuse a layer that the user has split if it is for sequences that are split otherwise.

        Raises:
            ModuleError: If it is.
        """
        own = layer.sequence if hasattr(layer, "sequence") else layer.entrance.sequence
        given = self._sequence
        alike = (own is None) == (given is None)
        if own is not None and given is not None:
            alike = own.tensor.group is given.tensor.group and own.length == given.length
        if not alike:
            raise ModuleError(
                f"{layer!r} is split already, with sequence={own!r}, but the layers around it are "
                f"to be split with sequence={given!r}: give it the same"
            )


_SPLIT = (
    ColumnParallelLinear,
    RowParallelLinear,
    Entered,
    VocabParallelEmbedding,
    SequenceDropout,
    SequencePositions,
)
# What users split themselves stays as it is.

_PLACEWISE = (GELU, ReLU, SiLU, BertBlock, GptBlock, Checkpoint)
# With a split sequence these need no change, or only of the layers within.

_HELD = (Attention, FeedForward, SwiGLU, Embedding)
# Of these each rank has a part.

_Make = Callable[[Any, TensorGroup, "SequenceSplit | None"], Any]


def _placewise(layer: Module, tensor: TensorGroup, sequence: SequenceSplit | None) -> Module:
    return layer if sequence is None else split_sequence(layer, sequence)


def _dropout(layer: Dropout, tensor: TensorGroup, sequence: SequenceSplit | None) -> Dropout:
    return layer if sequence is None else SequenceDropout.of(layer, sequence)


def _positions(
    layer: LearnedPositions, tensor: TensorGroup, sequence: SequenceSplit | None
) -> LearnedPositions:
    return layer if sequence is None else SequencePositions.of(layer, sequence)


def _entered(cls: Any) -> _Make:
    return lambda layer, tensor, sequence: cls.of(layer, Entrance(tensor, sequence))


_MAKE: dict[type, _Make] = {
    Attention: _entered(ParallelAttention),
    FeedForward: _entered(ParallelFeedForward),
    SwiGLU: _entered(ParallelSwiGLU),
    Embedding: VocabParallelEmbedding.of,
    LayerNorm: _placewise,
    RMSNorm: _placewise,
    Linear: _placewise,
    Dropout: _dropout,
    ParallelDropout: lambda layer, tensor, sequence: layer,
    LearnedPositions: _positions,
}
