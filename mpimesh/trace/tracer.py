"""Events of a rank, and the ring that records them at about a microsecond each."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from operator import itemgetter
from types import TracebackType
from typing import Any, Literal, get_args

from mpimesh.arguments import as_function, as_int
from mpimesh.errors import TraceError

__all__ = [
    "CATEGORIES",
    "NULL_TRACER",
    "Category",
    "Event",
    "Span",
    "Tracer",
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
        message: For a send or receive, the message: a text that both ends have in common, such as
            ``"0>1 0SEND_F3"``, and no other message that is under way at the time.

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
    message: str | None = None

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
    "message": (str, type(None)),
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
    for name, value in zip(_FIELDS, row, strict=True):
        # bool is a kind of int, but no field is true or false.
        if not isinstance(value, _TYPES[name]) or isinstance(value, bool):
            raise TraceError(f"row {number} of events: {name} cannot be {value!r}")
    try:
        return Event(*row)
    except TraceError as error:
        raise TraceError(f"row {number} of events: {error}") from None


# -- recording ------------------------------------------------------------------------------------

# Sequence number, name, category, start_s, duration_s, nbytes, stage, microbatch, message.
_Entry = tuple[int, str, Category, float, float, int, int | None, int | None, str | None]

_MOST_EVENTS = 1 << 32


class Tracer:
    """The newest events of one rank.

    When the ring is full, the oldest events make room; :attr:`dropped` counts them.

    Threads: one writes (:meth:`record`, :meth:`span`, :meth:`clear`), and any other may call
    :meth:`events` and :attr:`dropped` at the same time, as a watchdog does. That needs no
    lock: an entry is one immutable tuple with its own sequence number, put into its place by
    one store, and a reader copies the ring by one call and sorts by the numbers. It
    sees each entry whole, and may miss only those written while it reads.

    Args:
        rank: The rank that the events belong to; None is that of the mesh or model that it is given
            to first, 0 before.
        capacity: Most events kept, at least 1.
        clock: Gives seconds that never go back.

    Raises:
        TraceError: If `rank` or `capacity` is too small.
    """

    __slots__ = ("_count", "_has_rank", "_slots", "clock", "rank")

    #: False for :data:`NULL_TRACER` only: costly arguments need not be made for it.
    enabled: bool = True

    def __init__(
        self,
        rank: int | None = None,
        *,
        capacity: int = 65536,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._has_rank = rank is not None
        self.rank = 0 if rank is None else as_int(rank, "the rank of a tracer", TraceError)
        capacity = as_int(capacity, "the capacity of a tracer", TraceError)
        if self.rank < 0 or not 1 <= capacity <= _MOST_EVENTS:
            raise TraceError(
                f"a tracer needs a rank of at least 0 and room for 1 to {_MOST_EVENTS} events, "
                f"got rank={rank} and capacity={capacity}"
            )
        self.clock = as_function(clock, "the clock of a tracer", TraceError)
        self._slots: list[_Entry | None] = [None] * capacity
        self._count = 0

    def join(self, rank: int) -> None:
        """Take the rank of a mesh or a model, unless it has one."""
        if not self._has_rank and self.enabled:
            self.rank, self._has_rank = rank, True

    @property
    def capacity(self) -> int:
        """Most events kept."""
        return len(self._slots)

    @property
    def dropped(self) -> int:
        """Number of events that newer ones pushed out since the last :meth:`clear`."""
        return max(0, self._count - len(self._slots))

    def record(
        self,
        name: str,
        category: Category,
        *,
        start_s: float,
        duration_s: float,
        nbytes: int = 0,
        stage: int | None = None,
        microbatch: int | None = None,
        message: str | None = None,
    ) -> None:
        """Keep an event that is over, with times read from :attr:`clock`.

        Args:
            name: Such as ``2F0`` for an action of a pipeline.
            category: What kind of work it was.
            start_s: When it began.
            duration_s: How long it took.
            nbytes: Bytes moved.
            stage: The stage of a pipeline that it was for.
            microbatch: The microbatch that it was for.
            message: What pairs a send with its receive, alike on both ranks.

        Raises:
            TraceError: If the category is unknown.
        """
        check_category(category)
        number = self._count
        entry = (number, name, category, start_s, duration_s, nbytes, stage, microbatch, message)
        self._slots[number % len(self._slots)] = entry
        self._count = number + 1

    def span(
        self,
        name: str,
        category: Category,
        *,
        nbytes: int = 0,
        stage: int | None = None,
        microbatch: int | None = None,
    ) -> Span:
        """Return a context manager that records the time spent in its body.

        Its arguments are as of :meth:`record`. The event is kept also when the body raises.
        ``span.nbytes`` may be set in the body.
        """
        return Span(self, name, category, nbytes, stage, microbatch)

    def events(self) -> list[Event]:
        """Return the kept events in the order in which they were recorded.

        A span is recorded when it ends, so it comes after the spans inside it.
        """
        entries = [entry for entry in self._slots.copy() if entry is not None]
        entries.sort(key=itemgetter(0))  # by sequence number
        return [Event(self.rank, *entry[1:]) for entry in entries]

    def clear(self) -> None:
        """Forget all events, and the count of dropped ones."""
        self._slots = [None] * len(self._slots)
        self._count = 0


@dataclass(slots=True, eq=False)
class Span:
    """The time between ``with`` and the end of its body, see :meth:`Tracer.span`.

    Attributes:
        nbytes: Bytes moved in the body.
    """

    _tracer: Tracer
    _name: str
    _category: Category
    nbytes: int
    _stage: int | None
    _microbatch: int | None
    _start_s: float = field(init=False)

    def __enter__(self) -> Span:
        self._start_s = self._tracer.clock()
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        tracer = self._tracer
        tracer.record(
            self._name,
            self._category,
            start_s=self._start_s,
            duration_s=tracer.clock() - self._start_s,
            nbytes=self.nbytes,
            stage=self._stage,
            microbatch=self._microbatch,
        )


class _NullSpan(Span):
    __slots__ = ()

    def __enter__(self) -> Span:
        return self

    def __exit__(self, *_exception: object) -> None:
        pass


class _NullTracer(Tracer):
    __slots__ = ("_span",)

    enabled = False

    def __init__(self) -> None:
        super().__init__(0, capacity=1, clock=float)
        self._span = _NullSpan(self, "", "other", 0, None, None)

    def record(self, *_values: Any, **_details: Any) -> None:
        """Do nothing."""

    def span(self, *_values: Any, **_details: Any) -> Span:
        """Return the one span that records nothing."""
        return self._span


#: Stands where nothing is to be recorded: it keeps nothing and reads no clock, so all may share it.
NULL_TRACER = _NullTracer()
