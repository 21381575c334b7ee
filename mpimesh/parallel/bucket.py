"""The memory of gradients that are reduced together, and what is counted for each."""

from __future__ import annotations

from collections.abc import Sequence

from mpimesh.arrays import Array
from mpimesh.errors import ModuleError
from mpimesh.nn import Parameter
from mpimesh.runtime import CollectiveTensor

__all__ = ["Bucket", "Entry", "make_entries"]


class Bucket:
    """Flat gradient memory of some parameters, reduced as one.

    Attributes:
        flat: The memory.
        parameters: Those whose gradients are views of it, in its order.
    """

    __slots__ = ("flat", "handle", "incomplete", "parameters", "start_s")

    def __init__(self, parameters: Sequence[Parameter], flat: Array) -> None:
        self.parameters = tuple(parameters)
        self.flat = flat
        self.incomplete = 0
        self.handle: CollectiveTensor | None = None
        self.start_s = 0.0
        start = 0
        for parameter in self.parameters:
            end = start + parameter.size
            parameter.attach_grad(flat[start:end].reshape(parameter.shape))
            start = end

    @property
    def nbytes(self) -> int:
        """Bytes of the memory."""
        return int(self.flat.nbytes)


class Entry:
    """What is counted for one parameter.

    Attributes:
        parameter: Whose gradient it is.
        name: Its name in messages.
        bucket: Where the gradient lives; None in a group of one rank.
        count: How often the gradient was added to in this cycle.
        uses: How often in each backward of earlier cycles; None while that is not known.
    """

    __slots__ = ("bucket", "count", "name", "parameter", "uses")

    def __init__(self, parameter: Parameter, name: str) -> None:
        self.parameter = parameter
        self.name = name
        self.bucket: Bucket | None = None
        self.count = 0
        self.uses: int | None = None


def make_entries(
    parameters: list[Parameter], names: Sequence[str] | None
) -> tuple[dict[int, Entry], list[tuple[str, Parameter]]]:
    """Return an entry for each parameter to train, by its id, in order; and the frozen ones."""
    if names is not None and len(names) != len(parameters):
        raise ModuleError(f"got {len(names)} names for {len(parameters)} parameters")
    entries: dict[int, Entry] = {}
    frozen: list[tuple[str, Parameter]] = []
    for place, parameter in enumerate(parameters):
        name = parameter.name if names is None else names[place]
        if id(parameter) in entries:
            raise ModuleError(f"parameter {name!r} is registered twice, the second time as {place}")
        if parameter.on_ready is not None:
            raise ModuleError(
                f"parameter {name!r} is registered with other buckets; close() those first"
            )
        if parameter.requires_grad:
            parameter.value()
            entries[id(parameter)] = Entry(parameter, name)
        else:
            frozen.append((name, parameter))
    return entries, frozen
