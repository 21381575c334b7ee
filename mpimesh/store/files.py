"""Files that are seen under their names only when all of them is on the disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from mpimesh.arguments import shown
from mpimesh.errors import StoreError
from mpimesh.runtime import Launch
from mpimesh.runtime.world import current_world

__all__ = ["PART", "as_folder", "ranks_of_job", "replaced", "sync", "temporary_beside", "write_at"]

PART = ".part"
"""The end of the names of files and folders that are being written."""

_MOST_BYTES = 1 << 30  # a write of Linux ends at 2 GiB


def as_folder(path: object) -> Path:
    """Return the absolute path of a checkpoint. Local.

    Raises:
        StoreError: If it is no path.
    """
    if not isinstance(path, str | os.PathLike) or "\0" in str(path):
        raise StoreError(f"the path of a checkpoint is a text or a Path, got {shown(path)}")
    return Path(path).absolute()


def ranks_of_job() -> int:
    """Return how many ranks run this program, without starting MPI. Local."""
    virtual = current_world().virtual
    return Launch.detect().size if virtual is None else virtual.size


def temporary_beside(path: Path) -> Path:
    """Return a name that nobody has, beside `path`, hidden, and ending with `PART`. Local."""
    return path.with_name(f".{path.name}.{uuid4().hex[:12]}{PART}")


def sync(path: Path) -> None:
    """Have a file or a folder on the disk. A folder's names are there only after its own sync."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def write_at(number: int, data: memoryview, offset: int) -> None:
    """Write all of `data`, which is contiguous bytes, at `offset` of an open file."""
    while data:
        written = os.pwrite(number, data[:_MOST_BYTES], offset)
        data, offset = data[written:], offset + written


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield the name to write a file under, which becomes `path` once it is on the disk. Local.

    Whoever reads `path` finds all of it, or the file before. An error leaves the file before, and
    nothing else.

    Raises:
        StoreError: If it cannot be written.
    """
    fresh = temporary_beside(path)
    try:
        try:
            yield fresh
            sync(fresh)
            fresh.replace(path)
            sync(path.parent)
        finally:
            with suppress(OSError):
                fresh.unlink(missing_ok=True)
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror or error}") from error
