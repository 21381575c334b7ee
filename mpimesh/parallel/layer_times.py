"""Run the layers of a model one after the other, each in a copy of its own, and take the time."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from types import ModuleType
from typing import Any, TypeVar

import numpy as np

from mpimesh.arrays import Array, StreamScope, moved, namespace
from mpimesh.nn import Context, Module, SupportsLayer
from mpimesh.nn.protocol import backward_input, backward_weight, materialize, num_layers
from mpimesh.parallel.interface import Leaf
from mpimesh.parallel.tree import Tree, flatten, tree_map

__all__ = ["LayerTime", "time_layers"]

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class LayerTime:
    """The times of a layer for one microbatch.

    Attributes:
        forward_s: Seconds of its forward.
        backward_input_s: Seconds of the input's half of its backward.
        backward_weight_s: Seconds of the weights' half.
        output_bytes: Bytes of its output.
    """

    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    output_bytes: int


def time_layers(
    layers: Sequence[SupportsLayer], x: Tree, *, dtype: Any, xp: ModuleType, repeats: int
) -> Iterator[LayerTime]:
    """Yield the time of each layer, of a training step as a pipeline does it. Local.

    One layer after the other is copied, given memory, and run. A copy reads the values of a layer
    that has any, and has gradients of its own.

    Args:
        layers: The layers of the whole model, in order.
        x: A microbatch.
        dtype: Dtype of parameters that have no memory yet.
        xp: The array library that they compute with.
        repeats: How often each is run, after once to get warm; the medians are taken.

    Raises:
        Exception: What a layer raises.
    """
    index = 0
    trained = False
    y = tree_map(lambda leaf, _: moved(leaf, xp), x)
    for place, layer in enumerate(layers):
        trained = trained or any(parameter.requires_grad for parameter in layer.parameters())
        twin = _twin(layer, dtype, xp, index)
        index += num_layers(layer)
        if place == 0 and isinstance(twin, Module):
            twin.input_grad = False  # as in a pipeline: nobody reads it
        y, times = _time_layer(twin, y, trained=trained, repeats=repeats)
        del twin  # before the next one gets memory
        yield times


def _twin(layer: SupportsLayer, dtype: Any, xp: ModuleType, index: int) -> SupportsLayer:
    """Return a copy that has memory: where all values are there already, theirs."""
    parameters = layer.parameters()
    whole = bool(parameters) and all(one.data is not None for one in parameters)
    kept: dict[int, Any] = {id(one.grad): None for one in parameters}
    if whole:
        kept.update((id(one.data), one.data) for one in parameters)
    twin = copy.deepcopy(layer, kept)
    if not whole:
        materialize(twin, seed=0, dtype=dtype, xp=xp, index=index)
    return twin


def _time_layer(
    layer: SupportsLayer, x: Tree, *, trained: bool, repeats: int
) -> tuple[Tree, LayerTime]:
    clock = _Clock(x)
    runs = []
    for _ in range(1 + repeats):
        context = Context()
        y, forward_s = clock.time(lambda: layer.forward(x, context))  # noqa: B023 - called at once
        runs.append((forward_s, *_time_backward(layer, y, context, clock, trained=trained)))
    forward_s, input_s, weight_s = map(median, zip(*runs[1:], strict=True))
    output_bytes = sum(int(leaf.nbytes) for leaf in flatten(y, name="the output")[0])
    return y, LayerTime(forward_s, input_s, weight_s, output_bytes)


def _time_backward(
    layer: SupportsLayer, y: Tree, context: Context, clock: _Clock, *, trained: bool
) -> tuple[float, float]:
    """Return the times of both halves of a backward; none where a pipeline runs none."""
    if not trained:
        return 0.0, 0.0
    dy = tree_map(_gradient, y)
    _, input_s = clock.time(lambda: backward_input(layer, dy, context))
    _, weight_s = clock.time(lambda: backward_weight(layer, context))
    return input_s, weight_s


def _gradient(leaf: Array, _path: str) -> Array | None:
    """Return a gradient for an array of an output; those of integers have none."""
    if not Leaf(tuple(leaf.shape[1:]), np.dtype(leaf.dtype)).has_gradient:
        return None
    return namespace(leaf).ones(leaf.shape, leaf.dtype)


class _Clock:
    """Takes times, on a device up to the end of what was called for."""

    def __init__(self, x: Tree) -> None:
        self._scope = StreamScope.of(flatten(x)[0][0])

    def time(self, call: Callable[[], R]) -> tuple[R, float]:
        """Return what `call` gives, and its seconds."""
        self._finish()
        start_s = time.perf_counter()
        result = call()
        self._finish()
        return result, time.perf_counter() - start_s

    def _finish(self) -> None:
        if self._scope is not None:
            self._scope.stream.synchronize()
