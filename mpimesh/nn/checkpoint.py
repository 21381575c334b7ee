"""Activations that are computed again in backward instead of being kept."""

from __future__ import annotations

from functools import partial
from typing import Any

from mpimesh.arrays.types import Array
from mpimesh.errors import ModuleError
from mpimesh.nn import protocol
from mpimesh.nn.checks import check_context, layer_advice
from mpimesh.nn.context import Context
from mpimesh.nn.module import Module
from mpimesh.nn.parameter import Parameter
from mpimesh.nn.protocol import FeaturePart, SupportsLayer, is_layer

__all__ = ["Checkpoint"]


class Checkpoint(Module):
    """A layer of which forward keeps its input only; backward runs forward again.

    In a pipeline that is part of the action that computes the input's gradient, ``B`` or ``I``;
    between the two halves of a backward what the weights' half needs is kept, as without. What a
    layer draws depends on the context and on its place in the model, so the second forward gives
    the bits of the first, and so do the gradients. Collectives of split layers run again, too, on
    all ranks alike.

    Names of parameters, states, numbers of layers and first values are those of the layer.

    Shapes:
        x, result: those of the layer.

    Cost:
        A second forward. While a microbatch is in flight its input is kept, and in its backward
        what forward of this one layer keeps: a model of n layers, each in a Checkpoint, keeps n
        inputs and one layer's activations.

    Args:
        layer: A layer, or several in a :class:`Sequential`. One that draws random numbers otherwise
            than by its context and place, such as a dropout of PyTorch, would draw others in
            backward. Neither its mode nor its values may change between forward and backward.

    Raises:
        ModuleError: If `layer` lacks forward, backward or parameters.

    Example:
        >>> blocks = [nn.Checkpoint(nn.GptBlock(16, 2)) for _ in range(4)]
        >>> model = nn.Sequential(nn.Embedding(256, 16), *blocks, nn.Linear(16, 256))
        >>> model.named_parameters()[1][0]
        '1.norm1.weight'
    """

    def __init__(self, layer: SupportsLayer) -> None:
        if not is_layer(layer):
            raise ModuleError(
                f"layer must have methods forward, backward and parameters, got {layer!r}"
                f"{layer_advice(layer)}"
            )
        self.layer = layer

    def named_parameters(self) -> list[tuple[str, Parameter]]:
        """Return the layer's parameters, under its names."""
        return protocol.named_parameters(self.layer)

    def set_part(self, part: FeaturePart | None) -> FeaturePart | None:
        """Tell the layer which features it gets; see `Module.set_part`."""
        self._part = part
        return protocol.set_part(self.layer, part)

    @property
    def input_grad(self) -> bool:
        """True if the layer returns the gradient of its input; set it for a first layer."""
        return getattr(self.layer, "input_grad", True)

    @input_grad.setter
    def input_grad(self, wanted: bool) -> None:
        if isinstance(self.layer, Module):
            self.layer.input_grad = wanted

    def forward(self, x: Any, ctx: Context | None = None) -> Any:
        """Return the layer's output; with a context, save `x` in it.

        Raises:
            ModuleError: If `ctx` is no Context; and whatever the layer raises.
        """
        check_context(self, ctx)
        if ctx is None:
            return self.layer.forward(x)
        inner = _Forgetful(step=ctx.step, first_row=ctx.first_row, training=ctx.training)
        inner.offer(self.layer, partial(ctx.empty, self))
        y = self.layer.forward(x, inner)
        ctx.save(self, x)
        return y

    def backward_input(self, dy: Any, ctx: Context) -> Any:
        """Run the layer's forward again, and the input's half of its backward."""
        inner = self._again(ctx)
        dx = protocol.backward_input(self.layer, dy, inner)
        ctx.take(self)
        ctx.defer(self, inner)
        return dx

    def backward_weight(self, ctx: Context) -> None:
        """Run the weights' half of the layer's backward."""
        (inner,) = ctx.take_deferred(self)
        protocol.backward_weight(self.layer, inner)

    def backward(self, dy: Any, ctx: Context) -> Any:
        """Run the layer's forward again, and its backward."""
        dx = self.layer.backward(dy, self._again(ctx))
        ctx.take(self)
        return dx

    def _again(self, ctx: Context) -> Context:
        """Return a context of the microbatch with what forward saves in it."""
        (x,) = self._context(ctx).peek(self)
        inner = Context(step=ctx.step, first_row=ctx.first_row, training=ctx.training)
        self.layer.forward(x, inner)
        inner.offer(self.layer, partial(ctx.empty, self))  # room for the gradient, not for y
        return inner

    def __repr__(self) -> str:
        return f"Checkpoint({self.layer!r})"


class _Forgetful(Context):
    """A context that keeps nothing for backward."""

    __slots__ = ()

    def save(self, module: object, *values: Array) -> None:
        """Let go of `values`."""
