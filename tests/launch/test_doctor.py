"""``python -m mpimesh doctor`` as a person starts it: alone, under mpiexec, wrongly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpimesh.testing import mpi_vendor
from tests.helpers.raises import names

STAND_IN = Path(__file__).with_name("stand_in")
DOCTOR = ["-m", "mpimesh", "doctor"]
VENDOR = {"mpich": "MPICH", "openmpi": "Open MPI"}


@pytest.mark.deep
def test_the_json_of_two_ranks_is_true(launch, tmp_path):
    result = launch(2, [*DOCTOR, "--json"], env={"XDG_CACHE_HOME": str(tmp_path)})
    assert result.returncode == 0, str(result)
    told = json.loads(result.stdout)
    assert told["healthy"] is True
    assert told["mpi"]["vendor"] == VENDOR[mpi_vendor()]
    assert Path(told["mpi"]["path"]).exists()
    assert told["mpi"]["tag_limit"] >= 32767
    assert (told["launch"]["size"], told["world_size"]) == (2, 2)
    assert [one["rank"] for one in told["ranks"]] == [0, 1]
    assert len({one["pid"] for one in told["ranks"]}) == 2
    assert [node["ranks"] for node in told["nodes"]] == [[0, 1]]
    usable = {(row["transport"], row["operation"]): row["usable"] for row in told["capabilities"]}
    assert usable["mpi", "*"] is True
    assert usable["node_shared", "*"] is True
    speeds = {one["how"]: one for one in told["measurements"]}
    assert 1e-8 < speeds["MPI messages"]["latency_s"] < 1
    assert 1e6 < speeds["shared memory, in place"]["bytes_per_s"] < 1e13


def test_one_rank_writes_one_page(launch):
    result = launch(3, DOCTOR, env={"OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, str(result)
    assert result.stdout.count("mpimesh doctor:") == 1
    assert "3 ranks on 1 node" in result.stdout
    assert "How a mesh of all ranks moves them" in result.stdout
    assert "\x1b" not in result.stdout


def test_worlds_of_one_rank_are_told_with_what_mends_it(launch):
    """As srun with the wrong --mpi starts them: two tasks, and MPI knows of one."""
    env = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    result = launch(1, [*DOCTOR, "--json"], env=env, launcher=["env"])
    assert result.returncode == 1, str(result)
    (error,) = [one for one in json.loads(result.stdout)["findings"] if one["severity"] == "error"]
    assert "srun started 2 tasks" in error["what"]
    assert "srun --mpi=pm" in error["cure"]
    second = launch(1, DOCTOR, env=env | {"SLURM_PROCID": "1"}, launcher=["env"])
    assert (second.returncode, second.stdout) == (0, "")


@pytest.mark.deep
@pytest.mark.parametrize(
    ("variable", "severity", "told"),
    [("MPIMESH_CHECKS", "error", "'on'"), ("MPIMESH_CHEKCS", "warning", "MPIMESH_CHECKS")],
)
def test_settings_that_cannot_be_are_found(launch, variable, severity, told):
    result = launch(2, [*DOCTOR, "--json"], env={variable: "on"})
    page = json.loads(result.stdout)
    (finding,) = [one for one in page["findings"] if variable in one["what"]]
    assert finding["severity"] == severity
    names(finding["what"], variable, told)
    assert page["healthy"] is (severity == "warning"), str(result)
    assert (result.returncode == 0) is page["healthy"]
    assert variable not in result.stderr, str(result)


@pytest.mark.deep
@pytest.mark.parametrize("ending", ["os._exit(9)", "raise RuntimeError('lost')", "time.sleep(60)"])
def test_a_rank_that_fails_or_hangs_ends_the_job(ending, launch):
    program = f"""
        import os, sys, time
        import mpimesh.cli.examine as examine
        from mpi4py import MPI
        def fail(*_):
            {ending}
        if MPI.COMM_WORLD.rank == 1:
            examine.find_cuda = fail
        from mpimesh.cli import app
        app(["doctor", "--limit", "4"])
    """
    result = launch(2, program, timeout_s=30)
    assert not result.timed_out, str(result)
    assert result.returncode != 0
    assert result.seconds < 20
    assert "What is wrong" not in result.stdout


@pytest.mark.deep
def test_it_runs_without_any_mpi(launch):
    result = launch(1, DOCTOR, env={"MPI4PY_LIBMPI": "/nowhere"}, launcher=["env"])
    assert result.returncode == 1, str(result)
    assert "no MPI library could be loaded" in result.stdout
    assert "pip install mpich" in result.stdout


def test_wrong_options_are_refused(launch):
    result = launch(1, [*DOCTOR, "--dry-run"], launcher=["env"])
    assert result.returncode == 2
    names(result.stderr, "--dry-run", "--clean")
    result = launch(1, [*DOCTOR, "--fresh", "--clean"], launcher=["env"])
    assert result.returncode == 2
    names(result.stderr, "--fresh", "--clean")


@pytest.mark.deep
def test_mpi_that_cannot_take_device_memory_is_told(launch, tmp_path):
    """CuPy is a stand-in, here and in the child processes, where its memory is nowhere."""
    program = """
        import sys
        from tests.devices.fake_cuda import FakeCupy
        sys.modules["cupy"] = FakeCupy()
        from mpimesh.cli import app
        app(["doctor", "--json"])
    """
    env = {
        "PYTHONPATH": f"{STAND_IN}:{STAND_IN.parents[2]}",
        "STAND_IN": "nowhere",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    result = launch(2, program, env=env)
    assert result.returncode == 0, str(result)
    told = json.loads(result.stdout)
    assert told["cuda"]["gpus"] == 1
    rows = {(row["transport"], row["operation"]): row for row in told["capabilities"]}
    assert "signal 11" in rows["mpi_cuda", "messages"]["proof"]
    assert not rows["mpi_cuda", "all_gather"]["usable"]
    assert "share one GPU" in rows["nccl", "*"]["proof"]
    assert rows["staged", "*"]["usable"]
    routes = {one["operation"]: one for one in told["algorithms"] if one["memory"] == "device"}
    assert routes["all_reduce"]["algorithm"] == "staged"
    assert "signal 11" in routes["all_reduce"]["reason"]
    assert any("MPI does not take device memory" in one["what"] for one in told["findings"])


@pytest.mark.deep
def test_a_reader_that_has_seen_enough_is_no_error(launch):
    reader = "import subprocess, sys; one = subprocess.Popen([sys.executable, '-m', 'mpimesh', "
    reader += "'doctor'], stdout=subprocess.PIPE); one.stdout.close(); sys.exit(one.wait())"
    result = launch(1, ["-c", reader], launcher=["env"])
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.deep
def test_shared_memory_that_is_off_is_told_as_off(launch):
    result = launch(2, DOCTOR, env={"MPIMESH_NODE_SHARED": "never"})
    assert result.returncode == 0, str(result)
    rows = [line for line in result.stdout.splitlines() if line.strip().startswith("node_shared")]
    assert rows
    for row in rows:
        assert row.endswith(" off (MPIMESH_NODE_SHARED=never)"), str(result)
        assert " yes " not in row
