"""A guard under mpiexec: a signal to one rank, one step for all, one exit code."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mpimesh.testing import LaunchResult

LIMIT_S = 40.0
PROGRAM = """
import json, os, signal, subprocess, sys, time
import numpy as np
import mpimesh as mm

def kill(number, *after_s):
    if not after_s:
        return os.kill(os.getpid(), number)
    command = "; ".join(f"sleep {s}; kill -{int(number)} {os.getpid()}" for s in after_s)
    subprocess.Popen(["sh", "-c", f"{command}; touch killed"])

def wait_for_kill():
    while not os.path.exists("killed"):
        time.sleep(0.05)

guard = mm.run_guard(%(guard)s)
%(early)s
with mm.DeviceMesh("dp=-1") as mesh:
    rank, step = mesh.rank, -1
    for step in range(30):
        %(step)s
        mesh.group().all_reduce(np.ones(3)).resolve()
        if guard.stopping(mesh):
            break
    sys.stdout.write(json.dumps([rank, step, guard.reason]) + "\\n")
%(late)s
guard.exit()
"""


def program(*, guard: str = "", early: str = "", step: str = "pass", late: str = "") -> str:
    return PROGRAM % {"guard": guard, "early": early, "step": step, "late": late}


def ended(result: LaunchResult, code: int) -> list[Any]:
    """Return step and reason of the end, alike on all ranks."""
    assert (result.returncode, result.timed_out, result.strays) == (code, False, ()), str(result)
    assert "Traceback" not in result.stderr, str(result)
    told = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("[")]
    assert [rank for rank, *_ in sorted(told)] == [0, 1, 2], str(result)
    (end,) = {(step, reason) for _, step, reason in told}
    return list(end)


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGTERM"])
def test_a_signal_to_one_rank(launch, name):
    """One that a rank has before its call of a step is agreed on by the call of the next."""
    text = program(step=f"if (rank, step) == (1, 7): kill(signal.{name})")
    assert ended(launch(3, text, timeout_s=LIMIT_S), 85) == [8, name]


@pytest.mark.deep
def test_signals_to_all_at_different_steps(launch):
    text = program(step="if step == 7 + 5 * rank: kill(signal.SIGTERM)")
    assert ended(launch(3, text, timeout_s=LIMIT_S), 85) == [8, "SIGTERM"]


def test_a_signal_before_mpi_starts(launch):
    """Some ranks are in MPI_Init by then, or come to it later."""
    early = "if os.environ.get('PMI_RANK', os.environ.get('OMPI_COMM_WORLD_RANK')) == '2':\n"
    early += "    kill(signal.SIGTERM)\n    time.sleep(0.5)"
    assert ended(launch(3, program(early=early), timeout_s=LIMIT_S), 85) == [0, "SIGTERM"]


def test_a_signal_while_the_rank_waits_for_another(launch):
    """And once more while it ends: slower ranks keep the exit code."""
    step = "if (rank, step) == (0, 7): kill(signal.SIGUSR1, 0.3)\n"
    step += "        if (rank, step) == (1, 7): wait_for_kill()"
    late = "if rank == 1: time.sleep(0.5); kill(signal.SIGTERM, 0.1)"
    text = program(step=step, late=late)
    assert ended(launch(3, text, timeout_s=LIMIT_S), 85) == [8, "SIGUSR1"]


def test_a_second_sigterm_ends_a_rank_that_waits(launch):
    """Its handler runs while it waits for what never comes."""
    step = "if (rank, step) == (0, 7): kill(15, 0.2, 2)\n"
    step += "        if (rank, step) == (1, 7): time.sleep(100)"
    result = launch(3, program(step=step), timeout_s=LIMIT_S)
    assert not result.timed_out, str(result)
    assert result.returncode not in (0, 85), str(result)


@pytest.mark.deep
def test_the_time_of_the_job(launch):
    text = program(guard="margin_s=60, limit_s=60.5", step="time.sleep(0.1)")
    step, reason = ended(launch(3, text, timeout_s=LIMIT_S), 85)
    assert (step < 29, reason) == (True, "the time limit")


@pytest.mark.deep
def test_a_program_that_was_not_stopped(launch):
    """One that is told in its last step has done its work."""
    text = program(step="if (rank, step) == (1, 29): kill(signal.SIGUSR1)")
    assert ended(launch(3, text, timeout_s=LIMIT_S), 0) == [29, ""]


@pytest.mark.deep
def test_a_rank_that_is_killed_ends_the_job_as_ever(launch):
    text = program(step="if (rank, step) == (1, 7): os.kill(os.getpid(), signal.SIGKILL)")
    result = launch(3, text, timeout_s=LIMIT_S)
    assert not result.timed_out, str(result)
    assert result.returncode not in (0, 85), str(result)
