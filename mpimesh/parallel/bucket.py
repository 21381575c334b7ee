"""The memory of gradients that are reduced together, and what is counted for each."""

from __future__ import annotations

from collections.abc import Sequence

from mpimesh.arrays import Array
from mpimesh.errors import ModuleError
from mpimesh.nn import Parameter
from mpimesh.runtime import CollectiveTensor, ProcessGroup

__all__ = ["Bucket", "Entry", "make_entries"]


class Bucket:
    """Flat gradient memory of some parameters, reduced as one.

    Attributes:
        flat: The memory.
        parameters: Those whose gradients are views of it, in its order.
        group: The ranks over which it is reduced.
        name: What it is called in traces and labels, alike on all of them.
    """

    __slots__ = ("flat", "group", "handle", "incomplete", "name", "parameters", "start_s")

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
        group: The ranks over which the gradient is reduced.
        bucket: Where the gradient lives; None in a group of one rank.
        count: How often the gradient was added to in this cycle.
        uses: How often in each backward of earlier cycles; None while that is not known.
        complete: Whether nothing more is added in this cycle, as far as its bucket knows.
    """

    __slots__ = ("bucket", "complete", "count", "group", "name", "parameter", "uses")

    def __init__(self, parameter: Parameter, name: str, group: ProcessGroup) -> None:
        self.parameter = parameter
        self.name = name
        self.group = group
        self.bucket: Bucket | None = None
        self.count = 0
        self.uses: int | None = None
        self.complete = False


def make_entries(
    parameters: list[Parameter], names: Sequence[str] | None, groups: Sequence[ProcessGroup]
) -> tuple[dict[int, Entry], list[tuple[str, Parameter]]]:
    """Return an entry for each parameter to train, by its id, in order; and the frozen ones."""
    if names is not None and len(names) != len(parameters):
        raise ModuleError(f"got {len(names)} names for {len(parameters)} parameters")
    if len(groups) != len(parameters):
        raise ModuleError(f"got {len(groups)} groups for {len(parameters)} parameters")
    entries: dict[int, Entry] = {}
    frozen: list[tuple[str, Parameter]] = []
    for place, parameter in enumerate(parameters):
        name = parameter.name if names is None else names[place]
        if id(parameter) in entries:
            raise ModuleError(f"parameter {name!r} is registered twice, the second time as {place}")
        if parameter.on_ready is not None:
            raise ModuleError(
                f"parameter {name!r} is registered with other buckets: call buckets.close() of the "
                "model that trains it, or make new layers"
            )
        if parameter.requires_grad:
            parameter.value()
            entries[id(parameter)] = Entry(parameter, name, groups[place])
        else:
            frozen.append((name, parameter))
    return entries, frozen
