"""The picture of a timetable: every action in its place, and small however many there are."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import pytest

from mpimesh.errors import ScheduleError
from mpimesh.schedule import (
    Schedule,
    ScheduleName,
    Timetable,
    make_schedule,
    schedule_svg,
    simulate,
)
from tests.helpers.parallel_schedules import halves, looped
from tests.helpers.raises import raises

SVG = "{http://www.w3.org/2000/svg}"


def timed(name: ScheduleName, num_stages: int, num_microbatches: int, **times) -> Timetable:
    schedule = make_schedule(name, num_stages, num_microbatches)
    return simulate(schedule, **({"forward_s": 0.005, "backward_s": 0.01} | times))


def texts(element: ET.Element) -> list[str]:
    return [one.text or "" for one in element.iter(f"{SVG}text")]


def rows(root: ET.Element) -> list[ET.Element]:
    return root.findall(f"{SVG}g[@data-rank]")


def grounds(root: ET.Element) -> list[ET.Element]:
    return root.findall(f"{SVG}rect[@class='idle']")


def number(element: ET.Element, name: str) -> float:
    return float(element.get(name, "nan"))


def fills(root: ET.Element) -> set[str | None]:
    return {box.get("fill") for row in rows(root) for box in row.iter(f"{SVG}rect")}


def test_every_action_is_drawn_once_where_its_times_say():
    table = timed("1f1b", 4, 16, message_s=0.001)
    root = ET.fromstring(schedule_svg(table))
    ground = grounds(root)[0]
    left, width = number(ground, "x"), number(ground, "width")
    for rank, row in enumerate(rows(root)):
        boxes = {
            (box.findtext(f"{SVG}title") or "").split(":")[0]: box for box in row.iter(f"{SVG}rect")
        }
        actions = table.computing(rank)
        assert len(list(row.iter(f"{SVG}rect"))) == len(boxes) == len(actions) == 32
        for action, start_s, end_s in actions:
            box = boxes[str(action)]
            x = left + float(start_s / table.step_s) * width
            assert number(box, "x") == pytest.approx(x, abs=0.02)
            taken = float((end_s - start_s) / table.step_s) * width
            assert taken - 1 < number(box, "width") < taken
        assert sorted(texts(row)) == sorted(2 * [str(m) for m in range(16)])


def test_numbers_stand_beside_the_rows_and_above_the_picture():
    table = timed("1f1b", 4, 8)
    seen = texts(ET.fromstring(schedule_svg(table)))
    # 8 + 3 slots of 15 ms, of which each rank is idle for 3.
    assert seen[:2] == [
        "1f1b: 4 stages, 8 microbatches",
        "step 165 ms · bubble 45 ms a rank, 27.3 % of the time",
    ]
    assert seen[2:5] == ["forward", "backward", "idle"]
    assert seen.count("27 %") == 4
    assert {"rank 0", "rank 3", "time in ms", "0", "160", "peak", "4"} <= set(seen)


def test_stages_of_a_rank_have_shades_and_halves_have_colours():
    table = simulate(looped(6, 4), forward_s=1, backward_s=2)
    root = ET.fromstring(schedule_svg(table))
    assert len(fills(root)) == 6  # 3 stages on a rank, 2 kinds
    assert texts(root)[0] == "looped: 6 stages on 2 ranks, 4 microbatches"
    assert any("lighter: a rank's later stages" in one for one in texts(root))
    split = simulate(halves(3, 4), forward_s=1, backward_input_s=1, backward_weight_s=1)
    root = ET.fromstring(schedule_svg(split))
    assert len(fills(root)) == 3
    assert {"forward", "backward, input", "backward, weights"} <= set(texts(root))
    assert "backward" not in texts(root)


def test_thousands_of_boxes_are_paths_with_every_action_in_them():
    text = schedule_svg(timed("1f1b", 16, 64))
    root = ET.fromstring(text)
    for row in rows(root):
        paths = "".join(path.get("d", "") for path in row.iter(f"{SVG}path"))
        assert paths.count("M") == 2 * 64
    assert len(text) < 60_000


@pytest.mark.deep
def test_a_large_schedule_is_small_and_keeps_its_areas():
    table = timed("1f1b", 64, 1024)
    text = schedule_svg(table)
    root = ET.fromstring(text)
    assert len(text) < 100_000
    assert not [one for row in rows(root) for one in texts(row)]
    row, ground = rows(root)[17], grounds(root)[17]
    areas = [area(path.get("d", "")) for path in row.iter(f"{SVG}path")]
    whole = number(ground, "width") * number(ground, "height")
    # The upper area holds all computing, the lower one the forwards: a third of it.
    assert areas[0] / whole == pytest.approx(1024 / 1087, abs=0.002)
    assert areas[1] / areas[0] == pytest.approx(1 / 3, abs=0.002)


def area(path: str) -> float:
    """The area below the roofs of a path of H and V, which begins and ends at the bottom."""
    start = re.match(r"M([\d.]+) ([\d.]+)", path)
    assert start is not None
    x, bottom = map(float, start.groups())
    y, total = bottom, 0.0
    for kind, text in re.findall(r"([HV])([\d.]+)", path):
        if kind == "V":
            y = float(text)
        else:
            total += (float(text) - x) * (bottom - y)
            x = float(text)
    assert y == bottom
    return total


def test_several_timetables_share_one_axis():
    short, long = timed("1f1b", 3, 4), timed("gpipe", 3, 4, message_s=0.02)
    root = ET.fromstring(schedule_svg({"measured": long, "predicted": short}, title="a < b"))
    seen = texts(root)
    assert seen[:2] == ["a < b", "step measured 170 ms, predicted 90 ms"]
    assert [row.get("data-rank") for row in rows(root)] == ["0", "1", "2"] * 2
    widths = [number(one, "width") for one in grounds(root)]
    assert widths[3] / widths[0] == pytest.approx(90 / 170, abs=0.001)
    tops = [number(one, "y") for one in grounds(root)]
    assert tops == sorted(tops)
    assert seen.count("0") == 2 * 3 * 2 + 1  # F and B of the first microbatch, and one axis


def test_a_picture_grows_where_that_makes_room_for_all_numbers():
    sizes = {}
    for num_microbatches in (16, 32, 100):
        table = timed("1f1b", 4, num_microbatches)
        root = ET.fromstring(schedule_svg(table))
        shown = sum(len(texts(row)) for row in rows(root))
        sizes[num_microbatches] = number(root, "width"), shown
    assert sizes[16] == (1200, 4 * 16 * 2)
    assert 1200 < sizes[32][0] <= 1800
    assert sizes[32][1] == 4 * 32 * 2
    assert sizes[100] == (1200, 0)  # no width would do, and a part of them would be odd


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "forward"])
@pytest.mark.parametrize("numbers", [(1, 1), (2, 1), (9, 3), (20, 3), (40, 2)])
def test_pictures_of_any_size_are_whole(name, numbers):
    table = timed(name, *numbers)
    root = ET.fromstring(schedule_svg(table, width=500))
    assert number(root, "width") == 500
    assert len(rows(root)) == numbers[0]
    bottoms = [number(one, "y") + number(one, "height") for one in grounds(root)]
    assert all(
        bottom < number(below, "y")
        for bottom, below in zip(bottoms, grounds(root)[1:], strict=False)
    )
    assert bottoms[-1] < number(root, "height") - 40


def test_steps_that_take_no_time_have_a_picture():
    root = ET.fromstring(schedule_svg(timed("gpipe", 2, 3, forward_s=0, backward_s=0)))
    assert not [box for row in rows(root) for box in row]
    idle_rank = Schedule.from_string("# x stages=2 microbatches=1 placement=0,1\n0F0\n\n")
    assert len(rows(ET.fromstring(schedule_svg(simulate(idle_rank, forward_s=1))))) == 2


def test_wrong_pictures_are_refused():
    with raises(ScheduleError, 400):
        schedule_svg(timed("gpipe", 2, 2), width=399)
    with raises(ScheduleError, "timetables", {}):
        schedule_svg({})
