"""The heartbeat under mpiexec: a rank that does not come any more ends the job, with the reason."""

from __future__ import annotations

import re

import pytest

from mpimesh.runtime.watchdog import EXIT_CODE
from tests.helpers.depth import deep
from tests.launch.failure_programs import PRELUDE

LIMIT_S = 40.0

BEATS = """
from mpimesh.compat.tensorflow import Heartbeat
with mm.DeviceMesh("dp=-1") as mesh:
    heartbeat = Heartbeat(mesh, timeout_s=1)
    for step in range(5):
        if RANK == 1 and step == 2:
            {way}
        heartbeat.beat()
    print(f"beats {{heartbeat.beats}}\\n", end="", flush=True)
"""


@pytest.mark.parametrize("nprocs", [2, *deep(4)])
@pytest.mark.parametrize("way", ["os.kill(os.getpid(), signal.SIGSTOP)", "time.sleep(30)"])
def test_t35_a_rank_that_does_not_come_ends_the_job(launch, way, nprocs):
    result = launch(nprocs, PRELUDE + BEATS.format(way=way), timeout_s=LIMIT_S)
    assert not result.timed_out, str(result)
    assert result.returncode == EXIT_CODE, str(result)
    assert result.seconds < LIMIT_S / 2, str(result)
    assert "beats" not in result.stdout, str(result)
    reason = r"\[rank 0\] \S*PeerLostError: heartbeat 2, strike 3 of 3: .*ranks \[1\] of group"
    assert len(re.findall(reason, result.stderr)) == 1, str(result)
    assert result.stderr.count("PeerLostError: ") == 1, str(result)
    assert "3 strikes of 1 s" in result.stderr, str(result)
    assert re.search(r"\[rank 0\] mpimesh: heartbeat 2, strike 1 of 3", result.stderr), str(result)


def test_t35_a_rank_that_comes_in_time_does_not(launch):
    result = launch(4, PRELUDE + BEATS.format(way="time.sleep(1.4)"), timeout_s=LIMIT_S)
    assert result.returncode == 0, str(result)
    assert result.stdout.count("beats 5") == 4, str(result)
    assert "heartbeat 2, strike 1 of 3" in result.stderr, str(result)
    assert "strike 3" not in result.stderr, str(result)
