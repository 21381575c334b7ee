"""The curve: points where the values say, gaps, ticks, and any number of values."""

from __future__ import annotations

import math
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mpimesh.errors import TraceError
from mpimesh.trace import curve_svg
from mpimesh.trace.svg import nice_ticks, smooth, tick_labels
from tests.helpers.raises import raises

SVG = "{http://www.w3.org/2000/svg}"


def parse(text: str) -> ET.Element:
    return ET.fromstring(text)


def texts(root: ET.Element) -> list[str]:
    return [one.text or "" for one in root.iter(f"{SVG}text")]


def path(root: ET.Element, kind: str) -> list[list[tuple[float, float]]]:
    """The pieces of a line, each a list of points."""
    found = root.find(f"{SVG}path[@class='{kind}']")
    assert found is not None
    pieces = [piece for piece in found.get("d", "").split("M") if piece]
    return [[tuple(map(float, p.split())) for p in piece.split("L")] for piece in pieces]  # type: ignore[misc]


def test_points_lie_where_the_values_say():
    values = [4.0, 1.0, 3.0, 2.0]
    (points,) = path(parse(curve_svg(values, title="t")), "bold")
    x, y = np.array(points).T
    assert np.allclose(np.diff(x), np.diff(x)[0], atol=0.02)
    # y falls on the page as values rise, in proportion.
    assert np.allclose(np.diff(y) / np.diff(values), (y[1] - y[0]) / -3.0, atol=0.01)
    assert y[1] > y[0]


def test_long_curves_have_a_thin_raw_and_a_bold_smoothed_line():
    values = [math.exp(-n / 30) + 0.1 * (-1) ** n for n in range(200)]
    root = parse(curve_svg(values, title="t"))
    (raw,), (bold,) = path(root, "raw"), path(root, "bold")
    assert len(raw) == len(bold) == 200

    def roughness(points):
        return np.abs(np.diff(np.array(points)[:, 1], n=2)).sum()

    assert roughness(bold[5:-5]) < 0.3 * roughness(raw[5:-5])


def test_text():
    root = parse(curve_svg([2.5, 0.5, 1.0], title="Loss & more", x_label="epoch", y_label="nll"))
    seen = texts(root)
    assert seen[:2] == ["Loss & more", "3 values · first 2.5 · lowest 0.5 · last 1"]
    assert {"epoch", "nll", "1", "2", "3", "0", "0.5", "1.0", "1.5", "2.0", "2.5"} <= set(seen)


def test_values_that_are_not_finite_leave_gaps():
    values = [1.0, 2.0, math.nan, 3.0, math.inf, 2.0, 1.0, -math.inf]
    pieces = path(parse(curve_svg(values, title="t")), "bold")
    # A lone value is a dot: a line to its own place.
    assert [len(piece) for piece in pieces] == [2, 2, 2]
    assert pieces[1][0] == pieces[1][1]


@pytest.mark.parametrize("values", [[], [math.nan], [math.inf] * 30])
def test_no_values_are_a_picture_too(values):
    assert "no values" in texts(parse(curve_svg(values, title="t")))


@pytest.mark.parametrize("value", [0.0, 5.0, -3.0, 1e-12, 1e12])
@pytest.mark.parametrize("count", [1, 2, 30])
def test_equal_values_are_a_level_line(value, count):
    root = parse(curve_svg([value] * count, title="t"))
    heights = {y for piece in path(root, "bold") for _, y in piece}
    assert len(heights) == 1
    assert 60 < heights.pop() < 350


def test_many_values_keep_their_extremes():
    values = [1.0] * 100_000
    values[54_321] = 9.0
    text = curve_svg(values, title="t")
    assert len(text) < 100_000
    (raw,) = path(parse(text), "raw")
    heights = [y for _, y in raw]
    assert min(heights) < 100 < 250 < max(heights), "the one high value must be seen"


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=60), st.sampled_from([1, 3, 5, 9]))
def test_smoothing_is_the_mean_of_the_neighbours(values, window):
    smoothed = smooth(values, window)
    for place, mean in enumerate(smoothed):
        reach = min(window // 2, place, len(values) - 1 - place)
        around = values[place - reach : place + reach + 1]
        assert mean == pytest.approx(np.mean(around), rel=1e-6, abs=1e-4)


def test_smoothing_leaves_out_what_is_not_finite():
    smoothed = smooth([1.0, math.nan, 3.0, 5.0, math.inf], 3)
    assert smoothed[0] == 1.0
    assert math.isnan(smoothed[1])
    assert smoothed[2:] == [4.0, 4.0, math.inf]


@given(
    st.floats(-1e9, 1e9),
    st.floats(1e-6, 1e9),
    st.integers(2, 12),
)
def test_ticks_are_round_few_and_inside(low, width, most):
    high = low + max(width, abs(low) * 1e-6)
    ticks = nice_ticks(low, high, most)
    assert len(ticks) <= most
    slack = (high - low) * 1e-6
    assert all(low - slack <= tick <= high + slack for tick in ticks)
    if len(ticks) > 1:
        step = ticks[1] - ticks[0]
        assert np.allclose(np.diff(ticks), step, rtol=1e-3)
        mantissa = step / 10.0 ** math.floor(math.log10(step * 1.001))
        assert min(abs(mantissa - round_one) for round_one in (1, 2, 5, 10)) < 0.01


@pytest.mark.parametrize(
    ("ticks", "labels"),
    [
        ([0.0, 0.5, 1.0], ["0", "0.5", "1.0"]),
        ([0.0, 2000.0], ["0", "2,000"]),
        ([0.00001, 0.00002], ["0.00001", "0.00002"]),
        ([1e-9, 2e-9], ["1e-09", "2e-09"]),
        ([2e7, 4e7], ["2e+07", "4e+07"]),
        ([], []),
        ([0.0], ["0"]),
    ],
)
def test_tick_labels(ticks, labels):
    assert tick_labels(ticks) == labels


@pytest.mark.parametrize("size", [(199, 400), (400, 149)])
def test_a_picture_too_small_is_refused(size):
    with raises(TraceError, f"{size[0]} x {size[1]}"):
        curve_svg([1.0], title="t", width=size[0], height=size[1])


def test_every_length_is_drawn():
    for count in range(1, 45):
        root = parse(curve_svg([1.0 / (n + 1) for n in range(count)], title="t", width=400))
        assert f"{count:,}" in " ".join(texts(root))
