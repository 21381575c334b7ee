"""Layers that are made of layers, other than one after the other."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from mpimesh.arrays.types import Array
from mpimesh.errors import ModuleError, ModuleStateError
from mpimesh.nn import protocol
from mpimesh.nn.context import Context
from mpimesh.nn.linear import Linear
from mpimesh.nn.masked import joined, parted
from mpimesh.nn.module import Module
from mpimesh.nn.split import Split

__all__ = ["Composite", "SplitLayer"]


class Composite(Module):
    """A layer whose parameters are those of the layers that are its attributes.

    These may be replaced before the first use by others that do the same, such as layers that
    are split over ranks.
    """

    mixes_features = True

    def backward_weight(self, ctx: Context) -> None:
        """Run the `backward_weight` of the layers within, from last to first."""
        for _, child in reversed(self.named_children()):
            protocol.backward_weight(child, ctx)

    def _back(self, layer: protocol.SupportsLayer, dy: Array, ctx: Context) -> Array:
        """Run the input's half of the backward of a layer within.

        Raises:
            ModuleStateError: If it gives no gradient.
        """
        dx = protocol.backward_input(layer, dy, ctx)
        if dx is None:
            raise ModuleStateError(
                f"{layer!r} gives no gradient for its input, which {self!r} needs: leave its "
                "input_grad at True"
            )
        return dx


class SplitLayer(Composite):
    """A composite that may be split over ranks: the first layers by outputs, the last by inputs.

    Then its forward and backward are collective over the ranks. What a subclass runs sees all of
    the input, and gives a part of its gradient: the input is gathered once for all first layers,
    and one sum is made of their gradients.

    Attributes:
        split: The ranks; None if it is not split.
        eager: Whether `backward_input` runs the weights' half, too, while the gradient of the
            input is summed, so that `backward_weight` has nothing left to do. Set by what is
            around it, while its own `backward` runs both halves.
    """

    split: Split | None = None
    eager: bool = False

    def forward(self, x: Any, ctx: Context | None = None) -> Any:
        """Return what the layers give. Collective over the group if they are split.

        Raises:
            ShapeError: If `x` has another shape, or a mask does not fit it.
            DTypeError: If `x` has another dtype than the weights, or a mask is not boolean.
            ModuleError: If `x` is a tuple of something else than an array and a mask.
            ModuleStateError: If the layer is not materialised.
        """
        if self.split is None:
            return self._run(x, ctx)
        x, mask = parted(self, x, ctx)
        whole = self.split.enter(x, ctx)
        if mask is not None:
            mask = self.split.whole_mask(mask, ctx)
        return self._run(joined(whole, mask), ctx)

    def backward_input(self, dy: Array, ctx: Context) -> Any:
        """Return the gradient of `x`; with a mask, a tuple of that and None. Collective if split.

        Raises:
            ShapeError: If `dy` has another shape than the result.
            DTypeError: If `dy` has another dtype.
            ModuleStateError: If forward did not run with `ctx`, or its backward ran already.
        """
        found = self._run_back(dy, ctx)
        return found if self.split is None else self._leave(self.split, found, ctx, self.eager)

    def backward(self, dy: Array, ctx: Context) -> Any:
        """Run both halves; if split, weights' gradients are made while that of `x` is summed."""
        if self.split is None:
            return super().backward(dy, ctx)
        return self._leave(self.split, self._run_back(dy, ctx), ctx, True)

    def backward_weight(self, ctx: Context) -> None:
        """Add the parameters' gradients. Collective if the input is split along the sequence."""
        if self.split is None:
            super().backward_weight(ctx)
        elif not self.eager:
            self._add_gradients(self.split, ctx)

    @abstractmethod
    def _run(self, x: Any, ctx: Context | None) -> Array: ...

    @abstractmethod
    def _run_back(self, dy: Array, ctx: Context) -> Any: ...

    def _leave(self, split: Split, found: Any, ctx: Context, with_weights: bool) -> Any:
        """Return the sum of the ranks' gradients of the input, which may come with a mask."""
        dx, _ = parted(self, found)
        pending = split.leave(dx, ctx)
        if with_weights:
            self._add_gradients(split, ctx)
        dx = pending.resolve()
        return (dx, None) if isinstance(found, tuple) else dx

    def _add_gradients(self, split: Split, ctx: Context) -> None:
        children = [child for _, child in reversed(self.named_children())]
        first = [child for child in children if isinstance(child, Linear) and child.is_first]
        wanted = any(layer.weight.requires_grad for layer in first)
        whole = split.again(ctx, wanted=wanted)
        for child in children:
            if child not in first:
                protocol.backward_weight(child, ctx)
        x = whole.resolve()
        for layer in first:
            layer.add_gradients(x, ctx)

    def _plain(self, *layers: protocol.SupportsLayer) -> list[Linear]:
        """Return layers within if they can be split.

        Raises:
            ModuleError: If one is something else than an unsplit Linear.
        """
        for layer in layers:
            if type(layer) is not Linear or layer.split is not None:
                raise ModuleError(
                    f"{type(self).__name__}: only plain Linear layers within can be split, got "
                    f"{layer!r}"
                )
        return [layer for layer in layers if isinstance(layer, Linear)]
