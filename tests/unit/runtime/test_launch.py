"""The launcher's variables, and worlds that are refused."""

from __future__ import annotations

import pytest

from mpimesh.errors import LaunchError
from mpimesh.runtime import Launch
from mpimesh.runtime.launch import check_world, way_to_mpi
from tests.helpers.raises import raises

OPENMPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
HYDRA = {"PMI_SIZE": "4", "PMI_RANK": "2", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "4"}
SRUN = {
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURMD_NODENAME": "n1",
}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1"}
PMI2 = {"PMI_SIZE": "4", "PMI_RANK": "3", "PMI_FD": "9"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Launch()),
        (OPENMPI, Launch("mpiexec (Open MPI)", 4, 3, 1)),
        (HYDRA, Launch("mpiexec (MPICH)", 4, 2, 2)),
        (SRUN, Launch("srun", 4, 3, 1, "n1")),
        # srun speaks PMI-2 to its tasks: still srun, and the local rank is Slurm's.
        (SRUN | PMI2, Launch("srun", 4, 3, 1, "n1")),
        # mpiexec inside a job: its proxies are the tasks of Slurm.
        (SRUN | HYDRA, Launch("mpiexec (MPICH)", 4, 2, 2, "n1")),
        (SRUN | OPENMPI, Launch("mpiexec (Open MPI)", 4, 3, 1, "n1")),
        (PMI2, Launch("a PMI launcher", 4, 3, None)),
        (PMI2 | {"PMI_LOCAL_RANK": "1"}, Launch("a PMI launcher", 4, 3, 1)),
        # A script of sbatch, outside any step.
        ({"SLURM_NTASKS": "4", "SLURMD_NODENAME": "n0"}, Launch(node="n0")),
        # A terminal of salloc, and a script that prepares what PyTorch reads.
        (dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS", "WORLD_SIZE"), "4"), Launch()),
        (TORCHRUN, Launch("torchrun", 4, 3, 1)),
        (TORCHRUN | HYDRA, Launch("mpiexec (MPICH)", 4, 2, 2)),
        (
            {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1"},
            Launch("a launcher for PyTorch", 4, 3, 1),
        ),
        ({"PMIX_RANK": "2", "PMIX_NAMESPACE": "x"}, Launch("a PMIx launcher", 3, 2, None)),
        ({"PMIX_RANK": "0", "PMIX_NAMESPACE": "x"}, Launch("a PMIx launcher", 1, 0, None)),
        (
            {"PALS_RANKID": "3", "PALS_LOCAL_RANKID": "1", "PMI_SIZE": "4", "PMI_RANK": "3"},
            Launch("PALS", 4, 3, 1),
        ),
        (
            {f"JSM_NAMESPACE_{name}": str(n) for name, n in (("SIZE", 4), ("RANK", 3))},
            Launch("jsrun", 4, 3, None),
        ),
        (
            {f"MV2_COMM_WORLD_{name}": str(n) for name, n in (("SIZE", 4), ("RANK", 3))},
            Launch("mpirun_rsh (MVAPICH)", 4, 3, None),
        ),
        ({"FLUX_TASK_RANK": "3", "FLUX_JOB_SIZE": "4"}, Launch("flux run", 4, 3, None)),
        ({"OMPI_COMM_WORLD_SIZE": "many"}, Launch("mpiexec (Open MPI)", 1, 0, None)),
    ],
)
def test_detect(environment, expected):
    assert Launch.detect(environment) == expected


@pytest.mark.parametrize(
    ("environment", "vendor", "cure"),
    [
        (SRUN, "MPICH", ("MPICH", "srun --mpi=pmi2")),
        (SRUN, "Intel MPI", ("Intel MPI", "srun --mpi=pmi2")),
        (SRUN, "Open MPI", ("Open MPI", "srun --mpi=pmix")),
        (SRUN | PMI2, "Open MPI", ("Open MPI", "srun --mpi=pmix")),
        (SRUN, "Some MPI", ("Some MPI", "srun --mpi=list")),
        (OPENMPI, "MPICH", ("MPICH", "mpiexec")),
        (HYDRA, "Open MPI", ("Open MPI", "mpiexec")),
        (TORCHRUN, "MPICH", ("MPICH", "mpiexec -n 4")),
        (TORCHRUN, "", ("no MPI", "it is not there", "pip install mpich")),
        (SRUN, "", ("no MPI", "it is not there", "pip install mpich")),
    ],
)
def test_a_world_of_one_among_several_tasks_is_refused(environment, vendor, cure):
    launch = Launch.detect(environment)
    with raises(LaunchError, launch.launcher, "4 tasks", f"task {launch.rank}", *cure) as caught:
        check_world(launch, 1, vendor, reason="it is not there")
    assert caught.value.agreed


@pytest.mark.parametrize("environment", [{}, OPENMPI, HYDRA, SRUN])
@pytest.mark.parametrize("world_size", [2, 4])
def test_any_other_world_is_taken(environment, world_size):
    check_world(Launch.detect(environment), world_size, "MPICH")


def test_one_task_is_a_world_of_one():
    check_world(Launch.detect({"PMI_SIZE": "1", "MPI_LOCALRANKID": "0"}), 1, "MPICH")
    check_world(Launch.detect({}), 1, "")


def test_a_library_of_another_name_is_told(monkeypatch):
    """Debian 12's MPICH has no libmpi.so.12, which the wheels of mpi4py look for."""
    monkeypatch.setattr("ctypes.util.find_library", lambda name: f"lib{name}.so.12")
    cures = (
        "pip install mpich",
        "libmpich.so.12",
        "libmpi.so.12",
        "LD_LIBRARY_PATH",
        "--no-binary",
    )
    with raises(LaunchError, "torchrun", *cures):
        check_world(Launch.detect(TORCHRUN), 1, "", reason="cannot open libmpi.so.12")
    assert ";" not in way_to_mpi()  # doctor takes what follows it for the cure
