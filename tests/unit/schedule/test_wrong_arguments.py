"""Every public call of schedules, with one wrong argument at a time."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from mpimesh import schedule
from mpimesh.errors import ScheduleError
from mpimesh.schedule import Action, ActionKind, Costs, Edges, Schedule, make_schedule, simulate
from tests.helpers.raises import raises
from tests.helpers.wrong_arguments import outcomes, uncovered

ONE_F = make_schedule("1f1b", 2, 3)


def timetable() -> schedule.Timetable:
    return simulate(ONE_F, forward_s=1, backward_s=2)


TIMES: dict[str, Any] = {
    "forward_s": 1.0,
    "backward_input_s": [1.0, Fraction(3, 2)],
    "backward_weight_s": 1,
    "message_s": 0.5,
}
SIZES = {"num_stages": 2, "num_microbatches": 3}
LOOPED = {"num_stages": 4, "num_microbatches": 3, "num_ranks": 2}

CASES: dict[str, Any] = {
    **{
        name: lambda name=name: (getattr(schedule, name), SIZES)
        for name in ("gpipe", "one_f_one_b", "zb1p", "zb2p", "forward_only")
    },
    **{
        name: lambda name=name: (getattr(schedule, name), LOOPED)
        for name in ("interleaved", "looped_bfs", "zbv", "vhalf", "vmin", "dualpipev")
    },
    "auto": lambda: (schedule.auto, {**SIZES, "num_ranks": 2, **TIMES, "max_in_flight": 4}),
    "make_schedule": lambda: (make_schedule, {"name": "interleaved", **LOOPED}),
    "stages_per_rank": lambda: (schedule.stages_per_rank, {"name": "zbv"}),
    "Action": lambda: (
        Action,
        {"stage": 1, "kind": ActionKind.SEND_F, "microbatch": 2, "other": 3},
    ),
    "Action.from_string": lambda: (Action.from_string, {"text": "2SEND_F0"}),
    "Schedule": lambda: (
        Schedule,
        {"name": "mine", **SIZES, "ranks": ONE_F.ranks, "placement": (0, 1)},
    ),
    "Schedule.stage_rank": lambda: (ONE_F.stage_rank, {"stage": 1}),
    "Schedule.stages_of": lambda: (ONE_F.stages_of, {"rank": 1}),
    "Schedule.peak_in_flight": lambda: (ONE_F.peak_in_flight, {"rank": 1}),
    "Schedule.from_string": lambda: (Schedule.from_string, {"text": str(ONE_F)}),
    "Costs.of": lambda: (Costs.of, {"num_stages": 2, **TIMES}),
    "Costs.joined": lambda: (Costs.of(3).joined, {"sizes": [1, 2]}),
    "Edges": lambda: (Edges, {"num_stages": 4, "skips": ((1, 3),)}),
    "Edges.of": lambda: (Edges.of, {"schedule": ONE_F, "skips": ()}),
    "lower": lambda: (schedule.lower, {"schedule": ONE_F, "skips": (), "reduce_grad": True}),
    "most_waiting": lambda: (
        schedule.most_waiting,
        {"schedule": schedule.lower(ONE_F), "rank": 1},
    ),
    "partition": lambda: (
        schedule.partition,
        {"layer_s": [1, 2, 3], "num_stages": 2, "message_s": 0.5},
    ),
    "simulate": lambda: (simulate, {"schedule": ONE_F, **TIMES}),
    "validate": lambda: (schedule.validate, {"schedule": ONE_F, "skips": ()}),
    "schedule_table": lambda: (schedule.schedule_table, {"schedule": ONE_F, "mark": (0, 1)}),
    "schedule_svg": lambda: (
        schedule.schedule_svg,
        {"timetables": timetable(), "title": "t", "width": 500},
    ),
}

# Where one argument does not fit another, either is named.
ALSO = {
    "num_stages": "num_stages|stages|backward_input_s",
    "backward_input_s": "backward_s",
    "backward_weight_s": "backward_s",
    "layer_s": "num_stages",
    "text": "line 1|is not an action",
}
LEFT_OUT = {
    "ScheduleName",
    # Results, which users read.
    "ActionKind",
    "Costs",
    "Edges.between",
    "Edges.destinations",
    "Edges.number",
    "Edges.sources",
    "Idle",
    "Partition",
    "Proof",
    "TimedAction",
    "Timetable",
    # Of events that were measured, and without arguments.
    "action_overhead_s",
    "measured_step",
    "predicted_step",
    "schedule_names",
}


@pytest.mark.parametrize("name", CASES)
def test_wrong_arguments_are_refused_by_name(name):
    found = list(outcomes(CASES[name], also=ALSO))
    assert not found, "\n" + "\n".join(found)


def test_every_public_call_is_tried():
    assert uncovered(schedule, CASES, LEFT_OUT) == []


@pytest.mark.parametrize("name", schedule.schedule_names())
def test_a_schedule_too_long_to_be_listed_is_refused(name):
    """It was listed, until memory or patience ended."""
    for stages, microbatches in ((2, 2**70), (2**70, 2), (2**12, 2**12)):
        with raises(ScheduleError, name, stages, microbatches):
            make_schedule(name, stages, microbatches)
