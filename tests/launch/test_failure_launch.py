"""A world that is not what the launcher started is refused, by every rank."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from mpimesh.testing import mpi_vendor
from tests.helpers.raises import names

PROGRAM = 'import mpimesh as mm; mm.DeviceMesh("dp=-1"); print("made")'
VENDOR = {"mpich": "MPICH", "openmpi": "Open MPI"}


def other_mpiexec() -> Path | None:
    """The mpiexec of the other MPI: of OTHER_MPIEXEC, or of the environment beside this one."""
    names = {".venv": ".venv-openmpi", ".venv-openmpi": ".venv", "vm": "vo", "vo": "vm"}
    home = Path(sys.prefix)
    beside = home.parent / names.get(home.name, home.name) / "bin" / "mpiexec"
    found = Path(os.environ.get("OTHER_MPIEXEC", beside))
    return found if found.exists() and found.parent != Path(sys.executable).parent else None


def error_line(result):
    return next(line for line in result.stderr.splitlines() if "LaunchError: " in line)


@pytest.mark.deep
def test_a_launcher_that_this_mpi_does_not_know(launch):
    """A launcher of another kind leaves its variables."""
    variables = ["PMI_SIZE=2", "PMI_RANK=1", "MPI_LOCALRANKID=1"]
    launcher = "mpiexec (MPICH)"
    if mpi_vendor() == "mpich":
        variables = ["OMPI_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_RANK=1"]
        launcher = "mpiexec (Open MPI)"
    result = launch(1, ["-c", PROGRAM], launcher=["env", *variables])
    assert result.returncode == 1, str(result)
    assert result.seconds < 20
    cure = f"mpiexec that belongs to {VENDOR[mpi_vendor()]}"
    names(error_line(result), launcher, "2 tasks", "task 1", cure)
    assert "made" not in result.stdout


def test_srun_without_the_flag(launch):
    variables = ["SLURM_STEP_NUM_TASKS=4", "SLURM_PROCID=2", "SLURM_LOCALID=0"]
    result = launch(1, ["-c", PROGRAM], launcher=["env", *variables])
    assert result.returncode == 1, str(result)
    flag = "--mpi=pmi2" if mpi_vendor() == "mpich" else "--mpi=pmix"
    names(error_line(result), "srun", "4 tasks", "task 2", f"srun {flag}")


@pytest.mark.deep
@pytest.mark.skipif(other_mpiexec() is None, reason="only one MPI here")
def test_the_mpiexec_of_the_other_mpi(launch):
    other = other_mpiexec()
    options = ["--allow-run-as-root", "--oversubscribe"] if mpi_vendor() == "mpich" else []
    result = launch(2, ["-c", PROGRAM], launcher=[str(other), *options, "-n", "2"])
    assert result.returncode != 0, str(result)
    assert result.seconds < 20
    assert "made" not in result.stdout
    if mpi_vendor() == "openmpi":
        assert result.stderr.count("LaunchError: mpiexec (MPICH) started 2 tasks") == 2, str(result)
    else:
        # MPICH itself refuses to start under a launcher that speaks PMIx.
        assert "LaunchError" in result.stderr or "PMIx" in result.stderr, str(result)
