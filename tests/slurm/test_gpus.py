"""Which GPU each rank takes under a real Slurm, by the flags that share GPUs out."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from mpimesh.testing import mpi_vendor
from tests.slurm.cluster import Slurm

pytestmark = pytest.mark.slurm

ROOT = Path(__file__).resolve().parents[2]
JOB = Path(__file__).with_name("gpu_job.py")
SMI = """#!/bin/sh
for k in 0 1; do
  uuid=GPU-$SLURMD_NODENAME-$k
  echo "$k, NVIDIA A100, $uuid, 40960, 00000000:0$k:00.0, 570.86, 0, 30, Disabled, 8.0"
done
"""


@pytest.fixture
def srun(slurm: Slurm, tmp_path: Path):
    """Run the job on make-believe GPUs; skipped where the MPI is not MPICH."""
    if mpi_vendor() != "mpich":
        pytest.skip("the job is started by PMI-2, which MPICH speaks")
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI)
    program.chmod(0o755)

    def run(*flags: str) -> str:
        path = f"PATH={tmp_path}:/usr/bin:/bin"
        return slurm.run(
            *("srun", "-K", "--mpi=pmi2", *flags, "env", path, f"PYTHONPATH={ROOT}"),
            *(sys.executable, JOB),
        )

    return run


def told(output):
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda fields: fields["rank"])


@pytest.mark.parametrize(
    ("flags", "numbers"),
    [
        (["--gpus-per-node=2"], [0, 1]),
        (["--gpus-per-task=1"], [0, 0]),
        (["--gpus-per-node=2", "--gpu-bind=single:1"], [0, 0]),
    ],
)
def test_every_rank_has_a_gpu_of_its_own(srun, flags, numbers):
    ranks = told(srun("-N2", "-n4", *flags))
    assert not any(fields["shared"] for fields in ranks)
    assert [fields["local_rank"] for fields in ranks] == [0, 1, 0, 1]
    assert [fields["number"] for fields in ranks] == numbers * 2
    nodes = [fields["gpu"].split("-")[1] for fields in ranks]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
    assert [fields["gpu"][-2:] for fields in ranks] == ["-0", "-1"] * 2


def test_two_ranks_on_one_gpu_are_seen_by_both(srun):
    ranks = told(srun("-w", "n0", "-N1", "-n2", "--gpus-per-node=1"))
    assert ranks[0]["gpu"] == ranks[1]["gpu"]
    shared = ["ranks 0-1: GPU 0 of node n0, NVIDIA A100, GPU-n0-0"]
    assert [fields["shared"] for fields in ranks] == [shared] * 2
