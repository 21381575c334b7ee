"""Layers one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any, Self, TypeGuard

import numpy as np

from mpimesh.arrays.types import Array
from mpimesh.errors import ModuleError, ModuleStateError
from mpimesh.nn import protocol
from mpimesh.nn.checks import check_context, layer_advice
from mpimesh.nn.context import Context
from mpimesh.nn.module import Module
from mpimesh.nn.protocol import FeaturePart, SupportsLayer, is_layer

__all__ = ["Sequential", "is_plain"]


class Sequential(Module):
    """Layers in order, each fed with the output of the one before; none is the identity.

    ``Sequential(a, b)`` and ``Sequential([a, b])`` are the same. Any
    :class:`~mpimesh.nn.protocol.SupportsLayer` may stand in it.

    In the numbering of layers it takes no place itself: ``Sequential(a, b, c)``
    materialised at index 0 has the weights of `a`, `b` and `c` materialised on
    three pipeline stages at 0, ``a.num_layers`` and ``a.num_layers + b.num_layers``.

    Attributes:
        before: Called with each layer before it runs, and whether it runs backward; None calls
            nothing. Training that has a layer's values only while it runs brings them so.

    Raises:
        ModuleError: If something given is no layer.
    """

    def __init__(self, *layers: SupportsLayer | Iterable[SupportsLayer]) -> None:
        self._layers: list[SupportsLayer] = []
        self.before: Callable[[SupportsLayer, bool], None] | None = None
        for layer in layers:
            for one in layer if isinstance(layer, list | tuple) else (layer,):
                self.append(one)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy holds: its layers ask nobody."""
        return {**self.__dict__, "before": None}

    def append(self, layer: SupportsLayer) -> Self:
        """Add `layer` at the end and return the module, so that calls can be chained.

        Raises:
            ModuleError: If `layer` lacks forward, backward or parameters.
        """
        if not is_layer(layer):
            got = layer.__name__ + " (a class, not an object)" if isinstance(layer, type) else layer
            raise ModuleError(
                f"a layer has methods forward, backward and parameters, got {got}"
                f"{layer_advice(layer)}"
            )
        self._layers.append(layer)
        return self

    @property
    def layers(self) -> Sequence[SupportsLayer]:
        """The layers, in order."""
        return tuple(self._layers)

    def named_children(self) -> list[tuple[str, SupportsLayer]]:
        """Return the layers, called "0", "1", ..."""
        return [(str(i), layer) for i, layer in enumerate(self._layers)]

    @property
    def num_layers(self) -> int:
        """The places of all layers together; none if there are no layers."""
        return sum(protocol.num_layers(layer) for layer in self._layers)

    def materialize(
        self, *, seed: int, dtype: Any = np.float32, xp: ModuleType = np, index: int = 0
    ) -> None:
        """Give all layers memory and tell them where they stand; see `Module.materialize`.

        Raises:
            DTypeError: If `dtype` is not a float one.
            ModuleError: If `seed` or `index` is negative, or a layer needs features that this rank
                has not.
        """
        super().materialize(seed=seed, dtype=dtype, xp=xp, index=index)
        self.set_part(self._part)

    def set_place(self, *, seed: int, index: int) -> None:
        """Tell all layers where they stand; raises as :meth:`set_part`."""
        super().set_place(seed=seed, index=index)
        self.set_part(self._part)

    def set_part(self, part: FeaturePart | None) -> FeaturePart | None:
        """Tell each layer which features it gets from the one before; return the last one's.

        Raises:
            ModuleError: If a layer needs others, or one that stands twice would get some here and
                others there.
        """
        self._part = part
        told: dict[int, FeaturePart | None] = {}
        for layer in self._layers:
            keeps = "_part" in getattr(layer, "__dict__", ())
            if keeps and told.get(id(layer), part) != part:
                raise ModuleError(
                    f"{layer!r} stands where this rank has all features and where it has some, and "
                    "cannot serve both: give each place a layer of its own"
                )
            told[id(layer)] = part
            part = protocol.set_part(layer, part)
        return part

    @property
    def input_grad(self) -> bool:
        """Whether the first layer returns the gradient of its input; set it for a first stage."""
        return getattr(self._layers[0], "input_grad", True) if self._layers else True

    @input_grad.setter
    def input_grad(self, wanted: bool) -> None:
        # A backward of its own may read what the first layer returns.
        if is_plain(self) and self._layers and isinstance(self._layers[0], Module):
            self._layers[0].input_grad = wanted

    def forward(self, x: Array, ctx: Context | None = None) -> Array:
        """Return the output of the last layer.

        Raises:
            ModuleError: If `ctx` is no Context.
        """
        check_context(self, ctx)
        before = self.before
        for layer in self._layers:
            if before is not None:
                before(layer, False)
            x = layer.forward(x, ctx)
        return x

    def backward_input(self, dy: Array, ctx: Context) -> Array | None:
        """Run the layers' `backward_input` from last to first.

        Raises:
            ModuleStateError: If a layer returns no gradient while a layer before
                it has parameters to train.
        """
        dx: Array | None = dy
        for place in reversed(range(len(self._layers))):
            if self.before is not None:
                self.before(self._layers[place], True)
            dx = protocol.backward_input(self._layers[place], dx, ctx)
            if dx is None:
                self._stop_at(place, ctx)
                break
        return dx

    def backward_weight(self, ctx: Context) -> None:
        """Run the layers' `backward_weight` from last to first, as `backward` does."""
        for layer in reversed(self._layers):
            if self.before is not None:
                self.before(layer, True)
            protocol.backward_weight(layer, ctx)

    def backward(self, dy: Array, ctx: Context) -> Array | None:
        """Run the layers' `backward` from last to first.

        The gradients have the bits of the two halves one after the other, but
        the last layer's are ready, and its memory is free, before the first
        layer's turn.
        """
        dx: Array | None = dy
        for place in reversed(range(len(self._layers))):
            if self.before is not None:
                self.before(self._layers[place], True)
            dx = self._layers[place].backward(dx, ctx)
            if dx is None:
                self._stop_at(place, ctx)
                break
        return dx

    def _stop_at(self, place: int, ctx: Context) -> None:
        """Free what the layers before `place` saved: their backward will not run."""
        before = self._layers[:place]
        for layer in before:
            if layer.parameters():
                raise ModuleStateError(
                    f"{self._layers[place]!r} gives no gradient for its input, so {layer!r} before "
                    "it would never be trained: put it after that layer"
                )
        for layer in before:
            _drop(layer, ctx)

    def __len__(self) -> int:
        return len(self._layers)

    # Any, as a layer has more than SupportsLayer says: `model[0].weight` is to type-check.

    def __iter__(self) -> Iterator[Any]:
        return iter(self._layers)

    def __getitem__(self, place: int) -> Any:
        return self._layers[place]

    def __repr__(self) -> str:
        return f"Sequential({', '.join(map(repr, self._layers))})"


_METHODS = ("forward", "backward", "backward_input", "backward_weight")


def is_plain(layer: object) -> TypeGuard[Sequential]:
    """Tell whether a layer is a Sequential that runs its layers as that class does."""
    return isinstance(layer, Sequential) and not any(
        name in vars(layer) or getattr(type(layer), name) is not getattr(Sequential, name)
        for name in _METHODS
    )


def _drop(layer: SupportsLayer, ctx: Context) -> None:
    ctx.drop(layer)
    if isinstance(layer, Module):
        for _, child in layer.named_children():
            _drop(child, ctx)
