"""A job that fails leaves the flight record of each rank, however the rank ended."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

PRELUDE = """
import os, signal, time
import numpy as np
import mpimesh as mm

def main(mesh):
    group, rank = mesh.group(), mesh.rank
    for _ in range(1200):
        group.all_reduce(np.ones(3)).resolve()
    {}

with mm.DeviceMesh("dp=-1") as mesh:
    main(mesh)
"""


def run(launch, tmp_path, body, **environment):
    """Run a program that fails, and return its result and what the records say."""
    folder = tmp_path / "flight"
    variables = {"MPIMESH_RECORD_DIR": str(folder), **environment}
    result = launch(3, PRELUDE.format(body), env=variables, timeout_s=40)
    assert not result.timed_out, str(result)
    command = [sys.executable, "-m", "mpimesh", "flight", str(folder)]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said.returncode == 0, f"{said.stderr}\n{result}"
    assert "ranks 0-2 left a record" in said.stdout, f"{said.stdout}\n{result}"
    return result, said.stdout, folder


def test_another_order_on_one_rank(launch, tmp_path):
    body = """
    calls = [lambda: group.broadcast(np.ones(3)), lambda: group.all_reduce(np.ones(4))]
    for call in calls[::-1] if rank == 1 else calls:
        call().resolve()
    """
    result, text, folder = run(launch, tmp_path, body)
    assert result.returncode != 0, str(result)
    assert "operation 1201 of group 'world'" in text
    assert "rank 1: all_reduce(shape (4,), float64, sum) at " in text
    assert "broadcast(shape (3,), float64, root 0) at " in text
    written = sorted(folder.glob("rank-*.json"))
    assert written, text
    entries = json.loads(written[0].read_text())["entries"]
    assert len(entries) == 1000
    assert entries[-2]["bytes"] == 24
    assert 0 < entries[-2]["start_s"] <= entries[-2]["end_s"]


@pytest.mark.deep
def test_a_call_that_one_rank_does_not_make(launch, tmp_path):
    body = "rank == 1 and time.sleep(60); group.all_reduce(np.ones(4)).resolve()"
    result, text, _ = run(launch, tmp_path, body, MPIMESH_TIMEOUT_S="2")
    assert result.returncode == 124, str(result)
    assert re.search(r"ended with: .*all_reduce\(shape \(4,\)", text), text
    assert "rank 1: has not started it" in text
    assert "rank 0 waits for rank 1 in all_reduce(shape (4,), float64, sum)" in text
    assert "rank 2 waits for rank 1 in all_reduce(shape (4,), float64, sum)" in text
    assert "rank 1 waits for nobody" in text


def test_a_rank_that_is_killed(launch, tmp_path):
    body = """
    if rank == 1:
        while not all(os.path.exists(f"started-{one}") for one in (0, 2)):
            time.sleep(0.05)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    work = group.all_reduce(np.ones(4))
    open(f"started-{rank}", "w").close()
    work.resolve()
    """
    _, text, _ = run(launch, tmp_path, body)
    assert "rank 1: has not started it" in text
    assert "rank 0 waits for rank 1" in text


@pytest.mark.deep
def test_a_rank_that_leaves_with_a_code(launch, tmp_path):
    body = "rank == 1 and exit(3); time.sleep(20)"
    _, text, _ = run(launch, tmp_path, body)
    assert re.search(r"rank 1 ended with: .*exit code 3|rank 1 ended with: SystemExit: 3", text)


@pytest.mark.deep
def test_ranks_that_wait_in_a_circle(launch, tmp_path):
    body = "group.recv((rank + 1) % 3).resolve()"
    result, text, _ = run(launch, tmp_path, body, MPIMESH_TIMEOUT_S="2")
    assert result.returncode == 124, str(result)
    assert "rank 0 waits for rank 1, rank 1 waits for rank 2, rank 2 waits for rank 0" in text


@pytest.mark.deep
@pytest.mark.parametrize("record", [False, True])
def test_a_job_that_ends_well_and_one_without_a_folder(launch, tmp_path, record):
    folder = tmp_path / "flight"
    if record:
        result = launch(2, PRELUDE.format("pass"), env={"MPIMESH_RECORD_DIR": str(folder)})
        assert result.returncode == 0, str(result)
        assert list(folder.iterdir()) == []
    else:
        body = "group.all_gather(np.ones(2)).resolve(); rank == 1 and 1 / 0; time.sleep(20)"
        result = launch(2, PRELUDE.format(body))
        assert result.returncode != 0, str(result)
        assert "last operations of this rank:" in result.stderr, str(result)
        assert "all_gather(shape (2,), float64" in result.stderr
