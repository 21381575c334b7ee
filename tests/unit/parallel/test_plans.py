"""One rank's part of a step: forward schedules for any placement, and what is pruned."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from mpimesh.comm import MAX_USER_TAG
from mpimesh.errors import ScheduleError
from mpimesh.parallel.plans import ABORT_TAG, MAX_EDGES, Plans
from mpimesh.schedule import (
    Action,
    ActionKind,
    Edges,
    auto,
    forward_only,
    lower,
    make_schedule,
    validate,
)
from mpimesh.schedule.generators import forward_schedule
from tests.helpers.parallel_traps import message_tag
from tests.helpers.raises import raises
from tests.helpers.random_schedules import skips_of

K = ActionKind


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 6), st.randoms())
def test_forward_schedules_are_valid_for_any_placement(ranks, each, microbatches, random):
    placement = [rank for rank in range(ranks) for _ in range(each)]
    random.shuffle(placement)
    schedule = forward_schedule(placement, microbatches)
    assert validate(schedule).send_window == 0 or each > 1
    assert schedule.placement == tuple(placement)


@given(st.integers(1, 6), st.integers(1, 6))
def test_with_one_stage_a_rank_it_is_the_plain_one(stages, microbatches):
    made = forward_schedule(range(stages), microbatches)
    assert made.ranks == forward_only(stages, microbatches).ranks


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 5), st.sampled_from(["1f1b", "gpipe"]))
def test_pruning_keeps_pairs(stages, microbatches, first_trained, name):
    ranks = [
        Plans(name, stages, microbatches, num_ranks=stages, rank=rank).plan(
            microbatches, training=True, first_trained=first_trained
        )
        for rank in range(stages)
    ]
    every = {action for plan in ranks for action in plan.actions}
    for action in every:
        if action.kind.is_message:
            assert action.partner in every
    backwards = {action.stage for action in every if action.kind is ActionKind.B}
    assert backwards == set(range(first_trained, stages))
    forwards = sum(action.kind is ActionKind.F for action in every)
    assert forwards == stages * microbatches


def test_no_microbatches_are_no_work():
    plans = Plans("1f1b", 2, 4, num_ranks=2, rank=1)
    assert plans.plan(0, training=True).actions == ()
    assert plans.stages == (1,)
    assert plans.placement == (0, 1)


def test_tags_are_apart_and_within_what_every_mpi_has():
    edges = Edges(MAX_EDGES - 1, ((0, 2), (5, 4000)))
    assert len(edges) == MAX_EDGES
    sends = [Action(0, K.SEND_F, 0, 2), Action(2, K.SEND_B, 0, 0)]
    sends += [Action(5, K.SEND_F, 0, 4000), Action(4000, K.SEND_B, 0, 5)]
    for stage in range(edges.num_stages - 1):
        sends += [Action(stage, K.SEND_F, 0), Action(stage + 1, K.SEND_B, 0)]
    tags = {message_tag(action, edges) for action in sends}
    assert len(tags) == len(sends) == 2 * MAX_EDGES
    assert min(tags) > MAX_USER_TAG + 16
    assert max(tags) < ABORT_TAG == 28672
    for action in sends[:100]:
        assert message_tag(action.partner, edges) == message_tag(action, edges)
        if action.other is None:
            assert message_tag(action) == message_tag(action, edges)
    # The microbatch is not in the tag, so no number of microbatches is too large.
    assert message_tag(Action(1, K.SEND_F, 10**9)) in tags


@pytest.mark.parametrize(
    ("action", "edges", "values"),
    [
        (Action(MAX_EDGES, K.SEND_F, 0), None, (4096, "4096SEND_F0", "edges", "stages", "skips")),
        (Action(0, K.F, 0), None, ("0F0",)),
        (Action(0, K.SEND_B, 0), None, ("0SEND_B0", "edge")),
        (Action(0, K.SEND_F, 0, 2), None, ("0SEND_F0>2", "edge")),
        (Action(0, K.SEND_F, 0, 2), Edges(4, ((1, 3),)), ("0SEND_F0>2", "edge", 4, [(1, 3)])),
        (Action(3, K.SEND_F, 0), Edges(4), ("3SEND_F0", "edge", 4, [])),
    ],
)
def test_what_has_no_tag_is_told(action, edges, values):
    with raises(ScheduleError, *values):
        message_tag(action, edges)


@given(st.integers(3, 6), st.integers(1, 4), st.integers(0, 6), st.data())
def test_plans_carry_skips_and_prune_them_in_pairs(stages, microbatches, first_trained, data):
    skips = data.draw(skips_of(stages))
    every: set[Action] = set()
    for rank in range(stages):
        plans = Plans("1f1b", stages, microbatches, num_ranks=stages, rank=rank, skips=skips)
        assert plans.edges == Edges(stages, skips)
        every |= {*plans.plan(microbatches, training=True, first_trained=first_trained).actions}
        forward = plans.plan(microbatches, training=False).actions
        ends = {one.other for one in forward if one.other is not None}
        assert ends == {*plans.edges.sources(rank), *plans.edges.destinations(rank)}
    for action in every:
        if action.kind.is_message:
            assert action.partner in every
    gradients = {(one.far_stage, one.stage) for one in every if one.kind is K.SEND_B and one.other}
    assert gradients == {skip for skip in skips if skip[0] >= max(first_trained, 1)}


def test_plans_refuse_a_schedule_whose_messages_lack_the_skips():
    lowered = lower(make_schedule("gpipe", 3, 2))
    with raises(ScheduleError, "rank 2", "step 1", ">2F0<", "2RECV_F0<0"):
        Plans(lowered, 3, 2, num_ranks=3, rank=0, skips=[(0, 2)])
    lowered = lower(make_schedule("gpipe", 3, 2), skips=[(0, 2)])
    with raises(ScheduleError, "rank 2", "step 1", ">2RECV_F0<0<", "skip", []):
        Plans(lowered, 3, 2, num_ranks=3, rank=0)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_stages_stay_where_they_are_for_any_number_of_microbatches(ranks):
    """``auto`` deals the stages of few microbatches, and folds those of many into a V."""
    plans = Plans("auto", 2 * ranks, 8, num_ranks=ranks, rank=0)
    assert ranks < 2 or auto(2 * ranks, 1, num_ranks=ranks).placement != plans.placement
    for count in range(1, 9):
        schedule = plans.schedule(count, training=True)
        assert schedule.placement == plans.placement
        assert schedule.num_microbatches == count
        assert plans.plan(count, training=True).actions
