"""The layers of a transformer that treat each token alone."""

from __future__ import annotations

from mpimesh.arguments import shown
from mpimesh.arrays.types import Array
from mpimesh.errors import ModuleError
from mpimesh.nn import protocol
from mpimesh.nn.activations import GELU, sigmoid, silu_slope
from mpimesh.nn.checks import check_extent, sum_dtype
from mpimesh.nn.composite import SplitLayer
from mpimesh.nn.context import Context
from mpimesh.nn.linear import Linear
from mpimesh.nn.split import Split

__all__ = ["FeedForward", "SwiGLU"]


class FeedForward(SplitLayer):
    """``y = down(activation(up(x)))``, with two linear layers.

    It may be split over the ranks of a group, by :meth:`set_split` or as a
    :class:`mpimesh.ParallelFeedForward`.

    Shapes:
        x, result: (..., features).
        up.weight: (hidden, features). down.weight: (features, hidden).

    Args:
        features: Length of the last axis of `x`.
        hidden: Length of what is between.
        activation: The layer between; None for :class:`GELU`.
        bias: Whether the linear layers have biases.

    Raises:
        ModuleError: If an extent is not a whole number of at least 1.
    """

    def __init__(
        self,
        features: int,
        hidden: int,
        *,
        activation: protocol.SupportsLayer | None = None,
        bias: bool = True,
    ) -> None:
        self.features = check_extent("features", features)
        self.hidden = check_extent("hidden", hidden)
        self.up: protocol.SupportsLayer = Linear(self.features, self.hidden, bias=bias)
        self.activation: protocol.SupportsLayer = _activation(activation)
        self.down: protocol.SupportsLayer = Linear(self.hidden, self.features, bias=bias)

    def set_split(self, split: Split) -> None:
        """Have some of the hidden values from now on, before there is memory. Local.

        Raises:
            ModuleError: If layers within are no plain linear ones, or the activation needs all
                hidden values.
            ModuleStateError: If the layer has memory.
        """
        up, down = self._plain(self.up, self.down)
        up.set_split(split, 0, within=True)
        down.set_split(split, 1)
        protocol.set_part(self.activation, split.ranks.part_of(self.hidden))
        self.split = split

    def _run(self, x: Array, ctx: Context | None) -> Array:
        for layer in (self.up, self.activation, self.down):
            x = layer.forward(x, ctx)
        return x

    def _run_back(self, dy: Array, ctx: Context) -> Array:
        for layer in (self.down, self.activation, self.up):
            dy = self._back(layer, dy, ctx)
        return dy

    def __repr__(self) -> str:
        name = type(self).__name__
        options = f"activation={self.activation!r}{Split.text(self.split)}"
        return f"{name}({self.features}, {self.hidden}, {options})"


class SwiGLU(SplitLayer):
    """``y = down(silu(gate(x)) * up(x))``, with three linear layers.

    Of Shazeer, "GLU Variants Improve Transformer" (2020). It may be split over the ranks of a
    group, by :meth:`set_split` or as a :class:`mpimesh.ParallelSwiGLU`.

    Shapes:
        x, result: (..., features).
        gate.weight, up.weight: (hidden, features). down.weight: (features, hidden).

    Cost:
        Saves `x`, what `gate` and `up` give, and their product. Backward computes the sigmoid
        again.

    Args:
        features: Length of the last axis of `x`.
        hidden: Length of what is between; two thirds of that of a :class:`FeedForward` is as
            many parameters.
        bias: Whether the linear layers have biases.

    Raises:
        ModuleError: If an extent is not a whole number of at least 1.
    """

    def __init__(self, features: int, hidden: int, *, bias: bool = False) -> None:
        self.features = check_extent("features", features)
        self.hidden = check_extent("hidden", hidden)
        self.gate: protocol.SupportsLayer = Linear(self.features, self.hidden, bias=bias)
        self.up: protocol.SupportsLayer = Linear(self.features, self.hidden, bias=bias)
        self.down: protocol.SupportsLayer = Linear(self.hidden, self.features, bias=bias)

    def set_split(self, split: Split) -> None:
        """Have some of the hidden values from now on, before there is memory. Local.

        Raises:
            ModuleError: If layers within are no plain linear ones.
            ModuleStateError: If the layer has memory.
        """
        gate, up, down = self._plain(self.gate, self.up, self.down)
        gate.set_split(split, 0, within=True)
        up.set_split(split, 0, within=True)
        down.set_split(split, 1)
        self.split = split

    def _run(self, x: Array, ctx: Context | None) -> Array:
        gate, up = self.gate.forward(x, ctx), self.up.forward(x, ctx)
        wide = gate.astype(sum_dtype(gate.dtype), copy=False)
        mixed = sigmoid(wide)
        mixed *= wide
        mixed *= up
        mixed = mixed.astype(gate.dtype, copy=False)
        if ctx is not None:
            ctx.save(self, mixed.shape, mixed.dtype, gate, up)
        return self.down.forward(mixed, ctx)

    def _run_back(self, dy: Array, ctx: Context) -> Array:
        d_mixed = self._back(self.down, dy, ctx)
        gate, up = self._take(d_mixed, ctx)
        wide = gate.astype(sum_dtype(gate.dtype), copy=False)
        share = sigmoid(wide)
        d_gate = silu_slope(wide, share)
        d_gate *= up
        d_gate *= d_mixed
        share *= wide
        share *= d_mixed
        d_up, d_gate = (one.astype(gate.dtype, copy=False) for one in (share, d_gate))
        dx = self._back(self.up, d_up, ctx)
        return dx + self._back(self.gate, d_gate, ctx)

    def __repr__(self) -> str:
        group = Split.text(self.split)
        return f"{type(self).__name__}({self.features}, {self.hidden}{group})"


def _activation(given: protocol.SupportsLayer | None) -> protocol.SupportsLayer:
    if given is not None and not protocol.is_layer(given):
        raise ModuleError(f"activation must be a layer, such as nn.GELU(), got {shown(given)}")
    return GELU() if given is None else given
