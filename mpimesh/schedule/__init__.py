"""Pipeline schedules as data: made, lowered to messages, proved, and timed."""

from __future__ import annotations

from mpimesh.schedule.action import Action, ActionKind
from mpimesh.schedule.arrivals import most_waiting
from mpimesh.schedule.auto import auto
from mpimesh.schedule.costs import Costs
from mpimesh.schedule.dualpipev import dualpipev
from mpimesh.schedule.edges import Edges
from mpimesh.schedule.forward_only import forward_only
from mpimesh.schedule.gpipe import gpipe
from mpimesh.schedule.interleaved import interleaved
from mpimesh.schedule.looped_bfs import looped_bfs
from mpimesh.schedule.lower import lower
from mpimesh.schedule.measured import action_overhead_s, measured_step, predicted_step
from mpimesh.schedule.one_f_one_b import one_f_one_b
from mpimesh.schedule.partition import Partition, partition
from mpimesh.schedule.picture import schedule_svg
from mpimesh.schedule.registry import make_schedule, schedule_names, stages_per_rank
from mpimesh.schedule.schedule import Schedule
from mpimesh.schedule.simulate import simulate
from mpimesh.schedule.table import schedule_table
from mpimesh.schedule.timetable import Idle, TimedAction, Timetable
from mpimesh.schedule.validate import Proof, validate
from mpimesh.schedule.vhalf import vhalf
from mpimesh.schedule.vmin import vmin
from mpimesh.schedule.zb1p import zb1p
from mpimesh.schedule.zb2p import zb2p
from mpimesh.schedule.zbv import zbv

__all__ = [
    "Action",
    "ActionKind",
    "Costs",
    "Edges",
    "Idle",
    "Partition",
    "Proof",
    "Schedule",
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
