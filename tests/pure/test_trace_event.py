"""Events: what they refuse, their JSON, and one clock for all."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpimesh.errors import TraceError
from mpimesh.trace import CATEGORIES, Event, events_from_json, events_to_json
from mpimesh.trace.event import shift_events

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
            *("nbytes", "stage", "microbatch"),
        ],
        "rows": [[1, "2F0", "forward", 0.5, 0.25, 8, 2, 0]],
    }


GOOD = [1, "2F0", "forward", 0.5, 0.25, 8, 2, 0]
FIELDS = json.loads(events_to_json([]))["fields"]


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, "1", "row 1 of events: rank cannot be '1'"),
        (0, True, "row 1 of events: rank cannot be True"),
        (0, -1, "row 1 of events: event '2F0' needs a rank"),
        (1, None, "row 1 of events: name cannot be None"),
        (2, "sleep", "row 1 of events: there is no event category 'sleep'"),
        (3, None, "row 1 of events: start_s cannot be None"),
        (4, -1.0, "row 1 of events: .* duration_s=-1.0"),
        (5, 1.5, "row 1 of events: nbytes cannot be 1.5"),
        (6, "0", "row 1 of events: stage cannot be '0'"),
    ],
)
def test_a_wrong_row_is_named(place, value, message):
    row = [*GOOD[:place], value, *GOOD[place + 1 :]]
    with pytest.raises(TraceError, match=message):
        events_from_json(json.dumps({"fields": FIELDS, "rows": [GOOD, row]}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON"),
        ("[]", "need the JSON object"),
        ('{"rows": []}', "need the JSON object"),
        (json.dumps({"fields": FIELDS, "rows": {}}), "must be a list, got dict"),
        (json.dumps({"fields": FIELDS, "rows": [GOOD[:3]]}), "row 0 of events must be a list of 8"),
        (json.dumps({"fields": FIELDS, "rows": ["abcdefgh"]}), "row 0 of events must be a list"),
        (json.dumps({"fields": FIELDS, "rows": [GOOD]}).replace("0.5", "NaN"), "start_s=nan"),
    ],
)
def test_other_text_is_refused(text, message):
    with pytest.raises(TraceError, match=message):
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
    with pytest.raises(TraceError, match=str(next(iter(changes.values())))):
        Event(**{**good, **changes})


def test_offsets_put_ranks_on_one_clock():
    events = [Event(rank, "x", "other", 10.0, 1.0) for rank in range(3)]
    shifted = shift_events(events, {0: -10.0, 2: 0.5})
    assert [event.start_s for event in shifted] == [0.0, 10.0, 10.5]
    assert [event.end_s for event in shifted] == [1.0, 11.0, 11.5]
    assert shift_events(events, None) == events
    with pytest.raises(TraceError, match="finite start"):
        shift_events(events, {1: float("nan")})
