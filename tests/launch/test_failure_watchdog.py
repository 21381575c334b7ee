"""The watchdog under mpiexec: one report that names who waits where and who is missing.

And the line about a long wait, where there is no watchdog.
"""

from __future__ import annotations

import re
import time

import pytest

from mpimesh.runtime.watchdog import EXIT_CODE
from mpimesh.testing import LaunchResult
from tests.helpers.depth import deep
from tests.launch.failure_programs import PRELUDE, notices_after, program

LIMIT_S = 40.0


def reported(result: LaunchResult, *, missing: str) -> None:
    """Check for a single report, made in time, that names the `missing` ranks."""
    ended_s = time.time()
    assert not result.timed_out, str(result)
    assert result.returncode == EXIT_CODE, str(result)
    assert len(re.findall(r"has waited \S+ s, longer than", result.stderr)) == 1, str(result)
    assert f"missing: {missing}\n" in result.stderr, str(result)
    gone = re.search(r"rank 1 goes at ([0-9.]+)", result.stdout)
    assert gone is not None, str(result)
    gone_s = float(gone[1])
    # The limit of 2 s, 1 s for answers, and the end of the job; idle machines take 3 s in all.
    assert ended_s - gone_s < 8, f"{ended_s - gone_s:.2f} s\n{result}"


def run(launch, text: str, nprocs: int = 4, limit_s: float = 2.0) -> LaunchResult:
    environment = {"MPIMESH_TIMEOUT_S": str(limit_s)}
    result: LaunchResult = launch(nprocs, text, env=environment, timeout_s=LIMIT_S)
    return result


@pytest.mark.deep
@pytest.mark.parametrize("wait", ["all_reduce", "close", "new_mesh"])
def test_a_sleeping_rank_is_named(launch, wait):
    result = run(launch, program("time.sleep(30)", wait))
    reported(result, missing="rank 1")
    assert re.search(
        r"\[rank 0\]   rank 1: in no operation of mpimesh, at \S+script.py:\d+; "
        r"started last: all_reduce\(shape \(3,\), float64, sum\) on group 'world' at",
        result.stderr,
    ), str(result)
    assert "[rank 0]   ranks 0, 2-3: in " in result.stderr


@pytest.mark.deep
def test_a_message_waits_for_its_sender_only(launch):
    wait = "RANK == 0 and mesh.group().recv(1).resolve(); time.sleep(30)"
    result = run(launch, program("time.sleep(30)", wait))
    reported(result, missing="rank 1")
    assert "[rank 0]   ranks 2-3: in no operation of mpimesh" in result.stderr, str(result)


def test_a_rank_in_another_operation_is_missing(launch):
    """Without checks nobody compares the calls; the report shows both."""
    text = program("mesh.group().recv(0).resolve()", "all_reduce")
    environment = {"MPIMESH_TIMEOUT_S": "2", "MPIMESH_CHECKS": "0"}
    result = launch(3, text, env=environment, timeout_s=LIMIT_S)
    reported(result, missing="rank 1")
    assert "[rank 0]   rank 1: in recv(source 0, tag 0) on group 'world'" in result.stderr


@pytest.mark.deep
@pytest.mark.parametrize("nprocs", [2, 4])
def test_a_stopped_rank_gives_no_answer(launch, nprocs):
    result = run(launch, program("os.kill(os.getpid(), signal.SIGSTOP)", "all_reduce"), nprocs)
    reported(result, missing="rank 1")
    assert "rank 1: no answer (stopped, dead, or" in result.stderr, str(result)
    assert "its process is stopped" in result.stderr, str(result)


def test_the_first_mesh_is_watched_too(launch):
    """A rank that never makes its first mesh; nobody can ask it."""
    text = """
print("rank 1 goes at", time.time(), flush=True)
if RANK == 1:
    time.sleep(30)
mm.DeviceMesh("dp=-1")
"""
    result = run(launch, PRELUDE + text, nprocs=3)
    reported(result, missing="unknown, for want of a way to ask")


OPEN = """
from mpimesh.comm.arena import Node
if RANK == 1:
    Node.open = lambda node, address: time.sleep(30)
    print("rank 1 goes at", time.time(), flush=True)
mm.DeviceMesh("dp=-1")
"""

CLOSE = """
from mpimesh.runtime.live_groups import LiveGroups
mesh = mm.DeviceMesh("dp=-1")
if RANK == 1:
    LiveGroups.free = lambda groups: time.sleep(30)
    print("rank 1 goes at", time.time(), flush=True)
mesh.close()
mm.DeviceMesh("dp=-1")
"""


@pytest.mark.parametrize(
    ("text", "where"), [(OPEN, "DeviceMesh"), *deep((CLOSE, "close"))], ids=["making", "closing"]
)
def test_a_rank_that_hangs_while_a_mesh_is_made_or_closed(launch, text, where):
    """As on a file system that does not answer."""
    result = run(launch, PRELUDE + text, nprocs=3)
    assert result.returncode == EXIT_CODE, str(result)
    assert re.search(rf"rank 1(: in| has waited .* in) {where}\(\)", result.stderr), str(result)
    assert result.seconds < LIMIT_S / 2, str(result)


@pytest.mark.deep
def test_a_rank_that_has_stopped_while_others_wait_at_their_end(launch):
    way = "os.kill(os.getpid(), signal.SIGSTOP)"
    result = run(launch, program(way, "pass"), nprocs=3)
    assert result.returncode == EXIT_CODE, str(result)
    assert "in the end of the program" in result.stderr, str(result)
    assert "its process is stopped" in result.stderr, str(result)


@pytest.mark.deep
def test_the_report_is_the_lowest_waiting_rank_s(launch):
    """Rank 0 is stopped: rank 1 speaks, not rank 2, which waits as long."""
    text = """
mesh = mm.DeviceMesh("dp=-1")
print("rank 1 goes at", time.time(), flush=True)
if RANK == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
mesh.group().barrier()
"""
    result = run(launch, PRELUDE + text, nprocs=3)
    reported(result, missing="rank 0")
    assert "[rank 1] mpimesh: rank 1 has waited" in result.stderr, str(result)


@pytest.mark.deep
def test_what_is_not_watched(launch):
    """Work, waits in MPI itself, short waits, and a rank that has ended before the others."""
    text = """
with mm.DeviceMesh("dp=-1") as mesh:
    if RANK == 1:
        time.sleep(3.5)
    MPI.COMM_WORLD.Barrier()
    for _ in range(4):
        if RANK == 0:
            time.sleep(1)
        mesh.group().all_reduce(np.ones(3)).resolve()
if RANK:
    time.sleep(3.5)
"""
    result = run(launch, PRELUDE + text, nprocs=3, limit_s=3.0)
    assert result.returncode == 0, str(result)
    assert "mpimesh" not in result.stderr, str(result)


LATE = """
mesh = mm.DeviceMesh("dp=-1")
if RANK == 1:
    time.sleep(5)
mesh.group().all_reduce(np.ones(3)).resolve()
print("all well", flush=True)
mesh.close()
"""


@pytest.mark.deep
def test_a_long_wait_is_told_in_one_line_and_goes_on(launch):
    text = notices_after(3) + PRELUDE + LATE
    result = launch(4, text, timeout_s=LIMIT_S)
    assert result.returncode == 0, str(result)
    assert result.stdout.count("all well") == 4, str(result)
    lines = [line for line in result.stderr.splitlines() if "mpimesh" in line]
    assert len(lines) == 1, str(result)
    told = re.fullmatch(
        r"\[rank 0\] mpimesh: has waited 3 s in all_reduce\(shape \(3,\), float64, sum\) on group "
        r"'world' at (\S+):(\d+)\. MPIMESH_TIMEOUT_S=60 ends .* says what each rank does\. .*",
        lines[0],
    )
    assert told is not None, str(result)
    assert "all_reduce" in text.splitlines()[int(told[2]) - 1]
    assert lines[0].endswith(". Missing, of the job: rank 1 (last here: nothing)"), str(result)


@pytest.mark.deep
def test_no_line_where_the_watchdog_looks(launch):
    environment = {"MPIMESH_TIMEOUT_S": "30"}
    result = launch(2, notices_after(1) + PRELUDE + LATE, env=environment, timeout_s=LIMIT_S)
    assert result.returncode == 0, str(result)
    assert "mpimesh" not in result.stderr, str(result)
