"""Chrome's trace format, word for word."""

from __future__ import annotations

import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from mpimesh.errors import TraceError
from mpimesh.trace import Event, chrome_trace, write_chrome_trace
from tests.helpers.raises import raises

EVENTS = [
    Event(0, "0F0", "forward", 10.0, 0.005, stage=0, microbatch=0),
    Event(1, "1RECV_F0", "wait", 10.0, 0.0062, stage=1, microbatch=0),
    Event(0, "0SEND_F0", "send", 10.005, 0.0012, nbytes=4096, stage=0, microbatch=0),
    Event(1, "all_reduce", "collective", 10.0062, 0.003, nbytes=64),
    Event(1, "step", "optimizer", 10.0092, 0.0000015),
]

GOLDEN = """
{"traceEvents": [
 {"ph":"M","name":"process_name","pid":0,"tid":0,"args":{"name":"first"}},
 {"ph":"M","name":"process_sort_index","pid":0,"tid":0,"args":{"sort_index":0}},
 {"ph":"M","name":"process_name","pid":1,"tid":0,"args":{"name":"rank 1"}},
 {"ph":"M","name":"process_sort_index","pid":1,"tid":0,"args":{"sort_index":1}},
 {"ph":"M","name":"thread_name","pid":0,"tid":0,"args":{"name":"work"}},
 {"ph":"M","name":"thread_sort_index","pid":0,"tid":0,"args":{"sort_index":0}},
 {"ph":"M","name":"thread_name","pid":0,"tid":1,"args":{"name":"messages"}},
 {"ph":"M","name":"thread_sort_index","pid":0,"tid":1,"args":{"sort_index":1}},
 {"ph":"M","name":"thread_name","pid":1,"tid":0,"args":{"name":"work"}},
 {"ph":"M","name":"thread_sort_index","pid":1,"tid":0,"args":{"sort_index":0}},
 {"ph":"M","name":"thread_name","pid":1,"tid":1,"args":{"name":"messages"}},
 {"ph":"M","name":"thread_sort_index","pid":1,"tid":1,"args":{"sort_index":1}},
 {"ph":"X","name":"0F0","cat":"forward","pid":0,"tid":0,"ts":0.0,"dur":5000.0,
  "args":{"stage":0,"microbatch":0}},
 {"ph":"X","name":"0SEND_F0","cat":"send","pid":0,"tid":1,"ts":5000.0,"dur":1200.0,
  "args":{"bytes":4096,"stage":0,"microbatch":0}},
 {"ph":"X","name":"1RECV_F0","cat":"wait","pid":1,"tid":0,"ts":0.0,"dur":6200.0,
  "args":{"stage":1,"microbatch":0}},
 {"ph":"X","name":"all_reduce","cat":"collective","pid":1,"tid":1,"ts":6200.0,"dur":3000.0,
  "args":{"bytes":64}},
 {"ph":"X","name":"step","cat":"optimizer","pid":1,"tid":0,"ts":9200.0,"dur":1.5,"args":{}}
], "displayTimeUnit": "ms"}
"""


def test_golden():
    assert chrome_trace(EVENTS, labels={0: "first"}) == json.loads(GOLDEN)


def test_the_file_holds_the_trace(tmp_path):
    path = tmp_path / "trace.json"
    write_chrome_trace(path, iter(EVENTS), labels={0: "first"})
    assert json.loads(path.read_text(encoding="utf-8")) == json.loads(GOLDEN)
    write_chrome_trace(str(path), [])
    assert json.loads(path.read_text(encoding="utf-8")) == {
        "traceEvents": [],
        "displayTimeUnit": "ms",
    }


def test_offsets_move_the_events_of_a_rank():
    trace = chrome_trace(EVENTS, offsets_s={1: -9.0})
    starts = {one["name"]: one["ts"] for one in trace["traceEvents"] if one["ph"] == "X"}
    assert starts["1RECV_F0"] == 0.0
    assert starts["0F0"] == 9_000_000.0
    with raises(TraceError, "'1RECV_F0'", "rank 1", "start_s=inf"):
        chrome_trace(EVENTS, offsets_s={1: float("inf")})


@given(
    st.lists(
        st.builds(
            Event,
            rank=st.integers(0, 2),
            name=st.just("m"),
            category=st.sampled_from(["send", "recv", "collective"]),
            start_s=st.integers(0, 20).map(float),
            duration_s=st.integers(1, 6).map(float),
        ),
        max_size=30,
    )
)
def test_messages_under_way_together_lie_on_as_many_threads(events):
    trace = chrome_trace(events)
    complete = [one for one in trace["traceEvents"] if one["ph"] == "X"]
    assert len(complete) == len(events)
    for rank in range(3):
        mine = [event for event in events if event.rank == rank]
        together = [
            sum(event.start_s <= time < event.end_s for event in mine) for time in range(27)
        ]
        threads = {one["tid"] for one in complete if one["pid"] == rank}
        assert threads == set(range(1, max(together) + 1))
        for tid in threads:
            spans = sorted(
                (one["ts"], one["ts"] + one["dur"])
                for one in complete
                if (one["pid"], one["tid"]) == (rank, tid)
            )
            assert all(a[1] <= b[0] for a, b in pairwise(spans))
