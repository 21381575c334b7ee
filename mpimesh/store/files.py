"""Files that are seen under their names only when all of them is on the disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from mpimesh.arguments import shown
from mpimesh.errors import StoreError

__all__ = [
    "PART",
    "TOKEN_DIGITS",
    "as_folder",
    "new_token",
    "replaced",
    "sync",
    "temporary_beside",
    "write_at",
]

PART = ".part"
"""The end of the names of files and folders that are being written."""

TOKEN_DIGITS = 12
"""Digits before that end, by which those of one name are told from those of a longer one."""

_MOST_BYTES = 1 << 30  # a write of Linux ends at 2 GiB


def as_folder(path: object) -> Path:
    """Return the absolute path of a checkpoint. Local.

    Raises:
        StoreError: If it is no path.
    """
    if not isinstance(path, str | os.PathLike) or "\0" in str(path):
        raise StoreError(f"the path of a checkpoint is a text or a Path, got {shown(path)}")
    return Path(path).absolute()


def new_token() -> str:
    """Return `TOKEN_DIGITS` hexadecimal digits that nobody has had. Local."""
    return uuid4().hex[:TOKEN_DIGITS]


def temporary_beside(path: Path, token: str = "") -> Path:
    """Return a hidden name beside `path` that ends with a token, a new one if empty, and `PART`."""
    return path.with_name(f".{path.name}.{token or new_token()}{PART}")


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
