"""Layers that are made of layers, other than one after the other."""

from __future__ import annotations

from mpimesh.arrays.types import Array
from mpimesh.errors import ModuleStateError
from mpimesh.nn import protocol
from mpimesh.nn.context import Context
from mpimesh.nn.module import Module

__all__ = ["Composite"]


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
