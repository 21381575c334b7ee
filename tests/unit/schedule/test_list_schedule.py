"""List scheduling for any placement, times, caps, and order of preference."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from mpimesh.errors import ScheduleError
from mpimesh.schedule import Action, ActionKind, Schedule, gpipe, simulate, validate, vhalf, vmin
from mpimesh.schedule.auto import BuildingBlock, list_schedule, repeat
from mpimesh.schedule.costs import Costs
from tests.helpers.depth import deep_but
from tests.helpers.raises import raises

K = ActionKind
SECONDS = st.fractions(min_value=0, max_value=5, max_denominator=4)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], int, dict[str, Any], list[int], dict[Any, int]]:
    """A placement of any shape, times, just enough room or more, and any preferences."""
    num_ranks = draw(st.integers(1, 4))
    more = draw(st.lists(st.integers(0, num_ranks - 1), max_size=5))
    placement = draw(st.permutations([*range(num_ranks), *more]))
    count = draw(st.integers(1, 5))
    size = len(placement)
    times = {
        name: draw(st.lists(SECONDS, min_size=many, max_size=many))
        for name, many in (
            ("forward_s", size),
            ("backward_input_s", size),
            ("backward_weight_s", size),
            ("message_s", size - 1),
        )
    }
    caps = [placement.count(rank) + draw(st.integers(0, 4)) for rank in range(num_ranks)]
    kinds = [(stage, kind) for stage in range(size) for kind in (K.F, K.I, K.W)]
    ranking = dict(zip(draw(st.permutations(kinds)), range(3 * size), strict=True))
    return placement, count, times, caps, ranking


def solved(problem):
    placement, count, times, caps, ranking = problem
    schedule = list_schedule(
        "any",
        placement,
        count,
        Costs.of(len(placement), **times),
        caps=caps,
        rule=lambda action: (ranking[action.stage, action.kind],),
    )
    assert schedule is not None
    return schedule


@given(problems())
def test_any_rule_ends_and_keeps_to_its_room(problem):
    placement, _, _, caps, _ = problem
    schedule = solved(problem)
    validate(schedule)
    assert schedule.placement == tuple(placement)
    for rank, cap in enumerate(caps):
        assert schedule.peak_in_flight(rank) <= cap


@given(problems())
def test_nobody_waits_who_could_compute_weights(problem):
    _, _, times, _, _ = problem
    schedule = solved(problem)
    timetable = simulate(schedule, **times)
    for rank in range(schedule.num_ranks):
        left, free_s = 0, None
        for action, start_s, end_s in timetable.computing(rank):
            if left and free_s is not None:
                assert start_s == free_s
            left += {K.I: 1, K.W: -1}.get(action.kind, 0)
            free_s = end_s
        assert left == 0


def whole_orders(schedule: Schedule) -> list[list[Action]]:
    return [
        [Action(a.stage, K.I if a.kind is K.B else a.kind, a.microbatch) for a in actions]
        for actions in schedule.ranks
    ]


def test_orders_are_kept_and_weights_fill_the_gaps():
    schedule = list_schedule(
        "filled", [0, 1], 2, Costs.of(2), caps=[2, 2], orders=whole_orders(gpipe(2, 2))
    )
    assert schedule is not None
    assert [",".join(map(str, actions)) for actions in schedule.ranks] == [
        "0F0,0F1,0I0,0I1,0W0,0W1",
        "1F0,1F1,1I0,1I1,1W0,1W1",
    ]


def test_orders_that_need_more_room_than_there_is_give_nothing():
    orders = whole_orders(gpipe(2, 3))
    costs = Costs.of(2)
    assert list_schedule("room", [0, 1], 3, costs, caps=[3, 3], orders=orders) is not None
    assert list_schedule("room", [0, 1], 3, costs, caps=[3, 2], orders=orders) is None


def test_a_building_block_that_needs_more_than_its_cap_is_refused():
    with raises(ScheduleError, 2, 4):
        repeat("tight", BuildingBlock((1, 1, 1, 1)), 4, 8, cap=2)


def test_a_building_block_that_needs_a_rank_twice_at_a_time_is_refused():
    with raises(ScheduleError, 0, 3, "(0, 5, 6, 11)"):
        repeat("twice", BuildingBlock((1, 1, 1, 1)), 3, 8, cap=9)


@pytest.mark.parametrize("num_ranks", deep_but(range(9, 33), 9, 16, 31))
def test_the_blocks_of_the_family_fit_many_ranks(num_ranks):
    for generator, cap in ((vhalf, (num_ranks + 2) // 2), (vmin, (num_ranks + 4) // 3)):
        schedule = generator(2 * num_ranks, num_ranks)
        validate(schedule)
        assert max(map(schedule.peak_in_flight, range(num_ranks))) <= 2 * cap
