"""Work on blocks that may fail for what is in them: then it fails on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable

from mpimesh.runtime import DeviceMesh
from mpimesh.runtime.agreement import exchange
from mpimesh.runtime.call import Call

__all__ = ["attempted"]


def attempted(
    mesh: DeviceMesh,
    name: str,
    work: Callable[[], None],
    error: type[ValueError] = ValueError,
) -> None:
    """Do some work on this rank's block. Collective over the mesh: all learn whether all could.

    Args:
        mesh: The mesh.
        name: What is called, for messages.
        work: Raises a `ValueError` if it cannot be done for the values of this rank.
        error: What is raised then; one of NumPy's own, perhaps.

    Raises:
        ValueError: On every rank of the mesh, with the words of the first rank that has one.

    Cost:
        Two small all-gathers.
    """
    problem = ""
    try:
        work()
    except ValueError as failure:
        problem = str(failure) or type(failure).__name__
    group = mesh.group()
    found = exchange(group.progress, group.communicator, problem, what=Call(name, group.name))
    first = next(filter(None, found), "")
    if first:
        raise error(first)
