"""Turn events into the boxes of a picture: few, however many events there are."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from mpimesh.trace.event import Category, Event

__all__ = ["Box", "busy_s", "merge_events", "union_s"]

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
