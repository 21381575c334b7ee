"""``mpimesh simulate``: what a pipeline's step will take, before it runs."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias, cast

import numpy as np
from rich.table import Table
from rich.text import Text

from mpimesh.arguments import counted, ranks_text, size_text
from mpimesh.cli.console import (
    InputError,
    check_file,
    check_picture,
    print_page,
    table,
    write_picture,
)
from mpimesh.errors import ScheduleError
from mpimesh.schedule import (
    ActionKind,
    Schedule,
    ScheduleName,
    Timetable,
    auto,
    make_schedule,
    schedule_names,
    schedule_svg,
    schedule_table,
    simulate,
    stages_per_rank,
    validate,
)
from mpimesh.trace import svg, write_chrome_trace

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["ALL", "Request", "StepTimes", "run_simulate"]

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
        trace: Where to write a trace, if anywhere.
        table: Whether to print the ranks' lists.
        as_json: Whether to print JSON and nothing else.
    """

    schedule: str
    stages: int | None
    microbatches: int | None
    ranks: int | None
    svg: Path | None
    trace: Path | None
    table: bool
    as_json: bool


def run_simulate(request: Request, times: StepTimes) -> None:
    """Simulate one schedule, or compare all. Starts no MPI.

    Raises:
        InputError: If what was given does not go together, or a file cannot be used.
        MpimeshError: If a schedule cannot be made as asked.
    """
    check_picture("--svg", request.svg)
    check_file("--svg", request.svg)
    check_file("--trace", request.trace)
    if request.svg is not None and request.svg == request.trace:
        raise InputError(f"--svg and --trace would both write {request.svg}: give two names")
    if request.schedule == ALL:
        _compare(request, times)
        return
    timetable = times.simulate(_schedule(request, times))
    peak_bytes = times.peak_bytes(timetable)
    if request.as_json:
        sys.stdout.write(json.dumps(_fields(timetable, peak_bytes), indent=1) + "\n")
    else:
        show_timetable(timetable, peak_bytes)
        if request.table:
            show_table(timetable.schedule)
    if request.svg is not None:
        _draw(timetable, request.svg, quiet=request.as_json)
    if request.trace is not None:
        try:
            write_chrome_trace(request.trace, timetable.events())
        except OSError as error:
            text = f"--trace: {request.trace} cannot be written: {error.strerror}"
            raise InputError(text) from None
        if not request.as_json:
            sys.stdout.write(f"\ntrace: {request.trace}, for ui.perfetto.dev\n")


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
    return make_schedule(cast(ScheduleName, name), stages, microbatches, num_ranks=ranks)


def _compare(request: Request, times: StepTimes) -> None:
    """Compare all schedules that train, on as many ranks as there are stages."""
    for option, value in (("--table", request.table), ("--trace", request.trace)):
        if value:
            raise InputError(f"{option} takes one schedule: name it instead of {ALL}")
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
    cuts = (
        (1, 2) if name == AUTO and num_ranks > 1 else (stages_per_rank(cast(ScheduleName, name)),)
    )
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
    write_picture("--svg", path, schedule_svg(timetables, title=title))
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


# -- the page --------------------------------------------------------------------------------------

_MEMORY = (">memory",)
_MOST_RANKS = 64
_WIDTH = 110

_PARTS = {
    "fill": "filling",
    "inputs": "for\ninputs",
    "gradients": "for\ngradients",
    "other": "other",
    "drain": "draining",
}


def show_timetable(timetable: Timetable, peak_bytes: Sequence[float] | None) -> None:
    """Print what a step takes, where its bubble lies, and what each rank does and keeps."""
    schedule = timetable.schedule
    stages, ranks = schedule.num_stages, schedule.num_ranks
    placed = "one on each rank" if stages == ranks else f"on {counted(ranks, 'rank')}"
    summary = Table.grid(padding=(0, 2, 0, 0))
    summary.add_row("step", _seconds(timetable.step_s, timetable))
    summary.add_row(
        "bubble",
        f"{_seconds(timetable.mean_bubble_s, timetable)} a rank, "
        f"{100 * timetable.bubble_fraction:.1f} % of the time",
    )
    summary.add_row("", str(timetable.mean_idle()))
    print_page(
        Text.assemble(
            (schedule.name, "bold"),
            f": {counted(stages, 'stage')}, {placed}, "
            f"{counted(schedule.num_microbatches, 'microbatch', 'es')}",
        ),
        summary,
        Text(),
        _ranks(timetable, peak_bytes),
        piped_width=_WIDTH,
    )


def show_table(schedule: Schedule) -> None:
    """Print the list of each rank, step by step, without messages."""
    computing = Schedule(
        schedule.name,
        schedule.num_stages,
        schedule.num_microbatches,
        tuple(
            tuple(action for action in actions if not action.kind.is_message)
            for actions in schedule.ranks
        ),
        schedule.placement,
    )
    sys.stdout.write(f"\n{schedule_table(computing)}\n")


def show_comparison(
    timetables: Mapping[str, Timetable],
    peak_bytes: Mapping[str, Sequence[float] | None],
    refused: Mapping[str, str],
) -> None:
    """Print schedules side by side in the order given, and why others were left out."""
    titles = (">stages", ">ranks", ">step", ">bubble", ">share", ">peak", ">= micro-\nbatches")
    rows = table("schedule", *titles, *_MEMORY[: any(peak_bytes.values())], no_wrap=True)
    for name, one in timetables.items():
        schedule = one.schedule
        kept = peak_bytes[name]
        peak = max(map(one.peak_activations, range(schedule.num_ranks)))
        rows.add_row(
            name,
            str(schedule.num_stages),
            str(schedule.num_ranks),
            _seconds(one.step_s, one),
            _seconds(one.mean_bubble_s, one),
            f"{100 * one.bubble_fraction:.1f} %",
            str(peak),
            f"{peak * schedule.num_ranks / schedule.num_stages:,.1f}".removesuffix(".0"),
            *([] if kept is None else [size_text(max(kept))]),
        )
    notes = [Text(f"{name}: {reason}", "dim") for name, reason in refused.items()]
    if len({one.schedule.num_stages for one in timetables.values()}) > 1:
        notes.append(
            Text(
                "schedules with two stages on a rank have the same model, each stage cut into two "
                "halves of half the time",
                "dim",
            )
        )
    notes.append(Text(_PEAK, "dim"))
    print_page(rows, Text(), *notes, piped_width=_WIDTH)


_PEAK = (
    "peak: the most activations that a rank keeps, each of one microbatch in one stage; "
    "= microbatches: of one microbatch in all of a rank's stages"
)


def _ranks(timetable: Timetable, peak_bytes: Sequence[float] | None) -> Table:
    num_ranks = timetable.schedule.num_ranks
    parts = [name for name in _PARTS if name != "other"]
    titles = (">stages", ">busy", ">idle", ">share", *(f">{_PARTS[name]}" for name in parts))
    rows = table("rank", *titles, ">peak", *_MEMORY[: peak_bytes is not None], no_wrap=True)
    for rank in range(min(num_ranks, _MOST_RANKS)):
        idle = timetable.idle(rank).parts()
        rows.add_row(
            str(rank),
            ranks_text(sorted(timetable.schedule.stages_of(rank))),
            _seconds(timetable.busy_s(rank), timetable),
            _seconds(timetable.bubble_s(rank), timetable),
            f"{100 * timetable.idle_fraction(rank):.1f} %",
            *(_seconds(idle[name], timetable) for name in parts),
            str(timetable.peak_activations(rank)),
            *([] if peak_bytes is None else [size_text(peak_bytes[rank])]),
        )
    if num_ranks > _MOST_RANKS:
        rows.add_row("...", f"{num_ranks - _MOST_RANKS} more: see --json")
    return rows


def _seconds(seconds: float | Fraction, timetable: Timetable) -> str:
    """Write a part of a step; what is below a billionth of it is rounding."""
    if abs(float(seconds)) <= 1e-9 * float(timetable.step_s):
        return "0"
    return svg.duration(float(seconds))


# -- the times of a step, as the command line gives them -------------------------------------------

Times: TypeAlias = "npt.NDArray[np.float64]"
"""One number for all stages or edges, or one for each."""

_OPTIONS = {
    "forward": "--forward",
    "backward": "--backward",
    "backward_input": "--backward-input",
    "backward_weight": "--backward-weight",
    "message": "--message or --latency",
    "transfer": "--bandwidth or --activation-bytes",
    "kept_bytes": "--kept-bytes",
}
"""Options that the fields of times are read from."""
_EDGES = ("message", "transfer")


@dataclass(frozen=True, slots=True, eq=False)
class StepTimes:
    """Seconds of the parts of a step.

    Attributes:
        forward: Of F.
        backward: Of B.
        backward_input: Of I.
        backward_weight: Of W.
        message: From a send to its arrival, for each edge between neighbour stages.
        transfer: In which a message keeps the edge from the next, likewise.
        kept_bytes: Bytes, not seconds: what a microbatch leaves in a stage until its backward.
    """

    forward: Times
    backward: Times | None
    backward_input: Times | None
    backward_weight: Times | None
    message: Times
    transfer: Times
    kept_bytes: Times | None = None

    @classmethod
    def read(
        cls,
        *,
        forward: str | None,
        backward: str | None,
        backward_input: str | None,
        backward_weight: str | None,
        message: str | None,
        latency: str | None,
        bandwidth: str | None,
        activation_bytes: str | None,
        kept_bytes: str | None,
    ) -> Self:
        """Read the options. Of a backward that is given as a sum, each half takes half.

        Raises:
            InputError: If one cannot be read, or they do not go together.
        """
        forward_s = _read("--forward", forward, _SECONDS)
        if forward_s is None:
            raise InputError("the time of a forward is missing: give --forward, such as 5ms")
        whole, first, second = _both_halves(
            _read("--backward", backward, _SECONDS),
            _read("--backward-input", backward_input, _SECONDS),
            _read("--backward-weight", backward_weight, _SECONDS),
        )
        if message is not None and (latency or bandwidth or activation_bytes):
            raise InputError(
                "--message is the whole time of a message: give either it, or --latency, "
                "--bandwidth and --activation-bytes"
            )
        delays = _read("--latency", latency, _SECONDS)
        if message is not None:
            delays = _read("--message", message, _SECONDS)
        sizes = _read("--activation-bytes", activation_bytes, _BYTES)
        rates = _read("--bandwidth", bandwidth, _RATES)
        if (sizes is None) != (rates is None):
            raise InputError("--bandwidth and --activation-bytes go together: give both or none")
        if rates is not None and not rates.all():
            raise InputError(f"--bandwidth: a bandwidth must be above 0, got {bandwidth!r}")
        transfers = np.zeros(1)
        if sizes is not None and rates is not None:
            transfers = _combined(np.divide, sizes, rates, "--activation-bytes and --bandwidth")
        return cls(
            forward=forward_s,
            backward=whole,
            backward_input=first,
            backward_weight=second,
            message=np.zeros(1) if delays is None else delays,
            transfer=transfers,
            kept_bytes=_read("--kept-bytes", kept_bytes, _BYTES),
        )

    def simulate(self, schedule: Schedule) -> Timetable:
        """Time `schedule`.

        Raises:
            InputError: If a time that it needs is missing, or there are not as many as stages.
            ScheduleError: If it is wrong.
        """
        self._check_counts(schedule.num_stages)
        kinds = {action.kind for action in schedule.actions()}
        split = kinds & {ActionKind.I, ActionKind.W}
        if (split and self.backward_input is None) or (
            ActionKind.B in kinds and self.backward is None
        ):
            raise InputError(
                f"schedule {schedule.name} has backwards: give --backward, or --backward-input and "
                "--backward-weight"
            )
        return simulate(
            schedule,
            forward_s=_plain(self.forward),
            backward_s=_plain(self.backward),
            backward_input_s=_plain(self.backward_input),
            backward_weight_s=_plain(self.backward_weight),
            message_s=_plain(self.message),
            transfer_s=_plain(self.transfer),
        )

    def find_schedule(
        self, num_stages: int, num_microbatches: int, *, num_ranks: int | None
    ) -> Schedule:
        """Find the schedule that is fastest with these times.

        Raises:
            InputError: If the times of the halves of a backward are missing.
            ScheduleError: If numbers do not fit each other.
        """
        if self.backward_input is None or self.backward_weight is None:
            raise InputError(
                "a schedule is found by the times: give --backward, or --backward-input and "
                "--backward-weight"
            )
        self._check_counts(num_stages)
        return auto(
            num_stages,
            num_microbatches,
            num_ranks=num_ranks,
            forward_s=_plain(self.forward),
            backward_input_s=_plain(self.backward_input),
            backward_weight_s=_plain(self.backward_weight),
            message_s=_plain(self.message + self.transfer),
        )

    def peak_bytes(self, timetable: Timetable) -> list[float] | None:
        """Return the most memory that activations take on each rank; None if it is not known."""
        if self.kept_bytes is None:
            return None
        schedule = timetable.schedule
        kept_bytes = np.broadcast_to(self.kept_bytes, schedule.num_stages).tolist()
        return [timetable.peak_bytes(rank, kept_bytes) for rank in range(schedule.num_ranks)]

    def halved(self) -> StepTimes:
        """Return the times of the same model with each stage cut into two equal ones.

        An edge inside what was one stage is as its neighbours are.
        """
        cut: dict[str, Times] = {}
        for name in _OPTIONS:
            times: Times | None = getattr(self, name)
            if times is None:
                continue
            if name not in _EDGES:
                times = times / 2
            if times.size > 1:
                twice = np.repeat(times, 2)
                # The edge inside the last stage is as the one before it.
                times = np.append(twice, times[-1]) if name in _EDGES else twice
            cut[name] = times
        return replace(self, **cut)

    def _check_counts(self, num_stages: int) -> None:
        for name, option in _OPTIONS.items():
            times: Times | None = getattr(self, name)
            needed = num_stages - (name in _EDGES)
            if times is not None and times.size not in (1, needed):
                what = "pair of neighbour stages" if name in _EDGES else "stage"
                raise InputError(
                    f"{option} needs one number, or one for each {what}, which are {needed} for "
                    f"{num_stages} stages; got {times.size}"
                )


def _both_halves(
    whole: Times | None, first: Times | None, second: Times | None
) -> tuple[Times | None, Times | None, Times | None]:
    """Complete B from I and W, or I and W from B."""
    if whole is None:
        if (first is None) != (second is None):
            raise InputError(
                "half of a backward is missing: give --backward-input and --backward-weight, or "
                "one of them and --backward, their sum"
            )
        if first is not None and second is not None:
            whole = _combined(np.add, first, second, "--backward-input and --backward-weight")
    elif first is not None:
        second = _rest(whole, first, "--backward-input") if second is None else second
    elif second is not None:
        first = _rest(whole, second, "--backward-weight")
    else:
        first = second = whole / 2
    return whole, first, second


def _rest(whole: Times, half: Times, option: str) -> Times:
    rest = _combined(np.subtract, whole, half, f"--backward and {option}")
    if rest.min() < 0:
        raise InputError(f"{option} is more than --backward, the sum of both halves")
    return rest


def _combined(operation: np.ufunc, first: Times, second: Times, options: str) -> Times:
    try:
        both: Times = operation(first, second)
    except ValueError:
        raise InputError(
            f"{options} need one number, or one for each stage; got {first.size} and {second.size}"
        ) from None
    return both


def _plain(times: Times | None) -> Any:
    """Return times as a schedule takes them: one number, or a list."""
    return times if times is None else times.item() if times.size == 1 else times.tolist()


class _Quantity(NamedTuple):
    """A kind of number that an option takes: its name, an example, and the factors of units."""

    name: str
    example: str
    units: dict[str, float]


_NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([^\s]*)\s*")
_SECONDS = _Quantity(
    "a time",
    "5ms",
    {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0},
)
_BYTES = _Quantity(
    "a size",
    "8MiB",
    {
        "B": 1,
        **{f"{prefix}B": 1000**power for power, prefix in enumerate("kMGT", start=1)},
        **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", start=1)},
    },
)
_RATES = _Quantity(
    "a bandwidth", "12.5GB/s", {f"{unit}/s": factor for unit, factor in _BYTES.units.items()}
)


def _read(option: str, text: str | None, quantity: _Quantity) -> Times | None:
    """Read one number with a unit, or several with commas between; None if there is no text.

    Raises:
        InputError: If one cannot be read. Only 0 needs no unit.
    """
    if text is None:
        return None
    values = []
    for part in text.split(","):
        match = _NUMBER.fullmatch(part)
        number, unit = match.groups() if match else ("", "")
        value = float(number or "nan")
        if (unit not in quantity.units and (unit or value != 0)) or not math.isfinite(value):
            raise InputError(
                f"{option}: {part.strip()!r} is not {quantity.name}: write a number and a unit, "
                f"such as {quantity.example}; units: {', '.join(quantity.units)}"
            )
        values.append(value * quantity.units.get(unit, 1.0))
    return np.array(values)
