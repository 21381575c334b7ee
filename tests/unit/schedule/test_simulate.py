"""The simulator against closed formulas, and against the longest path through all actions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cache

import pytest
from hypothesis import given, strategies as st

from mpimesh.errors import ScheduleError
from mpimesh.schedule import (
    Action,
    ActionKind,
    Idle,
    Schedule,
    ScheduleName,
    lower,
    make_schedule,
    simulate,
)
from tests.helpers.raises import raises
from tests.helpers.random_schedules import needs, random_schedules

SECONDS = st.fractions(min_value=0, max_value=10, max_denominator=12)


@pytest.mark.parametrize("num_stages", range(1, 9))
@pytest.mark.parametrize("num_microbatches", [1, 2, 5, 8, 13, 24])
@pytest.mark.parametrize(
    ("forward_s", "backward_s"), [(1, 2), (3, 3), (7, 2), (Fraction(1, 3), Fraction(5, 7))]
)
def test_bubble_of_equal_stages_is_that_of_the_formula(
    num_stages, num_microbatches, forward_s, backward_s
):
    cases: tuple[tuple[ScheduleName, float], ...] = (
        ("gpipe", forward_s + backward_s),
        ("1f1b", forward_s + backward_s),
        ("forward", forward_s),
    )
    for name, work_s in cases:
        schedule = make_schedule(name, num_stages, num_microbatches)
        outcome = simulate(schedule, forward_s=forward_s, backward_s=backward_s)
        assert outcome.step_s == (num_microbatches + num_stages - 1) * work_s
        for rank in range(num_stages):
            assert outcome.busy_s(rank) == num_microbatches * work_s
            assert outcome.bubble_s(rank) == (num_stages - 1) * work_s
        expected = Fraction(num_stages - 1, num_microbatches + num_stages - 1)
        assert outcome.bubble_fraction == pytest.approx(float(expected), rel=1e-12)


@given(st.integers(1, 6), st.integers(1, 8), SECONDS, SECONDS, SECONDS)
def test_messages_delay_gpipe_once_for_each_edge_and_direction(stages, microbatches, f, b, message):
    outcome = simulate(
        make_schedule("gpipe", stages, microbatches), forward_s=f, backward_s=b, message_s=message
    )
    assert outcome.step_s == (microbatches + stages - 1) * (f + b) + 2 * (stages - 1) * message


def longest_path(
    schedule: Schedule,
    durations: Mapping[ActionKind, Sequence[Fraction]],
    messages: Sequence[Fraction],
    transfers: Sequence[Fraction],
) -> dict[str, Fraction]:
    """When each action of an unlowered schedule ends: the latest of its list and its messages."""
    places = {
        str(a): (r, i) for r, actions in enumerate(schedule.ranks) for i, a in enumerate(actions)
    }

    @cache
    def end(name: str) -> Fraction:
        rank, step = places[name]
        action = schedule.ranks[rank][step]
        ready = [Fraction(0)]
        if step:
            ready.append(end(str(schedule.ranks[rank][step - 1])))
        for needed in needs(action):
            if needed in places:
                source = Action.from_string(needed).stage
                same = schedule.placement[source] == schedule.placement[action.stage]
                edge = min(source, action.stage)
                ready.append(end(needed) if same else passed(needed) + messages[edge])
        return max(ready) + durations[action.kind][action.stage]

    @cache
    def passed(name: str) -> Fraction:
        """When the message of an action's result has left the edge, after those sent before."""
        rank, step = places[name]
        action = schedule.ranks[rank][step]
        before = [
            str(one)
            for one in schedule.ranks[rank][:step]
            if (one.stage, one.kind) == (action.stage, action.kind)
        ]
        edge = action.stage if action.kind is ActionKind.F else action.stage - 1
        free = passed(before[-1]) if before else Fraction(0)
        return max(end(name), free) + transfers[edge]

    return {name: end(name) for name in places}


@given(st.data(), random_schedules())
def test_any_schedule_ends_where_the_longest_path_ends(data, schedule):
    def seconds(count: int) -> list[Fraction]:
        return [data.draw(SECONDS) for _ in range(count)]

    durations = {
        ActionKind.F: seconds(schedule.num_stages),
        ActionKind.I: seconds(schedule.num_stages),
        ActionKind.W: seconds(schedule.num_stages),
    }
    durations[ActionKind.B] = [
        first + second
        for first, second in zip(durations[ActionKind.I], durations[ActionKind.W], strict=True)
    ]
    messages, transfers = seconds(schedule.num_stages - 1), seconds(schedule.num_stages - 1)
    outcome = simulate(
        schedule,
        forward_s=durations[ActionKind.F],
        backward_input_s=durations[ActionKind.I],
        backward_weight_s=durations[ActionKind.W],
        message_s=messages,
        transfer_s=transfers,
    )
    ends = {
        str(action): end_s
        for rank in range(schedule.num_ranks)
        for action, _, end_s in outcome.computing(rank)
    }
    assert ends == longest_path(schedule, durations, messages, transfers)
    assert outcome.step_s == max(ends.values())
    for rank in range(schedule.num_ranks):
        assert sum(outcome.idle(rank).parts().values()) == outcome.bubble_s(rank)
        assert outcome.idle(rank).other_s == 0
        ones = [1.0] * schedule.num_stages
        assert outcome.peak_bytes(rank, ones) == outcome.peak_activations(rank)


@given(st.integers(2, 6), st.integers(1, 8), SECONDS, SECONDS, SECONDS)
def test_a_slow_edge_passes_one_message_at_a_time(stages, microbatches, f, message, transfer):
    outcome = simulate(
        make_schedule("forward", stages, microbatches),
        forward_s=f,
        message_s=message,
        transfer_s=transfer,
    )
    pace = max(f, transfer)
    assert outcome.step_s == (
        stages * f + (stages - 1) * (message + transfer) + (microbatches - 1) * pace
    )


def test_the_bubble_of_1f1b_is_told_by_its_places():
    outcome = simulate(make_schedule("1f1b", 4, 8), forward_s=1, backward_s=2)
    # The last rank waits for its first input and then works to its end; the first one has sent
    # four microbatches on their way before it waits for a gradient.
    assert outcome.idle(3) == Idle(fill_s=3, drain_s=6)
    first = outcome.idle(0)
    assert (first.fill_s, first.inputs_s, first.drain_s, first.gradients_s) == (0, 0, 0, 9)
    assert [outcome.peak_activations(rank) for rank in range(4)] == [4, 3, 2, 1]
    assert outcome.mean_bubble_s == 9
    assert outcome.mean_idle() == Idle(
        fill_s=(0 + 1 + 2 + 3) / 4, gradients_s=(9 + 6 + 3) / 4, drain_s=(0 + 2 + 4 + 6) / 4
    )
    assert str(Idle(fill_s=1, drain_s=2.5, inputs_s=1e-9)) == (
        "draining the pipeline 2500 ms, filling the pipeline 1000 ms"
    )
    assert str(Idle()) == "never idle"
    assert outcome.idle_fraction(0) == pytest.approx(9 / 33)


@pytest.mark.deep
def test_a_thousand_microbatches_on_64_stages_take_seconds():
    """A second or so; the limit is for a machine that is busy with other things, too."""
    start_s = time.process_time()
    schedule = lower(make_schedule("1f1b", 64, 1024))
    outcome = simulate(schedule, forward_s=1, backward_s=2, message_s=0)
    assert time.process_time() - start_s < 10
    assert outcome.step_s == (1024 + 63) * 3


def test_a_split_backward_lets_the_gradient_go_before_the_weights():
    split = Schedule.from_string("0F0,0I0,0W0\n1F0,1I0,1W0\n")
    outcome = simulate(split, forward_s=1, backward_input_s=2, backward_weight_s=5)
    assert outcome.step_s == 1 + 1 + 2 + 2 + 5
    whole = Schedule.from_string("0F0,0B0\n1F0,1B0\n")
    assert simulate(whole, forward_s=1, backward_input_s=2, backward_weight_s=5).step_s == 16


def test_events_are_what_a_tracer_would_see():
    outcome = simulate(make_schedule("1f1b", 2, 1), forward_s=1, backward_s=2, message_s=0.5)
    seen = [
        (e.rank, e.name, e.category, e.start_s, e.duration_s, e.stage, e.microbatch)
        for e in outcome.events()
    ]
    assert seen == [
        (0, "0F0", "forward", 0.0, 1.0, 0, 0),
        (0, "0SEND_F0", "send", 1.0, 0.5, 0, 0),
        (0, "0RECV_B0", "wait", 1.0, 4.0, 0, 0),
        (0, "0B0", "backward", 5.0, 2.0, 0, 0),
        (1, "1RECV_F0", "wait", 0.0, 1.5, 1, 0),
        (1, "1F0", "forward", 1.5, 1.0, 1, 0),
        (1, "1B0", "backward", 2.5, 2.0, 1, 0),
        (1, "1SEND_B0", "send", 4.5, 0.5, 1, 0),
    ]
    assert outcome.step_s == 7.0


def test_no_time_at_all_is_no_bubble():
    outcome = simulate(make_schedule("gpipe", 3, 2), forward_s=0, backward_s=0)
    assert outcome.step_s == 0
    assert outcome.bubble_fraction == 0.0


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ({"forward_s": 1}, ("backward_s",)),
        (
            {"forward_s": [1, 2], "backward_s": 1},
            ("forward_s", 3, 2),
        ),
        ({"forward_s": 1, "backward_s": [1] * 4}, ("backward_s", 3)),
        (
            {"forward_s": 1, "backward_s": 1, "message_s": [1] * 3},
            ("message_s", 2),
        ),
        ({"forward_s": 1, "backward_s": 1, "transfer_s": -2}, ("transfer_s", 0)),
        ({"forward_s": -1, "backward_s": 1}, ("forward_s", 0, -1)),
        ({"forward_s": 1, "backward_s": float("nan")}, ("backward_s", 0)),
        ({"forward_s": 1, "backward_s": float("inf")}, ()),
    ],
)
def test_wrong_times_are_refused(times, message):
    with raises(ScheduleError, *message):
        simulate(make_schedule("1f1b", 3, 2), **times)


def test_a_schedule_that_stops_half_way_is_refused_with_its_deadlock():
    schedule = lower(Schedule.from_string("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1"))
    with raises(ScheduleError, "deadlock", "step 2", ">0RECV_B0<", "step 5"):
        simulate(schedule, forward_s=1, backward_s=1)


@pytest.mark.parametrize("text", ["0F0\n1F0,1SEND_F0", "0F0,0B0,0SEND_B0\n1F0,1B0"])
def test_a_message_that_has_no_other_end_is_refused(text):
    with raises(ScheduleError, "rank 1", "step 0", ">1F0<", "1RECV_F0"):
        simulate(Schedule.from_string(text), forward_s=1, backward_s=1)
