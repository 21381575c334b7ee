"""Start-up files of MPI that an aborted job has left in /dev/shm.

MPI's libraries put the memory that ranks of a node share into files there, and
remove them once all ranks have opened them, or at the end. A job that is
aborted leaves them behind: 1 to 16 MB for each rank, in a file system that is
the machine's memory. mpimesh itself leaves nothing, for its shared memory has
no name.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["SHM", "Leftover", "find_leftovers", "remove"]

SHM = Path("/dev/shm")  # noqa: S108 - it is that very folder

_PATTERNS = (
    "mpich_shm_*",
    "sm_segment.*",  # Open MPI 5
    "vader_segment.*",  # Open MPI 2 to 4
    "psm_shm.*",
    "psm2_shm.*",
    "psm3_shm.*",
)
_YOUNG_S = 60.0
"""Younger files may be of a rank that is about to open them."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """A file that nobody uses.

    Attributes:
        path: Where it is.
        nbytes: What it takes.
    """

    path: str
    nbytes: int


def find_leftovers(
    folder: Path = SHM, proc: Path = Path("/proc"), *, now_s: float | None = None
) -> tuple[Leftover, ...]:
    """Return MPI's files of this user in `folder` that no process maps or has open.

    Processes in other containers that share the folder cannot be seen: do not clean while they
    run MPI.

    Args:
        folder: Where to look.
        proc: Where the processes are.
        now_s: The time now, by :func:`time.time`.
    """
    now_s = time.time() if now_s is None else now_s
    found = {}
    for pattern in _PATTERNS:
        for path in folder.glob(pattern):
            with suppress(OSError):
                facts = path.lstat()
                old = now_s - max(facts.st_mtime, facts.st_ctime) > _YOUNG_S
                if facts.st_uid == os.geteuid() and old and not path.is_symlink():
                    found[str(path)] = Leftover(str(path), facts.st_blocks * 512)
    if found:
        for used in _files_in_use(proc):
            found.pop(used, None)
    return tuple(found[path] for path in sorted(found))


def remove(leftovers: Iterable[Leftover]) -> tuple[Leftover, ...]:
    """Remove the files, and return those that this call has removed."""
    removed = []
    for leftover in leftovers:
        with suppress(OSError):  # such as another rank's doctor was faster
            Path(leftover.path).unlink()
            removed.append(leftover)
    return tuple(removed)


def _files_in_use(proc: Path) -> Iterable[str]:
    """Yield the paths that any process maps or has open, as far as this user may look."""
    for process in proc.iterdir():
        if not process.name.isdecimal():
            continue
        # A process may vanish while it is looked at, and others' are not ours to read.
        with suppress(OSError):
            for line in (process / "maps").read_text(errors="replace").splitlines():
                words = line.split(maxsplit=5)
                if len(words) == 6:
                    yield words[5].removesuffix(" (deleted)")
        with suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with suppress(OSError):
                    yield str(descriptor.readlink())
