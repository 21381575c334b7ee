"""``python -m mpimesh simulate``: what a pipeline's step will take, before it runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpimesh.cli.quantities import InputError
from mpimesh.cli.simulate_report import show_comparison, show_table, show_timetable
from mpimesh.cli.step_times import StepTimes
from mpimesh.errors import ScheduleError
from mpimesh.schedule import (
    Schedule,
    Timetable,
    make_schedule,
    schedule_names,
    schedule_svg,
    stages_per_rank,
    validate,
)

__all__ = ["ALL", "Request", "run_simulate"]

ALL = "all"
AUTO = "auto"
_MOST_SEARCHED = 16_384  # stages times microbatches; half a minute


@dataclass(frozen=True, slots=True)
class Request:
    """The request of a simulation: its schedule, and the way to show it.

    Attributes:
        schedule: A name, a file, or ``all``.
        stages: Number of stages; None if a file tells it.
        microbatches: Number of microbatches; None if a file tells it.
        ranks: Number of ranks; None for as many as the schedule takes.
        svg: Where to write a picture, if anywhere.
        table: Whether to print the ranks' lists.
        as_json: Whether to print JSON and nothing else.
    """

    schedule: str
    stages: int | None
    microbatches: int | None
    ranks: int | None
    svg: Path | None
    table: bool
    as_json: bool


def run_simulate(request: Request, times: StepTimes) -> None:
    """Simulate one schedule, or compare all. Starts no MPI.

    Raises:
        InputError: If what was given does not go together, or a file cannot be used.
        MpimeshError: If a schedule cannot be made as asked.
    """
    if request.schedule == ALL:
        _compare(request, times)
        return
    timetable = times.simulate(_schedule(request, times))
    if request.as_json:
        sys.stdout.write(
            json.dumps(_fields(timetable, times.peak_bytes(timetable)), indent=1) + "\n"
        )
    else:
        show_timetable(timetable, times.peak_bytes(timetable))
        if request.table:
            show_table(timetable.schedule)
    if request.svg is not None:
        _draw(timetable, request.svg, quiet=request.as_json)


def _schedule(request: Request, times: StepTimes) -> Schedule:
    if request.schedule in schedule_names():
        stages, microbatches = _numbers(request)
        return _make(request.schedule, stages, microbatches, request.ranks, times)
    path = Path(request.schedule)
    if not path.is_file():
        raise InputError(
            f"there is no schedule and no file {request.schedule!r}: give one of "
            f"{', '.join(schedule_names())}, or {ALL}, or a file that holds one as text"
        )
    try:
        schedule = Schedule.from_string(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ScheduleError) as error:
        raise InputError(f"no schedule can be read from {path}: {error}") from None
    for option, given, told in (
        ("--stages", request.stages, schedule.num_stages),
        ("--microbatches", request.microbatches, schedule.num_microbatches),
        ("--ranks", request.ranks, schedule.num_ranks),
    ):
        if given not in (None, told):
            raise InputError(
                f"{option} is {given}, but the schedule in {path} is for {told}: leave it out"
            )
    validate(schedule)
    return schedule


def _numbers(request: Request) -> tuple[int, int]:
    for option, given in (("--stages", request.stages), ("--microbatches", request.microbatches)):
        if given is None:
            raise InputError(f"{option} is missing: a schedule that is not a file needs it")
        if given < 1:
            raise InputError(f"{option} must be at least 1, got {given}")
    return request.stages or 1, request.microbatches or 1


def _make(
    name: str, stages: int, microbatches: int, ranks: int | None, times: StepTimes
) -> Schedule:
    """Make a schedule; the one that is found for given times gets them."""
    if name == AUTO:
        return times.find_schedule(stages, microbatches, num_ranks=ranks)
    return make_schedule(name, stages, microbatches, num_ranks=ranks)


def _compare(request: Request, times: StepTimes) -> None:
    """Compare all schedules that train, on as many ranks as there are stages."""
    if request.table:
        raise InputError(f"--table prints one schedule: name it instead of {ALL}")
    num_ranks, num_microbatches = _numbers(request)
    if request.ranks not in (None, num_ranks):
        raise InputError(
            f"--schedule {ALL} compares on as many ranks as stages: leave --ranks out, "
            f"got {request.ranks} for {num_ranks} stages"
        )
    done: dict[str, Timetable] = {}
    peak_bytes: dict[str, list[float] | None] = {}
    refused: dict[str, str] = {}
    for name in schedule_names():
        if name == AUTO and num_ranks * num_microbatches > _MOST_SEARCHED:
            refused[name] = (
                f"left out, as it takes minutes for {num_ranks} stages and {num_microbatches:,} "
                f"microbatches; --schedule {AUTO} does it"
            )
            continue
        try:
            timetable, mine = _fastest(name, num_ranks, num_microbatches, times)
        except ScheduleError as error:
            refused[name] = str(error).splitlines()[0]
        else:
            if timetable.schedule.trains:
                done[timetable.schedule.name] = timetable
                peak_bytes[timetable.schedule.name] = mine.peak_bytes(timetable)
    done = dict(sorted(done.items(), key=lambda item: (item[1].step_s, item[0])))
    if request.as_json:
        rows = [_fields(one, peak_bytes[name], ranks=False) for name, one in done.items()]
        told = {"schedules": rows, "refused": refused}
        sys.stdout.write(json.dumps(told, indent=1) + "\n")
    else:
        show_comparison(done, peak_bytes, refused)
    if request.svg is not None:
        _draw(done, request.svg, quiet=request.as_json)


def _fastest(
    name: str, num_ranks: int, num_microbatches: int, times: StepTimes
) -> tuple[Timetable, StepTimes]:
    """Time a schedule on so many ranks, with one stage on each or two, as it wants.

    Returns:
        The outcome, and the times with stages cut as they were for it.
    """
    cuts = (1, 2) if name == AUTO and num_ranks > 1 else (stages_per_rank(name),)
    found = []
    for cut in cuts if num_ranks > 1 else (1,):
        mine = times.halved() if cut == 2 else times
        schedule = _make(name, cut * num_ranks, num_microbatches, num_ranks, mine)
        found.append((mine.simulate(schedule), mine))
    return min(found, key=lambda one: one[0].step_s)


def _draw(timetables: Timetable | Mapping[str, Timetable], path: Path, *, quiet: bool) -> None:
    title = None
    if not isinstance(timetables, Timetable):
        schedule = next(iter(timetables.values())).schedule
        title = f"{schedule.num_ranks} ranks, {schedule.num_microbatches} microbatches"
    try:
        path.write_text(schedule_svg(timetables, title=title), encoding="utf-8")
    except OSError as error:
        raise InputError(f"--svg: {path} cannot be written: {error.strerror}") from None
    if not quiet:
        sys.stdout.write(f"\npicture: {path}\n")


def _fields(
    timetable: Timetable, peak_bytes: Sequence[float] | None, *, ranks: bool = True
) -> dict[str, Any]:
    """Return what was found, for JSON: seconds and bytes as numbers."""
    schedule = timetable.schedule
    fields: dict[str, Any] = {
        "schedule": schedule.name,
        "stages": schedule.num_stages,
        "ranks": schedule.num_ranks,
        "microbatches": schedule.num_microbatches,
        "step_s": float(timetable.step_s),
        "bubble_s": float(timetable.mean_bubble_s),
        "bubble_fraction": timetable.bubble_fraction,
        "peak_activations": max(map(timetable.peak_activations, range(schedule.num_ranks))),
        "peak_bytes": None if peak_bytes is None else max(peak_bytes),
    }
    if ranks:
        fields["per_rank"] = [
            {
                "rank": rank,
                "stages": schedule.stages_of(rank),
                "busy_s": float(timetable.busy_s(rank)),
                "idle_s": float(timetable.bubble_s(rank)),
                "idle_fraction": timetable.idle_fraction(rank),
                "idle": {
                    name: float(part_s) for name, part_s in timetable.idle(rank).parts().items()
                },
                "peak_activations": timetable.peak_activations(rank),
                "peak_bytes": None if peak_bytes is None else peak_bytes[rank],
            }
            for rank in range(schedule.num_ranks)
        ]
    return fields
