"""What all groups of one mesh share on one rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from mpimesh.runtime.operation import Operation
from mpimesh.runtime.traffic import Traffic
from mpimesh.runtime.world import World
from mpimesh.settings import Settings
from mpimesh.trace import NULL_TRACER, Tracer

__all__ = ["MeshContext"]


@dataclass(slots=True)
class MeshContext:
    """The state of a mesh that its groups work on.

    Attributes:
        world: What the rank has once.
        settings: Read from the environment when the mesh was made.
        rank: This rank in the mesh.
        open_operations: Started and not yet resolved, in the order of their start.
        closed: No operation may start any more.
        traffic: What this rank has handed to the transport.
        tracer: Where events go.
    """

    world: World
    settings: Settings
    rank: int
    open_operations: dict[int, Operation] = field(default_factory=dict)
    closed: bool = False
    traffic: Traffic = field(default_factory=Traffic)
    tracer: Tracer = NULL_TRACER

    @property
    def direct(self) -> bool:
        """Whether operations may start without checks, be it of a budget."""
        return not self.closed and not self.settings.checks and not self.traffic.budgets
