"""What mpimesh keeps from one job to the next, and how to be rid of it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from mpimesh.transport.proof_cache import cache_folder

__all__ = ["forget"]


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
