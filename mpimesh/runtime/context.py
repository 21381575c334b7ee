"""The state that all groups of one mesh share on one rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakSet

from mpimesh.comm import Communicator
from mpimesh.errors import ClosedError
from mpimesh.runtime.deadlock import Mail
from mpimesh.runtime.progress import Progress
from mpimesh.runtime.traffic import Traffic
from mpimesh.runtime.work import OpenWork
from mpimesh.runtime.world import World
from mpimesh.settings import Settings
from mpimesh.trace import NULL_TRACER, Tracer

__all__ = ["MeshContext"]


@dataclass(slots=True, eq=False, weakref_slot=True)
class MeshContext:
    """The state of a mesh that its groups work on: communicators, operations, memory.

    Attributes:
        world: What the rank has once.
        settings: Read from the environment when the mesh was made.
        communicator: The communicator of all ranks, those among them that the mesh leaves out.
        rank: This rank in `communicator`.
        open_work: Started and not yet resolved.
        closed: No operation may start or be waited for any more.
        forked: It is that of the parent process: here, in a forked child, nobody may use it.
        unended: Whether something may be under way that no rank waits for any more.
        unread: Messages that this rank has sent, less those that it has begun to receive.
        before_close: Called, once, before the communicators of the mesh go: collective, and alike
            on all its ranks.
        traffic: What this rank has handed to the transport.
        tracer: Where events go.
        name: What the ranks of the mesh call it, alike on all of them.
    """

    world: World
    settings: Settings
    communicator: Communicator
    rank: int = field(init=False)
    open_work: OpenWork = field(default_factory=OpenWork)
    closed: bool = False
    forked: bool = False
    unended: bool = False
    unread: int = 0
    before_close: list[Callable[[], None]] = field(default_factory=list)
    traffic: Traffic = field(default_factory=Traffic)
    tracer: Tracer = NULL_TRACER
    name: str = ""

    def __post_init__(self) -> None:
        """Remember the mesh, so that a forked child lets go of it."""
        self.rank = self.communicator.rank
        _OF_THIS_PROCESS.add(self)

    @property
    def progress(self) -> Progress:
        """The unfinished operations of this rank."""
        return self.world.progress

    # -- communicators -----------------------------------------------------------------------

    def adopt(self, communicator: Communicator, name: str) -> None:
        """Take in a communicator of the mesh, which all its ranks call by `name`."""
        communicator.name = self.full_name(name)
        communicator.engine = self.progress
        communicator.mail = Mail() if self.settings.checks else None
        ranks = tuple(getattr(communicator, "world_ranks", ()))
        self.progress.communicators[communicator.name] = communicator, ranks

    def full_name(self, name: str) -> str:
        """Return what a communicator is called of which the mesh's name is `name`. Local."""
        return f"{self.name}/{name}"

    def rename(self, communicator: Communicator, name: str) -> None:
        """Call a communicator of the mesh by another name, on all its ranks alike."""
        communicators = self.progress.communicators
        entry = communicators.pop(communicator.name, None)
        communicator.name = self.full_name(name)
        if entry is not None:
            communicators[communicator.name] = entry

    def free(self, communicator: Communicator, *, unended: bool | None = None) -> None:
        """Give a communicator of the mesh back. Collective over it.

        Args:
            communicator: The communicator.
            unended: Whether something may be under way on it; None for what is known of the mesh.
        """
        self.progress.communicators.pop(communicator.name, None)
        communicator.unended = self.unended if unended is None else unended
        communicator.free()

    def give_back(self) -> None:
        """Give the communicator of all ranks back, the last one. Collective over it."""
        self.free(self.communicator)
        if self.world.channels is not None:
            self.world.channels.forget_mesh(self.communicator)

    def leave(self, error: BaseException) -> None:
        """Stop using the mesh on this rank alone, by an error that may yet be caught."""
        self.closed = True
        communicators = self.progress.communicators
        for name in [name for name in communicators if name.startswith(f"{self.name}/")]:
            del communicators[name]
        if self.world.channels is not None:
            self.world.channels.leave_mesh(self.communicator, error)

    @property
    def why_closed(self) -> str:
        """Why nothing may start."""
        if self.forked:
            return (
                "its mesh is that of the parent process, and a forked child has no part in it; "
                "start children before MPI, or by spawn"
            )
        return "its mesh is closed"


_OF_THIS_PROCESS: WeakSet[MeshContext] = WeakSet()


def _let_go() -> None:
    """Close all meshes in a forked child: a message from there would be taken for the parent's."""
    for context in list(_OF_THIS_PROCESS):
        context.closed = context.forked = True
        for work in context.open_work.all():
            # To test its request would take messages that are the parent's.
            why = f"rank {context.rank} cannot wait for {work._call}: {context.why_closed}"
            work._error, work._resolved = ClosedError(why), True


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_let_go)
