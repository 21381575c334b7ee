"""The watchdog's table of ranks."""

from __future__ import annotations

import threading
import time
from typing import Any

from mpimesh.runtime.call import Call
from mpimesh.runtime.progress import Progress, Wait
from mpimesh.runtime.watchdog import RankState, missing_ranks, operation_key, wait_report
from mpimesh.runtime.world import solo_communicator


def waiting(number: int = 3, *, peers: tuple[int, ...] | None = None, mesh: str = "m") -> Wait:
    call = Call("reduce", "dp", rule="sum, root 0")
    call.number = number
    return Wait(call, solo_communicator(), peers, mesh=mesh)


def among(wait: Wait, *world_ranks: int) -> Wait:
    communicator: Any = wait.communicator
    communicator.world_ranks = world_ranks
    return wait


def in_operation(wait: Wait, waited_s: float) -> RankState:
    return RankState("reduce(sum)", operation_key(wait.what), waited_s)


def test_a_rank_in_no_operation():
    progress, last = Progress(), Call("barrier", "dp")
    for call in (*[Call("all_reduce", "dp")] * 10, last):
        progress.note(call)
    assert len(progress.calls) == 8
    assert progress.calls[-1] is last
    state = RankState.of(progress, threading.get_ident())
    here = f"{__file__}:"
    assert state.text().startswith(f"in no operation of mpimesh, at {here}")
    assert state.text().endswith(f"; started last: {last}")
    assert RankState.of(progress, None).at == ""
    assert RankState.of(progress, None, ended=True).text() == "has ended its program"


def test_a_rank_that_waits():
    progress = Progress()
    progress.current = waiting()
    progress.current.since_s = time.monotonic() - 5
    state = RankState.of(progress, None)
    assert 5 <= state.waited_s < 6
    assert state.key == operation_key(progress.current.what)
    assert state.text() == f"in {progress.current.what}"


def test_missing_are_those_elsewhere():
    wait = waiting()
    states = {
        4: in_operation(wait, 1.0),
        5: RankState(),
        6: None,
        7: RankState("reduce(sum)", operation_key(waiting(4).what), 1.0),
        9: in_operation(wait, 1.0),
    }
    assert missing_ranks(among(wait, 4, 5, 6, 7), states) == [5, 6, 7]
    assert missing_ranks(among(waiting(peers=(3, 1)), 4, 5, 6, 7), states) == [5, 7]


def test_report_joins_ranks_in_one_state():
    wait = waiting()
    wait.since_s -= 2.0
    states: dict[int, RankState | None] = dict.fromkeys(range(40), in_operation(wait, 2.04))
    states[3] = None
    states[5] = in_operation(wait, 1.26)
    lines = wait_report(0, wait, 1.5, [3], states).splitlines()
    assert lines[0] == (
        f"mpimesh: rank 0 has waited 2.0 s, longer than MPIMESH_TIMEOUT_S=1.5, in {wait.what}"
    )
    assert lines[1] == "  missing: rank 3"
    assert lines[2] == "  ranks 0-2, 4-39: in reduce(sum), for 1.3 to 2.0 s"
    assert lines[3].startswith("  rank 3: no answer (stopped, dead, or")
    assert len(lines) == 4
    # Such as ranks that close two meshes in another order.
    lines = wait_report(0, wait, 1.5, [], states).splitlines()
    assert lines[1].startswith("  missing: nobody")
