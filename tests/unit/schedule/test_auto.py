"""Schedules for given times and memory: against lower bounds, and against the whole family."""

from __future__ import annotations

from fractions import Fraction
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from mpimesh.errors import ScheduleError
from mpimesh.schedule import Schedule, auto, make_schedule, schedule_names, simulate, validate
from tests.helpers.depth import examples
from tests.helpers.raises import raises

SECONDS = st.fractions(min_value=0, max_value=10, max_denominator=6)


@st.composite
def pipelines(draw):
    """Numbers, times, and a cap for each rank that is just possible or larger."""
    num_ranks, chunks = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    num_stages = num_ranks * chunks
    times = {
        name: draw(st.lists(SECONDS, min_size=size, max_size=size))
        for name, size in (
            ("forward_s", num_stages),
            ("backward_input_s", num_stages),
            ("backward_weight_s", num_stages),
            ("message_s", num_stages - 1),
        )
    }
    caps = draw(st.lists(st.integers(chunks, 12), min_size=num_ranks, max_size=num_ranks))
    return num_stages, draw(st.integers(1, 8)), num_ranks, times, caps


def fits(schedule: Schedule, caps: list[int]) -> bool:
    return all(schedule.peak_in_flight(rank) <= cap for rank, cap in enumerate(caps))


def lower_bound(schedule: Schedule, times: dict[str, list[Fraction]]) -> Fraction:
    """A bound for any order on this placement: one microbatch's way, and the busiest rank's."""
    placement, count = schedule.placement, schedule.num_microbatches
    moved = [
        message if one != other else Fraction(0)
        for message, one, other in zip(times["message_s"], placement, placement[1:], strict=False)
    ]
    steps = zip([Fraction(0), *moved], [Fraction(0), *times["forward_s"][:-1]], strict=True)
    arrivals = list(accumulate(message + forward for message, forward in steps))
    alone = arrivals[-1] + times["forward_s"][-1] + sum(times["backward_input_s"]) + sum(moved)
    bounds = [alone + times["backward_weight_s"][0]]
    for rank in range(schedule.num_ranks):
        stages = schedule.stages_of(rank)
        work = sum(
            times[name][stage]
            for name in ("forward_s", "backward_input_s", "backward_weight_s")
            for stage in stages
        )
        bounds.append(arrivals[stages[0]] + count * work)
    return max(bounds)


@settings(max_examples=examples(60))
@given(pipelines())
def test_no_better_than_can_be_and_no_worse_than_the_family(pipeline):
    num_stages, num_microbatches, num_ranks, times, caps = pipeline
    schedule = auto(num_stages, num_microbatches, num_ranks=num_ranks, max_in_flight=caps, **times)
    validate(schedule)
    assert schedule.num_ranks == num_ranks
    assert fits(schedule, caps)
    assert Schedule.from_string(schedule.to_string()) == schedule
    step_s = simulate(schedule, **times).step_s
    assert step_s >= lower_bound(schedule, times)
    for name in set(schedule_names()) - {"auto", "forward"}:
        try:
            other = make_schedule(name, num_stages, num_microbatches, num_ranks=num_ranks)
        except ScheduleError:
            continue
        if fits(other, caps):
            assert step_s <= simulate(other, **times).step_s


@pytest.mark.parametrize("num_ranks", range(1, 7))
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_the_least_memory_there_is_is_enough(num_ranks, chunks):
    """One microbatch after another, each keeping one activation of every stage."""
    schedule = auto(num_ranks * chunks, 4, num_ranks=num_ranks, max_in_flight=chunks)
    validate(schedule)
    assert {schedule.peak_in_flight(rank) for rank in range(num_ranks)} == {chunks}


def test_stages_may_be_no_multiple_of_the_ranks():
    schedule = auto(5, 6, num_ranks=2, max_in_flight=[3, 4])
    validate(schedule)
    assert schedule.placement == (0, 1, 0, 1, 0)
    assert fits(schedule, [3, 4])


def test_unequal_stages_are_worth_measuring():
    """Where no schedule of the family is made for the times, its weights are put elsewhere."""
    times: dict[str, Any] = {
        "forward_s": [1, 3, 1, 2],
        "backward_input_s": [2, 1, 3, 1],
        "backward_weight_s": [2, 2, 1, 3],
        "message_s": [1, 1, 1],
    }
    schedule = auto(4, 12, max_in_flight=6, **times)
    step_s = simulate(schedule, **times).step_s
    family = [
        simulate(made, **times).step_s
        for name in ("1f1b", "zb1p")
        for made in [make_schedule(name, 4, 12)]
    ]
    assert step_s < min(family)
    assert schedule.name.startswith("auto-")


def test_enough_memory_leaves_no_bubble_between():
    """With equal times, no message to wait for and no cap it finds what ZB-V finds."""
    schedule = auto(8, 16, num_ranks=4)
    assert (
        simulate(schedule, forward_s=1, backward_input_s=1, backward_weight_s=1).step_s
        == 6 * 16 + 3
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_in_flight": 0}, (0, 1)),
        ({"num_ranks": 2, "max_in_flight": [2, 1]}, (1, 2)),
        ({"max_in_flight": [1, 1]}, (4, 2)),
        ({"forward_s": [1, 2]}, ("forward_s", 4, 2)),
        ({"backward_input_s": -1}, ("backward_input_s", 0, -1)),
        ({"backward_weight_s": float("nan")}, ("backward_weight_s", 0)),
        ({"message_s": [1] * 4}, ("message_s", 3, 4)),
    ],
)
def test_wrong_times_and_caps_are_refused(options, message):
    with raises(ScheduleError, *message):
        auto(4, 4, **options)
