"""Files that mpimesh keeps from one job to the next, and their removal."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path

from mpimesh.transport.mpi_environment import cache_folder

__all__ = ["forget", "why_not_kept"]


def forget(folder: Path | None = None) -> tuple[str, ...]:
    """Remove the sizes that were measured and the proofs of CUDA-aware MPI. Local.

    Another rank may do it at the same time.

    Args:
        folder: Where they are; None for mpimesh's own place.

    Returns:
        The names of the files that this call has removed.
    """
    folder = cache_folder() if folder is None else folder
    gone = []
    for path in sorted(folder.glob("*.json")) if folder is not None else ():
        with suppress(OSError):  # such as another rank was faster
            path.unlink()
            gone.append(path.name)
    return tuple(gone)


def why_not_kept(folder: Path | None = None) -> str:
    """Return why nothing can be kept for later jobs; "" if it can. Local.

    Args:
        folder: Where it would be; None for mpimesh's own place.
    """
    folder = cache_folder() if folder is None else folder
    if folder is None:
        return "this user has no home folder"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror}"
