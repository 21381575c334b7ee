"""Small facts that the ranks of a mesh tell each other."""

from __future__ import annotations

from typing import Any

from mpimesh.runtime import DeviceMesh
from mpimesh.runtime.agreement import exchange
from mpimesh.runtime.call import Call

__all__ = ["told_by_all"]


def told_by_all(mesh: DeviceMesh, name: str, fact: Any) -> list[Any]:
    """Return what each rank of the mesh says, in the order of its group. Collective.

    Args:
        mesh: The mesh; this rank is in it.
        name: What is called, for messages.
        fact: What this rank says: what JSON has.

    Cost:
        Two small all-gathers.
    """
    group = mesh.group()
    return exchange(group._core.progress, group.communicator, fact, what=Call(name, group.name))
