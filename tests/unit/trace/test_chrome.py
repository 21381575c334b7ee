"""Chrome's trace format, word for word."""

from __future__ import annotations

import json
from itertools import pairwise

from hypothesis import given, strategies as st

from mpimesh.errors import TraceError
from mpimesh.schedule import make_schedule, simulate
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


def message(rank, category, start_s, text, duration_s=0.001):
    return Event(rank, f"{category} {text}", category, start_s, duration_s, message=text)


def test_an_arrow_goes_from_each_send_to_its_receive():
    events = [
        message(0, "send", 1.0, "0>1 0SEND_F0", 0.002),
        message(1, "recv", 0.9, "0>1 0SEND_F0", 0.102),
        message(1, "send", 2.0, "1>0 1SEND_B0"),
        message(0, "recv", 1.5, "1>0 1SEND_B0", 0.501),
        # The next step; of the first one a receive of the same text was pushed out of the ring.
        message(0, "send", 3.0, "0>1 0SEND_F1"),
        message(0, "send", 4.0, "0>1 0SEND_F1"),
        message(1, "recv", 4.0, "0>1 0SEND_F1", 0.0),
        message(1, "send", 5.0, "1>2 1SEND_F0"),  # nobody received it
        Event(0, "0F0", "forward", 1.0, 4.0),
    ]
    trace = chrome_trace(events, offsets_s={1: 0.0001})["traceEvents"]
    slices = [one for one in trace if one["ph"] == "X"]
    starts = {one["id"]: one for one in trace if one["ph"] == "s"}
    ends = {one["id"]: one for one in trace if one["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) == len([one for one in trace if one["ph"] in "sf"]) / 2 == 3

    def bound(end):
        inside = [
            one["name"]
            for one in slices
            if (one["pid"], one["tid"]) == (end["pid"], end["tid"])
            and one["ts"] <= end["ts"] <= one["ts"] + one["dur"]
        ]
        assert len(inside) == 1
        return inside[0]

    for one in starts:
        start, end = starts[one], ends[one]
        assert (start["cat"], start["name"], end["bp"]) == (end["cat"], end["name"], "e")
        assert bound(start).removeprefix("send ") == bound(end).removeprefix("recv ")
        assert start["pid"] != end["pid"]
        assert start["ts"] < end["ts"]
    assert 4_000_000.0 - 900_100.0 in {one["ts"] for one in starts.values()}
    assert json.loads(json.dumps(trace)) == trace


def test_a_simulated_step_has_an_arrow_for_every_message_that_is_waited_for():
    schedule = make_schedule("1f1b", 3, 4)
    timetable = simulate(schedule, forward_s=1.0, backward_s=2.0, message_s=0.5)
    events = timetable.events()
    trace = chrome_trace(events)["traceEvents"]
    waits = [one for one in events if one.message and one.category != "send"]
    assert len([one for one in trace if one["ph"] == "f"]) == len(waits) > 0
