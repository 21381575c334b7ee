"""The memory of gradients that are reduced together."""

from __future__ import annotations

from collections.abc import Sequence

from mpimesh.arrays import Array
from mpimesh.nn import Parameter
from mpimesh.parallel.gradients.shard import Shard
from mpimesh.runtime import CollectiveTensor, ProcessGroup

__all__ = ["Bucket"]


class Bucket:
    """Flat gradient memory of some parameters, reduced as one.

    Attributes:
        flat: The memory.
        parameters: Those whose gradients are views of it, in its order.
        group: The ranks over which it is reduced.
        name: What it is called in traces and labels, alike on all of them.
        shard: This rank's part, if the ranks divide the bucket; else None.
    """

    __slots__ = (
        "_views",
        "flat",
        "group",
        "handle",
        "incomplete",
        "name",
        "parameters",
        "shard",
        "start_s",
    )

    def __init__(
        self, parameters: Sequence[Parameter], flat: Array, group: ProcessGroup, name: str
    ) -> None:
        self.parameters = tuple(parameters)
        self.flat = flat
        self.group = group
        self.name = name
        self.incomplete = 0
        self.handle: CollectiveTensor | None = None
        self.start_s = 0.0
        self.shard: Shard | None = None
        self._views: list[Array] = []
        start = 0
        for parameter in self.parameters:
            end = start + parameter.size
            view = flat[start:end].reshape(parameter.shape)
            parameter.attach_grad(view)
            self._views.append(view)
            start = end

    def show(self) -> None:
        """Let the parameters' gradients be views of the memory."""
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.grad = view

    def hide(self) -> None:
        """Let the parameters have no gradient: what is in the memory is no sum."""
        for parameter in self.parameters:
            parameter.grad = None

    def clear(self) -> None:
        """Let the gradients, which are shown, be 0."""
        for parameter in self.parameters:
            parameter.zero_grad()

    def write_zeros(self) -> None:
        """Write the zeros of the gradients to which nothing was added."""
        for parameter in self.parameters:
            parameter.write_zeros()

    @property
    def nbytes(self) -> int:
        """Bytes of the memory."""
        return int(self.flat.nbytes)
