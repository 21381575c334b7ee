"""The flight record: what goes into a ring comes out, and records together say what went wrong."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from mpimesh.cli.flight import first_difference, report, waits_for
from mpimesh.errors import SettingsError
from mpimesh.runtime.call import Call, last_words
from mpimesh.runtime.flight import KEPT, FlightEntry, Record, Recorder, read_records
from mpimesh.runtime.progress import Wait
from tests.helpers.depth import examples
from tests.helpers.raises import names


def group_of(name="world", size=4):
    side = SimpleNamespace(world_ranks=list(range(size)), size=size)
    ledger = SimpleNamespace(ranks=side.world_ranks, mesh="m1")
    return SimpleNamespace(name=name, communicator=side, ledger=ledger, ranks=range(size))


def call_of(number, name="all_reduce", shape=(3,)):
    call = Call(name, "world", "sum", shape, "float64")
    call.number = number
    call.compared = shape
    return call


def entries(*names, group="world", ranks="0-2", at_s=0.0):
    return tuple(
        FlightEntry(group, "m", ranks, number, name, name, "x.py:1", 8, at_s + number, 0.0, "done")
        for number, name in enumerate(names, 1)
        if name
    )


def records(*rows, wait=None):
    return {
        rank: Record(rank, len(rows), "h", 1, (wait or {}).get(rank, {}), row)
        for rank, row in enumerate(rows)
        if row is not None
    }


@settings(max_examples=examples(30))
@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 3)), max_size=2600))
def test_a_ring_holds_the_last_operations(steps):
    with tempfile.TemporaryDirectory() as folder:
        recorder, group = Recorder(Path(folder), 1, 4), group_of()
        calls = []
        for number, (name, state) in enumerate(steps, 1):
            calls.append(call_of(number, name))
            recorder.start(group, calls[-1], 8 * number)
            if state:
                recorder.end(calls[-1], state == 2)
        found = read_records(Path(folder))[0][1]
        recorder.finish(failed=True)
        assert [path.name for path in Path(folder).iterdir()] == ["rank-1.json"]
        assert read_records(Path(folder)) == ({1: found}, [])
    kept = min(KEPT, len(steps))
    assert [entry.number for entry in found.entries] == [
        call.number for call in calls[len(calls) - kept :]
    ]
    for entry in found.entries:
        name, state = steps[entry.number - 1]
        assert entry.signature == calls[entry.number - 1].text()
        assert entry.bytes == 8 * entry.number
        assert (entry.group, entry.ranks) == ("world", "0-3")
        assert entry.state == ("started", "done", "failed", "done")[state]
        assert (entry.end_s > 0) == bool(state)
        assert entry.site.startswith(__file__)


def test_a_wait_stands_in_the_ring_until_it_ends(tmp_path):
    recorder, group = Recorder(tmp_path, 0, 4), group_of()
    call = call_of(1)
    recorder.start(group, call, 24)
    recorder.wait(Wait(call, group.communicator, None, mesh="m1"))
    found = read_records(tmp_path)[0][0]
    assert found.wait["needs"] == "0-3"
    assert found.entries[0].state == "waited for"
    recorder.wait(Wait("a message", group.communicator, [2], mesh="m1"))
    assert read_records(tmp_path)[0][0].wait["needs"] == "2"
    recorder.wait(None)
    assert read_records(tmp_path)[0][0].wait == {}


def test_more_texts_than_a_ring_has_room_for(tmp_path):
    recorder, group = Recorder(tmp_path, 0, 1), group_of()
    for number in range(1, 5001):
        recorder.start(group, call_of(number, shape=(number,)), 8)
    found = read_records(tmp_path)[0][0]
    assert found.entries[-1].signature == "all_reduce(shape (5000,), float64, sum)"
    assert found.entries[0].signature == "all_reduce(shape (4001,), float64, sum)"


def test_a_job_that_ends_well_leaves_nothing_and_removes_what_an_earlier_one_left(tmp_path):
    for name in ("rank-0.ring", "rank-2.json", "rank-1.json", "notes.txt"):
        (tmp_path / name).write_text("old")
    recorder = Recorder(tmp_path, 0, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "notes.txt",
        "rank-0.ring",
        "rank-1.json",
    ]
    recorder.finish(failed=False)
    assert not (tmp_path / "rank-0.ring").exists()
    assert read_records(tmp_path) == ({}, [tmp_path / "rank-1.json"])  # rank 1 removes it


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match=r"MPIMESH_RECORD_DIR.*rank 3"):
        Recorder(tmp_path / "file", 3, 4)


def test_the_first_difference_is_by_group_and_number():
    found = first_difference(
        records(entries("a", "b", "c"), entries("a", "x", "c"), entries("a", "b", "y"))
    )
    assert found is not None
    assert (found.key[1], found.number, found.missing) == ("world", 2, [])
    assert list(found.started.values()) == [[0, 2], [1]]
    assert "x at x.py:1" in list(found.started)[1]


def test_a_rank_that_is_behind_is_named_if_nothing_else_differs():
    found = first_difference(records(entries("a", "b"), entries("a"), entries("a", "b")))
    assert found is not None
    assert (found.number, found.missing) == (2, [1])
    late = entries("p", "q", group="tp", at_s=9.0)
    found = first_difference(
        records(entries("a", "b") + late, entries("a") + late, late[:1] + entries("z", group="tp"))
    )
    assert found is not None
    assert found.key[1] == "tp"  # what differs counts more than who is behind


def test_records_that_agree_or_are_not_there():
    assert first_difference(records(entries("a"), entries("a"), None)) is None
    assert first_difference({}) is None
    # What the ring of one has lost is no difference.
    long = entries(*["a"] * (KEPT + 500), ranks="0-1")
    other = entries(*["b"] * 300, group="tp", ranks="1")
    assert first_difference(records(long[-KEPT:], long[-KEPT + 300 :] + other)) is None


def test_who_waits_for_whom():
    mine = FlightEntry("world", "m", "0-2", 2, "b", "b", "x.py:2", 8, 2.0, 0.0, "waited for")
    wait = {"what": "b", "needs": "0-2"}
    found = records(
        (*entries("a"), mine), entries("a"), (*entries("a"), mine), wait={0: wait, 2: wait}
    )
    assert waits_for(found) == {0: [1], 2: [1]}
    text = report(found)
    assert "rank 0 waits for rank 1 in b" in text
    assert "rank 1: has not started it" in text


def test_ranks_that_are_in_one_call_without_a_number_do_not_wait_for_each_other():
    """Such as close(): two ranks of it, beside two that wait for these in a sum."""
    sums = [
        FlightEntry("dp", "m", ranks, 1, "b", "b", "x.py:3", 8, 1.0, 0.0, "waited for")
        for ranks in ("0,2", "1,3")
    ]
    close = {"group": "world", "mesh": "m1", "needs": "0-3"}
    waits = {
        0: {**close, "what": "close() on group 'world' at x.py:2"},
        1: {**close, "what": "close() on group 'world' at x.py:9"},
        2: {"what": "b", "group": "dp", "mesh": "m2", "needs": "0,2"},
        3: {"what": "b", "group": "dp", "mesh": "m3", "needs": "1,3"},
    }
    found = records((), (), (sums[0],), (sums[1],), wait=waits)
    assert waits_for(found) == {0: [2, 3], 1: [2, 3], 2: [0], 3: [1]}
    assert "a circle: rank 0 waits for rank 2, rank 2 waits for rank 0" in report(found)


def test_a_report_names_the_circle_and_who_left_nothing():
    waits = {0: {"what": "recv", "needs": "1"}, 1: {"what": "recv", "needs": "0"}}
    text = report(records(entries("a"), entries("a"), None, wait=waits))
    assert "rank 0 waits for rank 1, rank 1 waits for rank 0" in text
    assert "no record of rank 2" in text


@pytest.mark.parametrize("ranks", [range(0, 2048, 8), [n * n for n in range(200)]])
def test_an_operation_of_a_large_group_is_whole(tmp_path, ranks):
    group = group_of()
    group.communicator.world_ranks = group.ledger.ranks = [*ranks]
    recorder = Recorder(tmp_path, 0, 1)
    call = call_of(1)
    recorder.start(group, call, 24)
    communicator: Any = SimpleNamespace(world_ranks=[*ranks], size=len(ranks))
    recorder.wait(Wait("\u00e4" * 3000, communicator, mesh="m1"))
    (entry,) = read_records(tmp_path)[0][0].entries
    recorder.finish(failed=True)
    assert entry.digest
    assert entry.signature == call.text()
    assert read_records(tmp_path)[0][0].wait["needs"]


def test_ranks_of_a_group_without_a_short_text_are_those_that_started_something():
    ranks = "200 ranks with digest 1f"
    row = entries("a", "b", ranks=ranks)
    found = first_difference(records(row, entries("a", "c", ranks=ranks)))
    assert found is not None
    assert found.number == 2
    assert [*found.started.values()] == [[0], [1]]


def test_the_last_calls_in_words():
    calls = [call_of(number) for number in (1, 2, 3)]
    for call in calls[:2]:
        call.ended = True
    lines = last_words(calls).splitlines()
    assert len(lines) == 4 or "2 times" in lines[1]
    assert "number 3, not ended" in lines[-1]


def test_a_record_is_json(tmp_path):
    recorder = Recorder(tmp_path, 0, 1)
    recorder.start(group_of(), call_of(1), 24)
    found = read_records(tmp_path)[0][0]
    recorder.finish(failed=True, ending="ValueError: no\nand more")
    assert "rank 0 ended with: ValueError: no\n" in report(read_records(tmp_path)[0])
    fields = json.loads((tmp_path / "rank-0.json").read_text())
    assert fields["entries"] == [asdict(entry) for entry in found.entries]


@given(
    at=st.lists(st.tuples(st.integers(0, 2**30), st.integers(0, 255)), min_size=1, max_size=8),
    as_json=st.booleans(),
)
@settings(max_examples=examples(60))
def test_a_damaged_record_is_left_out_and_named(at, as_json):
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(2):
            recorder = Recorder(Path(folder), rank, 2)
            for number in range(1, 4):
                recorder.start(group_of(size=2), call_of(number), 24)
            recorder.wait(Wait(call_of(3), group_of(size=2).communicator, None, mesh="m1"))
            if as_json:
                recorder.finish(failed=True)
        path = Path(folder) / ("rank-1.json" if as_json else "rank-1.ring")
        data = bytearray(path.read_bytes())
        used = [place for place, byte in enumerate(data) if byte]
        for place, byte in at:
            data[used[place % len(used)]] = byte
        path.write_bytes(data)
        found, damaged = read_records(Path(folder))
        assert 0 in found
        assert ([path] if 1 not in found else []) == damaged
        text = report(found, damaged)
        assert (str(path) in text) == bool(damaged)


@pytest.mark.parametrize(
    "edit",
    [
        {"size": "3"},
        {"size": 10**12},
        {"rank": "1"},
        {"rank": 0},
        {"wait": [1]},
        {"wait": {"what": "x"}},
        {"wait": {"needs": "1"}},
        {"entries": [{}]},
        {"host": 5},
    ],
)
def test_a_record_that_no_rank_wrote_is_left_out(tmp_path, edit):
    rows = {"rank": 1, "size": 2, "host": "h", "pid": 1, "wait": {}, "entries": []}
    (tmp_path / "rank-0.json").write_text(json.dumps(rows | {"rank": 0}))
    (tmp_path / "rank-1.json").write_text(json.dumps(rows | edit))
    found, damaged = read_records(tmp_path)
    assert (list(found), damaged) == ([0], [tmp_path / "rank-1.json"])


@pytest.mark.parametrize("needs", ["0-4:0", "0-99999999999", "9-1", "x"])
def test_ranks_that_no_rank_wrote_are_bounded(tmp_path, needs):
    wait = {"what": "x", "needs": needs, "group": "g", "record": 0, "number": 0}
    rows = {"rank": 0, "size": 2, "host": "h", "pid": 1, "wait": wait, "entries": []}
    (tmp_path / "rank-0.json").write_text(json.dumps(rows))
    names(report(read_records(tmp_path)[0]), "rank 0 waits for")


@pytest.mark.parametrize("length", [600, 100_000])
def test_a_long_name_leaves_room_for_what_was_called(tmp_path, length):
    recorder, group = Recorder(tmp_path, 0, 4), group_of("n" * length)
    call = call_of(1)
    call.group = group.name
    recorder.start(group, call, 24)
    recorder.wait(Wait(call, group.communicator, None, mesh="m1"))
    found = read_records(tmp_path)[0][0]
    assert found.entries[0].site
    names(found.entries[0].signature, "all_reduce", "(3,)")
    assert found.wait["needs"] == "0-3"
