"""Ways out of one rank, beside the fault matrix: each ends the job, with a code and a reason."""

from __future__ import annotations

import re
import signal
import time

import pytest

from mpimesh.testing import LaunchResult
from tests.helpers.depth import deep, deep_but
from tests.launch.failure_programs import WAITS, program

PROMISED_S = 5.0
LIMIT_S = 40.0


IN_MATRIX = ("all_reduce", "recv", "new_mesh")
# What else the others may be in, and two of it with the mesh as a context manager, which sees the
# exception first.
CASES = [
    *((wait, False) for wait in WAITS if wait not in IN_MATRIX),
    ("all_reduce", True),
    ("raw_mpi", True),
]


def failed(result: LaunchResult, *, code: int | None = None) -> None:
    """Check that the job has failed, and in time after rank 1 has gone its way."""
    ended_s = time.time()
    assert not result.timed_out, str(result)
    assert result.returncode not in (0, None), str(result)
    gone = re.search(r"rank 1 goes at ([0-9.]+)", result.stdout)
    assert gone is not None, str(result)
    gone_s = float(gone[1])
    assert ended_s - gone_s < PROMISED_S, f"{ended_s - gone_s:.2f} s\n{result}"
    if code is not None:
        assert result.returncode == code, str(result)


@pytest.mark.parametrize(("wait", "within"), deep_but(CASES, ("raw_mpi", True)))
def test_exception(launch, wait, within):
    text = program("raise ValueError('the cause')", wait, within=within)
    result = launch(3, text, timeout_s=LIMIT_S)
    failed(result, code=1)
    assert "[rank 1] Traceback (most recent call last):" in result.stderr, str(result)
    assert "[rank 1] ValueError: the cause" in result.stderr
    assert "PeerLostError" not in result.stderr


@pytest.mark.parametrize(("wait", "within"), deep_but(CASES, ("close", False)))
def test_exit_with_a_code(launch, wait, within):
    result = launch(3, program("raise SystemExit(3)", wait, within=within), timeout_s=LIMIT_S)
    failed(result, code=3)
    assert "rank 1" in result.stderr, str(result)
    assert "SystemExit: 3" in result.stderr or "with exit code 3" in result.stderr, str(result)


@pytest.mark.deep
@pytest.mark.parametrize("wait", ["all_reduce", "recv", "close", "new_mesh"])
def test_end_in_peace_while_others_wait_for_it(launch, wait):
    result = launch(3, program("pass", wait), timeout_s=LIMIT_S)
    failed(result, code=1)
    assert re.search(r"PeerLostError: .*\brank 1\b.* ended\b", result.stderr), str(result)


@pytest.mark.parametrize("wait", ["all_reduce", *deep("raw_mpi", "compute")])
def test_exception_in_a_thread(launch, wait):
    way = "thread = threading.Thread(target=lambda: 1 / 0); thread.start(); time.sleep(100)"
    result = launch(3, program(way, wait), timeout_s=LIMIT_S)
    failed(result, code=1)
    assert "[rank 1] ZeroDivisionError: division by zero" in result.stderr, str(result)


@pytest.mark.deep
@pytest.mark.parametrize("wait", ["raw_mpi", "compute"])
def test_kill(launch, wait):
    way = "os.kill(os.getpid(), signal.SIGKILL)"
    failed(launch(3, program(way, wait), timeout_s=LIMIT_S))


@pytest.mark.deep
def test_interrupt(launch):
    way = "os.kill(os.getpid(), signal.SIGINT); time.sleep(100)"
    result = launch(3, program(way, "raw_mpi"), timeout_s=LIMIT_S)
    failed(result, code=128 + signal.SIGINT)
    assert "[rank 1] KeyboardInterrupt" in result.stderr, str(result)
