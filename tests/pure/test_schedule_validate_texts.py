"""What the proof says of a wrong schedule: the first wrong action, its rule, and a table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpimesh.errors import ScheduleError
from mpimesh.schedule import (
    Action,
    ActionKind,
    Schedule,
    make_schedule,
    schedule_table,
    validate,
)

K = ActionKind


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0,0F0\n1F0,1B0", "rank 0, step 2: 0F0 is done a second time"),
        ("0F0,0B0\n1F0,1B0,1W0", "rank 1, step 2: 1W0 does again what 1B0 did"),
        ("0F0,0I0,0W0,0B0\n1F0,1B0", "rank 0, step 3: 0B0 does again what 0I0 did"),
        ("0B0,0F0\n1F0,1B0", "rank 0, step 0: 0B0 comes before 0F0, which it needs"),
        ("0F0,0W0,0I0\n1F0,1B0", "rank 0, step 1: 0W0 comes before 0I0, which it needs"),
        ("0F0,0B0\n1F0", r"rank 1, step 1: 1B0 is missing"),
        ("0F0,0I0,0W0\n1F0,1I0", r"rank 1, step 2: 1W0 is missing"),
        ("0F0,0F1\n1F0", "rank 1, step 1: 1F1 is missing"),
        ("0F0,0SEND_F0\n1F0", "rank 1, step 0: 1F0 comes before 1RECV_F0, which it needs"),
        ("0SEND_F0,0F0\n1RECV_F0,1F0", "rank 0, step 0: 0SEND_F0 comes before 0F0"),
        ("0F0\n1RECV_F0,1F0", "1RECV_F0 waits for ever: there is no 0SEND_F0"),
        ("0F0,0SEND_F0,0RECV_B0\n1RECV_F0,1F0", "0RECV_B0 waits for ever"),
        ("0F0,0SEND_B0\n1RECV_F0,1F0", "0SEND_B0 has no other end: there is no stage -1"),
        ("0F0,0SEND_F0\n1RECV_F0,1F0,1SEND_F0", "1SEND_F0 has no other end: there is no stage 2"),
        ("0F0,0SEND_F0,1F0", "0SEND_F0 is no message: stage 1 lies on the same rank"),
        ("0F0,1F0,0B0,1B0", "step 2: 0B0 comes before 1B0 or 1I0, which it needs"),
        ("1F0,0F0", "step 0: 1F0 comes before 0F0"),
        ("0F0,0B0,0STEP", "step 2: 0STEP comes before 0REDUCE_GRAD, which it needs"),
        ("0F0,0F1,0B0,0REDUCE_GRAD,0B1", "0REDUCE_GRAD comes before 0B1 or 0W1, which it needs"),
        ("0F0,0REDUCE_GRAD", "0REDUCE_GRAD comes before 0B0 or 0W0, which it needs"),
        ("0F0,0I0,0REDUCE_GRAD,0W0", "0REDUCE_GRAD comes before 0B0 or 0W0, which it needs"),
        ("0F0,0B0,0REDUCE_GRAD,0REDUCE_GRAD", "step 3: 0REDUCE_GRAD is done a second time"),
        ("0F0,0B0,0REDUCE_GRAD,0STEP,0STEP", "step 4: 0STEP is done a second time"),
    ],
)
def test_the_first_wrong_action_is_named(text, message):
    with pytest.raises(ScheduleError, match=message):
        validate(Schedule.from_string(text))


def test_actions_outside_the_schedule_are_named():
    good = make_schedule("forward", 2, 2)
    for extra, message in [
        (Action(2, K.F, 0), "2F0 is for a stage that does not exist; there are 2"),
        (Action(0, K.F, 2), "0F2 is for a microbatch that does not exist; there are 2"),
        (Action(1, K.F, 0), "1F0 is for a stage that lies on rank 1"),
    ]:
        wrong = replace(good, ranks=((*good.ranks[0], extra), good.ranks[1]))
        with pytest.raises(ScheduleError, match=f"rank 0, step 2: {message}"):
            validate(wrong)


def test_first_is_the_smallest_step_of_all_ranks():
    with pytest.raises(ScheduleError, match="rank 1, step 0"):
        validate(Schedule.from_string("0F0,0B1,0B0,0F1\n1B0,1F0,1F1,1B1"))


def test_messages_that_would_overtake_each_other_are_refused():
    with pytest.raises(
        ScheduleError, match="0RECV_B1 is receive 0 from stage 1, but send 0"
    ) as info:
        validate(Schedule.from_string("0F0,0F1,0B1,0B0\n1F0,1B0,1F1,1B1"))
    assert "1SEND_B0 (rank 1, step 3)" in str(info.value)


def test_a_deadlock_names_the_ring_and_shows_the_table():
    with pytest.raises(ScheduleError) as info:
        validate(Schedule.from_string("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1"))
    assert str(info.value) == (
        "schedule csv is wrong at rank 0, step 2: deadlock: "
        "rank 0 waits at step 2 in 0RECV_B0 for 1SEND_B0, which is step 5 of rank 1; "
        "rank 1 waits at step 2 in 1RECV_F1 for 0SEND_F1, which is step 5 of rank 0\n"
        "step    0         1         2           3    4    5         6         ...\n"
        "rank 0  0F0       0SEND_F0  >0RECV_B0<  0B0  0F1  0SEND_F1  0RECV_B1       <-- here\n"
        "rank 1  1RECV_F0  1F0       1RECV_F1    1F1  1B0  1SEND_B0  1B1"
    )


def test_a_ring_leaves_out_ranks_that_only_wait_for_it():
    # Rank 2 waits for rank 1, but is no part of the ring of ranks 0 and 1.
    with pytest.raises(ScheduleError, match="deadlock") as info:
        validate(Schedule.from_string("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n2F0,2F1,2B0,2B1"))
    assert "rank 2 waits" not in str(info.value)


def test_the_table_shows_all_without_a_mark_and_a_window_with_one():
    schedule = make_schedule("forward", 20, 30)
    lines = schedule_table(schedule).splitlines()
    assert len(lines) == 21
    assert lines[0].split() == ["step", *map(str, range(30))]
    assert lines[20].split() == ["rank", "19", *(f"19F{m}" for m in range(30))]
    lines = schedule_table(schedule, mark=(10, 15)).splitlines()
    assert lines[0].split() == ["step", "...", *map(str, range(11, 20)), "..."]
    assert lines[1] == lines[-1] == "..."
    assert [line.split()[1] for line in lines[2:-1]] == [str(rank) for rank in range(6, 15)]
    marked = [line for line in lines if line.endswith("<-- here")]
    assert len(marked) == 1
    assert ">10F15<" in marked[0]
    assert lines[0].index("15") == marked[0].index(">10F15<"), "columns must line up"
