"""Facts of the programs and libraries at work."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpimesh.comm.cuda_probe import has_cupy
from mpimesh.comm.mpi_environment import loaded_ucx
from mpimesh.comm.nccl import nccl_library

__all__ = ["Cuda", "Mpi", "Software", "find_cuda", "find_mpi", "find_software"]

_THREADS = ("single", "funneled", "serialized", "multiple")
# How many communicators there can be at once, where somebody has counted.
_COMMUNICATORS = {"MPICH": 2046, "Open MPI": 65532}


@dataclass(frozen=True, slots=True)
class Software:
    """Versions; "" where something is not installed."""

    mpimesh: str
    python: str
    numpy: str
    mpi4py: str
    interpreter: str


@dataclass(frozen=True, slots=True)
class Mpi:
    """The MPI library that this process has loaded.

    Attributes:
        problem: Why there is none; the rest is empty then.
        vendor: Such as ``"MPICH"``.
        version: Of the library.
        standard: The MPI standard that it keeps, such as ``"4.1"``.
        device: Its network layer, where it says so.
        path: Its file.
        ucx: Version of the UCX that it has loaded; "" if none.
        ucx_path: Where that one is.
        ucx_cuda: Whether that one's CUDA transports are ``"loaded"`` or ``"not loaded"``; "" if it
            has none.
        thread_level: ``"single"``, ``"funneled"``, ``"serialized"`` or ``"multiple"``.
        tag_limit: The largest tag of a message.
        communicator_limit: How many communicators there can be; 0 if not known.
        large_counts: Whether one call moves more than 2^31 elements.
    """

    problem: str = ""
    vendor: str = ""
    version: str = ""
    standard: str = ""
    device: str = ""
    path: str = ""
    ucx: str = ""
    ucx_path: str = ""
    ucx_cuda: str = ""
    thread_level: str = ""
    tag_limit: int = 0
    communicator_limit: int = 0
    large_counts: bool = False


@dataclass(frozen=True, slots=True)
class Cuda:
    """CuPy and CUDA.

    Attributes:
        installed: Whether CuPy is.
        problem: Why it cannot be used.
        cupy: Its version.
        runtime: CUDA's version that CuPy uses.
        driver: CUDA's version that the driver can do.
        nccl: Its version; "" if CuPy has none.
        gpus: How many GPUs this process sees.
    """

    installed: bool = False
    problem: str = ""
    cupy: str = ""
    runtime: str = ""
    driver: str = ""
    nccl: str = ""
    gpus: int = 0


def find_software() -> Software:
    """Return the versions of what mpimesh is made of."""
    import mpimesh

    return Software(
        mpimesh=mpimesh.__version__,
        python=platform.python_version(),
        numpy=_version("numpy"),
        mpi4py=_version("mpi4py"),
        interpreter=sys.executable,
    )


def _version(package: str) -> str:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return ""


def find_mpi() -> Mpi:
    """Start MPI, and return what it is."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        return Mpi(problem=f"no MPI library could be loaded: {' '.join(str(error).split())}")
    vendor, version = MPI.get_vendor()
    ucx = loaded_ucx()
    tag_limit = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
    return Mpi(
        vendor=vendor,
        version=".".join(map(str, version)),
        standard=".".join(map(str, MPI.Get_version())),
        device=_device(MPI.Get_library_version()),
        path=_library_path(),
        ucx=ucx.version,
        ucx_path=ucx.path,
        ucx_cuda=ucx.cuda,
        thread_level=_thread_level(MPI),
        tag_limit=32767 if tag_limit is None else int(tag_limit),
        communicator_limit=_COMMUNICATORS.get(vendor, 0),
        large_counts=MPI.VERSION >= 4,
    )


def _thread_level(mpi: Any) -> str:
    levels = (
        mpi.THREAD_SINGLE,
        mpi.THREAD_FUNNELED,
        mpi.THREAD_SERIALIZED,
        mpi.THREAD_MULTIPLE,
    )
    names: dict[int, str] = dict(zip(levels, _THREADS, strict=True))
    return names.get(mpi.Query_thread(), "unknown")


def _device(text: str) -> str:
    """Return the network layer that a library's description names; "" if it names none."""
    fields = dict(line.partition(":")[::2] for line in text.splitlines() if ":" in line)
    return fields.get("MPICH Device", "").strip()


def _library_path(maps: Path = Path("/proc/self/maps")) -> str:
    """Return the file of the MPI library that is loaded; "" where it cannot be told."""
    with suppress(OSError):
        for line in maps.read_text().splitlines():
            path = Path(line.split(maxsplit=5)[-1])
            if path.name.startswith(("libmpi.so", "libmpich.so", "libmpi_", "libmpi-")):
                return str(path)
    return ""


def find_cuda() -> Cuda:
    """Return what CuPy sees; imports it if it is installed."""
    if not has_cupy():
        return Cuda()
    try:
        import cupy

        runtime = cupy.cuda.runtime
        return Cuda(
            installed=True,
            cupy=str(cupy.__version__),
            runtime=_cuda_version(runtime.runtimeGetVersion()),
            driver=_cuda_version(runtime.driverGetVersion()),
            nccl=_nccl_version(),
            gpus=int(runtime.getDeviceCount()),
        )
    except Exception as error:  # whatever it is, it is what the person must read
        return Cuda(installed=True, problem=f"{type(error).__name__}: {error}")


def _nccl_version() -> str:
    with suppress(Exception):
        nccl = nccl_library()
        if nccl is not None:
            number = int(nccl.get_version())
            return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    return ""


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
