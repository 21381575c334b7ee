"""Jobs whose ranks are killed while they save go on from whole checkpoints, to the bit."""

from __future__ import annotations

import pytest

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
