"""The watchdog's table, and the meaning of a farewell for a wait."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from mpimesh.runtime.call import Call
from mpimesh.runtime.failure import exit_status
from mpimesh.runtime.lines import Farewell
from mpimesh.runtime.progress import Progress, Wait
from mpimesh.runtime.rank_state import RankState, missing_ranks, operation_key, wait_report
from mpimesh.runtime.world import solo_communicator


def waiting(number: int = 3, *, peers: tuple[int, ...] | None = None, family: str = "m") -> Wait:
    call = Call("reduce", "dp", rule="sum, root 0")
    call.number = number
    communicator = solo_communicator()
    communicator.family = family
    return Wait(call, communicator, peers)


def in_operation(wait: Wait, waited_s: float) -> RankState:
    return RankState("reduce(sum)", operation_key(wait.what), waited_s)


def test_a_rank_in_no_operation():
    progress = Progress()
    calls: Any = progress.calls
    calls.append("a barrier")
    state = RankState.of(progress, threading.get_ident())
    here = f"{__file__}:"
    assert state.text().startswith(f"in no operation of mpimesh, at {here}")
    assert state.text().endswith("; started last: a barrier")
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
    assert missing_ranks(wait, [4, 5, 6, 7], states) == [5, 6, 7]
    assert missing_ranks(waiting(peers=(3, 1)), [4, 5, 6, 7], states) == [5, 7]


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


def test_farewell_travels_as_bytes():
    farewell = Farewell("ended with exit code 3 \u2713", 3, "m", {"m": {"dp": 4}})
    assert Farewell.from_bytes(farewell.to_bytes()) == farewell


@pytest.mark.parametrize(
    ("farewell", "number", "ends"),
    [
        (Farewell("left"), 3, True),
        (Farewell("left", family="m"), 3, True),
        (Farewell("left", family="another mesh"), 3, False),
        # It has started the third collective, or more: it did its part in it.
        (Farewell("left", started={"m": {"dp": 3}}), 3, False),
        (Farewell("left", started={"m": {"dp": 9}}), 3, False),
        (Farewell("left", started={"m": {"dp": 2}}), 3, True),
        (Farewell("left", started={"m": {"tp": 9}}), 3, True),
        (Farewell("left", started={"another mesh": {"dp": 9}}), 3, True),
        # Messages have no number.
        (Farewell("left", started={"m": {"dp": 9}}), 0, True),
    ],
)
def test_what_a_farewell_ends(farewell, number, ends):
    assert farewell.ends(waiting(number)) is ends


@pytest.mark.parametrize(
    ("code", "status"), [(None, 0), (0, 0), (3, 3), (256, 0), (-1, 255), (True, 1), ("text", 1)]
)
def test_exit_status(code, status):
    assert exit_status(code) == status
