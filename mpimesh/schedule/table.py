"""Print a schedule as a table of ranks by steps, with one action marked."""

from __future__ import annotations

from mpimesh.arguments import as_int, as_items, shown
from mpimesh.errors import ScheduleError
from mpimesh.schedule.placement import MOST_FORWARDS
from mpimesh.schedule.schedule import Schedule, check_schedule

__all__ = ["schedule_table"]

# What is shown around a mark: enough to see why, and still one screen.
_RANKS_AROUND = 4
_STEPS_AROUND = 4


def schedule_table(schedule: Schedule, *, mark: tuple[int, int] | None = None) -> str:
    """Return `schedule` as text: a line for each rank, a column for each step of its list.

    A column is a place in the lists, not a moment: ranks reach it at different times.

    Args:
        schedule: What to print.
        mark: Rank and step of an action to point at. Only what stands around it is
            shown. The step after a rank's last one marks the end of its list.

    Example:
        >>> print(schedule_table(make_schedule("1f1b", 2, 2), mark=(1, 1)))
        step    0    1      2    3
        rank 0  0F0  0F1    0B0  0B1
        rank 1  1F0  >1B0<  1F1  1B1  <-- here
    """
    check_schedule(schedule)
    if mark is not None:
        place = as_items(mark, "mark", ScheduleError, wanted="a rank and a step")
        if len(place) != 2:
            raise ScheduleError(f"mark must be a rank and a step, got {shown(mark)}")
        mark = (
            as_int(place[0], "rank of mark", ScheduleError, least=0, most=schedule.num_ranks - 1),
            as_int(place[1], "step of mark", ScheduleError, least=0, most=MOST_FORWARDS),
        )
    num_steps = max(len(actions) for actions in schedule.ranks)
    ranks, steps = range(schedule.num_ranks), range(num_steps)
    if mark is not None:
        ranks = _around(mark[0], _RANKS_AROUND, schedule.num_ranks)
        steps = _around(mark[1], _STEPS_AROUND, max(num_steps, mark[1] + 1))
        num_steps = max(num_steps, mark[1] + 1)
    left = ["..."] if steps.start > 0 else []
    right = ["..."] if steps.stop < num_steps else []
    rows = [["step", *left, *map(str, steps), *right]]
    for rank in ranks:
        cells = [_cell(schedule, rank, step, marked=(rank, step) == mark) for step in steps]
        end = ["<-- here"] if mark is not None and rank == mark[0] else []
        rows.append([f"rank {rank}", *[""] * len(left), *cells, *[""] * len(right), *end])
    lines = _align(rows)
    if ranks.start > 0:
        lines.insert(1, "...")
    if ranks.stop < schedule.num_ranks:
        lines.append("...")
    return "\n".join(lines)


def _around(center: int, distance: int, count: int) -> range:
    return range(max(0, center - distance), min(count, center + distance + 1))


def _cell(schedule: Schedule, rank: int, step: int, *, marked: bool) -> str:
    actions = schedule.ranks[rank]
    text = str(actions[step]) if step < len(actions) else ""
    return f">{text or '(end)'}<" if marked else text


def _align(rows: list[list[str]]) -> list[str]:
    widths = [0] * max(map(len, rows))
    for row in rows:
        for column, cell in enumerate(row):
            widths[column] = max(widths[column], len(cell))
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()
        for row in rows
    ]
