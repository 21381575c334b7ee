"""Draw timetables: a row for each rank, time from left to right."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from mpimesh.arguments import as_int, check_kind, counted, shown
from mpimesh.errors import ScheduleError
from mpimesh.schedule.schedule import Action, ActionKind
from mpimesh.schedule.simulate import Timetable
from mpimesh.trace import svg

__all__ = ["schedule_svg"]


# Okabe and Ito's palette, which colour-blind readers can tell apart.
_FILLS = {
    ActionKind.F: (0x00, 0x72, 0xB2),
    ActionKind.B: (0xE6, 0x9F, 0x00),
    ActionKind.I: (0xD5, 0x5E, 0x00),
    ActionKind.W: (0x00, 0x9E, 0x73),
}
_LABELS = {
    ActionKind.F: "forward",
    ActionKind.B: "backward",
    ActionKind.I: "backward, input",
    ActionKind.W: "backward, weights",
}
# How much white is in the colour of a rank's first, second, ... stage.
_WHITE = (0.0, 0.5, 0.72, 0.84)

_ORDER = tuple(_FILLS)

_TEXT_SIZES = (11.0, 9.5, 8.0)
_HAIR = 0.8  # pixels of ground between neighbours of one colour
_ALIKE = 0.12  # columns whose shares differ by no more are drawn as one


_Colour = tuple[ActionKind, int]
"""A kind of action, on the first, second, ... stage of a rank: each has a colour of its own."""


def _fill(kind: ActionKind, chunk: int) -> str:
    """Return the colour of an action on the `chunk`-th of its rank's stages."""
    white = _WHITE[min(chunk, len(_WHITE) - 1)]
    red, green, blue = (round(part + white * (255 - part)) for part in _FILLS[kind])
    return f"#{red:02x}{green:02x}{blue:02x}"


@dataclass(frozen=True, slots=True)
class _Bar:
    """A computation of a rank.

    Attributes:
        action: What is computed.
        chunk: On which of the rank's stages, counted from 0.
        start_s: When it starts.
        end_s: When it ends.
    """

    action: Action
    chunk: int
    start_s: float
    end_s: float

    @property
    def colour(self) -> _Colour:
        """The key of its colour."""
        return self.action.kind, self.chunk


def _width_of(number: str, size: float) -> float:
    """Return how wide a box must be for the number in it."""
    return svg.text_width(number, size) + 1.0


def _text_size(number: str, width: float, height: float) -> float:
    """Return the largest size of text with which `number` fits a box; 0 if none does."""
    fits = (size for size in _TEXT_SIZES if _width_of(number, size) <= width and size + 2 <= height)
    return next(fits, 0.0)


def _draw_boxes(
    frame: _Grid, y: float, bars: Iterable[_Bar], text: Mapping[_Colour, float], *, tips: bool
) -> list[str]:
    """Draw a box for each bar, with the number of its microbatch where it fits.

    Args:
        frame: Where.
        y: The upper edge of the row.
        bars: What to draw, each once.
        text: Size of the numbers in boxes of a colour; none in others.
        tips: Whether pointing at a box shows its action and times, which takes ten times the bytes.
    """
    parts: list[str] = []
    strokes: dict[str, list[str]] = {}
    numbers: list[str] = []
    for bar in bars:
        x, width = frame.x(bar.start_s), frame.x(bar.end_s) - frame.x(bar.start_s)
        visible = width - min(_HAIR, 0.2 * width)
        if tips:
            took, start = svg.duration(bar.end_s - bar.start_s), svg.duration(bar.start_s)
            tip, kind = f"{bar.action}: {took} from {start}", bar.action.kind
            box = (x, y, visible, frame.height, _fill(*bar.colour))
            parts.append(svg.rect(*box, kind=kind, radius=1.5, tip=tip))
        else:
            stroke = f"M{x:.1f} 0h{visible:.1f}"
            strokes.setdefault(_fill(*bar.colour), []).append(stroke)
        number = str(bar.action.microbatch)
        size = text.get(bar.colour, 0.0)
        if size and _width_of(number, size) <= width:
            middle, baseline = x + visible / 2, y + frame.height / 2 + 0.36 * size
            ink = svg.INK if bar.chunk > 0 or bar.action.kind is ActionKind.B else "#ffffff"
            numbers.append(svg.text(middle, baseline, number, size=size, anchor="middle", fill=ink))
    for colour, one in strokes.items():
        parts.append(
            f'<path transform="translate(0 {svg.number(y + frame.height / 2)})" '
            f'stroke="{colour}" stroke-width="{svg.number(frame.height)}" d="{"".join(one)}"/>'
        )
    return parts + numbers


def _draw_columns(
    frame: _Grid, y: float, bars: Iterable[_Bar], *, column_s: float, num_columns: int
) -> list[str]:
    """Draw columns of time, filled up to the share of it in which the rank computes.

    Within a column, the colours have the shares of their kinds of computations. Neighbours that
    are alike are drawn as one, with their mean.

    Args:
        frame: Where.
        y: The upper edge of the row.
        bars: What to draw.
        column_s: How much time a column stands for.
        num_columns: How many there are.
    """
    shares: dict[_Colour, list[float]] = {}
    for bar in bars:
        mine = shares.setdefault(bar.colour, [0.0] * num_columns)
        column, start_s = int(bar.start_s / column_s), bar.start_s
        while start_s < bar.end_s and column < num_columns:
            end_s = min(bar.end_s, (column + 1) * column_s)
            mine[column] += (end_s - start_s) / column_s
            start_s, column = end_s, column + 1
    keys = sorted(shares, key=lambda key: (_ORDER.index(key[0]), key[1]))
    runs = _runs(list(zip(*(shares[key] for key in keys), strict=True)))
    # Areas from the bottom up to a sum of shares: the highest first, below the others.
    areas: list[str] = []
    for number, key in enumerate(keys, start=1):
        roofs = [(column, sum(means[:number])) for column, means in runs]
        colour = _fill(*key)
        areas.append(f'<path fill="{colour}" d="{_area(frame, y, roofs, column_s, num_columns)}"/>')
    return areas[::-1]


def _runs(columns: list[tuple[float, ...]]) -> list[tuple[int, list[float]]]:
    """Join neighbours that are alike: the first column of each run, and the run's mean shares.

    Means preserve the areas. Empty columns join only empty ones.
    """
    runs: list[tuple[int, list[float]]] = []
    length = 0
    for number, shares in enumerate(columns):
        if runs:
            means = runs[-1][1]
            alike = all(abs(a - b) <= _ALIKE for a, b in zip(shares, means, strict=True))
            if alike and any(shares) == any(means):
                length += 1
                for index, share in enumerate(shares):
                    means[index] += (share - means[index]) / length
                continue
        runs.append((number, list(shares)))
        length = 1
    return runs


def _area(
    frame: _Grid, y: float, roofs: list[tuple[int, float]], column_s: float, num_columns: int
) -> str:
    """Outline an area with a flat roof from each column on."""
    bottom = y + frame.height
    path = [f"M{svg.number(frame.x(0.0))} {svg.number(bottom)}"]
    for column, share in roofs:
        height = svg.number(bottom - frame.height * min(share, 1.0))
        path.append(f"H{svg.number(frame.x(column * column_s))}V{height}")
    end = svg.number(frame.x(num_columns * column_s))
    return "".join([*path, f"H{end}V{svg.number(bottom)}z"])


_IDLE = "#f3f5f7"
_SIDE = 24.0  # from the picture's edge to what is drawn
_USUAL_WIDTH, _GREATEST_WIDTH = 1200, 1800
_NUMBERS = 88.0  # the columns of numbers at the right
_NARROWEST_BOX = 2.0  # pixels, in the mean of a row: else columns stand for many
_MOST_BOXES = 20_000
_MOST_NAMED = 4  # timetables whose steps stand below the title
_MOST_TIPS = 1500  # boxes that say what they are
_NARROWEST_COLUMN = 3.0
_IN_A_COLUMN = 8  # computations at least, or the columns would jump up and down

# Most ranks, height of a row, and distance to the next.
_ROW_SIZES = ((8, 30.0, 5.0), (16, 22.0, 4.0), (32, 15.0, 3.0))
_SMALL_ROW = (10.0, 2.0)


def schedule_svg(
    timetables: Timetable | Mapping[str, Timetable],
    *,
    title: str | None = None,
    width: int | None = None,
) -> str:
    """Draw when each rank computes what, as one SVG.

    A box is an action, with the number of its microbatch where it fits; the stages of a
    rank have shades of their own; idle time is left blank. At the right of a row stands the share
    of the step in which the rank is idle, and the most activations that it stores. Where there are
    too many actions for boxes, a row has columns, filled by the shares of time of what is
    computed, so the picture stays small.

    Args:
        timetables: What to draw; several are drawn below each other on one time axis, with their
            names.
        title: Stands above the picture; if None, what schedule it is.
        width: Width in pixels, at least 400; if None, 1200, or up to 1800 for room for the numbers.

    Returns:
        The text of an SVG file that needs no other file.

    Raises:
        ScheduleError: If `width` is too small, or there is no timetable.
    """
    tables = {"": timetables} if isinstance(timetables, Timetable) else timetables
    if (
        not isinstance(tables, Mapping)
        or not tables
        or not all(isinstance(one, Timetable) for one in tables.values())
    ):
        raise ScheduleError(
            "timetables must be a Timetable, as simulate() gives, or a dict of them by name, "
            f"got {shown(timetables)}"
        )
    if width is not None:
        as_int(width, "width", ScheduleError, least=400, most=100_000)
    if title is not None:
        check_kind(title, str, "title", ScheduleError, wanted="a text")
    first = next(iter(tables.values()))
    bars = [
        [_bars(table, rank) for rank in range(table.schedule.num_ranks)]
        for table in tables.values()
    ]
    frame = _make_frame(tables, _good_width(tables, bars) if width is None else width)
    counts = [len(row) for rows in bars for row in rows]
    merged = max(counts) * _NARROWEST_BOX > frame.right - frame.left or sum(counts) > _MOST_BOXES
    title = _title(first) if title is None else title
    body = [
        svg.text(_SIDE, 34, title, size=17, weight="600"),
        svg.text(_SIDE, 54, _summary(tables), size=12.5, fill=svg.MUTED),
        *_legend(bars, merged=merged),
        *svg.time_axis(frame.left, frame.right, frame.tops[0], frame.bottom, frame.span_s),
    ]
    tips = sum(counts) <= _MOST_TIPS
    for number, (name, table) in enumerate(tables.items()):
        body += _panel(frame, number, name, table)
        body += _rows(frame, number, table, bars[number], merged=merged, tips=tips)
    return svg.document(frame.right + _NUMBERS + _SIDE, frame.bottom + 50, title, body)


@dataclass(frozen=True, slots=True)
class _Grid:
    """The positions: pixels for ranks and times."""

    left: float
    right: float
    tops: tuple[float, ...]  # of the rows of each timetable
    height: float
    gap: float
    bottom: float
    span_s: float

    def x(self, time_s: float) -> float:
        return self.left + time_s / self.span_s * (self.right - self.left)

    def y(self, panel: int, rank: int) -> float:
        return self.tops[panel] + rank * (self.height + self.gap)


def _good_width(tables: Mapping[str, Timetable], bars: list[list[list[_Bar]]]) -> int:
    """Return a usual width, or a greater one if only that has room for the numbers."""
    narrow_s = min((one for rows in bars for one in _narrow_s(rows).values()), default=0.0)
    if not narrow_s:
        return _USUAL_WIDTH
    span_s = max(float(table.step_s) for table in tables.values())
    needed = span_s / narrow_s * _width_of(_longest(bars), 9.5)
    wanted = needed + 2 * _SIDE + _NUMBERS + 60
    return math.ceil(wanted) if _USUAL_WIDTH < wanted <= _GREATEST_WIDTH else _USUAL_WIDTH


def _narrow_s(rows: list[list[_Bar]]) -> dict[_Colour, float]:
    """Return for each colour how long short ones of its bars are; a tenth are shorter still."""
    lengths: dict[_Colour, list[float]] = {}
    for bar in (bar for row in rows for bar in row):
        lengths.setdefault(bar.colour, []).append(bar.end_s - bar.start_s)
    return {colour: sorted(one)[len(one) // 10] for colour, one in lengths.items()}


def _longest(bars: list[list[list[_Bar]]]) -> str:
    return str(
        max((bar.action.microbatch for rows in bars for row in rows for bar in row), default=0)
    )


def _make_frame(tables: Mapping[str, Timetable], width: int) -> _Grid:
    num_ranks = max(table.schedule.num_ranks for table in tables.values())
    sizes = (size[1:] for size in _ROW_SIZES if num_ranks <= size[0])
    height, gap = next(sizes, _SMALL_ROW)
    y, tops = 116.0, []
    for name, table in tables.items():
        y += 22.0 if name else 0.0
        tops.append(y)
        y += table.schedule.num_ranks * (height + gap) + 18.0
    return _Grid(
        left=_SIDE + svg.text_width(f"rank {num_ranks - 1}", 12) + 10,
        right=width - _SIDE - _NUMBERS,
        tops=tuple(tops),
        height=height,
        gap=gap,
        bottom=y - 18.0 - gap,
        # A step of no time at all still needs an axis.
        span_s=max(float(table.step_s) for table in tables.values()) or 1e-6,
    )


def _bars(table: Timetable, rank: int) -> list[_Bar]:
    chunks = {stage: number for number, stage in enumerate(table.schedule.stages_of(rank))}
    return [
        _Bar(action, chunks[action.stage], float(start_s), float(end_s))
        for action, start_s, end_s in table.computing(rank)
        if end_s > start_s
    ]


def _title(table: Timetable) -> str:
    schedule = table.schedule
    stages, ranks = schedule.num_stages, schedule.num_ranks
    on_ranks = "" if stages == ranks else f" on {counted(ranks, 'rank')}"
    microbatches = counted(schedule.num_microbatches, "microbatch", "es")
    return f"{schedule.name}: {counted(stages, 'stage')}{on_ranks}, {microbatches}"


def _summary(tables: Mapping[str, Timetable]) -> str:
    if len(tables) == 1:
        return _figures(*tables.values())
    if len(tables) > _MOST_NAMED:
        ends = [float(table.step_s) for table in tables.values()]
        return f"steps from {svg.duration(min(ends))} to {svg.duration(max(ends))}"
    steps = (f"{name} {svg.duration(float(table.step_s))}" for name, table in tables.items())
    return f"step {', '.join(steps)}"


def _figures(table: Timetable) -> str:
    bubble = svg.duration(float(table.mean_bubble_s))
    return (
        f"step {svg.duration(float(table.step_s))} · bubble {bubble} a rank, "
        f"{100 * table.bubble_fraction:.1f} % of the time"
    )


def _legend(bars: list[list[list[_Bar]]], *, merged: bool) -> list[str]:
    present = {bar.colour for rows in bars for row in rows for bar in row}
    num_chunks = 1 + max((chunk for _, chunk in present), default=0)
    parts: list[str] = []
    x = _SIDE
    for kind, label in _LABELS.items():
        chunks = sorted(chunk for one, chunk in present if one is kind)
        for chunk in chunks:
            parts.append(svg.rect(x, 74, 14, 12, _fill(kind, chunk), kind="legend", radius=2))
            x += 16
        if chunks:
            parts.append(svg.text(x + 4, 84.5, label, size=12))
            x += svg.text_width(label, 12) + 20
    parts.append(svg.rect(x, 74, 14, 12, _IDLE, kind="legend", radius=2, stroke=svg.FRAME))
    parts.append(svg.text(x + 20, 84.5, "idle", size=12))
    x += 66
    notes = ["peak: most activations kept"]
    if num_chunks > 1:
        notes.append("lighter: a rank's later stages")
    if merged:
        notes.append("heights: shares of the time")
    parts.append(svg.text(x, 84.5, " · ".join(notes), size=12, fill=svg.MUTED))
    return parts


def _panel(frame: _Grid, number: int, name: str, table: Timetable) -> Iterator[str]:
    """Draw the frame of the rows of a timetable, and the ground below them."""
    above = frame.tops[number] - 8
    if name:
        yield svg.text(frame.left, above, name, size=13, weight="600")
        x = frame.left + svg.text_width(name, 15) + 10
        yield svg.text(x, above, _figures(table), size=12, fill=svg.MUTED)
    for end, label in ((frame.right + 42, "idle"), (frame.right + _NUMBERS, "peak")):
        yield svg.text(end, above, label, size=11, anchor="end", fill=svg.MUTED)
    size = min(12.0, frame.height)
    ground = frame.x(float(table.step_s)) - frame.left
    for rank in range(table.schedule.num_ranks):
        y = frame.y(number, rank)
        yield svg.rect(frame.left, y, ground, frame.height, _IDLE, kind="idle")
        middle = y + frame.height / 2 + 0.36 * size
        yield svg.text(frame.left - 10, middle, f"rank {rank}", size=size, anchor="end")
        idle = f"{100 * table.idle_fraction(rank):.0f} %"
        yield svg.text(frame.right + 42, middle, idle, size=size, anchor="end")
        peak = str(table.peak_activations(rank))
        yield svg.text(frame.right + _NUMBERS, middle, peak, size=size, anchor="end")


def _rows(
    frame: _Grid,
    number: int,
    table: Timetable,
    rows: list[list[_Bar]],
    *,
    merged: bool,
    tips: bool,
) -> Iterator[str]:
    column_s, num_columns = _columns(frame, table, rows)
    # All bars of a colour have their numbers or none, but for a few very short ones.
    longest = _longest([rows])
    text = {
        colour: _text_size(longest, frame.x(short_s) - frame.left, frame.height)
        for colour, short_s in _narrow_s(rows).items()
    }
    for rank, bars in enumerate(rows):
        y = frame.y(number, rank)
        yield f'<g data-rank="{rank}">'
        if merged:
            yield from _draw_columns(frame, y, bars, column_s=column_s, num_columns=num_columns)
        else:
            yield from _draw_boxes(frame, y, bars, text, tips=tips)
        yield "</g>"


def _columns(frame: _Grid, table: Timetable, rows: list[list[_Bar]]) -> tuple[float, int]:
    """Return how long the columns of a timetable are, and how many."""
    step_s = float(table.step_s)
    count = sum(map(len, rows))
    mean_s = sum(bar.end_s - bar.start_s for row in rows for bar in row) / max(1, count)
    pixel_s = frame.span_s / (frame.right - frame.left)
    wanted_s = max(_NARROWEST_COLUMN * pixel_s, _IN_A_COLUMN * mean_s)
    num_columns = max(1, math.floor(step_s / wanted_s))
    return (step_s or frame.span_s) / num_columns, num_columns


def _in_notebook(timetable: Timetable) -> str:
    return schedule_svg(timetable)


Timetable._repr_html_ = _in_notebook  # type: ignore[attr-defined]
