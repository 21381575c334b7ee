"""The protocol of layers that are not mpimesh's own, and their treatment.

Anything with the three methods of `SupportsLayer` is a layer: it may stand in a
`Sequential` or a pipeline stage. What else it has is used when it is there:

| it has | without it |
|---|---|
| ``backward_input``, ``backward_weight`` | `backward` runs for the first, nothing for the second |
| ``materialize(seed=, dtype=, xp=, index=)`` | its parameters are taken as they are |
| ``set_place(seed=, index=)`` | with values of its own it is not told where it stands |
| ``num_layers`` | it takes one place in the numbering of layers |
| ``named_parameters()`` | its parameters are called ``param_0``, ``param_1``, ... |
| ``set_training(flag)`` | it is not told |
| ``set_part(part)`` | it treats each feature by itself, and gives those that it gets |

Only :class:`~mpimesh.nn.parameter.Parameter` objects belong into `parameters()`;
a layer without any returns an empty list. What a forward leaves for its
backward belongs into the context (``ctx.save``, ``ctx.take``), not into the
layer, or the layer can serve one microbatch at a time only.

A layer may take or give a tuple, or a dict with text keys, of arrays, nested, instead of one array.
The gradient is built alike, with None in the place of an array whose dtype is not floating.

Behind a layer that is split by its outputs a rank has some of the features only, a
:class:`FeaturePart`, up to a layer that is split by its inputs. Who stands between is told so by
`set_part`, and says which features it gives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol, TypeGuard, runtime_checkable

from mpimesh.arrays.types import Array
from mpimesh.errors import ModuleError
from mpimesh.nn.context import Context
from mpimesh.nn.parameter import Parameter

__all__ = [
    "FeaturePart",
    "Settled",
    "SupportsLayer",
    "backward_input",
    "backward_weight",
    "is_layer",
    "materialize",
    "named_parameters",
    "num_layers",
    "set_part",
    "set_place",
    "set_training",
]


@runtime_checkable
class SupportsLayer(Protocol):
    """The least that a layer is."""

    def forward(self, x: Array, ctx: Context | None = None) -> Array:
        """Return the output. With a context, save in it what backward needs.

        Must not write into `x`: the layer before may need it again. May return
        `x` or a view of it.
        """
        ...

    def backward(self, dy: Array, ctx: Context) -> Array | None:
        """Add the parameters' gradients (`Parameter.accumulate`) and return the input's.

        `dy` has the shape and dtype of the output and must not be written to.
        None says that the input has no gradient, as with integers.
        """
        ...

    def parameters(self) -> Sequence[Parameter]:
        """Return the parameters, in an order that never changes."""
        ...


@dataclass(frozen=True, slots=True)
class FeaturePart:
    """Which places of the last axis of an array a rank has, where others have the others.

    Attributes:
        start: The first.
        stop: The one behind the last.
        extent: How many there are over all ranks.
    """

    start: int
    stop: int
    extent: int

    @property
    def size(self) -> int:
        """Number of elements that this rank has."""
        return self.stop - self.start


def is_layer(one: object) -> TypeGuard[SupportsLayer]:
    """Tell whether `one` has the methods of a layer. A class is none."""
    return not isinstance(one, type) and all(
        callable(getattr(one, name, None)) for name in ("forward", "backward", "parameters")
    )


def backward_input(layer: SupportsLayer, dy: Array, ctx: Context) -> Array | None:
    """Run the input's half of `layer`'s backward, or all of it where it has no halves."""
    half = getattr(layer, "backward_input", None)
    return layer.backward(dy, ctx) if half is None else half(dy, ctx)


def backward_weight(layer: SupportsLayer, ctx: Context) -> None:
    """Run the weights' half of `layer`'s backward, if it has halves."""
    half = getattr(layer, "backward_weight", None)
    if half is not None:
        half(ctx)


class Settled:
    """Layers and parameters that have had their turn: the first place of each counts.

    Args:
        parameters: Those that keep the values that they have.
    """

    def __init__(self, parameters: Iterable[Parameter] = ()) -> None:
        # The objects themselves, too, so that no other one gets their ids.
        self._found: dict[int, object] = {}
        self.add(*parameters)

    def add(self, *objects: object) -> None:
        """From now on `objects` are settled."""
        self._found.update((id(one), one) for one in objects)

    def __contains__(self, one: object) -> bool:
        """Tell whether this very object is settled."""
        return id(one) in self._found


def materialize(
    layer: SupportsLayer,
    *,
    seed: int,
    dtype: Any,
    xp: ModuleType,
    index: int,
    settled: Settled | None = None,
) -> None:
    """Let `layer` allocate its parameters, if it knows how.

    Args:
        layer: The layer.
        seed: The seed of the whole model.
        dtype: Dtype of the parameters.
        xp: `numpy` or `cupy`.
        index: Number of layers before this one in the whole model.
        settled: What a layer before had, too. Such parameters keep their values, and a layer that
            stands there itself is left as it is; what `layer` has joins it.
    """
    settled = Settled() if settled is None else settled
    if layer in settled:
        return
    kept = [(parameter, parameter.data) for parameter in layer.parameters() if parameter in settled]
    method = getattr(layer, "materialize", None)
    if method is not None:
        method(seed=seed, dtype=dtype, xp=xp, index=index)
    for parameter, data in kept:
        parameter.data = data
    settled.add(layer, *(one for one in layer.parameters() if one.data is not None))


def set_place(layer: SupportsLayer, *, seed: int, index: int) -> None:
    """Tell `layer`, which keeps the values that it has, where it stands, if it wants to know.

    Args:
        layer: The layer.
        seed: The seed of the whole model.
        index: Number of layers before this one in the whole model.
    """
    method = getattr(layer, "set_place", None)
    if method is not None:
        method(seed=seed, index=index)


def set_part(layer: SupportsLayer, part: FeaturePart | None) -> FeaturePart | None:
    """Tell `layer` which features it gets, None for all; return which it gives.

    Raises:
        ModuleError: If it needs others.
    """
    method = getattr(layer, "set_part", None)
    if method is None:
        return part
    given: FeaturePart | None = method(part)
    return given


def num_layers(layer: SupportsLayer) -> int:
    """Return how many places `layer` takes in the numbering of layers."""
    return int(getattr(layer, "num_layers", 1))


def named_parameters(layer: SupportsLayer) -> list[tuple[str, Parameter]]:
    """Return `layer`'s parameters with names.

    Raises:
        ModuleError: If it gives something else.
    """
    method = getattr(layer, "named_parameters", None)
    if method is not None:
        named = list(method())
    else:
        named = [(f"param_{i}", one) for i, one in enumerate(layer.parameters())]
    for name, one in named:
        if not isinstance(one, Parameter):
            raise ModuleError(
                f"{layer!r} has forward, backward and parameters like a layer, but {name!r} is of "
                f"type {type(one).__name__}, no nn.Parameter. To keep something else than a layer, "
                "put it into a dict, or behind a function"
            )
    return named


def set_training(layer: SupportsLayer, training: bool) -> None:
    """Tell `layer` whether it is trained, if it wants to know."""
    method = getattr(layer, "set_training", None)
    if method is not None:
        method(training)
