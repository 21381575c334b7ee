"""The first cause is shown, once: by whom it struck, or by those who saw it."""

from __future__ import annotations

import re
import signal
import textwrap

import pytest

from mpimesh.runtime.watchdog import EXIT_CODE
from mpimesh.testing import mpi_vendor
from tests.helpers.depth import deep, deep_but
from tests.launch.failure_programs import PRELUDE, program
from tests.launch.test_failure_exits import LIMIT_S, failed

FINALLY = "try:\n{0}    raise ValueError('the cause')\n{0}finally:\n{0}    mesh.barrier()".format(
    "    "
)


def test_an_exception_in_flight_is_in_the_watchdog_s_report(launch):
    """Rank 1 never leaves its `finally`, and the others never come to the barrier."""
    text = program(FINALLY, "recv")
    result = launch(3, text, env={"MPIMESH_TIMEOUT_S": "2"}, timeout_s=LIMIT_S)
    assert result.returncode == EXIT_CODE, str(result)
    assert result.stderr.count("ValueError: the cause") == 1, str(result)
    assert re.search(r"\brank 1\b.* exception:\n", result.stderr), str(result)
    assert result.stderr.index("the cause") < result.stderr.index("missing: "), str(result)


@pytest.mark.deep
def test_an_exception_in_flight_is_shown_with_the_mismatch_that_it_led_to(launch):
    result = launch(
        3, program(FINALLY, "all_reduce"), env={"MPIMESH_CHECKS": "1"}, timeout_s=LIMIT_S
    )
    failed(result, code=1)
    assert result.stderr.count("ValueError: the cause") == 1, str(result)


ALIKE = {
    "own": ("raise ValueError(f'the cause {object()}')", "ValueError: the cause"),
    "library": (
        "mm.PipelineParallel([mm.PipelineStage(0)], 4, mesh=mesh, dim='dp', schedule='zbv')",
        "mpimesh.errors.ScheduleError: ",
    ),
}


@pytest.mark.parametrize("kind", deep_but(ALIKE, "own"))
def test_what_several_ranks_raise_alike_is_shown_once(launch, kind):
    statement, cause = ALIKE[kind]
    text = f"""
    mesh = mm.DeviceMesh("dp=-1")
    print("rank 1 goes at", time.time(), flush=True)
    {statement}
    """
    result = launch(3, PRELUDE + textwrap.dedent(text), timeout_s=LIMIT_S)
    failed(result, code=1)
    assert result.stderr.count(cause) == 1, str(result)
    told = [line for line in result.stderr.splitlines() if line.startswith("[ranks 0-2] ")]
    # The headline, the line of the program in two rows, and the error.
    assert len(told) == 4, str(result)


@pytest.mark.deep
def test_a_rank_alone_does_not_wait_for_others_to_fail_alike(launch):
    text = program("mesh.group().all_reduce(np.ones(3), op='nix')", "compute")
    result = launch(3, text, timeout_s=LIMIT_S)
    failed(result, code=1)
    assert result.stderr.count("[rank 1] mpimesh.errors.ReduceOpError: ") == 1, str(result)


ENDS = {
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM)", "was killed by SIGTERM"),
    "SIGSEGV": ("os.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV"),
    "_exit(3)": ("os._exit(3)", "has left with exit code 3"),
    "_exit(0)": ("os._exit(0)", "has left with exit code 0"),
}


@pytest.mark.parametrize(
    ("end", "wait"),
    [
        ("SIGKILL", "all_reduce"),
        *deep(
            ("_exit(0)", "raw_mpi"),
            ("SIGKILL", "compute"),
            ("SIGKILL", "raw_mpi"),
            ("SIGTERM", "recv"),
            ("SIGSEGV", "all_reduce"),
            ("_exit(3)", "new_mesh"),
            ("_exit(0)", "close"),
        ),
    ],
)
def test_a_rank_that_goes_without_a_word_is_named(launch, end, wait):
    way, how = ENDS[end]
    # The witness of the ranks, where the launcher kills all of them at once, takes a moment.
    result = launch(3, program(f"time.sleep(0.5); {way}", wait), timeout_s=LIMIT_S)
    if end == "_exit(0)" and mpi_vendor() == "mpich":
        # Its mpiexec ends the job in time, but may count this as an end in peace.
        assert result.seconds < LIMIT_S / 2, str(result)
    else:
        failed(result)
    assert f") {how}, without ending MPI" in result.stderr, str(result)
    assert result.stderr.count("mpimesh: rank 1 (process ") == 1, str(result)


@pytest.mark.deep
def test_a_rank_that_ends_the_job_is_not_reported_as_lost(launch):
    way = "time.sleep(0.5); os.kill(os.getpid(), signal.SIGINT); time.sleep(100)"
    result = launch(3, program(way, "all_reduce"), timeout_s=LIMIT_S)
    failed(result, code=128 + signal.SIGINT)
    assert "[rank 1] KeyboardInterrupt" in result.stderr, str(result)
    assert "without ending MPI" not in result.stderr, str(result)


@pytest.mark.deep
def test_ranks_that_are_interrupted_at_once_are_not_said_to_be_at_one_place(launch):
    text = """
    import signal, threading
    with mm.DeviceMesh("dp=-1") as mesh:
        mesh.barrier()
        threading.Timer(1.0, signal.raise_signal, [signal.SIGINT]).start()
        print("rank 1 goes at", time.time() + 1, flush=True)
        if mesh.rank == 0:
            mesh.group().all_reduce(1).resolve()
        time.sleep(100)
    """
    result = launch(2, PRELUDE + textwrap.dedent(text), timeout_s=LIMIT_S)
    failed(result, code=128 + signal.SIGINT)
    assert not re.search(r"\[ranks 0-1\].*line \d+", result.stderr), str(result)
    assert re.search(r"\[rank [01]\].*line \d+", result.stderr), str(result)
