"""The ring: order, what falls out, spans, a reader beside the writer, the null tracer."""

from __future__ import annotations

import threading
from collections import deque

import pytest
from hypothesis import given, strategies as st

from mpimesh.errors import TraceError
from mpimesh.trace import NULL_TRACER, Event, Tracer
from tests.helpers.raises import raises


class Clock:
    """Goes on by one second each time it is read."""

    def __init__(self) -> None:
        self.reads = 0

    def __call__(self) -> float:
        self.reads += 1
        return float(self.reads)


@given(st.integers(1, 7), st.integers(0, 30))
def test_the_newest_events_are_kept_in_order(capacity, count):
    tracer = Tracer(3, capacity=capacity)
    newest: deque[str] = deque(maxlen=capacity)
    for number in range(count):
        tracer.record(str(number), "other", start_s=0.0, duration_s=0.0)
        newest.append(str(number))
    assert [event.name for event in tracer.events()] == list(newest)
    assert tracer.dropped == count - len(newest)
    assert tracer.capacity == capacity
    assert {event.rank for event in tracer.events()} <= {3}


def test_spans_measure_their_body_and_end_before_the_span_around_them():
    tracer = Tracer(1, clock=Clock())
    with tracer.span("outer", "optimizer"), tracer.span("0F2", "forward", stage=0, microbatch=2):
        pass
    with tracer.span("1SEND_F2", "send", nbytes=8) as span:
        span.nbytes += 16
    assert tracer.events() == [
        Event(1, "0F2", "forward", 2.0, 1.0, 0, 0, 2),
        Event(1, "outer", "optimizer", 1.0, 3.0),
        Event(1, "1SEND_F2", "send", 5.0, 1.0, 24),
    ]


def test_a_span_whose_body_raises_is_kept_and_the_error_goes_on():
    tracer = Tracer(0, clock=Clock())
    with pytest.raises(ZeroDivisionError), tracer.span("0F0", "forward"):
        _ = 1 / 0
    assert [event.name for event in tracer.events()] == ["0F0"]


def test_clear_forgets_everything():
    tracer = Tracer(0, capacity=2)
    for _ in range(5):
        tracer.record("x", "other", start_s=0.0, duration_s=0.0)
    tracer.clear()
    assert tracer.events() == []
    assert tracer.dropped == 0
    tracer.record("y", "other", start_s=0.0, duration_s=0.0)
    assert [event.name for event in tracer.events()] == ["y"]


@pytest.mark.parametrize(("rank", "capacity"), [(-1, 1), (0, 0), (0, -5)])
def test_wrong_sizes_are_refused(rank, capacity):
    with raises(TraceError, f"rank={rank}", f"capacity={capacity}"):
        Tracer(rank, capacity=capacity)


def test_an_unknown_category_is_refused_where_it_is_recorded():
    tracer = Tracer(0)
    with raises(TraceError, "category", "'foward'"):
        tracer.record("x", "foward", start_s=0.0, duration_s=0.0)  # type: ignore[arg-type]
    assert tracer.events() == []


def test_a_reader_beside_the_writer_sees_whole_events_in_order():
    tracer = Tracer(0, capacity=64)
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            # All fields tell the same number, so a torn event would show.
            tracer.record(str(number), "other", start_s=number, duration_s=number, nbytes=number)
            number += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        while tracer.dropped < 1000:
            pass
        for _ in range(300):
            events = tracer.events()
            numbers = [event.nbytes for event in events]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
            assert all(event.name == str(event.nbytes) for event in events)
            assert all(event.start_s == event.duration_s == event.nbytes for event in events)
    finally:
        stop.set()
        writer.join()


def test_the_null_tracer_keeps_nothing_and_is_a_tracer():
    assert isinstance(NULL_TRACER, Tracer)
    assert not NULL_TRACER.enabled
    assert Tracer(0).enabled
    with NULL_TRACER.span("0F0", "forward", stage=0) as span:
        span.nbytes = 5
    NULL_TRACER.record("x", "other", start_s=0.0, duration_s=1.0)
    assert NULL_TRACER.events() == []
    assert NULL_TRACER.dropped == 0
    assert NULL_TRACER.clock() == 0.0
    with pytest.raises(ZeroDivisionError), NULL_TRACER.span("0F0", "forward"):
        _ = 1 / 0
