"""Events of ranks over time, drawn as one SVG or written for Perfetto (ui.perfetto.dev)."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpimesh.errors import TraceError
from mpimesh.trace import svg
from mpimesh.trace.tracer import CATEGORIES, Category, Event, shift_events

__all__ = [
    "Box",
    "busy_s",
    "chrome_trace",
    "merge_events",
    "timeline_svg",
    "union_s",
    "write_chrome_trace",
]


@dataclass(frozen=True, slots=True)
class _Style:
    label: str
    fill: str
    ink: str
    beside: bool = False  # in a thin lane of its own below the boxes: it runs beside other work


# Okabe and Ito's palette, which colour-blind readers can tell apart; waiting in grey.
_STYLES: dict[Category, _Style] = {
    "forward": _Style("forward", "#0072b2", "#ffffff"),
    "backward": _Style("backward", "#e69f00", "#1f2328"),
    "backward_input": _Style("backward, input", "#e69f00", "#1f2328"),
    "backward_weight": _Style("backward, weights", "#f0e442", "#1f2328"),
    "optimizer": _Style("optimizer", "#009e73", "#ffffff"),
    "wait": _Style("waiting", "#c3c9d1", "#1f2328"),
    "send": _Style("send", "#cc79a7", "#1f2328", beside=True),
    "recv": _Style("receive", "#882255", "#ffffff", beside=True),
    "collective": _Style("collective", "#56b4e9", "#1f2328", beside=True),
    "other": _Style("other", "#7a6a58", "#ffffff"),
}
_IDLE = "#f3f5f7"

_SIDE = 24.0  # from the picture's edge to what is drawn
_BUSY_WIDTH = 52.0  # the column of percentages at the right
_NARROWEST = 1.0  # pixels; events narrower than this are drawn together
_POINTABLE = 4.0  # pixels; boxes narrower than this have no text, and no tip to point at

# Most ranks, height of the boxes, of each lane of messages, and distance to the next rank.
_ROW_SIZES = ((8, 34.0, 6.0, 10.0), (16, 24.0, 5.0, 7.0), (32, 16.0, 4.0, 5.0))
_SMALL_ROW = (11.0, 2.0, 3.0)


@dataclass(frozen=True, slots=True)
class _Frame:
    """Where things lie: pixels for ranks and times."""

    left: float
    right: float
    top: float
    box_height: float
    lane_height: float
    lanes: tuple[Category, ...]  # what runs beside, from the top: one would hide the other
    gap: float
    start_s: float
    span_s: float
    num_ranks: int

    @property
    def row_height(self) -> float:
        return self.box_height + self.lane_height * len(self.lanes)

    @property
    def bottom(self) -> float:
        return self.top + self.num_ranks * (self.row_height + self.gap) - self.gap

    @property
    def seconds_per_pixel(self) -> float:
        return self.span_s / (self.right - self.left)

    def x(self, time_s: float) -> float:
        return self.left + (time_s - self.start_s) / self.seconds_per_pixel

    def width(self, box: Box) -> float:
        return (box.end_s - box.start_s) / self.seconds_per_pixel

    def y(self, row: int) -> float:
        return self.top + row * (self.row_height + self.gap)


def timeline_svg(
    events: Iterable[Event],
    *,
    title: str = "Timeline",
    subtitle: str | None = None,
    width: int = 1200,
    offsets_s: Mapping[int, float] | None = None,
    labels: Mapping[int, str] | None = None,
) -> str:
    """Draw `events`, a row for each rank, over time from left to right.

    A row has boxes for what the rank did itself (forward, backward, optimizer, waiting), with the
    number of the microbatch where it fits. Below them, as they run beside, sends, receives and
    collectives each have a thin lane of their own. At the row's right stands the share of the
    time in which the rank was busy. Pointing at a box shows the name and times of its event,
    unless the box is slim. Events too short to be seen are drawn together, so the picture stays
    small.

    Args:
        events: Events of any ranks. A rank without events has no row.
        title: Stands above the picture.
        subtitle: Stands below the title; if None, the number of ranks, the time from the
            first start to the last end, and the share of it that ranks were busy.
        width: Width in pixels, at least 400.
        offsets_s: For a rank, seconds to add to its times, to put all on one clock.
        labels: For a rank, what stands at its row; ``rank 3`` if left out.

    Returns:
        The text of an SVG file that needs no other file.

    Raises:
        TraceError: If `width` is too small, or an offset is not finite.
    """
    if width < 400:
        raise TraceError(f"a timeline is at least 400 pixels wide, got width={width}")
    rows: dict[int, list[Event]] = {}
    for event in shift_events(events, offsets_s):
        rows.setdefault(event.rank, []).append(event)
    rows = dict(sorted(rows.items()))
    names = [(labels or {}).get(rank, f"rank {rank}") for rank in rows]
    frame = _make_frame(rows, names, width)
    busy = [busy_s(row) / frame.span_s for row in rows.values()]
    if subtitle is None:
        subtitle = _summary(frame, busy)
    height = frame.bottom + 50
    body = [
        svg.text(_SIDE, 34, title, size=17, weight="600"),
        svg.text(_SIDE, 54, subtitle, size=12.5, fill=svg.MUTED),
        *_legend(rows),
        *_background(frame, names, busy),
    ]
    for row, (rank, row_events) in enumerate(rows.items()):
        body += [f'<g data-rank="{rank}">', *_row(frame, row, row_events), "</g>"]
    if not rows:
        middle = (frame.left + frame.right) / 2
        body.append(svg.text(middle, frame.top + 26, "no events", anchor="middle", fill=svg.MUTED))
    return svg.document(width, height, title, body)


def _make_frame(rows: Mapping[int, list[Event]], names: list[str], width: int) -> _Frame:
    every = [event for row in rows.values() for event in row]
    start_s = min((event.start_s for event in every), default=0.0)
    end_s = max((event.end_s for event in every), default=0.0)
    sizes = (size[1:] for size in _ROW_SIZES if len(rows) <= size[0])
    box_height, lane_height, gap = next(sizes, _SMALL_ROW)
    present = {event.category for event in every}
    label_width = max((svg.text_width(name, 12) for name in names), default=0.0)
    return _Frame(
        left=_SIDE + min(label_width, width / 4) + 10,
        right=width - _SIDE - _BUSY_WIDTH,
        top=116.0,
        box_height=box_height,
        lane_height=lane_height,
        lanes=tuple(c for c in _STYLES if c in present and _STYLES[c].beside),
        gap=gap,
        start_s=start_s,
        # Events of no length at all still need an axis.
        span_s=end_s - start_s or 1e-6,
        num_ranks=max(1, len(rows)),
    )


def _summary(frame: _Frame, busy: list[float]) -> str:
    if not busy:
        return "nothing was recorded"
    ranks = "1 rank" if len(busy) == 1 else f"{len(busy)} ranks"
    share = 100 * sum(busy) / len(busy)
    return f"{ranks} · {svg.duration(frame.span_s)} · busy {share:.1f} % of the time"


def _legend(rows: Mapping[int, list[Event]]) -> list[str]:
    present = {event.category for row in rows.values() for event in row}
    parts: list[str] = []
    x = _SIDE
    for category in CATEGORIES:
        if category not in present:
            continue
        style = _STYLES[category]
        height, y = (5, 78) if style.beside else (12, 74)
        parts.append(svg.rect(x, y, 16, height, style.fill, kind="legend", radius=2))
        parts.append(svg.text(x + 22, 84.5, style.label, size=12))
        x += 22 + svg.text_width(style.label, 12) + 18
    return parts


def _background(frame: _Frame, names: list[str], busy: list[float]) -> list[str]:
    """The rows' grounds, the time axis, and what stands at both sides of the rows."""
    width, height = frame.right - frame.left, frame.row_height
    parts = [
        svg.rect(frame.left, frame.y(row), width, height, _IDLE, kind="idle")
        for row in range(frame.num_ranks)
    ]
    size = min(12.0, frame.row_height)
    for row, (name, share) in enumerate(zip(names, busy, strict=True)):
        y = frame.y(row) + frame.row_height / 2 + 0.36 * size
        parts.append(svg.text(frame.left - 10, y, name, size=size, anchor="end"))
        percent = f"{100 * share:.0f} %"
        parts.append(svg.text(frame.right + 46, y, percent, size=size, anchor="end"))
    if names:
        y = frame.top - 8
        parts.append(svg.text(frame.right + 46, y, "busy", size=11, anchor="end", fill=svg.MUTED))
        parts += svg.time_axis(frame.left, frame.right, frame.top, frame.bottom, frame.span_s)
    return parts


def _row(frame: _Frame, row: int, events: list[Event]) -> list[str]:
    itself = [event for event in events if not _STYLES[event.category].beside]
    parts = _lane(frame, itself, frame.y(row), frame.box_height)
    y = frame.y(row) + frame.box_height
    for category in frame.lanes:
        beside = [event for event in events if event.category == category]
        parts += _lane(frame, beside, y + 1, frame.lane_height - 1)
        y += frame.lane_height
    return parts


def _lane(frame: _Frame, events: list[Event], y: float, height: float) -> list[str]:
    narrowest_s = _NARROWEST * frame.seconds_per_pixel
    pointable_s = _POINTABLE * frame.seconds_per_pixel
    boxes = merge_events(events, origin_s=frame.start_s, resolution_s=narrowest_s)
    merged = [box for box in boxes if box.event is None]
    single = [box.event for box in boxes if box.event is not None]
    slim = [box for box in boxes if box.event is not None and box.event.duration_s < pointable_s]
    # What is too short to be seen lies below; a slim box may be inside a wide one, so on top.
    parts = _path(frame, merged, y, height)
    for event in single:
        if event.duration_s >= pointable_s:
            parts += _box(frame, event, y, height)
    return parts + _path(frame, slim, y, height)


def _path(frame: _Frame, boxes: list[Box], y: float, height: float) -> list[str]:
    """Draw boxes with no text and no tip: one path for a colour, a tenth of the bytes."""
    pieces: dict[Category, list[str]] = {}
    for box in boxes:
        width = svg.number(frame.width(box))
        piece = f"M{svg.number(frame.x(box.start_s))} {svg.number(y)}h{width}v{svg.number(height)}"
        pieces.setdefault(box.category, []).append(f"{piece}h-{width}z")
    return [
        f'<path class="{category}" fill="{_STYLES[category].fill}" d="{"".join(one)}"/>'
        for category, one in pieces.items()
    ]


def _box(frame: _Frame, event: Event, y: float, height: float) -> list[str]:
    style = _STYLES[event.category]
    x, width = frame.x(event.start_s), event.duration_s / frame.seconds_per_pixel
    shown = width - 0.8  # a hair of ground between neighbours of one colour
    radius, tip = 1.5 if height >= 8 else 0.0, _tip(frame, event)
    parts = [svg.rect(x, y, shown, height, style.fill, kind=event.category, radius=radius, tip=tip)]
    label = _label(event)
    size = min(12.0, height - 1)
    if label and size >= 8 and svg.text_width(label, size) + 3 <= width:
        middle, baseline = x + shown / 2, y + height / 2 + 0.36 * size
        parts.append(svg.text(middle, baseline, label, size=size, anchor="middle", fill=style.ink))
    return parts


def _label(event: Event) -> str:
    if event.category == "wait" or _STYLES[event.category].beside:
        return ""
    return event.name if event.microbatch is None else str(event.microbatch)


def _tip(frame: _Frame, event: Event) -> str:
    """Return the text shown while the pointer is over a box."""
    moved = f", {event.nbytes:,} bytes" if event.nbytes else ""
    duration, start = svg.duration(event.duration_s), svg.duration(event.start_s - frame.start_s)
    return f"{event.name}: {duration} from {start}{moved}"


# -- few boxes, however many events ---------------------------------------------------------------

_BUSY: frozenset[Category] = frozenset(
    {"forward", "backward", "backward_input", "backward_weight", "optimizer", "other"}
)


@dataclass(frozen=True, slots=True)
class Box:
    """A stretch of time in one colour.

    Attributes:
        category: What to colour it by.
        start_s: Where it begins.
        end_s: Where it ends.
        event: The event it stands for; None if it stands for several narrow ones.
    """

    category: Category
    start_s: float
    end_s: float
    event: Event | None = None


def merge_events(events: Iterable[Event], *, origin_s: float, resolution_s: float) -> list[Box]:
    """Return the boxes of one row, in the order in which to draw them.

    An event at least `resolution_s` long is a box of its own. Shorter ones are thrown into
    columns of that width, each in the colour that has most of its time, and columns of one
    colour side by side become one box. So where events do not lie inside each other, there is
    at most one narrow and one wide box for each column, and one more.

    The narrow boxes come first, to lie below the others: an event too short to be seen must
    not cover one that can be. Of the others, an outer event comes before an inner one.

    Args:
        events: Events of one row.
        origin_s: Where the first column begins.
        resolution_s: Width of a column in seconds.
    """
    wide: list[Event] = []
    columns: dict[int, dict[Category, float]] = {}
    for event in events:
        if event.duration_s >= resolution_s:
            wide.append(event)
        else:
            column = math.floor((event.start_s - origin_s) / resolution_s)
            shares = columns.setdefault(column, {})
            shares[event.category] = shares.get(event.category, 0.0) + event.duration_s
    wide.sort(key=lambda event: (event.start_s, -event.duration_s))
    narrow = _join_columns(columns, origin_s, resolution_s)
    return narrow + [Box(event.category, event.start_s, event.end_s, event) for event in wide]


def _join_columns(
    columns: dict[int, dict[Category, float]], origin_s: float, resolution_s: float
) -> list[Box]:
    boxes: list[Box] = []
    before = None
    for column in sorted(columns):
        shares = columns[column]
        category = max(shares, key=lambda one: shares[one])
        start_s, end_s = (origin_s + edge * resolution_s for edge in (column, column + 1))
        if before == column - 1 and boxes[-1].category == category:
            start_s = boxes.pop().start_s
        boxes.append(Box(category, start_s, end_s))
        before = column
    return boxes


def union_s(events: Iterable[Event]) -> float:
    """Return how long at least one of `events` lasts."""
    total_s, reached_s = 0.0, -math.inf
    for event in sorted(events, key=lambda event: event.start_s):
        if event.end_s > reached_s:
            total_s += event.end_s - max(event.start_s, reached_s)
            reached_s = event.end_s
    return total_s


def busy_s(events: Iterable[Event]) -> float:
    """Return how long a rank worked: computing, without the waits inside it."""
    events = list(events)
    waits = [event for event in events if event.category == "wait"]
    work = [event for event in events if event.category in _BUSY]
    return union_s([*work, *waits]) - union_s(waits)


# -- Chrome's trace event format -------------------------------------------------------------------


def chrome_trace(
    events: Iterable[Event],
    *,
    offsets_s: Mapping[int, float] | None = None,
    labels: Mapping[int, str] | None = None,
) -> dict[str, Any]:
    """Return `events` as an object in Chrome's trace event format.

    A rank is a process. Its thread 0 has what it does itself, waiting too; messages and
    collectives, which run beside its work, lie on threads 1, 2, ..., as many as run at one time: of
    one thread, events that overlap without one inside the other are drawn wrong. An arrow (a flow
    event) goes from each send to its receive, where both have an :attr:`Event.message`.

    Args:
        events: Events of any ranks.
        offsets_s: For a rank, seconds to add to its times, to put all on one clock.
        labels: For a rank, its name; ``rank 3`` if left out.

    Returns:
        The object, with times in microseconds from the first event.

    Raises:
        TraceError: If an offset is not finite.
    """
    shifted = sorted(shift_events(events, offsets_s), key=_by_rank_and_start)
    origin_s = min((event.start_s for event in shifted), default=0.0)
    lanes = _lanes(shifted)
    records = [_complete(event, lane, origin_s) for event, lane in zip(shifted, lanes, strict=True)]
    threads = sorted({(event.rank, lane) for event, lane in zip(shifted, lanes, strict=True)})
    return {
        "traceEvents": [
            *_metadata(threads, labels or {}),
            *records,
            *_flows(shifted, lanes, origin_s),
        ],
        "displayTimeUnit": "ms",
    }


def write_chrome_trace(
    path: str | os.PathLike[str],
    events: Iterable[Event],
    *,
    offsets_s: Mapping[int, float] | None = None,
    labels: Mapping[int, str] | None = None,
) -> None:
    """Write :func:`chrome_trace` to the file `path`.

    Raises:
        TraceError: If an offset is not finite.
        OSError: If the file cannot be written.
    """
    trace = chrome_trace(events, offsets_s=offsets_s, labels=labels)
    text = json.dumps(trace, separators=(",", ":"), allow_nan=False)
    Path(path).write_text(text, encoding="utf-8")


def _by_rank_and_start(event: Event) -> tuple[int, float, float]:
    return event.rank, event.start_s, -event.duration_s


def _lanes(events: list[Event]) -> list[int]:
    """Give each event its thread: 0, or the first one that is free when the event starts."""
    lanes = []
    free_at_s: dict[int, list[float]] = {}
    for event in events:
        if not _STYLES[event.category].beside:
            lanes.append(0)
            continue
        ends = free_at_s.setdefault(event.rank, [])
        free = (lane for lane, end_s in enumerate(ends) if end_s <= event.start_s)
        lane = next(free, len(ends))
        ends[lane : lane + 1] = [event.end_s]
        lanes.append(lane + 1)
    return lanes


def _complete(event: Event, lane: int, origin_s: float) -> dict[str, Any]:
    arguments = {"bytes": event.nbytes or None, "stage": event.stage}
    arguments["microbatch"] = event.microbatch
    return {
        "ph": "X",
        "name": event.name,
        "cat": event.category,
        "pid": event.rank,
        "tid": lane,
        "ts": _microseconds(event.start_s - origin_s),
        "dur": _microseconds(event.duration_s),
        "args": {name: value for name, value in arguments.items() if value is not None},
    }


def _flows(events: list[Event], lanes: list[int], origin_s: float) -> Iterator[dict[str, Any]]:
    """Yield the two ends of an arrow for each message whose send and receive are both there.

    A message's text comes again in the next step. So the last receive is that of the last send, and
    so on backwards: of a ring that is full, the oldest are missing.
    """
    ends: dict[str, tuple[list[int], list[int]]] = {}
    for place, event in enumerate(events):
        if event.message is not None:
            ends.setdefault(event.message, ([], []))[event.category != "send"].append(place)
    number = 0
    for sends, receives in ends.values():
        for pair in zip(reversed(sends), reversed(receives), strict=False):
            number += 1
            for place, phase in zip(pair, ("s", "f"), strict=True):
                event = events[place]
                ts = _microseconds(event.start_s - origin_s)
                if phase == "f":  # at its end, but inside it
                    ts = max(ts, _microseconds(event.end_s - origin_s - 1e-9))
                flow = {"ph": phase, "name": "message", "cat": "message", "id": number}
                yield {
                    **flow,
                    **({"bp": "e"} if phase == "f" else {}),
                    "pid": event.rank,
                    "tid": lanes[place],
                    "ts": ts,
                }


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)  # to the nanosecond, the finest a clock here can tell


def _metadata(threads: list[tuple[int, int]], labels: Mapping[int, str]) -> list[dict[str, Any]]:
    records = []
    for rank in sorted({rank for rank, _ in threads}):
        records.append(_named("process_name", rank, 0, name=labels.get(rank, f"rank {rank}")))
        records.append(_named("process_sort_index", rank, 0, sort_index=rank))
    for rank, lane in threads:
        name = "work" if lane == 0 else "messages" if lane == 1 else f"messages {lane}"
        records.append(_named("thread_name", rank, lane, name=name))
        records.append(_named("thread_sort_index", rank, lane, sort_index=lane))
    return records


def _named(kind: str, rank: int, lane: int, **arguments: str | int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": lane, "args": arguments}
