"""The doctor under srun: it knows the nodes, and finds the wrong --mpi."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.cluster import Slurm

pytestmark = pytest.mark.slurm

ROOT = Path(__file__).resolve().parents[2]
FLAGS = {"MPICH": "--mpi=pmi2", "Open MPI": "--mpi=pmix"}


def doctor(slurm: Slurm, venv: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    python = str(venv / "bin" / "python")
    command = ["srun", "-K", *flags, python, "-m", "mpimesh", "doctor", "--json"]
    done = subprocess.run(
        command,
        env={**slurm.environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.stdout.startswith("{"), done.stderr
    return done.returncode, json.loads(done.stdout)


def test_it_knows_the_nodes_and_finds_the_wrong_flag(slurm, venv):
    code, told = doctor(slurm, venv, "--mpi=none", "-N2", "-n4")
    error = told["findings"][0]
    # The first task ends with 1. If another, in a world of its own, is still at work then, srun -K
    # ends it by a signal, and tells the code of that.
    assert code in (1, 128 + signal.SIGTERM)
    assert error["severity"] == "error"
    assert "srun started 4 tasks" in error["what"]
    right = FLAGS[told["mpi"]["vendor"]]
    assert right in error["cure"]

    code, told = doctor(slurm, venv, right, "-N2", "-n4", "-m", "cyclic")
    assert code == 0
    assert (told["launch"]["launcher"], told["world_size"]) == ("srun", 4)
    assert [node["ranks"] for node in told["nodes"]] == [[0, 2], [1, 3]]
    assert [one["local_rank"] for one in told["ranks"]] == [0, 0, 1, 1]
    assert [one["ranks"] for one in told["measurements"] if one["level"] == "between nodes"] == [
        [0, 1]
    ]
    assert any("different nodes" in finding["what"] for finding in told["findings"])
