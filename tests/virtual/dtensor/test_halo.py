"""Halos of random arrays on random meshes, against numpy.pad of the whole array."""

from __future__ import annotations

import doctest
import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

import mpimesh as mm
from mpimesh.errors import DTypeError, LayoutError, RankError
from mpimesh.layout import Layout, plan_halo, reads

MODES: dict[str, Any] = {
    "periodic": "wrap",
    "edge": "edge",
    "reflect": "reflect",
    "symmetric": "symmetric",
}
MESHES = ["x=1", "x=2", "x=3", "x=5", "x=2,y=2", "x=3,y=2", "x=1,y=2", "x=2,y=1,z=3"]


@st.composite
def cases(draw):
    """A mesh, placements, a shape, a width and a boundary for each axis."""
    mesh = mm.Mesh(draw(st.sampled_from(MESHES)))
    ndim = draw(st.integers(1, 3))
    specs = [draw(st.sampled_from(["R", *(f"S{axis}" for axis in range(ndim))])) for _ in mesh.dims]
    width = {axis: draw(st.tuples(st.integers(0, 4), st.integers(0, 4))) for axis in range(ndim)}
    ends = st.one_of(st.sampled_from(list(MODES)), st.integers(-9, 9).map(float))
    boundary = {axis: draw(ends) for axis in range(ndim)}
    least = [0 if not isinstance(boundary[axis], str) else 1 for axis in range(ndim)]
    shape = tuple(draw(st.integers(least[axis], 7)) for axis in range(ndim))
    placements: list[Any] = list(specs)
    for number, (spec, dim) in enumerate(zip(specs, mesh.dims, strict=True)):
        if spec != "R" and specs.count(spec) == 1 and draw(st.booleans()):
            placements[number] = draw(with_sizes(int(spec[1]), shape[int(spec[1])], dim.size))
    return mesh, placements, shape, width, boundary


@st.composite
def with_sizes(draw, axis, length, parts):
    """A split in blocks of any sizes, of which some have none."""
    inner = draw(st.lists(st.integers(0, length), min_size=parts - 1, max_size=parts - 1))
    cuts = [0, *sorted(inner), length]
    return mm.Shard(axis, sizes=[b - a for a, b in itertools.pairwise(cuts)])


def whole_padded(whole, width, boundary):
    """Pad axis by axis; fixed values last, for they count where several axes end."""
    order = sorted(range(whole.ndim), key=lambda axis: not isinstance(boundary[axis], str))
    for axis in order:
        pairs: Any = [width[axis] if one == axis else (0, 0) for one in range(whole.ndim)]
        end = boundary[axis]
        if isinstance(end, str):
            whole = np.pad(whole, pairs, mode=MODES[end])
        else:
            whole = np.pad(whole, pairs, constant_values=end)
    return whole


def cut(padded, box, width):
    return padded[
        tuple(
            slice(start, stop + before + after)
            for (start, stop), (before, after) in zip(box, width.values(), strict=True)
        )
    ]


@given(cases())
def test_any_halo(case):
    value, specs, shape, width, boundary = case
    whole = np.arange(1.0, 1 + math.prod(shape)).reshape(shape)
    expected = whole_padded(whole, width, boundary)

    def main():
        with mm.DeviceMesh(value) as mesh:
            x = mm.distribute(whole, mesh, specs)
            halo = mm.Halo(x, width, boundary)
            field = halo.field(x)
            started = halo.start(field)
            got = started.resolve()
            assert got is field.padded
            assert np.array_equal(field.local, x.local)
            again = halo.exchange(field)
            assert again is got
            return got.copy(), x.layout.box(shape, mesh.rank)

    for got, box in mm.run_virtual(value.size, main):
        assert np.array_equal(got, cut(expected, box, width))


@given(cases())
def test_what_is_read_is_given(case):
    mesh, specs, shape, width, boundary = case
    plan = plan_halo(Layout(mesh, specs), shape, width, boundary)
    read: dict[tuple[int, int], list[object]] = {}
    for rank in range(mesh.size):
        for one in plan.reads.takes(rank):
            if one.rank != rank:
                read.setdefault((one.rank, rank), []).append(one.box)
    given_boxes: dict[tuple[int, int], list[object]] = {}
    for rank in range(mesh.size):
        for who, box in plan.reads.gives(rank):
            given_boxes.setdefault((rank, who), []).append(box)
    assert read == given_boxes
    assert plan.reads.moves or not read


@pytest.mark.parametrize("placements", ["y=S0, x=S1", "y=S1, x=S0", "y=S0, x=S0", "y=R, x=S1"])
def test_received_bytes_are_those_of_the_halo(placements):
    """Of what lies on other ranks, and of nothing else."""
    mesh, width, shape = mm.Mesh("y=2,x=3"), {0: (1, 2), 1: (3, 0)}, (12, 18)
    layout = Layout(mesh, placements)
    plan = plan_halo(layout, shape, width)
    for rank in range(6):
        (top, bottom), (left, right) = layout.box(shape, rank)
        rows = np.arange(top - 1, bottom + 2) % 12
        columns = np.arange(left - 3, right) % 18
        mine = (
            np.isin(rows, np.arange(top, bottom)).sum()
            * np.isin(columns, np.arange(left, right)).sum()
        )
        assert plan.received_bytes(rank, 8) == 8 * (rows.size * columns.size - mine)
    assert (
        plan.messages(0)
        == {"y=S0, x=S1": 5, "y=S1, x=S0": 5, "y=S0, x=S0": 4, "y=R, x=S1": 3}[placements]
    )


@given(cases())
def test_inner_and_rim_are_the_block(case):
    mesh, specs, shape, width, boundary = case
    plan = plan_halo(Layout(mesh, specs), shape, width, boundary)
    for rank in range(mesh.size):
        count = np.zeros(plan.padded_shape(rank), int)
        for box in [plan.inner(rank), *plan.rim(rank)]:
            count[tuple(slice(*edge) for edge in box)] += 1
        expected = np.zeros_like(count)
        expected[tuple(slice(*edge) for edge in plan.interior(rank))] = 1
        assert np.array_equal(count, expected)
        reached = [
            (start - before, stop + after)
            for (start, stop), (before, after) in zip(plan.inner(rank), plan.width, strict=True)
        ]
        if all(start < stop for start, stop in plan.inner(rank)):
            inside = zip(reached, plan.interior(rank), strict=True)
            assert all(low >= start and high <= stop for (low, high), (start, stop) in inside)


def test_ends_of_an_axis_may_differ_and_none_is_left_alone():
    def main():
        with mm.DeviceMesh("x=2") as mesh:
            x = mm.distribute(np.arange(1, 5), mesh, "x=S0")
            halo = mm.Halo(x, 2, (7, "none"))
            field = halo.field(x)
            field.padded[...] = np.where(field.padded == 0, -1, field.padded)
            halo.exchange(field)
            return field.padded.tolist()

    assert mm.run_virtual(2, main) == [[7, 7, 1, 2, 3, 4], [1, 2, 3, 4, -1, -1]]


def test_two_fields_swapped_step_by_step():
    """As a stencil code does: the neighbours' values of this step, never of another."""

    def main():
        with mm.DeviceMesh("x=2,y=2") as mesh:
            whole = np.arange(42.0).reshape(6, 7)
            x = mm.distribute(whole, mesh, "x=S0, y=S1")
            halo = mm.Halo(x, 1)
            now, then = halo.field(x), halo.field()
            for _ in range(9):
                coming = halo.start(now)
                update(now.padded, then.padded, halo.inner)
                coming.resolve()
                for box in halo.rim:
                    update(now.padded, then.padded, box)
                now, then = then, now
            return now.tensor.full()

    whole = np.arange(42.0).reshape(6, 7)
    for _ in range(9):
        padded = np.pad(whole, 1, mode="wrap")
        whole = padded[1:-1, 1:-1] + 0.5 * padded[:-2, 2:] - 0.25 * padded[1:-1, :-2]
    for got in mm.run_virtual(4, main):
        assert np.array_equal(got, whole)


def update(now, then, box):
    rows, columns = box
    up = (slice(rows.start - 1, rows.stop - 1), slice(columns.start + 1, columns.stop + 1))
    left = (rows, slice(columns.start - 1, columns.stop - 1))
    then[box] = now[box] + 0.5 * now[up] - 0.25 * now[left]


def test_an_array_is_copied_into_a_new_field():
    def main():
        with mm.DeviceMesh("x=2") as mesh:
            x = mm.distribute(np.arange(4), mesh, "x=S0")
            halo = mm.Halo(x, (1, 0))
            padded = halo.exchange(x)
            assert padded is not None
            assert halo.received_bytes == x.itemsize
            return padded.tolist()

    assert mm.run_virtual(2, main) == [[3, 0, 1], [1, 2, 3]]


def test_a_rank_outside_the_mesh_takes_no_part():
    def main():
        with mm.DeviceMesh(mm.Mesh("x=2", [2, 0])) as mesh:
            halo = mm.Halo.of_shape((4,), mesh, "x=S0", dtype="i4")
            field = halo.field(mm.distribute(np.arange(4, dtype="i4"), mesh, "x=S0"))
            padded = halo.exchange(field)
            if mesh.rank == 1:
                assert padded is None
                assert halo.received_bytes == 0
                with pytest.raises(RankError):
                    _ = field.padded
            return None if padded is None else padded.tolist()

    assert mm.run_virtual(3, main) == [[1, 2, 3, 0], None, [3, 0, 1, 2]]


@pytest.mark.parametrize(
    ("shape", "width", "boundary", "text"),
    [
        ((4,), -1, "periodic", "whole number of at least 0"),
        ((4,), (1, 2, 3), "periodic", "a pair"),
        ((4,), True, "periodic", "whole number"),
        ((4,), {1: 1}, "periodic", "does not exist"),
        ((4,), 1, "wrap", "beyond the ends"),
        ((4,), 1, ("edge", "edge", "edge"), "beyond the ends"),
        ((4,), 1, {3: "edge"}, "does not exist"),
        ((0,), 1, "periodic", "no element"),
    ],
)
def test_what_is_refused(shape, width, boundary, text):
    with pytest.raises(LayoutError, match=text):
        plan_halo(Layout(mm.Mesh("x=2"), "x=S0"), shape, width, boundary)


def test_what_does_not_belong_to_a_halo_is_refused():
    def main():
        with mm.DeviceMesh("x=1") as mesh:
            x = mm.zeros((4,), mesh, "x=S0")
            halo, other = mm.Halo(x), mm.Halo(x)
            wrongs: list[Any] = [other.field(), x.local]
            for wrong in wrongs:
                with pytest.raises(LayoutError):
                    halo.start(wrong)
            with pytest.raises(LayoutError):
                halo.field(mm.zeros((5,), mesh, "x=S0"))
            summands = mm.DTensor.from_local(np.zeros(3), mesh, "x=P", shape=(3,))
            with pytest.raises(LayoutError):
                mm.Halo(summands)

    mm.run_virtual(1, main)


@pytest.mark.parametrize(
    ("width", "boundary"),
    [
        (10_000, "periodic"),
        (10**12, "periodic"),
        (10**12, 0),
        (10**30, "none"),
        (10**9, "reflect"),
        ((0, 10**9), ("none", "edge")),
    ],
)
def test_a_halo_that_nobody_could_plan_is_refused_at_once(width, boundary):
    def main():
        with mm.DeviceMesh("x=2") as mesh:
            x = mm.zeros((3, 4), mesh, "S0")
            with pytest.raises(LayoutError):
                mm.Halo(x, width, boundary)

    mm.run_virtual(2, main)


@given(cases())
def test_the_limit_counts_no_less_than_is_read(case):
    mesh, specs, shape, width, boundary = case
    plan = plan_halo(Layout(mesh, specs), shape, width, boundary)
    bounds = plan.reads.tiling.bounds
    for axis, pair in width.items():
        low, high = plan.ends[axis]
        most = 1 + sum(
            reads.most_runs(bounds[axis], *side)
            for side in ((pair[0], low, -1), (pair[1], high, 1))
        )
        for leaf in range(len(bounds[axis]) - 1):
            assert len(plan.reads.runs_of[axis](leaf)) <= most <= 1 + sum(pair)


def test_a_wide_halo_of_one_axis_or_of_fixed_values():
    def main():
        with mm.DeviceMesh("x=2") as mesh:
            x = mm.distribute(np.arange(3.0), mesh, "S0")
            wide = mm.Halo(x, 1000).exchange(x)
            fixed = mm.Halo(x, 100_000, 7).exchange(x)
            return wide.copy(), fixed.copy()

    for rank, (wide, fixed) in enumerate(mm.run_virtual(2, main)):
        box = [((0, 2), (2, 3))[rank]]
        whole = np.arange(3.0)
        assert np.array_equal(wide, cut(np.pad(whole, 1000, mode="wrap"), box, {0: (1000, 1000)}))
        far = np.pad(whole, 100_000, constant_values=7)
        assert np.array_equal(fixed, cut(far, box, {0: (100_000, 100_000)}))


def test_a_halo_of_a_plain_array_is_refused():
    plain: Any = np.zeros(3)
    with pytest.raises(LayoutError, match="ndarray"):
        mm.Halo(plain)


def test_a_fixed_value_is_one_of_the_dtype():
    def main():
        with mm.DeviceMesh("x=1") as mesh:
            refused: Any = [
                ("i4", 0.5),
                ("i4", (1, 1j)),
                ("f8", 2j),
                ("?", 2),
                ("i1", 128),
            ]
            for dtype, boundary in refused:
                with pytest.raises(DTypeError):
                    mm.Halo.of_shape((3,), mesh, "x=S0", 1, boundary, dtype=dtype)
            halo = mm.Halo.of_shape((3,), mesh, "x=S0", 1, (2.0, np.int64(3)), dtype="i2")
            return halo.exchange(halo.field()).tolist()

    assert mm.run_virtual(1, main) == [[2, 0, 0, 0, 3]]


def test_an_array_without_axes_has_no_halo():
    def main():
        with mm.DeviceMesh("x=2") as mesh:
            x = mm.distribute(np.array(4.0), mesh, "x=R")
            return float(mm.Halo(x).exchange(x))

    assert mm.run_virtual(2, main) == [4.0, 4.0]


def test_a_halo_shows_what_it_is_for():
    def main():
        with mm.DeviceMesh("x=1") as mesh:
            halo = mm.Halo.of_shape((3,), mesh, "x=S0")
            return repr(halo), repr(halo.field())

    ((halo, field),) = mm.run_virtual(1, main)
    assert halo == (
        "Halo(shape=(3,), x=S0 on x=1, width=((1, 1),), ends=(('periodic', 'periodic'),))"
    )
    assert field == (
        "<HaloField of DTensor(shape=(3,), dtype=float64, x=S0 on x=1), width ((1, 1),)>"
    )


def test_examples_of_docstrings():
    result = doctest.testmod(reads, extraglobs={"Mesh": mm.Mesh})
    assert result.attempted
    assert not result.failed
