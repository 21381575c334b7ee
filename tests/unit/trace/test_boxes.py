"""Boxes: nothing lost that can be seen, and few however many events there are."""

from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st

from mpimesh.trace import CATEGORIES, Event
from mpimesh.trace.timeline import Box, busy_s, merge_events, union_s


def event(category, start_s, duration_s):
    return Event(0, "x", category, start_s, duration_s)


EVENTS = st.lists(
    st.builds(
        event,
        st.sampled_from(CATEGORIES),
        st.integers(0, 400).map(float),
        st.integers(0, 50).map(float),
    ),
    max_size=40,
)


def covered(spans) -> np.ndarray:
    """For each half second whether a span lies over it."""
    mask = np.zeros(1000, dtype=bool)
    for start, end in spans:
        mask[round(2 * start) : round(2 * end)] = True
    return mask


@given(EVENTS, st.integers(1, 20))
def test_boxes_cover_the_events_and_at_most_a_column_more(events, resolution):
    boxes = merge_events(events, origin_s=0.0, resolution_s=float(resolution))
    wide = [box.event for box in boxes if box.event is not None]
    assert sorted(wide, key=id) == sorted(
        (one for one in events if one.duration_s >= resolution), key=id
    )
    short = [one for one in events if one.duration_s < resolution]
    for box in boxes:
        if box.event is None:
            assert box.start_s % resolution == box.end_s % resolution == 0
            inside = [one for one in short if box.start_s <= one.start_s < box.end_s]
            assert box.category in {one.category for one in inside}
    merged = covered((box.start_s, box.end_s) for box in boxes if box.event is None)
    columns = {int(one.start_s // resolution) for one in short}
    expected = covered((column * resolution, (column + 1) * resolution) for column in columns)
    assert np.array_equal(merged, expected)


def test_many_short_events_become_few_boxes():
    tick = 2.0**-13  # exact in binary, so are all sums
    events = [event("wait" if n % 3 == 0 else "forward", n * tick, tick) for n in range(8192)]
    boxes = merge_events(events, origin_s=0.0, resolution_s=2.0**-6)
    assert boxes == [Box("forward", 0.0, 1.0)]


def test_a_column_takes_the_category_with_most_time_not_most_events():
    events = [event("wait", 0.0, 0.1), event("send", 0.2, 0.01), event("send", 0.3, 0.01)]
    assert merge_events(events, origin_s=0.0, resolution_s=1.0) == [Box("wait", 0.0, 1.0)]


def test_short_boxes_lie_below_and_inner_events_above_outer_ones():
    outer, inner, short = event("optimizer", 0, 9), event("wait", 0, 4), event("send", 5, 0.5)
    boxes = merge_events([inner, short, outer], origin_s=0.0, resolution_s=1.0)
    assert [box.category for box in boxes] == ["send", "optimizer", "wait"]


@given(EVENTS)
def test_union_counts_every_moment_once(events):
    mask = covered((one.start_s, one.end_s) for one in events)
    assert union_s(events) == mask.sum() / 2


@given(EVENTS)
def test_busy_is_work_without_the_waits_inside(events):
    beside = ("send", "recv", "collective", "wait")
    work = covered((e.start_s, e.end_s) for e in events if e.category not in beside)
    waits = covered((e.start_s, e.end_s) for e in events if e.category == "wait")
    assert busy_s(events) == (work & ~waits).sum() / 2
