"""Memory, first values and uses of parameters, for the stages of one rank of a model."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any

from mpimesh.nn import Module
from mpimesh.nn.protocol import Settled, materialize, num_layers, set_place
from mpimesh.parallel.stage import PipelineStage

__all__ = ["give_values", "is_used_again", "leaves", "uses_of"]


def give_values(
    stages: Sequence[PipelineStage],
    local: Collection[int],
    *,
    seed: int,
    dtype: Any,
    xp: ModuleType,
) -> None:
    """Materialise the layers of the `local` stages, and no others. Local.

    A layer whose parameters all have memory is left as it is, and so is a parameter
    with memory that stands in several layers. The values of one without are those of its first
    place in the whole model, wherever that lies.

    Args:
        stages: All stages.
        local: The numbers of this rank's.
        seed: The seed of the whole model.
        dtype: Dtype of the parameters.
        xp: `numpy` or `cupy`.

    Cost:
        Where the first place of a local parameter is a layer of another rank's stage, that
        whole layer has memory for a moment.
    """
    layers = [(layer, number in local) for number, stage in enumerate(stages) for layer in stage]
    mine = {id(layer) for layer, is_local in layers if is_local}
    wanted = {id(p) for layer, is_local in layers if is_local for p in layer.parameters()}
    uses: dict[int, int] = {}
    for layer, _ in layers:
        for parameter in layer.parameters():
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    settled = Settled(
        parameter
        for layer, _ in layers
        for parameter in layer.parameters()
        if uses[id(parameter)] > 1 and parameter.data is not None
    )
    index = 0
    for layer, _ in layers:
        parameters = layer.parameters()
        whole = bool(parameters) and all(p.data is not None for p in parameters)
        lends = any(id(p) in wanted and p not in settled for p in parameters)
        if not whole and (id(layer) in mine or lends):
            before = [(p, p.data) for p in parameters if id(p) not in wanted]
            materialize(layer, seed=seed, dtype=dtype, xp=xp, index=index, settled=settled)
            for parameter, data in before:
                parameter.data = data
        elif id(layer) in mine:
            set_place(layer, seed=seed, index=index)
        index += num_layers(layer)


def is_used_again(stages: Sequence[PipelineStage]) -> bool:
    """Tell whether the very first layer, or one in it, stands elsewhere in the model, too.

    There somebody reads the gradient of its input.
    """
    first = [id(leaf) for leaf in leaves(stages[0].first_layer)]
    everywhere = [id(leaf) for stage in stages for leaf in leaves(stage)]
    return any(everywhere.count(one) > 1 for one in first)


def leaves(layer: Any) -> Iterator[Any]:
    """Yield `layer` and all below it, each as often as it stands there."""
    yield layer
    if isinstance(layer, Module):
        for _, child in layer.named_children():
            yield from leaves(child)


def uses_of(stages: Iterable[PipelineStage]) -> dict[int, int]:
    """Return by its id how often a backward adds to the gradient of each parameter.

    Empty where some layer is not of this library: it may use what is within it more than once, or
    not in each step.
    """
    uses: dict[int, int] = {}
    for stage in stages:
        for leaf in leaves(stage):
            if not type(leaf).__module__.startswith(("mpimesh.nn.", "mpimesh.parallel.")):
                return {}
            for parameter in leaf._own_parameters():
                uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    return uses
