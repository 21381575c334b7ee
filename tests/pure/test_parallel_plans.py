"""One rank's part of a step: forward schedules for any placement, and what is pruned."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpimesh.errors import ScheduleError
from mpimesh.parallel.plans import Plans, forward_schedule
from mpimesh.parallel.tags import ALARM_TAG, MAX_STAGES, message_tag
from mpimesh.schedule import Action, ActionKind, forward_only, validate
from mpimesh.transport import MAX_USER_TAG


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
    sends = [
        Action(stage, kind, 0)
        for stage in range(MAX_STAGES)
        for kind in (ActionKind.SEND_F, ActionKind.SEND_B)
    ]
    tags = {message_tag(action) for action in sends}
    assert len(tags) == len(sends)
    assert min(tags) > MAX_USER_TAG + 16
    assert max(tags) < ALARM_TAG <= 32767
    for action in sends[2:100]:
        assert message_tag(action.partner) == message_tag(action)
    # The microbatch is not in the tag, so no number of microbatches is too large.
    assert message_tag(Action(1, ActionKind.SEND_F, 10**9)) in tags
    with pytest.raises(ScheduleError, match="at most 4096 stages"):
        message_tag(Action(MAX_STAGES, ActionKind.SEND_F, 0))
    with pytest.raises(ScheduleError):
        message_tag(Action(0, ActionKind.F, 0))
