"""The environment of an MPI job: its variables, its launcher, its processes, its UCX, its cache.

Programs that are started from within a job use it, and whoever keeps for later jobs what was found
out about the MPI of this one.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpimesh.arguments import digest_text

__all__ = [
    "CUDA_MODULE",
    "Ucx",
    "cache_folder",
    "cache_problem",
    "clean_environment",
    "clear_cache",
    "digest",
    "find_mpiexec",
    "has_ucx_module",
    "loaded_ucx",
    "network_environment",
    "processes_with",
    "tuning",
    "write_json",
]

# -- variables, launcher and processes ---------------------------------------------------

# These tell a process that it is a rank of a job, or where the job's nodes are.
_OF_A_JOB = (
    *("COBALT_", "FLUX_", "HYDI_", "HYDRA_", "LSB_", "MPIEXEC_", "MPI_LOCAL", "NSLOTS"),
    *("OMPI_", "PALS_", "PBS_", "PE_HOSTFILE", "PMI", "PRTE_", "SLURM"),
)
# Open MPI has both under one name; these parts of it are where a person chooses MPI's way.
_FRAMEWORKS = tuple(
    f"OMPI_MCA_{name}"
    for name in (
        *("accelerator", "btl", "coll", "mpi_", "mtl", "opal_", "osc", "pml", "rcache", "smsc"),
    )
)
_TUNING = (
    *("FI_", "I_MPI_FABRICS", "I_MPI_OFFLOAD", "I_MPI_OFI", "I_MPI_SHM", "LD_LIBRARY_PATH"),
    *("MPICH_", "MPIR_", "MV2_", "UCX_"),
    *_FRAMEWORKS,
)


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` as a new job needs it: without what tells of the job at hand."""
    clean = {
        name: text
        for name, text in environment.items()
        if not name.startswith(_OF_A_JOB) or name.startswith(_FRAMEWORKS)
    }
    # Two ranks are no more than may run here, whatever the cores and the user.
    clean["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"
    clean["PRTE_MCA_hwloc_default_binding_policy"] = "none"
    clean["OMPI_MCA_rmaps_base_oversubscribe"] = "1"
    if os.geteuid() == 0:
        clean["OMPI_ALLOW_RUN_AS_ROOT"] = clean["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    package = str(Path(__file__).parents[2])
    clean["PYTHONPATH"] = os.pathsep.join([*filter(None, [clean.get("PYTHONPATH")]), package])
    return clean


_SHARED_MEMORY = frozenset(
    ("cma", "cuda_ipc", "knem", "mm", "posix", "shm", "sm", "smcuda", "sysv", "vader", "xpmem")
)


def network_environment(environment: Mapping[str, str], vendor: str) -> dict[str, str] | None:
    """Return `environment` where ranks of one node send messages as those of two nodes do.

    Args:
        environment: Of a job.
        vendor: The MPI, as mpi4py names it.

    Returns:
        None if there is no such setting for this MPI.
    """
    changed = dict(environment)
    changed["UCX_TLS"] = _without(changed.get("UCX_TLS", "all"), "sm", "cuda_ipc")
    if vendor == "Open MPI":
        changed["OMPI_MCA_btl"] = _without(changed.get("OMPI_MCA_btl", "all"), "sm", "smcuda")
    elif vendor == "Intel MPI":
        changed["I_MPI_FABRICS"] = "ofi"
    elif "MPICH" in vendor or "Cray" in vendor or "MVAPICH" in vendor:
        changed["MPIR_CVAR_NOLOCAL"] = changed["MPICH_NO_LOCAL"] = "1"
    else:
        return None
    return changed


def _without(chosen: str, *shared: str) -> str:
    """Return a list of transports without shared memory; one after "^" names those left out."""
    if chosen in ("", "all"):
        return "^" + ",".join(shared)
    if chosen.startswith("^"):
        return ",".join([chosen, *shared])
    return ",".join(
        "cuda_copy,gdr_copy" if name == "cuda" else name  # "cuda" has cuda_ipc in it
        for name in chosen.split(",")
        if name not in _SHARED_MEMORY
    )


def tuning(environment: Mapping[str, str]) -> list[str]:
    """Return the variables, as ``NAME=text``, by which a person has chosen MPI's way."""
    return sorted(
        f"{name}={text}" for name, text in environment.items() if name.startswith(_TUNING)
    )


def find_mpiexec(environment: Mapping[str, str]) -> str | None:
    """Return the mpiexec beside this interpreter, else the first in ``PATH``, if there is one."""
    beside = Path(sys.executable).parent / "mpiexec"
    if beside.exists():
        return str(beside)
    return shutil.which("mpiexec", path=environment.get("PATH", os.defpath))


def processes_with(variable: str) -> list[int]:
    """Return the processes that have `variable`, as ``NAME=text``, in their environment."""
    wanted = variable.encode()
    pids = []
    for entry in Path("/proc").iterdir():
        # A process may vanish while it is looked at, and others' are not ours to read.
        with suppress(OSError):
            if entry.name.isdecimal() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                pids.append(int(entry.name))
    return pids


# -- UCX ---------------------------------------------------------------------------------

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

    An MPI says which UCX it was built with, not which one it got: a folder in LD_LIBRARY_PATH may
    hold another. So it is read off what is mapped.

    Args:
        maps: What the process has mapped.
    """
    mapped = {
        line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines() if "/libuc" in line
    }
    for path in sorted(path for path in mapped if Path(path).name.startswith("libucp.so")):
        if version := _ucx_version(path):
            cuda = "not loaded" if has_ucx_module(Path(path).parent, CUDA_MODULE) else ""
            if any(Path(other).name.startswith(CUDA_MODULE) for other in mapped):
                cuda = "loaded"
            return Ucx(version, path, cuda)
    return Ucx()


def _ucx_version(path: str) -> str:
    with suppress(OSError, AttributeError):
        version = ctypes.CDLL(path).ucp_get_version_string
        version.restype = ctypes.c_char_p
        return str(version().decode())
    return ""


def has_ucx_module(folder: Path, module: str) -> bool:
    """Tell whether the UCX in `folder` has `module`, where UCX itself looks for its modules."""
    return any((folder / "ucx").glob(f"{module}*"))


# -- files that are kept for later jobs ----------------------------------------------------


def cache_folder(environment: Mapping[str, str] | None = None) -> Path | None:
    """Return mpimesh's folder among the user's caches, which may not be there yet.

    None for a user who has no home, as in some containers.
    """
    environment = os.environ if environment is None else environment
    setting = environment.get("XDG_CACHE_HOME", "")
    # As the specification says, a relative path counts as none.
    if setting.startswith("/"):
        return Path(setting) / "mpimesh"
    with suppress(RuntimeError):
        return Path.home() / ".cache" / "mpimesh"
    return None


def cache_problem(folder: Path | None = None) -> str:
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


def clear_cache() -> None:
    """Remove all that earlier jobs have kept. Local; another rank may do it at the same time."""
    folder = cache_folder()
    for path in folder.glob("*.json") if folder is not None else ():
        with suppress(OSError):  # such as another rank was faster
            path.unlink()


def digest(*texts: str) -> str:
    """Return 16 hexadecimal digits that stand for `texts`."""
    return digest_text("\0".join(texts).encode())


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file as a whole, in a folder that is made if need be.

    A reader sees the old file or the new one.

    Raises:
        OSError: If it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, new = tempfile.mkstemp(prefix=".new-", dir=path.parent)
    with os.fdopen(handle, "w") as file:
        json.dump(content, file, indent=1)
    Path(new).replace(path)
