"""One thing that happened on a rank: what, when, how long, and how many bytes it moved."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Any, Literal, get_args

from mpimesh.errors import TraceError

__all__ = [
    "CATEGORIES",
    "Category",
    "Event",
    "check_category",
    "events_from_json",
    "events_to_json",
    "shift_events",
]

Category = Literal[
    "forward",
    "backward",
    "backward_input",
    "backward_weight",
    "optimizer",
    "wait",
    "send",
    "recv",
    "collective",
    "other",
]
CATEGORIES: tuple[str, ...] = get_args(Category)
_KNOWN = frozenset(CATEGORIES)


@dataclass(frozen=True, slots=True)
class Event:
    """A stretch of time on one rank.

    Attributes:
        rank: The rank, in whatever group the tracer was made for.
        name: What ran, such as ``2F0`` or ``all_reduce``.
        category: One of :data:`CATEGORIES`. ``wait`` is time in which the rank could do
            nothing else; ``send``, ``recv`` and ``collective`` run beside other work, from
            when they are started until they are known to be done.
        start_s: When it began, in seconds of the rank's clock.
        duration_s: How long it took.
        nbytes: Bytes it moved; 0 if none.
        stage: Pipeline stage it belongs to, if any.
        microbatch: Microbatch it belongs to, if any.

    Raises:
        TraceError: If the category is unknown, a time is not finite, or a number is negative.
    """

    rank: int
    name: str
    category: Category
    start_s: float
    duration_s: float
    nbytes: int = 0
    stage: int | None = None
    microbatch: int | None = None

    def __post_init__(self) -> None:
        check_category(self.category)
        if not (math.isfinite(self.start_s) and 0 <= self.duration_s < math.inf):
            raise TraceError(
                f"event {self.name!r} of rank {self.rank} needs a finite start and a duration of "
                f"at least 0, got start_s={self.start_s} and duration_s={self.duration_s}"
            )
        if self.rank < 0 or self.nbytes < 0:
            raise TraceError(
                f"event {self.name!r} needs a rank and a number of bytes of at least 0, "
                f"got rank={self.rank} and nbytes={self.nbytes}"
            )

    @property
    def end_s(self) -> float:
        """When it ended, in seconds of the rank's clock."""
        return self.start_s + self.duration_s


def check_category(category: str) -> None:
    """Refuse a category that no picture would know.

    Raises:
        TraceError: If `category` is not one of :data:`CATEGORIES`.
    """
    if category not in _KNOWN:
        raise TraceError(f"there is no event category {category!r}; known: {', '.join(CATEGORIES)}")


def shift_events(events: Iterable[Event], offsets_s: Mapping[int, float] | None) -> list[Event]:
    """Put the events of several ranks on one clock.

    Args:
        events: Events of any ranks.
        offsets_s: For a rank, the seconds to add to its times; a rank left out keeps its own.

    Raises:
        TraceError: If an offset is not finite.
    """
    if not offsets_s:
        return list(events)
    return [
        replace(event, start_s=event.start_s + offsets_s.get(event.rank, 0.0)) for event in events
    ]


_FIELDS = [field.name for field in fields(Event)]
_TYPES: dict[str, tuple[type, ...]] = {
    "rank": (int,),
    "name": (str,),
    "category": (str,),
    "start_s": (int, float),
    "duration_s": (int, float),
    "nbytes": (int,),
    "stage": (int, type(None)),
    "microbatch": (int, type(None)),
}


def events_to_json(events: Iterable[Event]) -> str:
    """Return `events` as JSON: the names of the fields once, then one row for each event."""
    rows = [astuple(event) for event in events]
    return json.dumps({"fields": _FIELDS, "rows": rows}, separators=(",", ":"), allow_nan=False)


def events_from_json(text: str | bytes) -> list[Event]:
    """Read what :func:`events_to_json` wrote.

    Raises:
        TraceError: If `text` is anything else; the message names the row.
    """
    try:
        document = json.loads(text)
    except ValueError as error:
        raise TraceError(f"events are not valid JSON: {error}") from None
    if not isinstance(document, dict) or document.get("fields") != _FIELDS:
        raise TraceError(f"events need the JSON object {{'fields': {_FIELDS}, 'rows': [...]}}")
    rows = document.get("rows")
    if not isinstance(rows, list):
        raise TraceError(f"the rows of events must be a list, got {type(rows).__name__}")
    return [_read_row(row, number) for number, row in enumerate(rows)]


def _read_row(row: Sequence[Any], number: int) -> Event:
    if not isinstance(row, list) or len(row) != len(_FIELDS):
        raise TraceError(f"row {number} of events must be a list of {len(_FIELDS)}, got {row!r}")
    for field, value in zip(_FIELDS, row, strict=True):
        # bool is a kind of int, but no field is true or false.
        if not isinstance(value, _TYPES[field]) or isinstance(value, bool):
            raise TraceError(f"row {number} of events: {field} cannot be {value!r}")
    try:
        return Event(*row)
    except TraceError as error:
        raise TraceError(f"row {number} of events: {error}") from None
