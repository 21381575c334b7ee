"""Events: what they refuse, their JSON, and one clock for all."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from mpimesh.errors import TraceError
from mpimesh.trace import CATEGORIES, Event, events_from_json, events_to_json
from mpimesh.trace.tracer import shift_events
from tests.helpers.raises import raises

TIMES = st.floats(allow_nan=False, allow_infinity=False)
EVENTS = st.builds(
    Event,
    rank=st.integers(0, 10**6),
    name=st.text(),
    category=st.sampled_from(CATEGORIES),
    start_s=TIMES,
    duration_s=TIMES.map(abs),
    nbytes=st.integers(0, 2**62),
    stage=st.none() | st.integers(0, 99),
    microbatch=st.none() | st.integers(0, 99),
)


@given(st.lists(EVENTS, max_size=5))
def test_json_reads_back(events):
    text = events_to_json(events)
    assert events_from_json(text) == events
    assert events_from_json(text.encode()) == events


def test_json_names_the_fields_once():
    text = events_to_json([Event(1, "2F0", "forward", 0.5, 0.25, 8, 2, 0)])
    assert json.loads(text) == {
        "fields": [
            *("rank", "name", "category", "start_s", "duration_s"),
            *("nbytes", "stage", "microbatch", "message"),
        ],
        "rows": [[1, "2F0", "forward", 0.5, 0.25, 8, 2, 0, None]],
    }


GOOD = [1, "2F0", "forward", 0.5, 0.25, 8, 2, 0, None]
FIELDS = json.loads(events_to_json([]))["fields"]


@pytest.mark.parametrize(
    ("place", "value", "values"),
    [
        (0, "1", ("rank", "'1'")),
        (0, True, ("rank", True)),
        (0, -1, ("'2F0'", "rank=-1")),
        (1, None, ("name", None)),
        (2, "sleep", ("category", "'sleep'")),
        (3, None, ("start_s", None)),
        (4, -1.0, ("'2F0'", "duration_s=-1.0")),
        (5, 1.5, ("nbytes", 1.5)),
        (6, "0", ("stage", "'0'")),
        (8, 0, ("message", 0)),
    ],
)
def test_a_wrong_row_is_named(place, value, values):
    row = [*GOOD[:place], value, *GOOD[place + 1 :]]
    with raises(TraceError, "row 1", *values):
        events_from_json(json.dumps({"fields": FIELDS, "rows": [GOOD, row]}))


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("", ("JSON", "line 1 column 1")),
        ("[]", ("'fields'", "'rows'")),
        ('{"rows": []}', ("'fields'", "'rows'")),
        (json.dumps({"fields": FIELDS, "rows": {}}), ("rows", "dict")),
        (json.dumps({"fields": FIELDS, "rows": [GOOD[:3]]}), ("row 0", 9, GOOD[:3])),
        (json.dumps({"fields": FIELDS, "rows": ["abcdefgh"]}), ("row 0", 9, "'abcdefgh'")),
        (
            json.dumps({"fields": FIELDS, "rows": [GOOD]}).replace("0.5", "NaN"),
            ("row 0", "start_s=nan"),
        ),
    ],
)
def test_other_text_is_refused(text, values):
    with raises(TraceError, *values):
        events_from_json(text)


@pytest.mark.parametrize(
    "changes",
    [
        {"category": "sleep"},
        {"start_s": float("inf")},
        {"start_s": float("nan")},
        {"duration_s": -1e-9},
        {"duration_s": float("inf")},
        {"rank": -1},
        {"nbytes": -1},
    ],
)
def test_an_event_that_cannot_be_is_refused(changes):
    good: dict[str, Any] = {
        "rank": 0,
        "name": "x",
        "category": "other",
        "start_s": 0.0,
        "duration_s": 0.0,
    }
    Event(**good)
    [(field, value)] = changes.items()
    with raises(TraceError, field, value):
        Event(**{**good, **changes})


def test_offsets_put_ranks_on_one_clock():
    events = [Event(rank, "x", "other", 10.0, 1.0) for rank in range(3)]
    shifted = shift_events(events, {0: -10.0, 2: 0.5})
    assert [event.start_s for event in shifted] == [0.0, 10.0, 10.5]
    assert [event.end_s for event in shifted] == [1.0, 11.0, 11.5]
    assert shift_events(events, None) == events
    with raises(TraceError, "'x'", "rank 1", "start_s=nan"):
        shift_events(events, {1: float("nan")})
