"""Shared memory where something goes wrong: a rank dies, or leaves; no memory; a fork."""

from __future__ import annotations

import re
import time
from pathlib import Path
from textwrap import dedent

import pytest

from mpimesh.testing import LaunchResult, mpi_vendor
from tests.helpers.depth import deep
from tests.launch.failure_programs import PRELUDE

LIMIT_S = 40.0
PROMISED_S = 5.0
ALWAYS = {"MPIMESH_NODE_SHARED": "always", "MPIMESH_CHECKS": "0"}

LOOP = """
mesh = mm.DeviceMesh("dp=-1")
group = mesh.group("dp")
x = mesh.shared_empty(300_000)
x[...] = 0
for step in range(1_000_000):
    if step == 20 and RANK == 1:
        print("rank 1 goes at", time.time(), flush=True)
        {way}
    group.all_reduce(x, out=x).resolve()
"""


def left_behind() -> set[str]:
    """Return the names of this library in the system's folder for shared memory."""
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir() if "mpimesh" in path.name}


def ended(result: LaunchResult) -> None:
    """Check that the job has failed, soon after rank 1 has gone its way."""
    ended_s = time.time()
    assert not result.timed_out, str(result)
    assert result.returncode not in (0, None), str(result)
    gone = re.search(r"rank 1 goes at ([0-9.]+)", result.stdout)
    assert gone is not None, str(result)
    assert ended_s - float(gone[1]) < PROMISED_S, str(result)


@pytest.mark.parametrize("when", [*deep("between"), "within"])
def test_a_killed_rank_ends_the_job_and_leaves_nothing(launch, when):
    before = left_behind()
    kill = "os.kill(os.getpid(), signal.SIGKILL)"
    within = f"threading.Timer(0.05, lambda: {kill}).start()"
    text = LOOP.format(way=kill if when == "between" else within)
    ended(launch(3, PRELUDE + text, env=ALWAYS, timeout_s=LIMIT_S))
    assert left_behind() == before


@pytest.mark.deep
def test_a_rank_that_raises_ends_the_job_with_its_traceback(launch):
    way = "raise ValueError('the cause')"
    result = launch(3, PRELUDE + LOOP.format(way=way), env=ALWAYS, timeout_s=LIMIT_S)
    ended(result)
    assert "[rank 1] Traceback (most recent call last):" in result.stderr, str(result)
    assert "[rank 1] ValueError: the cause" in result.stderr
    assert "PeerLostError" not in result.stderr


@pytest.mark.deep
def test_ranks_do_not_wait_for_one_that_has_left(launch):
    """Its exception is caught: the program goes on, and ends in peace."""
    text = """
    mesh = mm.DeviceMesh("dp=-1")
    group = mesh.group("dp")
    x = mesh.shared_empty(300_000)
    x[...] = 0
    try:
        for step in range(1_000_000):
            if step == 20 and RANK == 1:
                print("rank 1 goes at", time.time(), flush=True)
                raise ValueError("the cause")
            group.all_reduce(x, out=x).resolve()
    except ValueError as error:
        print(f"caught {error}", flush=True)
    """
    result = launch(3, PRELUDE + dedent(text), env=ALWAYS, timeout_s=LIMIT_S)
    ended(result)
    assert "caught the cause" in result.stdout
    assert re.search(r"PeerLostError: .*\brank 1\b.* ended\b", result.stderr), str(result)


@pytest.mark.deep
def test_limited_address_space_sends_all_to_messages(launch):
    text = """
    import resource
    limit = 64 << 30
    if RANK == 1:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with mm.DeviceMesh("dp=-1") as mesh:
        x = mesh.shared_empty(100_000)
        x[...] = RANK
        total = mesh.group().all_reduce(x).resolve()
        (route,) = mesh.group().algorithms()
        # In one piece: the ranks' lines may run into each other.
        line = f"rank {RANK} has {set(total.tolist())} {route.algorithm} {route.reason}\\n"
        os.write(1, line.encode())
    """
    result = launch(2, PRELUDE + dedent(text), env=ALWAYS, timeout_s=LIMIT_S)
    assert result.returncode == 0, str(result)
    assert re.search(r"rank 0 has \{1.0\} mpi process 0 has no memory for others", result.stdout)
    assert re.search(r"rank 1 has \{1.0\} mpi no address space .*ulimit -v", result.stdout)


@pytest.mark.deep
def test_forked_children_do_not_disturb_shared_arrays(launch):
    if mpi_vendor() == "openmpi":
        pytest.skip("what it does to forked children is its own")
    text = """
    import gc, multiprocessing
    def work(n):
        globals().pop("x", None)  # its parent's array ends here, and must not end there
        gc.collect()
        for one in [mesh.shared_empty(100_000) for _ in range(3)]:
            one[...] = -1
        return n * n
    mesh = mm.DeviceMesh("dp=-1")
    group = mesh.group("dp")
    x = mesh.shared_empty(100_000)
    x[...] = 1
    y = mesh.shared_empty(100_000)
    y[...] = 5
    with multiprocessing.get_context("fork").Pool(2) as pool:
        for step in range(5):
            pending = pool.map_async(work, range(1, 2))
            z = mesh.shared_empty(100_000)
            z[...] = step
            group.all_reduce(x, out=x).resolve()
            assert pending.get(20) == [1]
            assert np.all(x == 2 ** (step + 1)) and np.all(y == 5) and np.all(z == step)
    print("right", flush=True)
    mesh.close()
    """
    result = launch(2, PRELUDE + dedent(text), env=ALWAYS, timeout_s=LIMIT_S)
    assert result.returncode == 0, str(result)
    assert result.stdout.count("right") == 2
