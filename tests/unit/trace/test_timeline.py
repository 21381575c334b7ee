"""The timeline: valid XML, boxes where the times say, text, and many or no events."""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree as ET

import pytest

from mpimesh.errors import TraceError
from mpimesh.schedule import make_schedule, simulate
from mpimesh.trace import CATEGORIES, Event, timeline_svg
from tests.helpers.raises import raises

SVG = "{http://www.w3.org/2000/svg}"


def parse(text: str) -> ET.Element:
    return ET.fromstring(text)


def boxes(root: ET.Element, category: str, rank: int | None = None) -> list[ET.Element]:
    where = "" if rank is None else f"[@data-rank='{rank}']"
    return root.findall(f"{SVG}g{where}/{SVG}rect[@class='{category}']")


def texts(element: ET.Element) -> list[str]:
    return [one.text or "" for one in element.iter(f"{SVG}text")]


def pipeline(num_stages: int, num_microbatches: int, **times) -> list[Event]:
    schedule = make_schedule("1f1b", num_stages, num_microbatches)
    return simulate(schedule, **({"forward_s": 0.005, "backward_s": 0.01} | times)).events()


def test_every_action_has_its_box_and_its_microbatch():
    root = parse(timeline_svg(pipeline(4, 8), title="1f1b"))
    assert len(boxes(root, "forward")) == len(boxes(root, "backward")) == 4 * 8
    for rank in range(4):
        group = root.find(f"{SVG}g[@data-rank='{rank}']")
        assert group is not None
        assert sorted(texts(group)) == sorted(2 * [str(m) for m in range(8)])


def test_boxes_lie_where_the_times_say():
    events = pipeline(3, 5, message_s=0.004)
    root = parse(timeline_svg(events))
    idle = root.find(f"{SVG}rect[@class='idle']")
    assert idle is not None
    left, width = float(idle.get("x", "")), float(idle.get("width", ""))
    span_s = max(event.end_s for event in events)
    drawn = {
        (rank, title.text.split(":")[0]): rect
        for rank in range(3)
        for rect in root.findall(f"{SVG}g[@data-rank='{rank}']/{SVG}rect")
        if (title := rect.find(f"{SVG}title")) is not None and title.text
    }
    assert len(drawn) == len(events)
    for event in events:
        rect = drawn[event.rank, event.name]
        assert rect.get("class") == event.category
        assert float(rect.get("x", "")) == pytest.approx(
            left + event.start_s / span_s * width, abs=0.011
        )
        # A hair less than its time, so that neighbours can be told apart.
        assert float(rect.get("width", "")) == pytest.approx(
            event.duration_s / span_s * width - 0.8, abs=0.011
        )


def test_ranks_lie_below_each_other_and_messages_below_the_work():
    root = parse(timeline_svg(pipeline(4, 4, message_s=0.004)))
    tops = [{rect.get("y") for rect in boxes(root, "forward", rank)} for rank in range(4)]
    assert all(len(top) == 1 for top in tops)
    work = [float(top.pop() or "") for top in tops]
    strips = [float(boxes(root, "send", rank)[0].get("y", "")) for rank in range(4)]
    assert all(y < strip < y + 60 for y, strip in zip(work, strips, strict=True))
    assert all(strip < y for strip, y in zip(strips, work[1:], strict=False))


def test_what_runs_beside_hides_nothing_else_that_does():
    sent = [Event(0, f"s{n}", "send", float(n), 3.0) for n in range(4)]
    received = [Event(0, f"r{n}", "recv", n + 0.5, 3.0) for n in range(4)]
    reduced = [Event(0, "c", "collective", 1.0, 4.0)]
    root = parse(timeline_svg([Event(0, "x", "forward", 0.0, 9.0), *sent, *received, *reduced]))
    lanes = []
    for category, number in (("forward", 1), ("send", 4), ("recv", 4), ("collective", 1)):
        found = boxes(root, category, 0)
        assert len(found) == number
        (lane,) = {(float(b.get("y", "")), float(b.get("height", ""))) for b in found}
        lanes.append(lane)
    assert all(y + height <= below for (y, height), (below, _) in pairwise(lanes))
    idle = root.find(f"{SVG}rect[@class='idle']")
    assert idle is not None
    ground = float(idle.get("y", "")) + float(idle.get("height", ""))
    assert sum(lanes[-1]) <= ground  # the row's ground has room for all


def test_a_picture_has_lanes_only_for_what_is_in_it():
    every = [Event(0, "x", "wait", 0.0, 1.0), Event(0, "x", "send", 0.0, 1.0)]
    every.append(Event(0, "x", "recv", 0.0, 1.0))
    heights = [float(parse(timeline_svg(every[:number])).get("height", "")) for number in (1, 2, 3)]
    assert heights[0] < heights[1] < heights[2]
    assert heights[1] - heights[0] == heights[2] - heights[1]


def test_header_legend_axis_and_labels():
    events = pipeline(4, 8)
    text = timeline_svg(events, title="a < b & c", labels={2: "dp 1"})
    root = parse(text)
    seen = texts(root)
    assert seen[0] == "a < b & c"
    # 11 slots of 15 ms, 8 of them busy.
    assert seen[1] == "4 ranks · 165 ms · busy 72.7 % of the time"
    assert seen[2:5] == ["forward", "backward", "waiting"]
    for label in ("rank 0", "rank 1", "dp 1", "rank 3", "73 %", "busy", "time in ms"):
        assert label in seen
    assert "rank 2" not in seen
    assert {"0", "20", "40", "60", "80", "100", "120", "140", "160"} <= set(seen)
    assert parse(timeline_svg(events, subtitle="predicted")).findall(f"{SVG}text")[1].text == (
        "predicted"
    )


def test_the_picture_needs_nothing_else_and_brings_its_background():
    text = timeline_svg(pipeline(2, 2))
    root = parse(text)
    background = root.find(f"{SVG}rect")
    assert background is not None
    assert background.get("fill") == "#ffffff"
    assert float(background.get("width", "")) >= 1199
    assert "href" not in text
    assert "url(" not in text
    assert "<script" not in text


@pytest.mark.parametrize(
    ("span_s", "unit"), [(2e-5, "µs"), (0.5, "ms"), (9.0, "ms"), (12.0, "s"), (4000.0, "s")]
)
def test_the_axis_has_a_unit_that_fits(span_s, unit):
    events = [Event(0, "x", "forward", 5.0, span_s)]
    assert f"time in {unit}" in texts(parse(timeline_svg(events)))


@pytest.mark.parametrize("num_ranks", [1, 2, 8, 9, 16, 17, 32, 33, 64])
def test_rows_never_overlap_and_fit_the_height(num_ranks):
    events = [Event(rank, "x", "forward", 0.0, 1.0) for rank in range(num_ranks)]
    events += [Event(rank, "y", "send", 0.0, 1.0) for rank in range(num_ranks)]
    root = parse(timeline_svg(events))
    spans = sorted(
        (float(rect.get("y", "")), float(rect.get("y", "")) + float(rect.get("height", "")))
        for rect in root.findall(f"{SVG}g/{SVG}rect")
    )
    assert len(spans) == 2 * num_ranks
    assert all(end > start for start, end in spans)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert spans[-1][1] < float(root.get("height", "")) < 1400


def test_thousands_of_events_stay_a_small_picture():
    events = pipeline(64, 100, message_s=0.001)
    assert len(events) > 30_000
    text = timeline_svg(events)
    assert len(text) < 1_500_000
    root = parse(text)
    # Slim boxes are pieces of one path for a colour: all 2 x 6400 are still there.
    pieces = [
        piece
        for category in ("forward", "backward")
        for path in root.iter(f"{SVG}path")
        if path.get("class") == category
        for piece in re.findall(r"M[^z]*z", path.get("d", ""))
    ]
    assert len(pieces) + len(boxes(root, "forward")) + len(boxes(root, "backward")) == 2 * 6400


def test_events_too_short_to_be_seen_are_drawn_together():
    events = [Event(0, "x", "forward", n * 1e-6, 1e-6) for n in range(100_000)]
    text = timeline_svg(events)
    assert len(text) < 10_000
    paths = list(parse(text).iter(f"{SVG}path"))
    assert len(paths) == 1
    assert len(re.findall("M", paths[0].get("d", ""))) <= 2


def test_zero_events_are_a_picture_too():
    root = parse(timeline_svg([], title="empty"))
    assert texts(root) == ["empty", "nothing was recorded", "no events"]


def test_one_event_of_no_length_is_a_picture_too():
    root = parse(timeline_svg([Event(5, "x", "other", 3.0, 0.0)]))
    assert "rank 5" in texts(root)
    assert len(list(root.iter(f"{SVG}path"))) == 1


def test_every_category_has_a_colour_and_a_legend():
    events = [Event(0, f"n{i}", c, float(i), 1.0) for i, c in enumerate(CATEGORIES)]  # type: ignore[arg-type]
    root = parse(timeline_svg(events))
    fills = [boxes(root, category)[0].get("fill") for category in CATEGORIES]
    # B and I share a colour: they are the same work, and are not in one schedule.
    assert len(set(fills)) == len(CATEGORIES) - 1
    assert len(root.findall(f"{SVG}rect[@class='legend']")) == len(CATEGORIES)


def test_names_that_xml_cannot_hold_are_replaced():
    events = [Event(0, "a\x00<b>\ud800&", "other", 0.0, 1.0)]
    root = parse(timeline_svg(events, title='"\x1b[1m"', labels={0: "<0>"}))
    assert texts(root)[0] == '"\ufffd[1m"'
    assert "<0>" in texts(root)
    assert "a\ufffd<b>\ufffd&" in texts(root)


def test_a_text_that_does_not_fit_is_left_out():
    events = [
        Event(0, "long name of a step", "optimizer", 0.0, 0.05),
        Event(0, "long name of a step", "optimizer", 0.1, 0.9),
    ]
    assert texts(parse(timeline_svg(events, width=500))).count("long name of a step") == 1


def test_offsets_move_a_row():
    events = [Event(0, "x", "forward", 100.0, 1.0), Event(1, "x", "forward", 0.0, 1.0)]
    root = parse(timeline_svg(events, offsets_s={1: 100.0}))
    assert boxes(root, "forward", 0)[0].get("x") == boxes(root, "forward", 1)[0].get("x")


def test_a_picture_too_narrow_is_refused():
    with raises(TraceError, "width=399"):
        timeline_svg([], width=399)
