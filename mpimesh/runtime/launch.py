"""The launcher of this process, and whether MPI agrees with it.

Started by the wrong launcher, or by `srun` with the wrong ``--mpi``, every rank
becomes a world of its own and computes everything alone, with exit code 0. The
launcher's variables tell how many tasks there should have been.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from mpimesh.errors import LaunchError, on_all_ranks

__all__ = ["Launch", "check_world"]

# The srun flag that each MPI's process manager interface answers to.
_SRUN_FLAGS = {"MPICH": "--mpi=pmi2", "Intel MPI": "--mpi=pmi2", "Open MPI": "--mpi=pmix"}


@dataclass(frozen=True, slots=True)
class Launch:
    """The launcher's facts about this process.

    Attributes:
        launcher: ``"mpiexec (Open MPI)"``, ``"mpiexec (MPICH)"``, ``"srun"``, ``"a PMI launcher"``
            or ``"none"``.
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
                return cls(
                    launcher,
                    _whole(env.get(size)) or 1,
                    _whole(env.get(rank)) or 0,
                    _whole(env.get(local_rank)),
                    node,
                )
        return cls(node=node)


# Launcher; what it alone sets; size, rank and local rank. `srun --mpi=pmi2` sets PMI_SIZE and
# PMI_RANK as MPICH's mpiexec does, but no local rank. Cray's launcher says it as below.
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
    ("a PMI launcher", "PMI_SIZE", "PMI_SIZE", "PMI_RANK", "PMI_LOCAL_RANK"),
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
        error = LaunchError(
            f"{what}no MPI library could be loaded ({reason}); "
            "install one, for example: pip install mpich"
        )
    else:
        if launch.launcher != "srun":
            cure = f"start it with the mpiexec that belongs to {vendor}, beside this Python"
        elif vendor in _SRUN_FLAGS:
            cure = f"start it with `srun {_SRUN_FLAGS[vendor]}`"
        else:
            cure = f"start it with the flag for {vendor} among those of `srun --mpi=list`"
        error = LaunchError(f"{what}{vendor} sees a world of 1: it was not told; {cure}")
    raise on_all_ranks(error)
