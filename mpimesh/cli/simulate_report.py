"""Timetables as a page of text."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from fractions import Fraction

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from mpimesh.arguments import ranks_text, size_text
from mpimesh.schedule import Schedule, Timetable, schedule_table
from mpimesh.trace import svg

__all__ = ["show_comparison", "show_table", "show_timetable"]

_MEMORY = ("memory",)
_MOST_RANKS = 64
_WIDTH = 110

_PARTS = {
    "fill": "filling",
    "inputs": "for inputs",
    "gradients": "for gradients",
    "other": "other",
    "drain": "draining",
}


def show_timetable(timetable: Timetable, peak_bytes: Sequence[float] | None) -> None:
    """Print what a step takes, where its bubble lies, and what each rank does and keeps."""
    schedule = timetable.schedule
    stages, ranks = schedule.num_stages, schedule.num_ranks
    placed = "one on each rank" if stages == ranks else f"on {ranks} rank{'s' * (ranks > 1)}"
    summary = Table.grid(padding=(0, 2, 0, 0))
    summary.add_row("step", _seconds(timetable.step_s, timetable))
    summary.add_row(
        "bubble",
        f"{_seconds(timetable.mean_bubble_s, timetable)} a rank, "
        f"{100 * timetable.bubble_fraction:.1f} % of the time",
    )
    summary.add_row("", str(timetable.mean_idle()))
    _print(
        Text.assemble(
            (schedule.name, "bold"),
            f": {stages} stage{'s' * (stages > 1)}, {placed}, "
            f"{schedule.num_microbatches:,} microbatch{'es' * (schedule.num_microbatches > 1)}",
        ),
        summary,
        Text(),
        _ranks(timetable, peak_bytes),
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
    titles = ("schedule", "stages", "ranks", "step", "bubble", "share", "peak", "= microbatches")
    table = _table(*titles, *_MEMORY[: any(peak_bytes.values())])
    for name, one in timetables.items():
        schedule = one.schedule
        kept = peak_bytes[name]
        peak = max(map(one.peak_activations, range(schedule.num_ranks)))
        table.add_row(
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
    _print(table, Text(), *notes)


_PEAK = (
    "peak: the most activations that a rank keeps, each of one microbatch in one stage; "
    "= microbatches: of one microbatch in all of a rank's stages"
)


def _ranks(timetable: Timetable, peak_bytes: Sequence[float] | None) -> Table:
    num_ranks = timetable.schedule.num_ranks
    parts = [name for name in _PARTS if name != "other"]
    titles = ("rank", "stages", "busy", "idle", "share", *(_PARTS[name] for name in parts), "peak")
    table = _table(*titles, *_MEMORY[: peak_bytes is not None])
    for rank in range(min(num_ranks, _MOST_RANKS)):
        idle = timetable.idle(rank).parts()
        table.add_row(
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
        table.add_row("...", f"{num_ranks - _MOST_RANKS} more: see --json")
    return table


def _table(*titles: str) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for number, title in enumerate(titles):
        table.add_column(title, justify="left" if number == 0 else "right", no_wrap=True)
    return table


def _seconds(seconds: float | Fraction, timetable: Timetable) -> str:
    """Write a part of a step; what is below a billionth of it is rounding."""
    if abs(float(seconds)) <= 1e-9 * float(timetable.step_s):
        return "0"
    return svg.duration(float(seconds))


def _print(*parts: RenderableType) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)
    with console.capture() as page:
        for part in parts:
            console.print(part)
    # Tables are padded to their width, which is of no use in a file.
    sys.stdout.write("".join(line.rstrip() + "\n" for line in page.get().splitlines()))
