"""Work on blocks that may fail for what is in them: then it fails on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable

from mpimesh.dtensor.telling import told_by_all
from mpimesh.runtime import DeviceMesh

__all__ = ["attempted"]


def attempted(
    mesh: DeviceMesh,
    name: str,
    work: Callable[[], None],
    error: type[Exception] = ValueError,
    *,
    caught: tuple[type[Exception], ...] = (ValueError, FloatingPointError),
) -> None:
    """Do some work on this rank's block. Collective over the mesh: all learn whether all could.

    Args:
        mesh: The mesh.
        name: What is called, for messages.
        work: Raises one of `caught` if it cannot be done for the values of this rank.
        error: What is raised then; one of NumPy's own, perhaps.
        caught: What counts as that; all else is a mistake of this rank.

    Raises:
        ValueError: On every rank of the mesh, with the words of the first rank that has one; or
            another `error`, or the `FloatingPointError` that :func:`numpy.errstate` asks for.

    Cost:
        Two small all-gathers.
    """
    problem = ["", False]
    try:
        work()
    except caught as failure:
        words = str(failure) or type(failure).__name__
        problem = [words, isinstance(failure, FloatingPointError)]
    for words, is_float in told_by_all(mesh, name, problem):
        if words:
            raise (FloatingPointError if is_float else error)(words)
