"""Edges that skip stages: their messages in any schedule, proved, timed and written down."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from mpimesh.errors import ScheduleError
from mpimesh.schedule import (
    Action,
    ActionKind,
    Edges,
    Schedule,
    lower,
    make_schedule,
    measured_step,
    predicted_step,
    schedule_names,
    simulate,
    stages_per_rank,
    validate,
)
from tests.helpers.depth import examples
from tests.helpers.raises import names, raises
from tests.helpers.random_schedules import skips_of

K = ActionKind
BACKWARD = (K.B, K.I)
HALVES: dict[str, Any] = {"backward_input_s": 2.0, "backward_weight_s": 2.0}


@st.composite
def schedules_with_skips(draw) -> tuple[Schedule, tuple[tuple[int, int], ...]]:
    """Any generator's schedule, with two stages on each rank where it can, and any skips."""
    name = draw(st.sampled_from(schedule_names()))
    chunks = 2 if name == "auto" and draw(st.booleans()) else stages_per_rank(name)
    num_ranks = draw(st.integers(1, 3 if chunks == 2 else 5))
    num_stages = num_ranks * chunks
    schedule = make_schedule(name, num_stages, draw(st.integers(1, 5)), num_ranks=num_ranks)
    return schedule, draw(skips_of(num_stages))


def far_ends(schedule: Schedule, stage: int, ends: list[int], neighbour: int) -> list[int | None]:
    """The ends on other ranks in the order of their messages: the neighbour, then skips rising."""
    ordered: list[int | None] = [None] if 0 <= neighbour < schedule.num_stages else []
    place = schedule.placement
    if ordered and place[neighbour] == place[stage]:
        ordered = []
    return ordered + [end for end in sorted(ends) if place[end] != place[stage]]


def computing(schedule: Schedule) -> list[list[Action]]:
    return [[one for one in actions if one.kind.computes] for actions in schedule.ranks]


@given(schedules_with_skips())
def test_every_schedule_is_right_with_any_skips(case):
    schedule, skips = case
    lowered = lower(schedule, skips=skips)
    assert Schedule.from_string(lowered.to_string()) == lowered
    assert computing(lowered) == computing(schedule)
    proof = validate(lowered)
    assert proof == validate(schedule, skips=skips) == validate(lowered, skips=skips)
    messages = Counter(one for one in lowered.actions() if one.kind.is_message)
    assert set(messages.values()) <= {1}
    assert all(one.partner in messages and one.partner.partner == one for one in messages)
    assert all(Action.from_string(str(one)) == one for one in messages)
    remote = sum(schedule.placement[a] != schedule.placement[b] for a, b in skips)
    plain = validate(schedule).num_messages
    directions = 2 if schedule.trains else 1
    assert proof.num_messages == plain + directions * remote * schedule.num_microbatches


@given(schedules_with_skips())
def test_messages_stand_around_their_action_in_the_order_of_the_rule(case):
    schedule, skips = case
    for actions in lower(schedule, skips=skips).ranks:
        for step, action in enumerate(actions):
            if action.kind is not K.F and action.kind not in BACKWARD:
                continue
            stage, forward = action.stage, action.kind is K.F
            before = far_ends(schedule, stage, [a for a, b in skips if b == stage], stage - 1)
            after = far_ends(schedule, stage, [b for a, b in skips if a == stage], stage + 1)
            recv, send = (K.RECV_F, K.SEND_F) if forward else (K.RECV_B, K.SEND_B)
            first, last = (before, after) if forward else (after, before)
            microbatch = action.microbatch
            around = [Action(stage, recv, microbatch, end) for end in first]
            around += [action, *(Action(stage, send, microbatch, end) for end in last)]
            start = step - len(first)
            assert list(actions[start : start + len(around)]) == around


@settings(max_examples=examples(150))
@given(schedules_with_skips(), st.data())
def test_a_message_of_a_skip_that_is_missing_twice_or_out_of_order_is_refused(case, data):
    schedule, skips = case
    lowered = lower(schedule, skips=skips)
    places = [
        (rank, step)
        for rank, actions in enumerate(lowered.ranks)
        for step, action in enumerate(actions)
        if action.other is not None
    ]
    if not places:
        return
    rank, step = data.draw(st.sampled_from(places))
    actions = list(lowered.ranks[rank])
    what = data.draw(st.sampled_from(["drop", "double", "swap"]))
    if what == "drop":
        del actions[step]
    elif what == "double":
        actions.insert(step, actions[step])
    else:
        others = [
            other
            for other, one in enumerate(actions)
            if other != step and replace(one, microbatch=0) == replace(actions[step], microbatch=0)
        ]
        if not others:
            return
        other = data.draw(st.sampled_from(others))
        actions[step], actions[other] = actions[other], actions[step]
    ranks = (*lowered.ranks[:rank], tuple(actions), *lowered.ranks[rank + 1 :])
    with pytest.raises(ScheduleError, match="<-- here"):
        validate(replace(lowered, ranks=ranks))


def test_messages_have_the_text_of_the_rule():
    lowered = lower(make_schedule("1f1b", 4, 1), skips=[(1, 3), (0, 3)])
    assert lowered.to_string().splitlines()[1:] == [
        "0F0,0SEND_F0,0SEND_F0>3,0RECV_B0,0RECV_B0<3,0B0",
        "1RECV_F0,1F0,1SEND_F0,1SEND_F0>3,1RECV_B0,1RECV_B0<3,1B0,1SEND_B0",
        "2RECV_F0,2F0,2SEND_F0,2RECV_B0,2B0,2SEND_B0",
        "3RECV_F0,3RECV_F0<0,3RECV_F0<1,3F0,3B0,3SEND_B0,3SEND_B0>0,3SEND_B0>1",
    ]


def test_stages_on_one_rank_skip_without_a_message():
    lowered = lower(make_schedule("zbv", 4, 1), skips=[(0, 3), (1, 3)])
    assert lowered.placement == (0, 1, 1, 0)
    ends = {(one.stage, one.other) for one in lowered.actions() if one.other is not None}
    assert ends == {(1, 3), (3, 1)}


@pytest.mark.parametrize(
    ("text", "place", "actions"),
    [
        ("0F0,0SEND_F0\n1RECV_F0,1F0,1SEND_F0\n2RECV_F0,2F0", (2, 1), {"2F0", "2RECV_F0<0"}),
        (
            "0F0,0SEND_F0\n1RECV_F0,1F0,1SEND_F0\n2RECV_F0,2RECV_F0<0,2F0",
            (2, 1),
            {"2RECV_F0<0", "0SEND_F0>2"},
        ),
        (
            "0F0,0SEND_F0,0SEND_F0>2\n1RECV_F0,1F0,1SEND_F0\n2RECV_F0<0,2F0",
            (2, 1),
            {"2F0", "2RECV_F0"},
        ),
        (
            "0SEND_F0>2,0F0,0SEND_F0\n1RECV_F0,1F0,1SEND_F0\n2RECV_F0,2RECV_F0<0,2F0",
            (0, 0),
            {"0SEND_F0>2", "0F0"},
        ),
        (
            "0F0,0SEND_F0,0SEND_F0>3\n1RECV_F0,1F0,1SEND_F0\n2RECV_F0,2RECV_F0<0,2F0",
            (0, 2),
            {"0SEND_F0>3"},
        ),
    ],
)
def test_what_is_wrong_with_a_skip_is_named(text, place, actions):
    rank, step = place
    with raises(ScheduleError) as caught:
        validate(Schedule.from_string(text), skips=[(0, 2)])
    sentence, _ = str(caught.value).split("\n", 1)  # the table names all actions
    names(sentence, f"rank {rank}", f"step {step}")
    assert set(re.findall(r"\d[A-Z_]+\d(?:[<>]\d)?", sentence)) == actions


def test_a_local_skip_is_a_need_on_the_ranks_own_list():
    schedule = Schedule.from_string("2F0,0F0\n1F0\n")
    with raises(ScheduleError) as caught:
        validate(schedule, skips=[(0, 2)])
    sentence, _ = str(caught.value).split("\n", 1)
    names(sentence, "rank 0", "step 0", "2F0", "0F0")
    with raises(ScheduleError, "deadlock", "step 0", "2RECV_F0", "step 2", "step 3"):
        validate(schedule)


@given(st.integers(1, 5), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_a_message_of_a_skip_counts_where_messages_cost(count, forward, message, transfer):
    """The output of stage 0 goes to stage 2 by a slow edge of its own."""
    times: dict[str, Any] = {
        "forward_s": forward,
        "message_s": [0, 0, message],
        "transfer_s": [0, 0, transfer],
    }
    outcome = simulate(make_schedule("forward", 3, count), skips=[(0, 2)], **times)
    # Microbatch m is there through stage 1 at (m + 2) f, and by the skip when the edge is free.
    passed = done = 0
    for microbatch in range(count):
        passed = max(passed, (microbatch + 1) * forward) + transfer
        done = max(done, (microbatch + 2) * forward, passed + message) + forward
    assert outcome.step_s == max(done, 0)


def test_times_are_given_for_every_edge():
    schedule = make_schedule("forward", 3, 1)
    with raises(ScheduleError, "message_s", 3, 2):
        simulate(schedule, forward_s=1, message_s=[1, 1], skips=[(0, 2)])
    lowered = lower(schedule, skips=[(0, 2)])
    assert simulate(lowered, forward_s=1, message_s=[0, 0, 5]).step_s == 7
    assert simulate(lowered, forward_s=1, message_s=5).step_s == 13
    with raises(ScheduleError, "rank 0", "step 2", ">0SEND_F0>3<", "stage 3"):
        simulate(
            Schedule.from_string("0F0,0SEND_F0,0SEND_F0>3\n1RECV_F0,1F0,1SEND_F0\n2RECV_F0,2F0"),
            forward_s=1,
        )


@given(schedules_with_skips(), st.integers(0, 9).map(float))
def test_a_step_with_skips_is_measured_and_predicted(case, message):
    schedule, skips = case
    if not schedule.trains:
        return
    outcome = simulate(
        schedule, forward_s=2.0, backward_s=4.0, message_s=message, skips=skips, **HALVES
    )
    measured = measured_step(schedule, outcome.events(), skips=skips)
    assert measured.schedule == lower(schedule, skips=skips)
    assert measured.step_s == outcome.step_s
    assert predicted_step(measured).step_s == pytest.approx(outcome.step_s)


# -- the numbers of edges -------------------------------------------------------------------


@given(st.integers(1, 8).flatmap(lambda count: st.tuples(st.just(count), skips_of(count))))
def test_edges_are_numbered_without_a_gap(case):
    num_stages, skips = case
    edges = Edges(num_stages, skips)
    assert edges == Edges(num_stages, skips[::-1])
    assert len(edges) == num_stages - 1 + len(skips)
    numbers: list[int] = []
    for stage in range(num_stages - 1):
        both = Action(stage, K.SEND_F, 0), Action(stage, K.RECV_B, 3)
        numbers += {edges.number(one) for one in (*both, *(one.partner for one in both))}
    for source, destination in sorted(skips):
        both = Action(source, K.SEND_F, 0, destination), Action(source, K.RECV_B, 1, destination)
        numbers += {edges.number(one) for one in (*both, *(one.partner for one in both))}
        assert source in edges.sources(destination)
        assert destination in edges.destinations(source)
    assert numbers == list(range(len(edges)))
    assert sum(len(edges.sources(stage)) for stage in range(num_stages)) == len(skips)
    schedule = lower(make_schedule("gpipe", num_stages, 2), skips=skips)
    assert Edges.of(schedule) == Edges.of(schedule, skips) == edges


@pytest.mark.parametrize("skip", [(0, 1), (1, 0), (2, 0), (0, 0), (-1, 2), (1, 4)])
def test_a_skip_goes_from_a_stage_beyond_the_next(skip):
    with raises(ScheduleError, skip[0]):
        lower(make_schedule("gpipe", 4, 1), skips=[skip])


def test_a_skip_is_given_once():
    with raises(ScheduleError, "skip", (0, 2)):
        Edges(4, ((0, 2), (1, 3), (0, 2)))


def test_exact_times_stay_exact():
    outcome = simulate(
        make_schedule("1f1b", 3, 2),
        forward_s=Fraction(1, 3),
        backward_s=Fraction(2, 3),
        message_s=Fraction(1, 7),
        skips=[(0, 2)],
    )
    assert isinstance(outcome.step_s, Fraction)
