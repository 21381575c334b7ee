"""Pipeline schedules as data: made, lowered to messages, proved, and timed."""

from __future__ import annotations

from mpimesh.schedule.auto import (
    ScheduleName,
    auto,
    make_schedule,
    schedule_names,
    stages_per_rank,
    vhalf,
    vmin,
)
from mpimesh.schedule.costs import Costs, Partition, partition
from mpimesh.schedule.draw import schedule_svg
from mpimesh.schedule.generators import (
    dualpipev,
    forward_only,
    gpipe,
    interleaved,
    looped_bfs,
    one_f_one_b,
    zb1p,
    zb2p,
    zbv,
)
from mpimesh.schedule.lower import Edges, lower
from mpimesh.schedule.schedule import Action, ActionKind, Schedule, schedule_table
from mpimesh.schedule.simulate import (
    Idle,
    TimedAction,
    Timetable,
    action_overhead_s,
    measured_step,
    predicted_step,
    simulate,
)
from mpimesh.schedule.validate import Proof, most_waiting, validate

__all__ = [
    "Action",
    "ActionKind",
    "Costs",
    "Edges",
    "Idle",
    "Partition",
    "Proof",
    "Schedule",
    "ScheduleName",
    "TimedAction",
    "Timetable",
    "action_overhead_s",
    "auto",
    "dualpipev",
    "forward_only",
    "gpipe",
    "interleaved",
    "looped_bfs",
    "lower",
    "make_schedule",
    "measured_step",
    "most_waiting",
    "one_f_one_b",
    "partition",
    "predicted_step",
    "schedule_names",
    "schedule_svg",
    "schedule_table",
    "simulate",
    "stages_per_rank",
    "validate",
    "vhalf",
    "vmin",
    "zb1p",
    "zb2p",
    "zbv",
]
