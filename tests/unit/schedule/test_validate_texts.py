"""The proof's words for a wrong schedule: the first wrong action, its rule, and a table."""

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
from tests.helpers.raises import names, raises

K = ActionKind


@pytest.mark.parametrize(
    ("text", "place", "actions"),
    [
        ("0F0,0B0,0F0\n1F0,1B0", (0, 2), ["0F0"]),
        ("0F0,0B0\n1F0,1B0,1W0", (1, 2), ["1W0", "1B0"]),
        ("0F0,0I0,0W0,0B0\n1F0,1B0", (0, 3), ["0B0", "0I0"]),
        ("0B0,0F0\n1F0,1B0", (0, 0), ["0B0", "0F0"]),
        ("0F0,0W0,0I0\n1F0,1B0", (0, 1), ["0W0", "0I0"]),
        ("0F0,0B0\n1F0", (1, 1), ["1B0"]),
        ("0F0,0I0,0W0\n1F0,1I0", (1, 2), ["1W0"]),
        ("0F0,0F1\n1F0", (1, 1), ["1F1"]),
        ("0F0,0SEND_F0\n1F0", (1, 0), ["1F0", "1RECV_F0"]),
        ("0SEND_F0,0F0\n1RECV_F0,1F0", (0, 0), ["0SEND_F0", "0F0"]),
        ("0F0\n1RECV_F0,1F0", (1, 0), ["1RECV_F0", "0SEND_F0"]),
        ("0F0,0SEND_F0,0RECV_B0\n1RECV_F0,1F0", (0, 2), ["0RECV_B0", "1SEND_B0"]),
        ("0F0,0SEND_B0\n1RECV_F0,1F0", (0, 1), ["0SEND_B0", "stage -1"]),
        ("0F0,0SEND_F0\n1RECV_F0,1F0,1SEND_F0", (1, 2), ["1SEND_F0", "stage 2"]),
        ("0F0,0SEND_F0,1F0", (0, 1), ["0SEND_F0", "stage 1"]),
        ("0F0,1F0,0B0,1B0", (0, 2), ["0B0", "1B0", "1I0"]),
        ("1F0,0F0", (0, 0), ["1F0", "0F0"]),
        ("0F0,0B0,0STEP", (0, 2), ["0STEP", "0REDUCE_GRAD"]),
        ("0F0,0F1,0B0,0REDUCE_GRAD,0B1", (0, 3), ["0REDUCE_GRAD", "0B1", "0W1"]),
        ("0F0,0REDUCE_GRAD", (0, 1), ["0REDUCE_GRAD", "0B0", "0W0"]),
        ("0F0,0I0,0REDUCE_GRAD,0W0", (0, 2), ["0REDUCE_GRAD", "0B0", "0W0"]),
        ("0F0,0B0,0REDUCE_GRAD,0REDUCE_GRAD", (0, 3), ["0REDUCE_GRAD"]),
        ("0F0,0B0,0REDUCE_GRAD,0STEP,0STEP", (0, 4), ["0STEP"]),
    ],
)
def test_the_first_wrong_action_is_named(text, place, actions):
    rank, step = place
    with raises(ScheduleError) as caught:
        validate(Schedule.from_string(text))
    sentence, _ = str(caught.value).split("\n", 1)  # the table names all actions
    names(sentence, f"rank {rank}", f"step {step}", *actions)


def test_actions_outside_the_schedule_are_named():
    good = make_schedule("forward", 2, 2)
    for extra, values in [
        (Action(2, K.F, 0), ("2F0", "stage", 2)),
        (Action(0, K.F, 2), ("0F2", "microbatch", 2)),
        (Action(1, K.F, 0), ("1F0", "stage", "rank 1")),
    ]:
        wrong = replace(good, ranks=((*good.ranks[0], extra), good.ranks[1]))
        with raises(ScheduleError) as caught:
            validate(wrong)
        sentence, _ = str(caught.value).split("\n", 1)
        names(sentence, "rank 0", "step 2", *values)


def test_first_is_the_smallest_step_of_all_ranks():
    with raises(ScheduleError, "rank 1", "step 0"):
        validate(Schedule.from_string("0F0,0B1,0B0,0F1\n1B0,1F0,1F1,1B1"))


def test_messages_that_would_overtake_each_other_are_refused():
    with raises(ScheduleError) as caught:
        validate(Schedule.from_string("0F0,0F1,0B1,0B0\n1F0,1B0,1F1,1B1"))
    sentence, _ = str(caught.value).split("\n", 1)
    names(sentence, "rank 0", "step 4", "0RECV_B1", "stage 1", "1SEND_B0", "rank 1", "step 3")


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
