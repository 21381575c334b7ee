"""Split arrays are carried from layout to layout, on virtual ranks."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import mpimesh as mm
from mpimesh.errors import (
    BudgetError,
    ClosedError,
    LayoutError,
    MismatchError,
    ReduceOpError,
    ShapeError,
)
from tests.helpers.depth import deep, examples
from tests.helpers.dtensor_check import on
from tests.helpers.dtensor_oracle import OPS, lacked_bytes, placements, split


@pytest.mark.parametrize(
    ("dims", "every"),
    [("a=2,b=4", 1), *deep(("a=4,b=1", 1)), ("a=3", 1), *deep(("a=2,b=2,c=2", 13))],
)
def test_any_layout_to_any_layout(dims, every):
    """All pairs; of those on three dims, which are proved as plans, every 13th."""
    x = np.arange(63.0).reshape(9, 7)

    def main():
        with mm.DeviceMesh(dims) as mesh:
            rows = placements(mesh.ndim)
            sources = [split(x, mesh, row) for row in rows]
            for number, (a, row) in enumerate((a, row) for a in sources for row in rows):
                if number % every:
                    continue
                b = a.redistribute(row)
                assert b.layout == mm.Layout(mesh, row)
                found = b.full()
                assert np.array_equal(found, x), (a, b, found)

    mm.run_virtual(mm.Mesh(dims).size, main)


@pytest.mark.parametrize("op", ["mean", *deep("prod", "min", "max")])
def test_other_reductions(op):
    rng = np.random.default_rng(3)
    x = rng.integers(1, 4, (5, 6)).astype(np.float64)

    def main():
        with mm.DeviceMesh("a=2,b=3") as mesh:
            specs = ("R", "S0", "S1", f"P({op})")
            for source in placements(2, specs):
                a = split(x, mesh, source)
                for target in placements(2, specs):
                    found = a.redistribute(target).full()
                    np.testing.assert_allclose(found, x, rtol=1e-15)

    mm.run_virtual(6, main)


SUMMANDS = [f"P({op})" for op in OPS]


def _whole(blocks, layout, shape):
    """The whole of the blocks of all ranks, by NumPy: copies are alike, summands are reduced."""
    dims = [dim for dim, spec in enumerate(layout.placement) if isinstance(spec, mm.Partial)]
    whole: dict[Any, Any] = {}
    for rank, block in enumerate(blocks):
        box = tuple(slice(*edges) for edges in layout.box(shape, rank))
        coords = layout.mesh.coords_of(rank)
        place = tuple(coords[dim] for dim in dims)
        summand = whole.setdefault(place, np.full(shape, np.nan))
        known = ~np.isnan(summand[box])
        np.testing.assert_array_equal(summand[box][known], block[known])
        summand[box] = block
    total = OPS[layout.partial_op or "sum"].reduce(list(whole.values()))
    return total / len(whole) if layout.partial_op == "mean" else total


@pytest.mark.parametrize(
    ("dims", "every"), [*deep(("a=3", 1)), ("a=2,b=2", 7), *deep(("a=2,b=2", 1), ("a=3,b=2", 5))]
)
@pytest.mark.parametrize("shape", [(5, 4), *deep(((1, 3),))])
def test_any_summands_to_any_others(dims, every, shape):
    """All pairs, of which one reduction may be before and another one after."""
    x = np.arange(1.0, 1 + np.prod(shape)).reshape(shape)
    mesh = mm.Mesh(dims)
    rows = [
        row
        for row in placements(mesh.ndim, ("R", "S0", "S1", *SUMMANDS))
        if len({spec for spec in row if spec in SUMMANDS}) < 2
    ]
    pairs = list(product(rows, rows))[::every]

    def main():
        with mm.DeviceMesh(dims) as live:
            return [split(x, live, a).redistribute(b).local.copy() for a, b in pairs]

    found = mm.run_virtual(mesh.size, main)
    for (a, b), blocks in zip(pairs, zip(*found, strict=True), strict=True):
        layout = mm.Layout(mesh, b)
        np.testing.assert_array_equal(_whole(blocks, layout, shape), x, err_msg=f"{a} -> {b}")


@pytest.mark.parametrize(
    "x",
    [
        np.arange(12).reshape(4, 3) % 2 == 0,
        np.arange(12, dtype=np.int8).reshape(4, 3),
        np.arange(12, dtype=np.float16).reshape(4, 3) / 8,
        np.arange(12).reshape(4, 3) * (1 + 2j),
        np.array([["a", "bc", ""], ["d", "e", "f"]], "U3"),
        np.zeros((3, 2), [("x", "f4"), ("y", "i2", (2,))]),
        np.arange(6).astype("datetime64[D]").reshape(2, 3),
        np.arange(6, dtype=">i4").reshape(3, 2),
    ],
    ids=lambda x: str(x.dtype),
)
def test_every_dtype_moves(x):
    def main():
        with mm.DeviceMesh("a=3") as mesh:
            a = mm.distribute(x, mesh, "S0").redistribute("S1")
            assert a.dtype == x.dtype
            found = a.full()
            assert found.dtype == x.dtype
            assert (found == x).all()

    mm.run_virtual(3, main)


def test_half_types_are_summed_in_float32():
    """2048 + 1 + 1 in float16 would stay at 2048."""

    def main():
        with mm.DeviceMesh("a=3") as mesh:
            mine = np.array([[2048, 1, 1][mesh.rank]], np.float16)
            x = mm.DTensor.from_local(mine, mesh, "P", shape=(1,))
            assert x.full() == [2050]

    mm.run_virtual(3, main)


@st.composite
def meshes(draw, ranks):
    sizes = draw(st.lists(st.integers(1, 3), max_size=3))
    while np.prod(sizes) > ranks:
        sizes.pop()
    ids = draw(st.permutations(range(ranks)))[: int(np.prod(sizes))]
    return mm.Mesh([(f"d{k}", size) for k, size in enumerate(sizes)], ids)


@settings(max_examples=examples(40))
@given(st.data())
def test_between_any_two_meshes(data):
    """Overlapping, disjoint or equal, also without dims; and back again."""
    ranks = 5
    first, second = data.draw(meshes(ranks)), data.draw(meshes(ranks))
    shape = tuple(data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=3)))
    specs = st.sampled_from(["R", "P", *(f"S{axis}" for axis in range(len(shape)))])
    source = data.draw(st.lists(specs, min_size=first.ndim, max_size=first.ndim))
    target = data.draw(st.lists(specs, min_size=second.ndim, max_size=second.ndim))
    max_bytes = data.draw(st.sampled_from([0, 8, 100]))
    x = np.arange(np.prod(shape), dtype=float).reshape(shape)

    def main():
        with mm.DeviceMesh(first) as here, mm.DeviceMesh(second) as there:
            a = mm.distribute(x, here, source)
            b = a.redistribute(target, mesh=there, max_bytes=max_bytes)
            assert b.is_member == second.contains_rank(there.rank)
            back = b.redistribute(source, mesh=here, max_bytes=max_bytes)
            if a.is_member:
                assert np.array_equal(back.full(), x)
            if b.is_member:
                assert np.array_equal(b.full(), x)

    mm.run_virtual(ranks, main)


@pytest.mark.parametrize("dims", ["a=2,b=4", "a=2,b=2"])
def test_what_is_lacked_is_what_comes(dims):
    """For every pair without summands: no byte more is counted, and none was moved unseen."""
    shape = (9, 7)
    x = np.arange(63.0).reshape(shape)

    def main():
        with mm.DeviceMesh(dims) as mesh:
            rows = placements(2, ("R", "S0", "S1"))
            sources = [mm.distribute(x, mesh, row) for row in rows]
            for a, row in ((a, row) for a in sources for row in rows):
                before = mesh.traffic().snapshot()
                b = a.redistribute(row)
                came = mesh.traffic() - before
                expected = lacked_bytes(a.layout, b.layout, shape, 8, mesh.rank)
                assert came.received_bytes == expected == a.plan(row).received_bytes(mesh.rank)
                assert came.received_messages == a.plan(row).messages(mesh.rank)

    mm.run_virtual(mm.Mesh(dims).size, main)


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_what_a_plan_says_is_what_is_counted(data):
    """Also of sums, which a collective may make: bytes and messages of each rank."""
    mesh = mm.Mesh(
        data.draw(st.sampled_from(["a=2", "a=3", "a=5", "a=2,b=2", "a=3,b=2", "a=1,b=3"]))
    )
    op = data.draw(st.sampled_from(list(OPS)))
    shape = tuple(data.draw(st.lists(st.integers(0, 9), max_size=2)))
    if data.draw(st.booleans()):
        shape = (*shape, 5000)  # past what every rank reduces for itself
    specs = ["R", f"P({op})", *(f"S{axis}" for axis in range(len(shape)))]
    rows = [tuple(data.draw(st.sampled_from(specs)) for _ in mesh.dims) for _ in range(2)]
    x = np.ones(shape, data.draw(st.sampled_from(["f4", "f8"])))

    def main():
        with mm.DeviceMesh(mesh) as live:
            a = split(x, live, rows[0])
            before = live.traffic().snapshot()
            plan = a.plan(rows[1])
            a.redistribute(rows[1])
            came = live.traffic() - before
            counted = (came.received_bytes, came.received_messages)
            assert counted == (plan.received_bytes(live.rank), plan.messages(live.rank)), str(plan)
            return plan.sent_bytes(live.rank), *counted, plan.total_bytes, plan.total_messages

    sent, nbytes, messages, total_bytes, total_messages = zip(
        *mm.run_virtual(mesh.size, main), strict=True
    )
    assert {sum(sent), sum(nbytes)} == {*total_bytes}
    assert {sum(messages)} == {*total_messages}


def test_budgets():
    def main():
        with mm.DeviceMesh("a=2") as mesh:
            x = mm.distribute(np.zeros((4, 4)), mesh, "S0")
            with mesh.budget(bytes=32, messages=1) as budget:
                x.redistribute("S1")
            assert budget.used_bytes == 32
            with mesh.budget(bytes=63), pytest.raises(BudgetError, match="redistribute"):
                x.redistribute("R")
            came = mesh.traffic().by_peer("redistribute")[1 - mesh.rank]
            assert (came.received_bytes, came.received_messages) == (32, 1)

    mm.run_virtual(2, main)


def test_it_goes_on_while_the_rank_works():
    x = np.arange(24.0).reshape(6, 4)

    def main():
        with mm.DeviceMesh("a=2,b=2") as mesh:
            a = mm.distribute(x, mesh, "S0, S1")
            first, second = a.start_redistribute("S1, S0"), a.start_redistribute("R, R")
            total = mesh.group().all_reduce(np.ones(1))
            assert total.resolve() == 4
            assert np.array_equal(second.resolve().local, x)
            assert np.array_equal(first.resolve().full(), x)
            assert second.resolve() is second.resolve()

    mm.run_virtual(4, main)


def test_a_copy_is_a_copy():
    """Without any move, too, the block is one of its own."""

    def main():
        with mm.DeviceMesh("a=2") as mesh:
            x = np.arange(4)
            a = mm.distribute(x, mesh, "R")
            b = a.redistribute("S0")
            b.local[...] = -1
            assert np.array_equal(a.local, [0, 1, 2, 3])
            assert np.array_equal(x, [0, 1, 2, 3])

    mm.run_virtual(2, main)


# -- bad input -------------------------------------------------------------------------


def refused(error, match, action, ranks=2, dims="a=2"):
    def main():
        with mm.DeviceMesh(dims) as mesh:
            x = mm.distribute(np.arange(6.0).reshape(2, 3), mesh, "S0")
            with pytest.raises(error, match=match):
                action(mesh, x)

    mm.run_virtual(ranks, main)


def test_layouts_that_do_not_fit():
    refused(LayoutError, "more axes", lambda mesh, x: x.redistribute("S2"))
    refused(LayoutError, "2 specs", lambda mesh, x: x.redistribute("S0, R"))
    refused(LayoutError, "add up to 3", lambda mesh, x: x.redistribute("S0(1,2)"))
    refused(LayoutError, "DeviceMesh", lambda mesh, x: x.redistribute("R", mesh=mm.Mesh("a=2")))
    refused(ShapeError, "max_bytes", lambda mesh, x: x.redistribute("R", max_bytes=-1))


def test_a_mean_of_whole_numbers():
    def action(mesh, x):
        mm.DTensor.from_local(np.ones(2, int), mesh, "P(mean)", shape=(2,)).full()

    refused(ReduceOpError, "mean", action)


def test_a_closed_mesh():
    def main():
        mesh = mm.DeviceMesh("a=2")
        x = mm.distribute(np.arange(4), mesh, "S0")
        mesh.close()
        with pytest.raises(ClosedError):
            x.redistribute("R")

    mm.run_virtual(2, main)


def test_ranks_that_want_different_layouts(monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "1")

    def main():
        with mm.DeviceMesh("a=2") as mesh:
            x = mm.distribute(np.arange(4.0).reshape(2, 2), mesh, "S0")
            with pytest.raises(MismatchError, match=r"rank 1: redistribute.*a=S1"):
                x.redistribute("R" if mesh.rank == 0 else "S1")

    mm.run_virtual(2, main)


def test_it_is_no_numpy_array():
    refused(LayoutError, "full", lambda mesh, x: np.asarray(x))
    refused(LayoutError, "looped", lambda mesh, x: list(x))


def test_ranks_that_name_different_roots(monkeypatch):
    """They wrote into each other's results, and nobody noticed."""
    monkeypatch.setenv("MPIMESH_CHECKS", "1")

    def main(mesh):
        x = mm.distribute(np.arange(6.0), mesh, "S0")
        with pytest.raises(MismatchError, match="ids"):
            x.full(root=mesh.rank % 2)
        with pytest.raises(MismatchError, match="max_bytes"):
            x.redistribute("R", max_bytes=8 + mesh.rank)

    on("a=3", main)


def test_ranks_that_name_meshes_of_other_orders(monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "1")

    def main(mesh):
        x = mm.distribute(np.arange(6.0), mesh, "S0")
        with (
            mm.DeviceMesh(mm.Mesh("b=2", ids=[0, 1])) as one,
            mm.DeviceMesh(mm.Mesh("b=2", ids=[1, 0])) as other,
            pytest.raises(MismatchError),
        ):
            x.redistribute("S0", mesh=other if mesh.rank else one)

    on("a=2", main)


def test_a_closed_mesh_takes_no_array():
    def main(mesh):
        x = mm.zeros(4, mesh, "S0")
        other = mesh.copy()
        other.close()
        with pytest.raises(ClosedError):
            x.redistribute("S0", mesh=other)

    on("a=2", main)


@pytest.mark.parametrize("checks", ["0", "1"])
def test_a_budget_that_one_rank_breaks(monkeypatch, checks):
    """The others learn of it, with checks or without: theirs is larger, but there is one."""
    monkeypatch.setenv("MPIMESH_CHECKS", checks)

    def main(mesh):
        x = mm.zeros((4, 4), mesh, "S0")
        limit = 8 if mesh.rank else 1 << 20
        words = "would receive" if mesh.rank else "budget of rank 1"
        with mesh.budget(bytes=limit), pytest.raises(BudgetError, match=words):
            x.redistribute("S1")

    on("a=2", main)


def test_what_is_sent_in_pieces_counts():
    """It was in no count of what is received, so no budget saw it."""

    def main(mesh):
        x = mm.distribute(np.arange(32.0).reshape(8, 4), mesh, "S0")
        before = mesh.traffic().snapshot()
        np.roll(x, 1, axis=0)
        assert (mesh.traffic() - before).received_bytes == x[0].nbytes
        with pytest.raises(BudgetError), mesh.budget(bytes=x[0].nbytes - 1):
            np.roll(x, 1, axis=0)

    on("a=4", main)


@pytest.mark.parametrize("checks", ["0", "1"])
def test_sums_on_one_of_two_equal_meshes_that_leave_ranks_out(monkeypatch, checks):
    """Only their members took part in the way back, by another collective than the rest."""
    monkeypatch.setenv("MPIMESH_CHECKS", checks)

    def main():
        small = mm.Mesh("d=2")
        with mm.DeviceMesh(small) as here, mm.DeviceMesh(small) as there:
            x = mm.distribute(np.arange(4.0), here, ["R"])
            back = x.redistribute(["P"], mesh=there).redistribute(["R"], mesh=here)
            return back.local.tolist() if back.is_member else None

    assert mm.run_virtual(3, main) == [[0.0, 1.0, 2.0, 3.0]] * 2 + [None]


@pytest.mark.parametrize("checks", ["0", "1"])
def test_what_exceeds_the_budget_of_one_rank_is_refused_on_all(monkeypatch, checks):
    """Those that refused alone left the others in an exchange with their next one: wrong values."""
    monkeypatch.setenv("MPIMESH_CHECKS", checks)
    numbers = np.arange(24.0).reshape(6, 4)

    def main(mesh):
        x = mm.distribute(numbers, mesh, "a=S0, b=R")
        before = mesh.traffic().snapshot()
        with mesh.budget(bytes=47) as budget:
            for _ in range(2):
                with pytest.raises(BudgetError, match=r"rank 1, 2|\b48 bytes"):
                    x.redistribute("a=S1, b=S0")  # ranks 0 and 3 have all that they need
            assert budget.used_bytes == 0
        assert (mesh.traffic() - before).received_bytes == 0
        y = (x + 1000).redistribute("a=S1, b=R")
        assert np.array_equal(y.full(), numbers + 1000)
        with mesh.budget(bytes=48) as budget:
            x.redistribute("a=S1, b=S0")
            assert budget.used_bytes == (48 if mesh.rank in (1, 2) else 0)

    on("a=2,b=2", main)


@pytest.mark.parametrize("places", [("P", "R"), ("S0", "R"), ("P", "S0"), ("S0", "S1"), ("P", "P")])
def test_a_plan_with_max_bytes_says_what_is_moved_with_it(places):
    before, after = places

    def main(mesh):
        for shape in ((8, 1), (5, 5), (21, 21)):
            x = mm.zeros(shape, mesh, before)
            for limit in (0, 64, 4096):
                start = mesh.traffic().snapshot()
                x.redistribute(after, max_bytes=limit)
                moved = (mesh.traffic() - start).received_bytes
                planned = x.plan(after, max_bytes=limit).received_bytes(mesh.rank)
                assert moved == planned, (shape, limit)
        with pytest.raises(ShapeError, match="max_bytes"):
            x.plan(after, max_bytes=-1)

    on("a=4", main)


def test_a_refused_operand_leaves_nothing_under_way():
    """The first operand was moving already; the mesh would not close."""

    def main(mesh):
        x = mm.distribute(np.ones((7, 5)), mesh, "S0")
        refused: Any = mm.DTensor.from_local(np.ones((7, 5), "c16"), mesh, "P(max)", shape=(7, 5))
        target: Any = mm.zeros((7, 5), mesh, "S1", dtype="c16")
        for call in (
            lambda: np.where(x.redistribute("S1") > 0, x, refused),
            lambda: np.add(x, refused, out=target),
            lambda: np.copyto(target, refused, where=x > 0),
        ):
            with pytest.raises(TypeError, match="no order"):
                call()

    on("a=2", main)
