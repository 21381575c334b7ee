"""Layouts told by their blocks, and runs of blocks in flat memory."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mpimesh import Mesh
from mpimesh.errors import LayoutError, RankError
from mpimesh.layout import BoxLayout, Layout, layout_of_runs
from mpimesh.layout.boxes import common, flat_runs, local_box, slices, view
from tests.helpers.depth import examples
from tests.helpers.raises import raises


@st.composite
def shapes_and_boxes(draw, count=1):
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    boxes = [
        tuple(tuple(sorted(draw(st.tuples(*[st.integers(0, size)] * 2)))) for size in shape)
        for _ in range(count)
    ]
    return shape, boxes


@settings(max_examples=examples(200))
@given(shapes_and_boxes())
def test_flat_runs_are_the_box_in_order(case):
    shape, (box,) = case
    whole = np.arange(math.prod(shape)).reshape(shape)
    runs = list(flat_runs(box, shape))
    found = [place for start, stop in runs for place in range(start, stop)]
    assert found == view(whole, box).reshape(-1).tolist()
    if found:
        assert all(stop < start for (_, stop), (start, _) in pairwise(runs)) or len(runs) == 1


@settings(max_examples=examples(200))
@given(shapes_and_boxes(2))
def test_what_two_boxes_have_in_common(case):
    shape, (one, other) = case
    marks = np.zeros(shape, int)
    view(marks, one)[...] += 1
    view(marks, other)[...] += 1
    both = common(one, other)
    assert (0 if both is None else view(marks, both).size) == (marks == 2).sum()
    if both is not None:
        assert (view(marks, both) == 2).all()
        assert (view(marks[slices(one)], local_box(both, one)) == 2).all()


@settings(max_examples=examples(100))
@given(
    sizes=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    copies=st.lists(st.integers(1, 3), min_size=5, max_size=5),
    axis=st.integers(0, 1),
)
def test_runs_of_an_axis_as_a_layout(sizes, copies, axis):
    """Whoever holds what: by placements where they can say it, else block by block."""
    length = sum(sizes)
    shape = (length, 2) if axis == 0 else (2, length)
    runs, start = [], 0
    for size, count in zip(sizes, copies, strict=False):
        runs += [(start, start + size)] * count
        start += size
    layout = layout_of_runs(shape, axis, runs)
    assert [layout.box(shape, rank)[axis] for rank in range(len(runs))] == runs
    assert all(layout.box(shape, rank)[1 - axis] == (0, 2) for rank in range(len(runs)))
    expected: dict[tuple[int, int], tuple[int, ...]] = {}
    for rank, run in enumerate(runs):
        if run[0] < run[1]:
            expected[run] = (*expected.get(run, ()), rank)
    holders = layout.holders(shape)
    assert {box[axis]: ranks for box, ranks in holders.items()} == expected
    assert layout.is_replicated == all(run == (0, length) for run in runs)
    if len(set(runs)) == len(runs):
        assert isinstance(layout, Layout)


def test_holders_over_several_dims():
    layout = Layout(Mesh("dp=2,tp=2", ids=[4, 5, 6, 7]), "tp=S0")
    assert layout.holders((3,)) == {((0, 2),): (4, 6), ((2, 3),): (5, 7)}
    assert layout.holders((1,)) == {((0, 1),): (4, 6)}


@pytest.mark.parametrize(
    "boxes",
    [
        [((0, 2),), ((1, 4),)],
        [((0, 2),)],
        [((0, 2),), ((2, 5),)],
        [((0, 4), (0, 1))],
        [],
    ],
)
def test_blocks_that_overlap_or_leave_out_are_refused(boxes):
    with raises(LayoutError, tuple(boxes), (4,)):
        BoxLayout((4,), tuple(boxes))


def test_another_shape_or_rank_is_refused():
    layout = BoxLayout((4,), (((0, 2),), ((2, 4),), ((2, 4),)))
    assert layout.box((4,), 2) == ((2, 4),)
    with raises(LayoutError, (4,), (5,)):
        layout.box((5,), 0)
    with raises(RankError, "rank 3", "3"):
        layout.box((4,), 3)
