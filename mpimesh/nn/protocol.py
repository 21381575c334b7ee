"""What mpimesh asks of a layer that is not its own, and how it treats it.

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

Only :class:`~mpimesh.nn.parameter.Parameter` objects belong into `parameters()`;
a layer without any returns an empty list. What a forward leaves for its
backward belongs into the context (``ctx.save``, ``ctx.take``), not into the
layer, or the layer can serve one microbatch at a time only.

A layer may take or give a tuple, or a dict with text keys, of arrays, nested, instead of one array.
The
gradient is built alike, with None in the place of an array whose dtype is not floating.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

from mpimesh.arrays.types import Array
from mpimesh.nn.context import Context
from mpimesh.nn.parameter import Parameter

__all__ = [
    "Settled",
    "SupportsLayer",
    "backward_input",
    "backward_weight",
    "materialize",
    "named_parameters",
    "num_layers",
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


def num_layers(layer: SupportsLayer) -> int:
    """Return how many places `layer` takes in the numbering of layers."""
    return int(getattr(layer, "num_layers", 1))


def named_parameters(layer: SupportsLayer) -> list[tuple[str, Parameter]]:
    """Return `layer`'s parameters with names."""
    method = getattr(layer, "named_parameters", None)
    if method is not None:
        return list(method())
    return [(f"param_{i}", parameter) for i, parameter in enumerate(layer.parameters())]


def set_training(layer: SupportsLayer, training: bool) -> None:
    """Tell `layer` whether it is trained, if it wants to know."""
    method = getattr(layer, "set_training", None)
    if method is not None:
        method(training)
