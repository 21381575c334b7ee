"""The template of slurm/, run on a real Slurm: sizes, GPUs, failures, restarts."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from mpimesh.store.checkpoints import steps_in
from tests.slurm.cluster import Job, Slurm

pytestmark = pytest.mark.slurm

ROOT = Path(__file__).resolve().parents[2]
JOB = Path(__file__).with_name("job.py")
TEMPLATE = ROOT / "slurm" / "job.sbatch"
SLOW = ("--steps", "500", "--step-s", "0.2")
"""More than the first run comes to."""

Submit: TypeAlias = Callable[..., int]


@pytest.fixture
def submit(slurm: Slurm, venv: Path, tmp_path: Path) -> Submit:
    """Submit the template with a program and its arguments."""

    def start(*arguments: str | Path, options: Sequence[str] = (), **env: str) -> int:
        variables = {"VENV": str(venv), "PYTHONPATH": str(ROOT), **env}
        return slurm.submit(TEMPLATE, *arguments, options=options, folder=tmp_path, env=variables)

    return start


@pytest.fixture
def finish(slurm: Slurm, tmp_path: Path) -> Callable[..., Job]:
    return lambda job, **options: slurm.wait(job, folder=tmp_path, **options)


def reports(job: Job) -> list[dict[str, Any]]:
    """What the ranks told of themselves, by rank."""
    lines = [json.loads(line) for line in job.output.splitlines() if line.startswith('{"rank"')]
    return sorted(lines, key=lambda fields: fields["rank"])


def wait_for(path: Path, text: str = "") -> None:
    """Wait until a file is there, with `text` in it."""
    end_s = time.monotonic() + 30
    while not path.exists() or (text and text not in path.read_text()):
        assert time.monotonic() < end_s, f"{path} did not come"
        time.sleep(0.05)


def test_one_world_over_two_nodes(submit, finish):
    job = finish(submit(JOB))
    assert job.state == "COMPLETED", job
    told = reports(job)
    assert [fields["rank"] for fields in told] == [0, 1, 2, 3]
    assert {fields["size"] for fields in told} == {4}
    assert [fields["SLURM_LOCALID"] for fields in told] == ["0", "1", "0", "1"]
    assert len({fields["SLURMD_NODENAME"] for fields in told}) == 2
    assert {fields["OMP_NUM_THREADS"] for fields in told} == {"1"}


def test_gpu_ranks_see_all_gpus_of_their_node(submit, finish):
    told = reports(finish(submit(JOB, options=["--gpus-per-node=2"])))
    assert [fields["CUDA_VISIBLE_DEVICES"] for fields in told] == ["0,1"] * 4


def test_a_dead_rank_ends_the_job(submit, finish):
    """The others wait for it in a collective; only -K ends them."""
    start_s = time.monotonic()
    job = finish(submit(JOB, "--fail-rank", "2", REQUEUE="1"))
    assert job.state == "FAILED", job
    assert job.restarts == 0
    assert time.monotonic() - start_s < 20


def test_restarts_have_a_limit(submit, finish, slurm, tmp_path):
    ready = tmp_path / "ready"
    number = submit(JOB, *SLOW, "--ready", ready, REQUEUE="1", MAX_RESTARTS="0")
    wait_for(ready)
    slurm.run("scancel", "--signal=USR1", str(number))
    job = finish(number)
    assert (job.state, job.exit_code, job.restarts) == ("FAILED", 85, 0)


@pytest.mark.parametrize("venv", ["mpich"], indirect=True)
def test_a_restart_has_a_step_of_its_own(submit, finish, slurm, tmp_path):
    """Killed ranks leave the shared memory that MPICH named after job and step behind."""
    ready = tmp_path / "ready"
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal, sys, time\n"
        "from mpi4py import MPI\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "total = MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.rank + 1)\n"
        "sys.stdout.write(f'step {os.environ[\"SLURM_STEP_ID\"]} total {total}\\n')\n"
        "sys.stdout.flush()\n"
        "if os.environ.get('SLURM_RESTART_COUNT', '0') == '0':\n"
        "    open(sys.argv[1], 'w').close()\n"
        "    time.sleep(100)\n"
    )
    number = submit(program, ready)
    wait_for(ready)
    slurm.run("scontrol", "requeue", str(number))
    job = finish(number)
    assert (job.state, job.restarts) == ("COMPLETED", 1), job
    assert job.output.count("step 1 total 10") == 4


def test_wrong_mpi_type_is_refused_with_the_flag_that_fits(submit, finish, tmp_path, venv):
    """As the override is taken, srun starts four worlds of one rank, and mpimesh says so."""
    program = tmp_path / "program.py"
    program.write_text("import mpimesh as mm\nwith mm.DeviceMesh('dp=-1'):\n    print('a mesh')\n")
    job = finish(submit(program, MPI_TYPE="none"))
    assert job.state == "FAILED", job
    assert "a mesh" not in job.output
    assert "--mpi=" in job.output


def test_mesh_of_a_template_is_the_whole_world(submit, finish, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import numpy as np, mpimesh as mm\n"
        "with mm.DeviceMesh('dp=2,pp=2') as mesh:\n"
        "    total = mesh.group('world').all_reduce(np.array([mesh.rank + 1.0])).resolve()\n"
        "    if mesh.rank == 0:\n"
        "        print('total', total[0])\n"
    )
    job = finish(submit(program))
    assert job.state == "COMPLETED", job
    assert "total 10.0" in job.output


def test_the_digits_go_on_after_a_requeue(submit, finish, slurm, tmp_path):
    """The main job over two nodes, stopped by the time signal and started again."""
    results = tmp_path / "digits.json"
    options = "--mesh dp=2,pp=2 --epochs 15 --batch-size 300 --lr 0.01 --checkpoint-epochs 1"
    program = ROOT / "examples" / "train_digits.py"
    number = submit(program, *options.split(), "--json", results, REQUEUE="1")
    folder, end_s = tmp_path / "checkpoints" / str(number), time.monotonic() + 30
    while not steps_in(folder):
        assert time.monotonic() < end_s, f"no checkpoint came in {folder}"
        time.sleep(0.05)
    slurm.run("scancel", "--signal=USR1", str(number))
    job = finish(number)
    assert (job.state, job.restarts) == ("COMPLETED", 1), job
    (stopped,) = re.findall(r"stopped after step (\d+)", job.output)
    told = json.loads(results.read_text())
    assert told["resumed_at_step"] == int(stopped)
    assert len(told["losses"]) == 15 * 5
    assert told["test_accuracy"] > 0.9
    assert (tmp_path / "out" / "timeline.svg").exists()
