"""Jobs whose ranks are killed while they save go on from whole checkpoints, to the bit."""

from __future__ import annotations

import pytest

from mpimesh.runtime.watchdog import EXIT_CODE
from tests.helpers.depth import is_deep
from tests.launch.checkpoint_kills import kill_many


@pytest.mark.scaled
def test_no_bad_checkpoint_after_kills():
    kills = 5 if is_deep() else 2
    outcome = kill_many(kills)
    assert outcome.kills == kills
    assert outcome.checkpoints > 0
    assert outcome.jobs > 0


SLOW = """
import os, time
import mpimesh as mm

write = os.pwrite
with mm.DeviceMesh("dp=2") as mesh:
    def slow(number, data, offset):
        time.sleep(1 if mesh.rank == {rank} else 0)
        return write(number, data, offset)

    os.pwrite = slow
    arrays = {{str(place): mm.full((100, 4), place, mesh, "dp=S0") for place in range(6)}}
    mm.save({path!r}, arrays)
    if mesh.rank == 0:
        print("saved", len(mm.load({path!r})))
"""


@pytest.mark.deep
@pytest.mark.parametrize("rank", [0, 1])
def test_a_slow_disk_is_no_hang(launch, tmp_path, rank):
    """Writing takes 8 seconds, and no wait may take longer than 3."""
    program = SLOW.format(rank=rank, path=str(tmp_path / "a"))
    result = launch(2, ["-c", program], env={"MPIMESH_TIMEOUT_S": "3"}, timeout_s=40)
    assert result.returncode == 0, str(result)
    assert result.stdout == "saved 6\n"


STUCK = """
import os, signal, time
import mpimesh as mm

write = os.pwrite
with mm.DeviceMesh("dp=-1") as mesh:
    def stuck(number, data, offset):
        if mesh.rank == 1:
            {what}
        return write(number, data, offset)

    os.pwrite = stuck
    tree = {{"x": mm.zeros((60, 1000), mesh, "dp=S0")}}
    if {how!r} == "save":
        mm.save({path!r}, tree)
    elif {how!r} == "thread":
        mm.save({path!r}, tree, wait=False).resolve()
    else:
        with mm.Checkpoints({path!r}, mesh) as checkpoints:
            checkpoints.save(1, tree)
    print("saved")
"""
FROZEN, HANGING = "os.kill(os.getpid(), signal.SIGSTOP)", "time.sleep(100)"


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("save", FROZEN),
        pytest.param("thread", FROZEN, marks=pytest.mark.deep),
        pytest.param("checkpoints", FROZEN, marks=pytest.mark.deep),
        pytest.param("save", HANGING, marks=pytest.mark.deep),
        pytest.param("checkpoints", HANGING, marks=pytest.mark.deep),
    ],
)
def test_a_rank_that_stops_while_it_writes_ends_the_job(launch, tmp_path, how, what):
    """Frozen, it answers nobody; with a file system that hangs, it writes nothing any more."""
    program = STUCK.format(what=what, how=how, path=str(tmp_path / "a"))
    result = launch(3, ["-c", program], env={"MPIMESH_TIMEOUT_S": "1.5"}, timeout_s=40)
    assert not result.timed_out, str(result)
    assert result.returncode == EXIT_CODE, str(result)
    assert "saved" not in result.stdout, str(result)
    assert "rank 1" in result.stderr, str(result)
