"""A step that was measured, from its events: as it was, and simulated with its own times."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from mpimesh.errors import ScheduleError
from mpimesh.schedule import (
    Timetable,
    action_overhead_s,
    lower,
    make_schedule,
    measured_step,
    predicted_step,
    simulate,
)
from tests.helpers.raises import raises
from tests.helpers.random_schedules import random_schedules

SECONDS = st.integers(0, 20).map(float)


def simulated(data, schedule) -> Timetable:
    def seconds(count: int) -> list[float]:
        return [data.draw(SECONDS) for _ in range(count)]

    return simulate(
        schedule,
        forward_s=seconds(schedule.num_stages),
        backward_input_s=seconds(schedule.num_stages),
        backward_weight_s=seconds(schedule.num_stages),
        message_s=seconds(schedule.num_stages - 1),
    )


@given(st.data(), random_schedules(), st.integers(-1000, 1000).map(float))
def test_a_simulated_step_is_measured_as_it_was_and_predicted_to_be_the_same(data, schedule, start):
    """Where all of a stage's actions take alike, its mean says all."""
    outcome = simulated(data, schedule)
    events = [replace(event, start_s=event.start_s + start) for event in outcome.events()]
    measured = measured_step(schedule, events)
    assert measured.schedule == lower(schedule)
    origin = min(s for rank in range(schedule.num_ranks) for _, s, _ in outcome.computing(rank))
    for rank in range(schedule.num_ranks):
        assert measured.computing(rank) == [
            (action, begin - origin, end - origin) for action, begin, end in outcome.computing(rank)
        ]
    assert measured.step_s == outcome.step_s - origin
    predicted = predicted_step(measured)
    assert predicted.step_s == pytest.approx(outcome.step_s, abs=1e-9)
    for rank in range(schedule.num_ranks):
        assert predicted.busy_s(rank) == pytest.approx(outcome.busy_s(rank), abs=1e-9)


def test_idle_time_between_actions_is_no_wait():
    schedule = make_schedule("1f1b", 2, 2)
    events = simulate(schedule, forward_s=1, backward_s=2).events()
    # Between its first actions rank 0 takes 0.25 s for itself.
    late = [
        replace(event, start_s=1.25, duration_s=0.75)
        if (event.rank, event.name) == (0, "0F1")
        else event
        for event in events
    ]
    idle = measured_step(schedule, late).idle(0)
    assert idle.other_s == 0.25
    assert sum(idle.parts().values()) == measured_step(schedule, late).bubble_s(0)


def test_actions_of_unequal_length_count_by_their_mean():
    schedule = make_schedule("forward", 2, 3)
    events = simulate(schedule, forward_s=1).events()
    longer = [replace(event, duration_s=2.5) if event.name == "1F2" else event for event in events]
    measured = measured_step(schedule, longer)
    assert measured.step_s == 5.5
    predicted = predicted_step(measured)
    assert predicted.step_s == 1 + 3 * 1.5
    assert predicted.busy_s(1) == measured.busy_s(1) == 4.5


def test_stages_that_are_not_trained_have_no_backward():
    schedule = make_schedule("1f1b", 3, 4)
    events = [
        event
        for event in simulate(schedule, forward_s=1, backward_s=2).events()
        if event.stage == 2 or event.name[1:3] in ("F0", "F1", "F2", "F3", "SE")
    ]
    measured = measured_step(schedule, events)
    kinds = [{str(action.kind) for action in actions} for actions in measured.schedule.ranks]
    assert kinds == [{"F", "SEND_F"}, {"RECV_F", "F", "SEND_F"}, {"RECV_F", "F", "B"}]
    assert predicted_step(measured).step_s == 2 + 4 * 3


@pytest.mark.parametrize("missing", ["0F0", "1B1", "2F3"])
def test_a_step_that_is_not_whole_is_refused(missing):
    schedule = make_schedule("gpipe", 3, 4)
    events = simulate(schedule, forward_s=1, backward_s=2).events()
    with raises(ScheduleError, f"rank {missing[0]}", missing):
        measured_step(schedule, [event for event in events if event.name != missing])
    with raises(ScheduleError, "0F0"):
        measured_step(schedule, [])


@given(st.data(), random_schedules())
def test_a_simulated_step_costs_nothing_beside_its_actions(data, schedule):
    assert action_overhead_s(simulated(data, lower(schedule))) == 0


@given(st.integers(1, 100))
def test_the_overhead_is_what_lies_between_actions(hundredths):
    """Rank 0 of one stage computes 6 actions, each a while after the one before."""
    pause = hundredths / 100
    schedule = make_schedule("gpipe", 1, 3)
    events = simulate(schedule, forward_s=1, backward_s=2).events()
    late = [replace(event, start_s=event.start_s + k * pause) for k, event in enumerate(events)]
    measured = measured_step(schedule, late)
    assert action_overhead_s(measured) == pytest.approx(5 * pause / 6)
