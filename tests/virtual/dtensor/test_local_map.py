"""Functions of blocks: what they get, and what their results become."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.dtensor import dtensor
from mpimesh.errors import LayoutError, MismatchError, MpimeshError, ShapeError


def on(dims, main, ranks=None):
    """Run main(mesh) on virtual ranks."""

    def started():
        with mm.DeviceMesh(dims) as mesh:
            return main(mesh)

    return mm.run_virtual(ranks or mm.Mesh(dims).size, started)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_blocks_go_in_and_come_out_without_a_message(ranks, monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "0")
    monkeypatch.delattr(dtensor, "agreed_blocks")
    whole = np.arange(21.0).reshape(7, 3)

    def main(mesh):
        x = mm.distribute(whole, mesh, "dp=S0")
        double = mm.local_map(lambda block, factor: factor * block, "dp=S0")
        y = double(x, 2)
        assert y.layout == x.layout
        return y.full()

    for got in on(f"dp={ranks}", main):
        assert np.array_equal(got, 2 * whole)


def test_arguments_are_brought_where_the_function_wants_them():
    a, b = np.arange(12.0).reshape(3, 4), np.arange(20.0).reshape(4, 5)

    def main(mesh):
        x, y = mm.distribute(a, mesh, "dp=R, tp=S0"), mm.distribute(b, mesh, "dp=S0, tp=R")
        product = mm.local_map(
            np.matmul, "dp=S0, tp=P", in_placements=("dp=S0, tp=S1", "dp=R, tp=S0")
        )
        z = product(x, y)
        assert z.shape == (3, 5)
        by_name = mm.local_map(
            lambda left, right: left @ right,
            "dp=S0, tp=S1",
            in_placements={"left": "dp=S0", "right": "tp=S1"},
        )
        same = mm.local_map(lambda u, v: u.shape, None, in_placements="dp=R")
        return z.full(), by_name(x, right=y).full(), same(x, y)

    for first, second, shapes in on("dp=2,tp=2", main):
        assert np.array_equal(first, a @ b)
        assert np.array_equal(second, a @ b)
        assert shapes == (3, 4)


@pytest.mark.parametrize(
    "where",
    [
        lambda mesh: "dp=S0",
        lambda mesh: mm.Placement(["S0"]),
        lambda mesh: mm.Layout(mesh, "dp=S0"),
        lambda mesh: mm.ones((2, 2), mesh, "dp=S0").layout,
    ],
)
def test_all_arguments_are_brought_to_one_place(where):
    whole = np.arange(12.0).reshape(4, 3)

    def main(mesh):
        x, y = mm.distribute(whole, mesh, "dp=R"), mm.distribute(whole, mesh, "dp=S1")
        total = mm.local_map(np.add, "dp=S0", in_placements=where(mesh))
        return total(x, y).full()

    for got in on("dp=2", main):
        assert np.array_equal(got, whole + whole)


def test_a_function_may_ask_where_its_blocks_are():
    @mm.local_map(out_placements="x=S0, y=S1")
    def places(block_of_x, scale, *, block):
        """Number the elements."""
        rows, columns = np.mgrid[block.index]
        assert block.box == block.boxes[0]
        assert block.offset == (block.box[0][0], block.box[1][0])
        assert block.shape == (5, 6)
        assert block.coords["x"] * 2 + block.coords["y"] == block.rank
        return scale * (rows * 6 + columns) + 0 * block_of_x

    assert places.__name__ == "places"
    assert places.__doc__ == "Number the elements."

    def main(mesh):
        return places(mm.zeros((5, 6), mesh, "x=S0, y=S1"), scale=3).full()

    for got in on("x=2,y=2", main):
        assert np.array_equal(got, 3 * np.arange(30).reshape(5, 6))


def test_several_results():
    def main(mesh):
        x = mm.distribute(np.arange(10.0), mesh, "dp=S0")
        pair = mm.local_map(lambda b: (b + 1, b.sum(), b.size), ("dp=S0", "dp=P", None))
        whole, total, size = pair(x)
        assert size == x.local.size
        named = mm.local_map(
            lambda b: {"top": b.max(), "sign": -b}, {"sign": "dp=S0", "top": "dp=P(max)"}
        )(x)
        assert list(named) == ["top", "sign"]
        listed = mm.local_map(lambda b: [b, b * 2], "dp=S0")(x)
        assert isinstance(listed, list)
        return (
            whole.full(),
            total.full(),
            named["top"].full(),
            named["sign"].full(),
            listed[1].full(),
        )

    for whole, total, top, sign, twice in on("dp=3", main):
        row = np.arange(10.0)
        assert np.array_equal(whole, row + 1)
        assert total == row.sum()
        assert top == 9
        assert np.array_equal(sign, -row)
        assert np.array_equal(twice, 2 * row)


def test_lengths_that_only_the_ranks_know_are_agreed_on():
    """Two arguments of different lengths, none at all, or a result that says so."""

    def main(mesh):
        x, y = mm.ones((5,), mesh, "dp=S0"), mm.ones((6,), mesh, "dp=S0")
        joined = mm.local_map(lambda a, b: np.concatenate([a, b]), "dp=S0")(x, y)
        kept = mm.local_map(lambda a, *, block: a[: block.rank], "dp=S0", out_shapes="agree")(y)
        made = mm.local_map(lambda n: np.full(n, mesh.rank), "dp=S0", mesh=mesh)(mesh.rank + 1)
        told = mm.local_map(lambda a: a[::2], "dp=S0", out_shapes=(4,))
        eight = told(mm.distribute(np.arange(8), mesh, "dp=S0"))
        return joined.shape, kept.shape, made.full(), eight.full()

    for joined, kept, made, eight in on("dp=2", main):
        assert joined == (11,)
        assert kept == (1,)
        assert made.tolist() == [0, 1, 1]
        assert eight.tolist() == [0, 2, 4, 6]


def test_sizes_of_uneven_blocks_are_kept():
    def main(mesh):
        x = mm.distribute(np.arange(6), mesh, [mm.Shard(0, sizes=(1, 5))])
        y = mm.local_map(np.negative, "dp=S0")(x)
        assert y.layout == x.layout
        return y.full()

    assert on("dp=2", main)[0].tolist() == [0, -1, -2, -3, -4, -5]


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda b: b[:1], r"rank [01]: .* of shape \(2,\) of an .* got shape \(1,\)"),
        (lambda b: b[None], r"rank [01]: .* of shape \(2, 2\) of an .* got shape \(1, 2\)"),
        (lambda b: float(b[0]), "rank [01]: .* must be a NumPy array"),
        (lambda b: b.sum(), r"shape \(\), which has no axis 0 .* out_placements"),
        (lambda b: (b, b, b), "out_placements are for"),
    ],
)
def test_results_that_do_not_fit(function, text, monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "0")

    def main(mesh):
        x = mm.ones((4,), mesh, "dp=S0")
        places = ("dp=S0", "dp=S0") if isinstance(function(x.local), tuple) else "dp=S0"
        mm.local_map(function, places)(x)

    with pytest.raises(ShapeError, match=text):
        on("dp=2", main)


def test_checks_compare_inferred_shapes_over_ranks(monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "1")

    def main(mesh):
        x = mm.ones((4,), mesh, "dp=S0")
        assert mm.local_map(np.negative, "dp=S0")(x).shape == (4,)
        with pytest.raises(ShapeError, match='"agree"'):
            mm.local_map(lambda b: b[:1], "dp=S0")(x)
        with pytest.raises(MismatchError):
            mm.local_map(lambda b: b[: mesh.rank], "dp=R")(x)
        mm.local_map(lambda b: b[: mesh.rank], "dp=S0", out_shapes="agree")(x)

    on("dp=2", main)


def test_an_error_of_the_function_is_of_its_rank_alone():
    def main(mesh):
        def picky(b):
            if mesh.rank == 1:
                raise KeyError("mine")
            return b

        mm.local_map(picky, "dp=S0")(mm.ones((4,), mesh, "dp=S0"))

    with pytest.raises(KeyError, match="mine"):
        on("dp=2", main)


def test_what_is_refused():
    text_as_function: Any = "dp=S0"

    def main(mesh):
        x = mm.ones((4,), mesh, "dp=S0")
        other = mesh.copy()
        y = mm.ones((4,), other, "dp=S0")
        for call, text in [
            (lambda: mm.local_map(text_as_function), "maps a function"),
            (lambda: mm.local_map(np.negative, "dp=S0")(3), "no argument"),
            (lambda: mm.local_map(np.add, "dp=S0")(x, y), "one mesh"),
            (lambda: mm.local_map(np.add, "dp=S0", mesh=other)(x, x), "is mapped over"),
            (lambda: mm.local_map(np.add, "dp=S0", in_placements=(None, "dp=R"))(x, 1), "a int"),
            (lambda: mm.local_map(np.add, "dp=S0", in_placements={"z": "dp=R"})(x, x), "not given"),
        ]:
            with pytest.raises(LayoutError, match=text):
                call()
        with pytest.raises(MpimeshError, match="out_shapes"):
            mm.local_map(np.negative, "dp=S0", out_shapes="even")(x)
        other.close()

    on("dp=1", main)


def test_a_rank_outside_the_mesh_calls_nothing():
    def main(mesh):
        x = mm.ones((4,), mesh, "dp=S0")
        y = mm.local_map(np.negative, "dp=R", in_placements="dp=R")(x)
        return None if y is None else y.full().tolist()

    assert on(mm.Mesh("dp=2", [2, 0]), main, 3) == [[-1.0] * 4, None, [-1.0] * 4]
