"""Actions and their text."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from mpimesh.errors import ScheduleError
from mpimesh.schedule import Action, ActionKind
from tests.helpers.raises import raises

NUMBERS = st.integers(0, 10**6)
ACTIONS = st.sampled_from(list(ActionKind)).flatmap(
    lambda kind: st.builds(Action, NUMBERS, st.just(kind), st.just(0) if kind.is_whole else NUMBERS)
)


@given(ACTIONS)
def test_text_reads_back(action):
    assert Action.from_string(str(action)) == action


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F0", Action(2, ActionKind.F, 0)),
        ("0B13", Action(0, ActionKind.B, 13)),
        ("10I7", Action(10, ActionKind.I, 7)),
        ("3W3", Action(3, ActionKind.W, 3)),
        ("2SEND_F0", Action(2, ActionKind.SEND_F, 0)),
        ("1RECV_B5", Action(1, ActionKind.RECV_B, 5)),
        ("2REDUCE_GRAD", Action(2, ActionKind.REDUCE_GRAD, 0)),
        ("0STEP", Action(0, ActionKind.STEP, 0)),
        ("1SEND_F0>3", Action(1, ActionKind.SEND_F, 0, 3)),
        ("3RECV_F0<1", Action(3, ActionKind.RECV_F, 0, 1)),
        ("3SEND_B12>0", Action(3, ActionKind.SEND_B, 12, 0)),
        ("1RECV_B0<30", Action(1, ActionKind.RECV_B, 0, 30)),
    ],
)
def test_text_is_that_of_the_literature(text, action):
    assert str(action) == text
    assert Action.from_string(text) == action


@pytest.mark.parametrize(
    "text",
    [
        *("", "F", "2F", "F0", "2f0", " 2F0", "2F0 ", "2F0\n", "02F0", "2F00", "-1F0", "2F-1"),
        *("2X0", "2SENDF0", "2F0,", "2.0F0", "\u0662F0", "2F0F0"),
        *("1SEND_F0<3", "3RECV_F0>1", "1SEND_F0>03", "1SEND_F0>", "1SEND_F0>3>5", "1SEND_F>3"),
        *("2REDUCE_GRAD0", "STEP", "2STEP0", "2REDUCE_GRADF0"),
    ],
)
def test_any_other_text_is_refused(text):
    with raises(ScheduleError, repr(text)):
        Action.from_string(text)


@pytest.mark.parametrize(("stage", "microbatch"), [(-1, 0), (0, -1)])
def test_negative_numbers_are_refused(stage, microbatch):
    with raises(ScheduleError, -1):
        Action(stage, ActionKind.F, microbatch)


@pytest.mark.parametrize("kind", [ActionKind.REDUCE_GRAD, ActionKind.STEP])
def test_what_is_for_a_whole_stage_has_no_microbatch(kind):
    with raises(ScheduleError, 1):
        Action(0, kind, 1)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("2SEND_F4", "3RECV_F4"),
        ("2SEND_B4", "1RECV_B4"),
        ("0RECV_B1", "1SEND_B1"),
        ("1SEND_F0>3", "3RECV_F0<1"),
        ("3SEND_B0>1", "1RECV_B0<3"),
    ],
)
def test_partner_is_the_other_end_of_a_message(one, other):
    assert str(Action.from_string(one).partner) == other
    assert str(Action.from_string(other).partner) == one
    assert Action.from_string(one).far_stage == Action.from_string(other).stage


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("2F0>4", ("2F0", "other=4")),
        ("1SEND_F0>2", ("1SEND_F0", "other=2", "after")),
        ("1SEND_F0>1", ("1SEND_F0", "other=1", "after")),
        ("3SEND_F0>1", ("3SEND_F0", "other=1", "after")),
        ("3SEND_B0>2", ("3SEND_B0", "other=2", "before")),
        ("1SEND_B0>3", ("1SEND_B0", "other=3", "before")),
        ("3RECV_F0<4", ("3RECV_F0", "other=4", "before")),
    ],
)
def test_a_skip_goes_beyond_the_neighbour_in_its_direction(text, values):
    with raises(ScheduleError, *values):
        Action.from_string(text)


@pytest.mark.parametrize("text", ["2F4", "2B4", "2W4", "2STEP", "0SEND_B1", "0RECV_F1"])
def test_no_partner_is_an_error(text):
    with raises(ScheduleError, text):
        _ = Action.from_string(text).partner


def test_kinds_are_sorted_into_computing_sending_and_receiving():
    messages = {kind for kind in ActionKind if kind.is_message}
    assert messages == {kind for kind in ActionKind if kind.startswith(("SEND_", "RECV_"))}
    assert {kind for kind in ActionKind if kind.computes} == {*"FBIW"}
    assert {kind for kind in ActionKind if kind.is_whole} == {"REDUCE_GRAD", "STEP"}
    assert {kind for kind in messages if kind.is_send} == {ActionKind.SEND_F, ActionKind.SEND_B}
    assert {kind for kind in messages if kind.is_recv} == messages - {
        ActionKind.SEND_F,
        ActionKind.SEND_B,
    }
