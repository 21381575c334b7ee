"""Sums of gradients and the optimizer's step as actions of a schedule."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from hypothesis import given, strategies as st

from mpimesh.errors import ScheduleError
from mpimesh.schedule import (
    Action,
    ActionKind,
    Schedule,
    Timetable,
    lower,
    make_schedule,
    measured_step,
    predicted_step,
    schedule_names,
    schedule_svg,
    simulate,
    stages_per_rank,
    validate,
)
from tests.helpers.raises import raises
from tests.helpers.random_schedules import random_schedules

K = ActionKind
BACKWARD = (K.B, K.I, K.W)


def family() -> st.SearchStrategy[Schedule]:
    return st.builds(
        lambda name, ranks, count: make_schedule(name, ranks * stages_per_rank(name), count),
        st.sampled_from([name for name in schedule_names() if name not in ("auto", "forward")]),
        st.integers(1, 4),
        st.integers(1, 6),
    )


@given(family(), st.booleans())
def test_every_stage_has_its_sums_when_nothing_more_comes(schedule, step):
    plain = lower(schedule)
    lowered = lower(schedule, reduce_grad=True, step=step)
    assert lower(lowered, reduce_grad=True, step=step) == lowered
    assert Schedule.from_string(lowered.to_string()) == lowered
    assert validate(lowered) == validate(plain)
    for rank, actions in enumerate(lowered.ranks):
        assert tuple(one for one in actions if not one.kind.is_whole) == plain.ranks[rank]
        sums = [one for one in actions if one.kind is K.REDUCE_GRAD]
        assert sorted(one.stage for one in sums) == list(schedule.stages_of(rank))
        for one in sums:
            place = actions.index(one)
            stages = [a.stage for a in actions[place:] if a.kind in (*BACKWARD, K.SEND_B)]
            assert one.stage not in stages
            # Directly after what it waits for, but for the sums of another stage.
            last = actions[place - 1]
            assert last.stage == one.stage
            assert last.kind in (*BACKWARD, K.SEND_B)
        steps = tuple(Action(one.stage, K.STEP, 0) for one in sums)
        assert (
            actions[len(actions) - len(steps) :] == steps if step else not set(steps) & {*actions}
        )
        assert lowered.peak_in_flight(rank) == schedule.peak_in_flight(rank)


def test_a_schedule_without_backward_has_no_sums():
    schedule = make_schedule("forward", 3, 2)
    assert lower(schedule, reduce_grad=True, step=True) == lower(schedule)


def test_sums_that_stand_in_a_schedule_stay_where_they_are():
    text = "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1REDUCE_GRAD,1SEND_B0\n"
    lowered = lower(Schedule.from_string(text), step=True)
    assert lowered.to_string().splitlines()[1:] == [
        "0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0STEP",
        "1RECV_F0,1F0,1B0,1REDUCE_GRAD,1SEND_B0,1STEP",
    ]
    validate(lowered)


@given(random_schedules(), st.integers(1, 9))
def test_sums_cost_nothing_unless_told_and_then_only_what_is_left_at_the_end(schedule, reduce_s):
    def timed(one: Schedule, **times: Any) -> Timetable:
        return simulate(one, forward_s=2, backward_input_s=1, backward_weight_s=3, **times)

    plain, lowered = timed(schedule), lower(schedule, step=True)
    assert timed(lowered).step_s == plain.step_s
    outcome = timed(lowered, reduce_s=reduce_s)
    ends = []
    for rank in range(schedule.num_ranks):
        # What a rank computes is not moved; its sums are made one after the other.
        assert outcome.computing(rank) == plain.computing(rank)
        done = 0
        for one in outcome.ranks[rank]:
            if one.action.kind is K.REDUCE_GRAD:
                done = max(done, one.start_s) + reduce_s
                assert one.end_s == done
        ends.append(done)
    assert outcome.step_s == max(plain.step_s, *ends)


def test_pictures_events_and_measurements_take_sums_as_they_are():
    lowered = lower(make_schedule("interleaved", 4, 3, num_ranks=2), step=True)
    times: dict[str, Any] = {"forward_s": Fraction(1), "backward_s": Fraction(2)}
    outcome = simulate(lowered, **times, reduce_s=[5, 1, 1, 1])
    assert schedule_svg(outcome).count("<rect") > 24
    events = [(event.name, event.category, event.microbatch) for event in outcome.events()]
    assert ("0REDUCE_GRAD", "collective", None) in events
    assert ("0STEP", "optimizer", None) in events
    measured = measured_step(lowered, outcome.events())
    assert measured.schedule == lowered
    for rank in range(2):
        assert measured.computing(rank) == outcome.computing(rank)
    assert predicted_step(measured).step_s == simulate(lowered, **times).step_s


def test_a_reduction_that_is_longer_than_what_is_left_makes_the_step_longer():
    lowered = lower(make_schedule("1f1b", 2, 2), step=True)
    # Stage 1 ends its backwards at 7 and stage 0 at 9, where each takes 1 + 2.
    assert simulate(lowered, forward_s=1, backward_s=2).step_s == 9
    assert simulate(lowered, forward_s=1, backward_s=2, reduce_s=[0, 2]).step_s == 9
    assert simulate(lowered, forward_s=1, backward_s=2, reduce_s=[0, 5]).step_s == 12
    assert simulate(lowered, forward_s=1, backward_s=2, reduce_s=[5, 5]).step_s == 14
    assert simulate(make_schedule("1f1b", 2, 2), forward_s=1, backward_s=2, reduce_s=9).step_s == 9


def test_times_of_sums_are_checked():
    with raises(ScheduleError, "reduce_s", 2):
        simulate(make_schedule("1f1b", 2, 2), forward_s=1, backward_s=2, reduce_s=[1, 2, 3])
