"""A rank that fails before its first mesh ends the job, whether MPI has started or not."""

from __future__ import annotations

import re

import pytest

from tests.helpers.depth import deep
from tests.launch.test_failure_exits import LIMIT_S, failed

HEAD = """
{before}
import os, signal, subprocess, sys, time
import mpimesh as mm

RANK = mm.runtime.Launch.detect().rank
if RANK == 1:
    print("rank 1 goes at", time.time(), flush=True)
"""

ONE = """
if RANK == 1:
    time.sleep({later})
    {way}
mm.DeviceMesh("dp=-1")
"""

MPI_FIRST = "from mpi4py import MPI"


@pytest.mark.parametrize(
    ("before", "way", "later", "code", "cause"),
    [
        ("", "raise ValueError('too early')", 0.5, 1, "[rank 1] ValueError: too early"),
        *deep(
            ("", "sys.exit(3)", 0, 3, "[rank 1] ended with exit code 3"),
            (MPI_FIRST, "raise ValueError('too early')", 0, 1, "[rank 1] ValueError: too early"),
            ("", "raise ValueError('too early')", 0, 1, "[rank 1] ValueError: too early"),
            ("", "sys.exit(3)", 0.5, 3, "[rank 1] ended with exit code 3"),
            ("", "os.kill(os.getpid(), signal.SIGKILL)", 0.5, None, ""),
            (MPI_FIRST, "sys.exit(3)", 0.5, 3, "[rank 1] ended with exit code 3"),
            (MPI_FIRST, "os.kill(os.getpid(), signal.SIGKILL)", 0.5, None, ""),
        ),
    ],
)
def test_one_rank_fails(launch, before, way, later, code, cause):
    text = HEAD.format(before=before) + ONE.format(way=way, later=later)
    result = launch(3, text, timeout_s=LIMIT_S)
    failed(result, code=code)
    # Of one that is killed the launcher tells, in words of its own.
    assert code is None or result.stderr.count(cause) == 1, str(result)


@pytest.mark.deep
@pytest.mark.parametrize("before", ["", *deep(MPI_FIRST)])
def test_all_ranks_fail_alike(launch, before):
    text = HEAD.format(before=before) + "raise ValueError('too early')"
    result = launch(3, text, timeout_s=LIMIT_S)
    assert result.returncode == 1, str(result)
    assert not result.timed_out, str(result)
    assert result.stderr.count("ValueError: too early") == 1, str(result)


@pytest.mark.deep
def test_all_ranks_leave_with_a_code_in_peace(launch):
    result = launch(3, HEAD.format(before=MPI_FIRST) + "sys.exit(3)", timeout_s=LIMIT_S)
    failed(result, code=3)
    assert "[rank" not in result.stderr, str(result)
    assert "bort" not in result.stderr, str(result)


@pytest.mark.deep
def test_a_rank_that_makes_no_mesh_may_leave_in_peace(launch):
    text = HEAD.format(before=MPI_FIRST) + "time.sleep(RANK == 1 and 2.5)"
    result = launch(2, text, timeout_s=LIMIT_S)
    assert result.returncode == 0, str(result)
    assert "[rank" not in result.stderr, str(result)


CHILDREN = """
import multiprocessing

def raises():
    raise ValueError("of a child")

if __name__ == "__main__":
    code = "import mpimesh; raise ValueError('of a child')"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    print("program", child.returncode, "[rank" in child.stderr, flush=True)
    for method in "spawn", "fork":
        process = multiprocessing.get_context(method).Process(target=raises)
        process.start()
        process.join()
        print(method, process.exitcode, flush=True)
    with mm.DeviceMesh("dp=-1") as mesh:
        mesh.group().barrier()
"""


@pytest.mark.deep
def test_children_of_a_rank_are_no_ranks(launch):
    result = launch(2, HEAD.format(before="") + CHILDREN, timeout_s=LIMIT_S)
    assert result.returncode == 0, str(result)
    assert result.stdout.count("program 1 False") == 2, str(result)
    assert len(re.findall("(spawn|fork) 1", result.stdout)) == 4, str(result)
    assert "[rank" not in result.stderr, str(result)
