"""Record events into a ring of fixed size, at about a microsecond each."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from mpimesh.arguments import as_function, as_int
from mpimesh.errors import TraceError
from mpimesh.trace.event import Category, Event, check_category

__all__ = ["NULL_TRACER", "NullTracer", "Span", "Tracer"]

# Sequence number, name, category, start_s, duration_s, nbytes, stage, microbatch.
_Entry = tuple[int, str, Category, float, float, int, int | None, int | None]

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
        rank: The rank that the events belong to.
        capacity: Most events kept, at least 1.
        clock: Gives seconds that never go back.

    Raises:
        TraceError: If `rank` or `capacity` is too small.
    """

    __slots__ = ("_count", "_slots", "clock", "rank")

    #: False for :data:`NULL_TRACER` only: costly arguments need not be made for it.
    enabled: bool = True

    def __init__(
        self, rank: int, *, capacity: int = 65536, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.rank = as_int(rank, "the rank of a tracer", TraceError)
        capacity = as_int(capacity, "the capacity of a tracer", TraceError)
        if rank < 0 or not 1 <= capacity <= _MOST_EVENTS:
            raise TraceError(
                f"a tracer needs a rank of at least 0 and room for 1 to {_MOST_EVENTS} events, "
                f"got rank={rank} and capacity={capacity}"
            )
        self.clock = as_function(clock, "the clock of a tracer", TraceError)
        self._slots: list[_Entry | None] = [None] * capacity
        self._count = 0

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
    ) -> None:
        """Keep an event that is over, with times read from :attr:`clock`.

        Raises:
            TraceError: If the category is unknown.
        """
        check_category(category)
        number = self._count
        entry = (number, name, category, start_s, duration_s, nbytes, stage, microbatch)
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

        The event is kept also when the body raises. ``span.nbytes`` may be set in the body.
        """
        return Span(self, name, category, nbytes, stage, microbatch)

    def events(self) -> list[Event]:
        """Return the kept events in the order in which they were recorded.

        A span is recorded when it ends, so it comes after the spans inside it.
        """
        entries = [entry for entry in self._slots.copy() if entry is not None]
        entries.sort(key=_sequence_number)
        return [Event(self.rank, *entry[1:]) for entry in entries]

    def clear(self) -> None:
        """Forget all events, and the count of dropped ones."""
        self._slots = [None] * len(self._slots)
        self._count = 0


def _sequence_number(entry: _Entry) -> int:
    return entry[0]


class Span:
    """The time between ``with`` and the end of its body, see :meth:`Tracer.span`.

    Attributes:
        nbytes: Bytes moved in the body.
    """

    __slots__ = ("_category", "_microbatch", "_name", "_stage", "_start_s", "_tracer", "nbytes")

    def __init__(
        self,
        tracer: Tracer,
        name: str,
        category: Category,
        nbytes: int,
        stage: int | None,
        microbatch: int | None,
    ) -> None:
        self._tracer = tracer
        self._name = name
        self._category: Category = category
        self._stage = stage
        self._microbatch = microbatch
        self._start_s = 0.0
        self.nbytes = nbytes

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

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        pass


class NullTracer(Tracer):
    """A tracer that keeps nothing and reads no clock; use :data:`NULL_TRACER`."""

    __slots__ = ("_span",)

    enabled = False

    def __init__(self) -> None:
        super().__init__(0, capacity=1, clock=_no_time)
        self._span = _NullSpan(self, "", "other", 0, None, None)

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
    ) -> None:
        """Do nothing."""

    def span(
        self,
        name: str,
        category: Category,
        *,
        nbytes: int = 0,
        stage: int | None = None,
        microbatch: int | None = None,
    ) -> Span:
        """Return the one span that records nothing."""
        return self._span


def _no_time() -> float:
    return 0.0


#: Stands where nothing is to be recorded. It keeps nothing, so all may share it.
NULL_TRACER = NullTracer()
