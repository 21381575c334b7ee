"""Numbers of messages that can wait for a rank: against slow models, and times of any kind."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings, strategies as st

from mpimesh.errors import ScheduleError
from mpimesh.parallel.plans import Plans
from mpimesh.schedule import (
    Action,
    ActionKind,
    Schedule,
    lower,
    make_schedule,
    most_waiting,
    simulate,
    validate,
)
from tests.helpers.depth import examples
from tests.helpers.raises import raises
from tests.helpers.random_schedules import random_schedules, skips_of

K = ActionKind


def proved(schedule: Schedule) -> None:
    try:
        validate(schedule)
    except ScheduleError:  # a random schedule may hand over in two orders
        assume(False)


def sent_by_others(lowered: Schedule, rank: int, step: int) -> set[Action]:
    """The most that can be sent while `rank` stands before `step`: by turns, until nobody moves."""
    at = [0] * lowered.num_ranks
    sent: set[Action] = set()
    moved = True
    while moved:
        moved = False
        for one, actions in enumerate(lowered.ranks):
            end = step if one == rank else len(actions)
            while at[one] < end:
                action = actions[at[one]]
                if action.kind.is_recv and action.partner not in sent:
                    break
                sent.add(action)
                at[one] += 1
                moved = True
    return {action for action in sent if action.kind.is_send}


def slow_most_waiting(lowered: Schedule, rank: int) -> dict[tuple[int, int], int]:
    most: dict[tuple[int, int], int] = {}
    actions = lowered.ranks[rank]
    for step, action in enumerate(actions):
        if action.kind.is_recv:
            edge = action.far_stage, action.stage
            sent = sent_by_others(lowered, rank, step)
            came = sum((one.stage, one.far_stage) == edge for one in sent)
            took = sum(
                one.kind.is_recv and (one.far_stage, one.stage) == edge for one in actions[:step]
            )
            most[edge] = max(most.get(edge, 0), came - took)
    return most


@settings(max_examples=examples(150))
@given(random_schedules(), st.data())
def test_it_is_what_a_slow_model_finds(schedule, data):
    lowered = lower(schedule, skips=data.draw(skips_of(schedule.num_stages)))
    proved(lowered)
    for rank in range(schedule.num_ranks):
        most = most_waiting(lowered, rank)
        assert most == slow_most_waiting(lowered, rank)
        assert all(count >= 1 for count in most.values())


@settings(max_examples=examples(150))
@given(random_schedules(), st.data())
def test_no_speed_of_the_ranks_lets_more_wait(schedule, data):
    lowered = lower(schedule, skips=data.draw(skips_of(schedule.num_stages)))
    proved(lowered)
    seconds = [data.draw(st.sampled_from([0, 1, 2, 30])) for _ in range(schedule.num_stages)]
    outcome = simulate(
        lowered, forward_s=seconds, backward_input_s=seconds[::-1], backward_weight_s=1
    )
    started = {one.action: one.start_s for actions in outcome.ranks for one in actions}
    for rank, actions in enumerate(outcome.ranks):
        most = most_waiting(lowered, rank)
        for step, one in enumerate(actions):
            if not one.action.kind.is_recv:
                continue
            edge = one.action.far_stage, one.action.stage
            # Those on the edge that were sent by the time at which it is received, and not before.
            later = [two.action for two in actions[step:] if two.action.kind is one.action.kind]
            waiting = sum(
                (two.far_stage, two.stage) == edge and started[two.partner] < one.end_s
                for two in later
            )
            assert waiting <= most[edge]


@pytest.mark.parametrize("count", [1, 2, 5, 20])
@pytest.mark.parametrize("stages", [2, 3, 6])
def test_the_usual_schedules(stages, count):
    one_f_one_b = make_schedule("1f1b", stages, count)
    gpipe = make_schedule("gpipe", stages, count)
    for rank in range(stages):
        before, after = (rank - 1, rank), (rank + 1, rank)
        # Before its first F the stage before has made the forwards of its warm-up and one more.
        # After its own last F the others have all that they need for the gradients it lacks.
        most = most_waiting(one_f_one_b, rank)
        expected = {before: min(count, stages - rank + 1), after: min(count, stages - rank)}
        assert most == {edge: expected[edge] for edge in expected if 0 <= edge[0] < stages}
        most = most_waiting(gpipe, rank)
        assert all(most[edge] == count for edge in most)
        assert set(most) == {edge for edge in (before, after) if 0 <= edge[0] < stages}


def test_a_rank_that_does_not_exist_is_told():
    with raises(ScheduleError, 0, 1, 2):
        most_waiting(make_schedule("gpipe", 2, 2), 2)


def test_plans_have_it_by_sender_and_receiver():
    plans = Plans("1f1b", 4, 8, num_ranks=4, rank=1, skips=[(1, 3)])
    plan = plans.plan(8, training=True)
    channels = {(one.far_stage, one.stage) for one in plan.actions if one.kind.is_recv}
    assert plan.most_waiting.keys() == channels
    assert plan.most_waiting[0, 1] == 4
    assert plan.most_waiting[2, 1] == 3
    assert plan.most_waiting[3, 1] == 3
    # Where nothing before stage 1 trains, no gradient holds stage 0 back.
    pruned = plans.plan(8, training=True, first_trained=1)
    assert pruned.most_waiting[0, 1] == 8
    assert plans.plan(8, training=False).most_waiting == {(0, 1): 8}
    assert plans.plan(0, training=True).most_waiting == {}
    assert Plans("gpipe", 1, 8, num_ranks=1, rank=0).plan(8, training=True).most_waiting == {}
