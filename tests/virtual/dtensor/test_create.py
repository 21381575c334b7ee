"""Split arrays are made: of whole arrays, of blocks, of callbacks, and of their indices."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import mpimesh as mm
from mpimesh.errors import (
    ArrayValueError,
    DTypeError,
    LayoutError,
    MismatchError,
    RankError,
    ShapeError,
)
from tests.contract.split_arrays import same
from tests.helpers.depth import examples
from tests.helpers.dtensor_check import on
from tests.helpers.dtensor_oracle import placements

MESHES = ["a=1", "a=2", "a=3", "a=2,b=2"]


def whole(makes):
    """The whole array that each of `makes` gives, on every mesh and in every layout."""
    found = []
    for dims in MESHES:

        def main(mesh):
            rows = placements(mesh.ndim, ("R", "S0", "P"))
            return [[make(mesh, row).full() for make in makes] for row in rows]

        found += [row for rank in on(dims, main) for row in rank]
    return found


def test_values_hang_on_the_index_only():
    makes = [
        lambda mesh, row: mm.arange(11, mesh=mesh, placements=row),
        lambda mesh, row: mm.arange(2.0, -1.0, -0.3, mesh=mesh, placements=row),
        lambda mesh, row: mm.linspace(0, 1, 7, mesh=mesh, placements=row),
        lambda mesh, row: mm.eye(5, 4, k=1, mesh=mesh, placements=row),
        lambda mesh, row: mm.full((3, 2), 1.5, mesh, row),
        lambda mesh, row: mm.ones((5,), mesh, row, dtype=int),
        lambda mesh, row: mm.zeros((0, 3), mesh, row),
        lambda mesh, row: mm.Random(3).normal((4, 5), mesh, row),
        lambda mesh, row: mm.Random(3).uniform((4, 5), mesh, row, low=-1, high=2, dtype="f4"),
        lambda mesh, row: mm.Random(3).exponential((7,), mesh, row, scale=2.0),
        lambda mesh, row: mm.Random(3).integers(-2, 9, (7,), mesh, row),
    ]
    expected = [
        np.arange(11),
        np.arange(2.0, -1.0, -0.3),
        np.linspace(0, 1, 7),
        np.eye(5, 4, k=1),
        np.full((3, 2), 1.5),
        np.ones(5, int),
        np.zeros((0, 3)),
    ]
    rows = whole(makes)
    for row in rows:
        for found, here in zip(row, expected + rows[0][len(expected) :], strict=True):
            assert found.dtype == here.dtype
            np.testing.assert_array_equal(found, here)


def test_each_draw_is_another_one():
    def main(mesh):
        rng = mm.Random(5)
        first, second = (rng.normal((6,), mesh, "S0").full() for _ in range(2))
        again = mm.Random(5).normal((6,), mesh, "R").local
        assert np.array_equal(first, again)
        assert not np.array_equal(first, second)
        assert mm.Random(5).bernoulli(1.0, (4,), mesh, "S0").full().all()
        return rng.permutation(6).tolist()

    orders = on("a=2", main)
    assert orders[0] == orders[1]
    assert sorted(orders[0]) == list(range(6))


def test_whole_arrays_are_cut():
    x = np.arange(35).reshape(7, 5)

    def main(mesh):
        for row in placements(2, ("R", "S0", "S1", "P")):
            for root in (None, 0, 3):
                given_here = x if root in (None, mesh.rank) else None
                t = mm.distribute(given_here, mesh, row, root=root)
                assert (t.shape, t.dtype) == (x.shape, x.dtype)
                assert np.array_equal(t.full(), x)
                if "P" not in row:
                    box = tuple(slice(*edges) for edges in t.layout.box(x.shape, mesh.rank))
                    assert np.array_equal(t.local, x[box])
                    assert t.global_offset == tuple(part.start for part in box)

    on("a=2,b=2", main)


def test_a_block_is_no_view_of_what_was_given():
    def main(mesh):
        x = np.arange(4)
        t = mm.distribute(x, mesh, "R")
        t.local[0] = 9
        assert x[0] == 0

    on("a=2", main)


def test_whole_arrays_come_back_to_one_rank():
    x = np.arange(12.0).reshape(3, 4)

    def main(mesh):
        t = mm.distribute(x, mesh, "S0, S1")
        found = t.full(root=2)
        assert (found is None) == (mesh.rank != 2)
        assert found is None or np.array_equal(found, x)
        with pytest.raises(RankError):
            t.full(root=4)

    on("a=2,b=2", main)


def test_each_rank_reads_its_part_of_a_file(tmp_path):
    x = np.arange(30.0).reshape(10, 3)
    np.save(tmp_path / "x.npy", x)

    def main(mesh):
        file = np.load(tmp_path / "x.npy", mmap_mode="r")
        asked = []

        def read(index):
            asked.append(index)
            return file[index]

        t = mm.from_callback(file.shape, mesh, "S0", read)
        assert asked == [tuple(slice(*edges) for edges in t.layout.box(x.shape, mesh.rank))]
        assert np.array_equal(t.full(), x)
        with pytest.raises(ShapeError, match="callback"):
            mm.from_callback((10, 3), mesh, "S0", lambda index: np.zeros(2))
        with pytest.raises(LayoutError):
            mm.from_callback((10, 3), mesh, "P", read)

    on("a=3", main)


@settings(max_examples=examples(30))
@given(st.lists(st.integers(0, 4), min_size=1, max_size=4))
def test_blocks_of_any_lengths(lengths):
    x = np.arange(2 * sum(lengths)).reshape(-1, 2)
    starts = np.cumsum([0, *lengths])

    def main(mesh):
        block = x[starts[mesh.rank] : starts[mesh.rank + 1]]
        t = mm.DTensor.from_local(block, mesh, "S0")
        assert t.shape == x.shape
        assert t.local.base is block.base
        assert np.array_equal(t.full(), x)
        assert np.array_equal(t.redistribute("S0").full(), x)  # evened out

    on(f"a={len(lengths)}", main)


def test_small_floats_stay_what_they_are():
    """NumPy's own description of a dtype of ml_dtypes is that of bytes without meaning."""
    x = np.arange(4).astype(ml_dtypes.bfloat16)

    def main(mesh):
        t = mm.distribute(x if mesh.rank == 0 else None, mesh, "S0", root=0)
        assert t.dtype == x.dtype
        assert t.local.tolist() == x[2 * mesh.rank :][:2].tolist()
        kinds = (ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fn)
        with pytest.raises(MismatchError, match=r"rank 1: .*float8_e4m3fn"):
            mm.DTensor.from_local(np.ones(2, kinds[mesh.rank]), mesh, "S0")

    on("a=2", main)


def test_a_rank_outside_learns_nothing_of_a_root():
    def main():
        with mm.DeviceMesh(mm.Mesh("a=1", [0])) as mesh:
            assert mm.distribute(np.ones(2), mesh, "S0").is_member == (mesh.rank == 0)
            if mesh.rank == 1:
                with pytest.raises(RankError, match=r"rank 1\b.*a=1.*mm.empty"):
                    mm.distribute(None, mesh, "S0", root=0)
                assert not mm.empty((2,), mesh, "S0").is_member

    mm.run_virtual(2, main)


def test_blocks_in_a_grid():
    def main(mesh):
        i, j = mesh.coord("a"), mesh.coord("b")
        t = mm.DTensor.from_local(np.full((i + 1, 2 - j), 10 * i + j), mesh, "S0, S1")
        assert t.layout.text == "a=S0(1,2), b=S1"
        assert t.full().tolist() == [[0, 0, 1], [10, 10, 11], [10, 10, 11]]
        even = mm.DTensor.from_local(np.full((2 - (i == j == 1),), i), mesh, "S0, S0")
        assert even.shape == (7,)

    on("a=2,b=2", main)


# -- blocks that disagree ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "placement", "error", "match"),
    [
        (lambda r: np.zeros(2, "f4" if r else "f8"), "S0", MismatchError, "rank 1: .*float32"),
        (lambda r: np.zeros((2, 1) if r else 2), "S0", MismatchError, r"rank 1: shape \(2, 1\)"),
        (lambda r: np.zeros((2, 1 + r)), "S0", MismatchError, r"axis 1.*\n.*rank 0: shape \(2, 1"),
        (lambda r: np.zeros(2 + r), "R", MismatchError, "axis 0"),
        (lambda r: np.zeros(2), "S1", LayoutError, "more axes"),
        (lambda r: np.zeros(1 + r), "S0(2,1)", LayoutError, None),
    ],
)
def test_blocks_that_disagree(block, placement, error, match):
    def main(mesh):
        with pytest.raises((error, ShapeError), match=match):
            mm.DTensor.from_local(block(mesh.rank), mesh, placement)
        mesh.barrier()  # all ranks are here: it was raised on all

    on("a=2", main)


def test_a_block_of_another_shape_than_the_layout_has():
    def main(mesh):
        with pytest.raises(ShapeError, match=r"rank 0\b.*\(2,\)"):
            mm.DTensor.from_local(np.zeros(3), mesh, "S0", shape=(2,))

    on("a=1", main)


def test_what_cannot_be_split():
    def main(mesh):
        with pytest.raises(DTypeError):
            mm.distribute(np.array([None]), mesh, "R")
        with pytest.raises(DTypeError, match=r"rank 1\b"):
            mm.distribute(np.array([None]) if mesh.rank else None, mesh, "R", root=1)
        with pytest.raises(ArrayValueError, match="step"):
            mm.arange(0, 1, 0, mesh=mesh, placements="R")
        with pytest.raises(ArrayValueError):
            mm.Random(-1)
        mesh.barrier()

    on("a=2", main)


def test_a_read_only_block_is_copied_and_can_be_written():
    def main():
        with mm.DeviceMesh("x=3") as mesh:
            block = np.array([1.0 + mesh.rank])
            block.flags.writeable = mesh.rank != 1
            x: Any = mm.DTensor.from_local(block, mesh, "S0")
            assert (x.local is block) == (mesh.rank != 1)
            x += 1
            np.add(x, 1, out=x)
            same(x, np.array([3.0, 4.0, 5.0]))
            y: Any = mm.DTensor.from_local(block, mesh, "S0", shape=(3,))
            np.copyto(y, 7)
            same(y, np.full(3, 7.0))

            def constant(part):
                return np.broadcast_to(part[:1] if mesh.rank else part[:1].copy(), part.shape)

            z = mm.local_map(constant, out_placements="S0")(y)
            z *= 2
            same(z, np.full(3, 14.0))

    mm.run_virtual(3, main)


def test_an_array_as_the_value_of_full():
    def main(mesh):
        for placement in ("R", "S0"):
            for shape, value in (((4,), [1, 2, 3, 4]), ((3, 2), [[1], [2], [3]]), ((2, 2), [5, 6])):
                found = mm.full(shape, value, mesh, placement).full()
                assert np.array_equal(found, np.full(shape, value))
        with pytest.raises(ShapeError, match=r"\(2,\).*\(4,\)"):
            mm.full((4,), [1, 2], mesh, "S0")

    on("a=2", main)


def test_parts_without_elements_take_the_others_dtype():
    """``np.array([])`` is of float64: the integers of the others were read as floats."""

    def main(mesh):
        x = mm.from_callback((2,), mesh, "S0", lambda index: [10, 20][index[0]])
        y = mm.local_map(lambda b: np.array([int(v) for v in b]), "S0")(mm.ones(2, mesh, "S0"))
        for found, want in ((x, [10, 20]), (y, [1, 1])):
            assert found.dtype == np.int64
            assert found.local.dtype == np.int64
            assert found.full().tolist() == want
        none = mm.from_callback((0,), mesh, "S0", lambda index: np.zeros(0, "f4"))
        assert none.dtype == np.float32
        dtype = "f4" if mesh.rank else "f8"
        with pytest.raises(MismatchError, match="rank 1: float32"):
            mm.from_callback((6,), mesh, "S0", lambda index: np.zeros(2, dtype))

    on("a=3", main)


def test_the_same_array_on_all_ranks_is_compared(monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "1")

    def main(mesh):
        with pytest.raises(MismatchError, match="distribute"):
            mm.distribute(np.full(2, mesh.rank), mesh, "R")
        with pytest.raises(MismatchError, match="distribute"):
            mm.distribute(np.ones((6 + mesh.rank, 2)), mesh, "S0")

    on("a=2", main)
