"""The launcher of this process: its variables, whether MPI agrees with them, an end without MPI.

Started by the wrong launcher, or by `srun` with the wrong ``--mpi``, every rank
becomes a world of its own and computes everything alone, with exit code 0. The
launcher's variables tell how many tasks there should have been.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpimesh.errors import LaunchError, on_all_ranks

if TYPE_CHECKING:
    from socket import socket

__all__ = ["Launch", "check_world", "end_before_mpi", "exit_status", "is_rank", "way_to_mpi"]

_ANSWER_S = 3.0
"""Longest wait for what the launcher answers."""
_MARK = "_MPIMESH_RANK"
"""The variable by which children know that they are no ranks, though they have their variables."""
_JOB = ("PMI_RANK", "PMI_FD", "PMI_PORT", "PMIX_NAMESPACE", "PMIX_RANK", "SLURM_JOB_ID")
"""Variables that two jobs do not share."""

# The srun flag that each MPI's process manager interface answers to.
_SRUN_FLAGS = {"MPICH": "--mpi=pmi2", "Intel MPI": "--mpi=pmi2", "Open MPI": "--mpi=pmix"}


@dataclass(frozen=True, slots=True)
class Launch:
    """Rank, node and size of the job, as the launcher of this process states them.

    Attributes:
        launcher: ``"mpiexec (Open MPI)"``, ``"mpiexec (MPICH)"``, ``"srun"``, ``"torchrun"`` or
            another, ``"none"`` without any.
        size: Number of tasks started together.
        rank: This task among them.
        local_rank: This task among those of its node; None where the launcher does not say.
        node: The node's name, where the launcher gives one.
    """

    launcher: str = "none"
    size: int = 1
    rank: int = 0
    local_rank: int | None = None
    node: str = ""

    @classmethod
    def detect(cls, environment: Mapping[str, str] | None = None) -> Launch:
        """Read the launcher's variables from `environment`, by default the process's own."""
        env = os.environ if environment is None else environment
        node = env.get("SLURMD_NODENAME", "")
        # The innermost launcher comes first: mpiexec may run inside an srun or sbatch.
        for launcher, mark, size, rank, local_rank in _VARIABLES:
            if mark in env:
                number = _whole(env.get(rank)) or 0
                return cls(
                    launcher,
                    # PMIx says no size, but a task that is not the first is not alone.
                    _whole(env.get(size)) or number + 1,
                    number,
                    _whole(env.get(local_rank)),
                    node,
                )
        return cls(node=node)


# Launcher; what it alone sets; size, rank and local rank. `srun --mpi=pmi2` sets PMI_SIZE and
# PMI_RANK as MPICH's mpiexec does, but no local rank. Cray's launcher says it as below. Of Slurm's
# variables those of the job, such as SLURM_NTASKS, are also there where a script or `salloc` starts
# one process; so are WORLD_SIZE and the like in scripts, where nobody has set RANK and LOCAL_RANK.
_VARIABLES = (
    (
        "mpiexec (Open MPI)",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
    ),
    ("mpiexec (MPICH)", "MPI_LOCALRANKID", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"),
    (
        "srun",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_PROCID",
        "SLURM_LOCALID",
    ),
    ("PALS", "PALS_RANKID", "PMI_SIZE", "PALS_RANKID", "PALS_LOCAL_RANKID"),
    (
        "jsrun",
        "JSM_NAMESPACE_SIZE",
        "JSM_NAMESPACE_SIZE",
        "JSM_NAMESPACE_RANK",
        "JSM_NAMESPACE_LOCAL_RANK",
    ),
    (
        "mpirun_rsh (MVAPICH)",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_LOCAL_RANK",
    ),
    ("flux run", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID"),
    ("a PMI launcher", "PMI_SIZE", "PMI_SIZE", "PMI_RANK", "PMI_LOCAL_RANK"),
    ("a PMIx launcher", "PMIX_RANK", "", "PMIX_RANK", "PMIX_LOCAL_RANK"),
    ("torchrun", "TORCHELASTIC_RUN_ID", "WORLD_SIZE", "RANK", "LOCAL_RANK"),
    ("a launcher for PyTorch", "LOCAL_RANK", "WORLD_SIZE", "RANK", "LOCAL_RANK"),
)


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def check_world(launch: Launch, world_size: int, vendor: str, *, reason: str = "") -> None:
    """Refuse a world of one rank inside a launcher that started more.

    Args:
        launch: What the launcher says.
        world_size: What MPI says.
        vendor: The MPI library's name, empty where none could be loaded.
        reason: Why none could be loaded.

    Raises:
        LaunchError: On every rank; names the launcher or flag that fits this MPI.
    """
    if world_size != 1 or launch.size == 1:
        return
    what = f"{launch.launcher} started {launch.size} tasks, but this is task {launch.rank} and "
    if not vendor:
        error = LaunchError(f"{what}no MPI library could be loaded ({reason}); {way_to_mpi()}")
    else:
        if launch.launcher != "srun":
            cure = (
                f"start it with the mpiexec that belongs to {vendor}, beside this Python: "
                f"mpiexec -n {launch.size} python program.py"
            )
        elif vendor in _SRUN_FLAGS:
            cure = f"start it with `srun {_SRUN_FLAGS[vendor]}`"
        else:
            cure = f"start it with the flag for {vendor} among those of `srun --mpi=list`"
        error = LaunchError(
            f"{what}{vendor} sees a world of 1, as it does not use this launcher's protocol; {cure}"
        )
    raise on_all_ranks(error)


def way_to_mpi() -> str:
    """Return what to do where no MPI library could be loaded."""
    from ctypes.util import find_library  # late: only errors need it

    # Debian's MPICH has another name than the wheels of mpi4py look for.
    name = find_library("mpich")
    if name is None:
        return "install one, for example: pip install mpich"
    return (
        f"install another one: pip install mpich, or take this machine's {name}, by a symlink to "
        "it called libmpi.so.12 in a folder on LD_LIBRARY_PATH, or by an mpi4py built for it: pip "
        "install --force-reinstall --no-binary mpi4py mpi4py"
    )


def is_rank() -> bool:
    """Tell whether the launcher has started this process itself, and no rank has."""
    job = "|".join(os.environ.get(name, "") for name in _JOB)
    mark = os.environ.get(_MARK, "").split(" ", 1)
    if mark[1:] == [job]:
        return mark[0] == str(os.getpid())
    os.environ[_MARK] = f"{os.getpid()} {job}"
    return True


def exit_status(code: object) -> int:
    """Return the exit status of a process that ends by ``SystemExit(code)``."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


def end_before_mpi(exit_code: int) -> None:
    """End the ranks of a job in which this one has not started MPI.

    Open MPI's mpiexec, and ``srun -K``, end a job one of whose processes leaves with an exit code.
    MPICH's waits on, and so does srun: the other ranks would stay in `MPI_Init`. MPICH's processes
    have a connection to either, on which MPI_Abort's request can be said at any time.
    """
    connection = _process_manager()
    if connection is not None:
        # PMI 1, which both speak. What they answer to the greeting is in the way of nothing.
        connection.settimeout(_ANSWER_S)
        connection.sendall(b"cmd=init pmi_version=1 pmi_subversion=1\n")
        connection.recv(1024)
        connection.sendall(b"cmd=abort exitcode=%d\n" % exit_code)
        connection.recv(1024)  # until this process is ended
    elif Launch.detect().launcher == "srun":
        import shutil  # late, both: nobody else needs them
        import subprocess

        command = shutil.which("scancel")
        job, step = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_STEP_ID")
        if command is not None and job and step:
            subprocess.run([command, f"{job}.{step}"], timeout=_ANSWER_S, check=False)


def _process_manager() -> socket | None:
    """Return the connection to the launcher that MPICH's process manager interface has."""
    text = os.environ.get("PMI_FD", "")
    if not text.isdecimal():
        return None
    try:
        if not stat.S_ISSOCK(os.fstat(int(text)).st_mode):
            return None
        from socket import socket  # late: only the end of a failed rank needs it

        return socket(fileno=os.dup(int(text)))
    except OSError:
        return None
