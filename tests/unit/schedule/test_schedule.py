"""The value: its numbers, its text, and what it keeps in flight."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from mpimesh.errors import ScheduleError
from mpimesh.schedule import (
    Action,
    ActionKind,
    Schedule,
    lower,
    make_schedule,
    schedule_names,
    stages_per_rank,
)
from tests.helpers.raises import raises

NAMES = st.sampled_from(schedule_names())
F = ActionKind.F


@given(NAMES, st.integers(1, 4), st.integers(1, 12), st.booleans())
def test_text_reads_back(name, num_ranks, num_microbatches, lowered):
    schedule = make_schedule(name, num_ranks * stages_per_rank(name), num_microbatches)
    schedule = lower(schedule) if lowered else schedule
    assert Schedule.from_string(schedule.to_string()) == schedule
    assert Schedule.from_string(str(schedule)) == schedule


def test_text_of_a_small_schedule():
    assert make_schedule("1f1b", 2, 3).to_string() == (
        "# 1f1b stages=2 microbatches=3 placement=0,1\n"
        "0F0,0F1,0B0,0F2,0B1,0B2\n"
        "1F0,1B0,1F1,1B1,1F2,1B2\n"
    )


def test_text_with_empty_lists_and_a_v_placement_reads_back():
    schedule = Schedule("odd", 4, 2, ((), (Action(1, F, 1),)), placement=(0, 1, 1, 0))
    assert Schedule.from_string(schedule.to_string()) == schedule


def test_csv_without_a_comment_line_is_read_and_bubbles_are_left_out():
    schedule = Schedule.from_string("0F0,0F1,,0B0,3F0, 0B1\n1F0,1B0,2F0,1F1,,1B1\n")
    assert (schedule.name, schedule.num_stages, schedule.num_microbatches) == ("csv", 4, 2)
    assert schedule.placement == (0, 1, 1, 0)
    assert [str(action) for action in schedule.ranks[0]] == ["0F0", "0F1", "0B0", "3F0", "0B1"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ()),
        ("# 1f1b stages=1\n0F0\n", (1,)),
        ("# a stages=2 microbatches=1 placement=0,1\n0F0\n", (2, 1)),
        ("# a stages=3 microbatches=1 placement=0,1\n0F0\n1F0\n", ("(0, 1)",)),
        ("# a stages=2 microbatches=1 placement=0,1\n0F0\n1F0,1G0\n", (3, "'1G0'")),
        ("0F0\n2F0\n", ("[0, 2]",)),
        ("0F0\n0F1\n", ()),
        (",,\n", ()),
    ],
)
def test_wrong_text_is_refused_with_the_line(text, message):
    with raises(ScheduleError, *message):
        Schedule.from_string(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("", 1, 1, ((),)), ()),
        (("a b", 1, 1, ((),)), ()),
        (("a", 0, 1, ()), (0, 1)),
        (("a", 1, 0, ((),)), (1, 0)),
        (("a", 1, 1, ()), (0,)),
        (("a", 1, 1, ((), ())), (2,)),
        (("a", 2, 1, ((), ()), (0, 0)), ("(0, 0)",)),
        (("a", 2, 1, ((), ()), (0, 2)), ("(0, 2)",)),
        (("a", 2, 1, ((), ()), (0, 1, 1)), ("(0, 1, 1)",)),
    ],
)
def test_numbers_that_do_not_fit_are_refused(arguments, message):
    with raises(ScheduleError, *message):
        Schedule(*arguments)


def test_placement_left_out_deals_the_stages_to_the_ranks_in_turn():
    schedule = Schedule("a", 5, 1, ((), ()))
    assert schedule.placement == (0, 1, 0, 1, 0)
    assert schedule.stages_of(0) == (0, 2, 4)
    assert schedule.stages_of(1) == (1, 3)
    assert [schedule.stage_rank(stage) for stage in range(5)] == [0, 1, 0, 1, 0]


def test_unknown_ranks_and_stages_are_refused():
    schedule = make_schedule("gpipe", 3, 2)
    for rank in (-1, 3):
        with raises(ScheduleError, rank, "rank"):
            schedule.stages_of(rank)
        with raises(ScheduleError, rank, "rank"):
            schedule.peak_in_flight(rank)
        with raises(ScheduleError, rank, "stage"):
            schedule.stage_rank(rank)


@pytest.mark.parametrize("num_stages", range(1, 9))
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 7, 8, 9, 24])
def test_peak_in_flight_is_that_of_the_formula(num_stages, num_microbatches):
    gpipe = make_schedule("gpipe", num_stages, num_microbatches)
    one_f_one_b = make_schedule("1f1b", num_stages, num_microbatches)
    forward = make_schedule("forward", num_stages, num_microbatches)
    for rank in range(num_stages):
        assert gpipe.peak_in_flight(rank) == num_microbatches
        assert one_f_one_b.peak_in_flight(rank) == min(num_stages - rank, num_microbatches)
        assert forward.peak_in_flight(rank) == 0


def test_a_split_backward_keeps_the_activations_until_the_weights_are_done():
    schedule = Schedule.from_string("0F0,0I0,0F1,0I1,0W0,0F2,0I2,0W1,0W2")
    assert schedule.peak_in_flight(0) == 2


def test_properties_tell_what_is_in_the_lists():
    schedule = make_schedule("1f1b", 2, 2)
    assert schedule.trains
    assert not schedule.is_lowered
    assert lower(schedule).is_lowered
    assert not make_schedule("forward", 2, 2).trains
    assert not lower(make_schedule("1f1b", 1, 2)).is_lowered, "one rank needs no message"
