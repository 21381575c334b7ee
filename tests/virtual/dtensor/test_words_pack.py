"""Components of split arrays are packed, and whole arrays become blocks, in TensorFlow's words."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import mpimesh as mm
from mpimesh.dtensor import default_mesh, fetch_layout, numpy_util, pack, unpack
from mpimesh.errors import LayoutError, MismatchError, RankError, ShapeError
from mpimesh.layout import MATCH, UNSHARDED, AxisLayout
from tests.helpers.dtensor_oracle import placements


def on(dims, function, *arguments):
    def main():
        with mm.DeviceMesh(dims) as mesh:
            return function(mesh, *arguments)

    return mm.run_virtual(mm.Mesh(dims).size, main)


def block_of(x, layout, rank):
    return x[tuple(slice(*edges) for edges in layout.box(x.shape, rank))]


# -- pack and unpack -------------------------------------------------------------------


def test_components_are_put_together():
    """3 x 2, ['x', unsharded]: the six components of TensorFlow's example."""
    x = np.arange(24).reshape(6, 4)

    def main(mesh):
        layout = AxisLayout(["x", UNSHARDED], mesh)
        mine = np.ascontiguousarray(block_of(x, layout.layout, mesh.rank))
        t = pack([mine], layout, mesh=mesh, check_replicas=True)
        assert t.shape == (6, 4)
        assert fetch_layout(t).sharding_specs == ["x", UNSHARDED]
        assert t.local is mine
        (again,) = unpack(t)
        assert again is mine
        assert np.array_equal(t.full(), x)

    on("x=3,y=2", main)


@pytest.mark.parametrize("dims", ["a=1", "a=2", "a=2,b=2"])
def test_every_layout_can_be_packed(dims):
    x = np.arange(64.0).reshape(8, 8)

    def main(mesh):
        for row in placements(mesh.ndim, ("R", "S0", "S1")):
            mine = block_of(x, mm.Layout(mesh, row), mesh.rank)
            t = pack([mine], row, mesh=mesh, check_replicas=True)
            assert t.shape == x.shape
            assert np.array_equal(t.full(), x)

    on(dims, main)


def test_summands_may_differ():
    def main(mesh):
        mine = np.full(2, 10.0**mesh.rank)
        t = pack([mine], "a=P, b=S0", mesh=mesh, check_replicas=True)
        assert t.full().tolist() == [101, 101, 1010, 1010]

    on("a=2,b=2", main)


def test_the_default_mesh_is_taken():
    def main(mesh):
        layout = AxisLayout(["a"], mesh)
        with default_mesh(mesh):
            assert pack((np.ones(1),), layout).shape == (2,)
        with pytest.raises(LayoutError, match="mesh="):
            pack((np.ones(1),), layout)

    on("a=2", main)


def one(rank, *, shape=(2, 2), dtype=float):
    return [np.zeros(shape, dtype)]


X_ROWS = [MATCH, "x"]


@pytest.mark.parametrize(
    ("give", "layout", "error", "match"),
    [
        (lambda r: one(r) * 3, "R", ShapeError, "expected 1 inputs to DTensorPack, but got 3"),
        (lambda r: one(r) if r else [], "R", ShapeError, "rank 0: expected 1 inputs .* but got 0"),
        (lambda r: one(r)[0], "R", ShapeError, "ranks 0.*1: .*list.*ndarray"),
        (lambda r: [None], "R", ShapeError, "ranks 0.*1: .*None"),
        (lambda r: [[[1], [2, 3]]] if r else one(r), "R", ShapeError, "rank 1: "),
        (
            lambda r: one(r, shape=(2, 2 + r)),
            "R",
            MismatchError,
            r"same shape.*\n.*\n.*1: .*\(2, 3",
        ),
        (lambda r: one(r, dtype="f8" if r else "f4"), "R", MismatchError, "rank 0: .*float32"),
        (lambda r: one(r, shape=(2,) * (r + 1)), "R", MismatchError, r"rank 1: shape \(2, 2\)"),
        (one, "S2", ShapeError, "more axes"),
        (one, "S0(1,1)", ShapeError, "sizes"),
        (one, ["x"], ShapeError, "is for 1 axes"),
        (one, X_ROWS, ShapeError, "match"),
    ],
)
def test_components_that_do_not_fit(give, layout, error, match):
    def main(mesh):
        found = layout if isinstance(layout, str) else AxisLayout(layout, mesh)
        with pytest.raises(error, match=match):
            pack(give(mesh.rank), found, mesh=mesh)
        mesh.barrier()  # it was raised on both

    on("x=2", main)


def test_ranks_that_say_different_things():
    def main(mesh):
        with pytest.raises(MismatchError, match=r"rank 1.*x=S0"):
            pack([np.ones(2)], "S0" if mesh.rank else "R", mesh=mesh)
        with pytest.raises(MismatchError, match=r"\[1\]"):
            pack([np.ones(2)], "R", mesh=mesh, check_replicas=mesh.rank == 1)
        mesh.barrier()

    on("x=2", main)


def test_copies_that_differ():
    def main(mesh):
        mine = np.zeros((1, 2))
        mine[0, 1] = mesh.rank == 3  # ranks 2 and 3 hold the second row
        assert pack([mine], "x=S0", mesh=mesh).shape == (2, 2)
        with pytest.raises(MismatchError, match=r"2 and 3.*\[1:2, 0:2\]"):
            pack([mine], "x=S0", mesh=mesh, check_replicas=True)
        mesh.barrier()

    on("x=2,y=2", main)


@pytest.mark.parametrize(
    "x",
    [
        np.array(["a", "bcd"]),
        np.arange(2).astype("M8[D]"),
        np.arange(2).astype(ml_dtypes.bfloat16),
        np.zeros(2, [("x", "f4"), ("y", "i2", (2,))]),
        np.arange(4)[::2] * 1j,
        np.zeros((0, 3)),
        np.array(5, ">i4"),
    ],
    ids=lambda x: str(x.dtype),
)
def test_copies_of_every_dtype_are_compared(x):
    def main(mesh):
        t = pack([x], "R", mesh=mesh, check_replicas=True)
        assert (t.shape, t.dtype) == (x.shape, x.dtype)
        if x.size:
            other = np.zeros_like(x) if mesh.rank and x.dtype.names is None else x.copy()
            if x.dtype.names and mesh.rank:
                other["y"][1, 1] = 3
            with pytest.raises(MismatchError, match="0 and 1"):
                pack([other], "R", mesh=mesh, check_replicas=True)

    on("x=2", main)


def test_a_rank_outside():
    def main():
        with mm.DeviceMesh(mm.Mesh("x=1", [1])) as mesh:
            if mesh.rank == 0:
                with pytest.raises(RankError, match=r"rank 0\b.*x=1"):
                    pack([], "R", mesh=mesh)
                assert unpack(mm.empty((2,), mesh, "R")) == []
            else:
                assert len(unpack(pack([np.ones(2)], "R", mesh=mesh))) == 1

    mm.run_virtual(2, main)


def test_a_plain_array_is_not_unpacked():
    with pytest.raises(LayoutError, match=r"unpack.*ndarray"):
        unpack(np.ones(2))  # type: ignore[arg-type]


# -- numpy_util -------------------------------------------------------------------------


def test_whole_arrays_and_their_blocks():
    x = np.arange(24).reshape(6, 4)
    mesh = mm.Mesh("x=3,y=2")
    for layout in (
        AxisLayout(["x", "y"], mesh),
        AxisLayout([UNSHARDED, "y"], mesh),
        mm.Layout(mesh, "S0, S0"),
        mm.Layout(mesh, "R, R"),
    ):
        blocks = numpy_util.unpack(x, layout)
        made = mm.Layout(mesh, layout)
        for rank, block in enumerate(blocks):
            assert np.array_equal(block, block_of(x, made, rank))
        whole = numpy_util.unpacked_to_numpy(blocks, layout)
        assert whole.dtype == x.dtype
        assert np.array_equal(whole, x)


def test_blocks_of_a_mesh_with_other_ranks():
    layout = mm.Layout(mm.Mesh("x=2", [5, 3]), "S0")
    x = np.arange(4)
    assert [b.tolist() for b in numpy_util.unpack(x, layout)] == [[0, 1], [2, 3]]
    assert numpy_util.unpacked_to_numpy(numpy_util.unpack(x, layout), layout).tolist() == [
        0,
        1,
        2,
        3,
    ]


def test_blocks_that_are_not_equal():
    mesh = mm.Mesh("x=3,y=2")
    x = np.zeros((7, 4))
    with pytest.raises(LayoutError, match="dimension 0 to be divisible"):
        numpy_util.unpack(x, AxisLayout(["x", UNSHARDED], mesh))
    uneven = numpy_util.unpack(x, mm.Layout(mesh, "S0, R"))
    assert [len(block) for block in uneven] == [3, 3, 2, 2, 2, 2]
    with pytest.raises(ShapeError):
        numpy_util.unpacked_to_numpy(uneven, mm.Layout(mesh, "S0, R"))
    with pytest.raises(ShapeError, match=r"\b6\b"):
        numpy_util.unpacked_to_numpy(uneven[:2], mm.Layout(mesh, "S0, R"))
    with pytest.raises(LayoutError):
        numpy_util.unpack(x, mm.Layout(mesh, "P, R"))


def test_to_numpy_and_back():
    x = np.arange(24.0).reshape(6, 4)

    def main(mesh):
        t = numpy_util.pack_numpy(x, AxisLayout(["x", "y"], mesh), mesh=mesh)
        assert t.local.tolist() == block_of(x, t.layout, mesh.rank).tolist()
        assert np.array_equal(numpy_util.to_numpy(t), x)
        found = numpy_util.to_numpy(t, root=4)
        assert (found is None) == (mesh.rank != 4)
        assert numpy_util.to_numpy(x) is x

    on("x=3,y=2", main)
