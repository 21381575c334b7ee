"""Which UCX this process has loaded, and whether that one can reach device memory.

An MPI says which UCX it was built with, not which one it got: a folder in LD_LIBRARY_PATH may hold
another. So it is read off what is mapped.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CUDA_MODULE", "Ucx", "loaded_ucx"]

CUDA_MODULE = "libuct_cuda.so"
"""UCX's module for device memory, loaded at its start if the driver's libraries are there."""


@dataclass(frozen=True, slots=True)
class Ucx:
    """The UCX of a process; all fields are "" if it has none.

    Attributes:
        version: Such as ``"1.22.0"``.
        path: Its ``libucp``.
        cuda: ``"loaded"`` if its CUDA transports are, ``"not loaded"`` if they lie beside it,
            "" if it has none.
    """

    version: str = ""
    path: str = ""
    cuda: str = ""

    def __str__(self) -> str:
        """Say it in a few words, without the place."""
        cuda = f"CUDA transports {self.cuda}" if self.cuda else "no CUDA transports"
        return f"{self.version}, {cuda}" if self.version else ""


def loaded_ucx(maps: Path = Path("/proc/self/maps")) -> Ucx:
    """Return the UCX that this process has loaded. Local; starts nothing.

    Args:
        maps: What the process has mapped.
    """
    mapped = {
        line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines() if "/libuc" in line
    }
    for path in sorted(path for path in mapped if Path(path).name.startswith("libucp.so")):
        if version := _version(path):
            return Ucx(version, path, _cuda(Path(path), mapped))
    return Ucx()


def _version(path: str) -> str:
    with suppress(OSError, AttributeError):
        version = ctypes.CDLL(path).ucp_get_version_string
        version.restype = ctypes.c_char_p
        return str(version().decode())
    return ""


def _cuda(library: Path, mapped: set[str]) -> str:
    if any(Path(path).name.startswith(CUDA_MODULE) for path in mapped):
        return "loaded"
    # Where UCX itself looks for its modules.
    beside = any((library.parent / "ucx").glob(f"{CUDA_MODULE}*"))
    return "not loaded" if beside else ""
