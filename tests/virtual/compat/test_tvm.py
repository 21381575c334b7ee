"""TVM's words for split arrays, with its golden facts."""

from __future__ import annotations

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.compat.tvm import (
    annotate_sharding,
    dtensor_type,
    redistribute,
    redistribute_replica_to_shard,
    scatter_from_worker0,
)
from mpimesh.errors import LayoutError
from tests.helpers import warned
from tests.helpers.compat_programs import parts_of_worker_0

X = np.arange(48.0).reshape(6, 8)


def on(dims, function, *arguments):
    def main():
        with mm.DeviceMesh(dims) as mesh:
            return function(mesh, *arguments)

    return mm.run_virtual(mm.Mesh(dims).size, main)


def test_a_hint_is_checked():
    def main(mesh):
        x = mm.distribute(X, mesh, "S[0], R")
        assert annotate_sharding(x, mesh, "S[0], R") is x
        assert annotate_sharding(x, mesh, mm.Placement.from_text("S[0]R")) is x
        with pytest.raises(LayoutError, match=r"a=S0, b=R.*a=R, b=S0"):
            annotate_sharding(x, mesh, "R, S[0]")
        with pytest.raises(LayoutError):
            annotate_sharding(X, mesh, "S[0], R")  # type: ignore[arg-type]

    on("a=2,b=2", main)


@pytest.mark.parametrize("source", ["R", "S[0]", "S[1]"])
@pytest.mark.parametrize("target", ["R", "S[0]", "S[1]"])
def test_every_pair_on_a_row_of_ranks(source, target):
    """S to R and S to another S are what TVM leaves out."""

    def main(mesh):
        before = mesh.traffic().total_bytes
        x = mm.distribute(X, mesh, source)
        y = redistribute(x, mesh, target)
        assert str(y.placement) == target
        if target == source or source == "R":
            assert mesh.traffic().total_bytes == before  # nothing moves
        else:
            assert mesh.traffic().total_bytes > before
        assert np.array_equal(y.full(), X)

    on("a=2", main)


def test_to_another_mesh():
    """The pipeline of TVM's tests: R on one mesh to R on the next."""

    def main():
        first, second = mm.Mesh("a=2", [0, 1]), mm.Mesh("a=2", [2, 3])
        with mm.DeviceMesh(first) as here, mm.DeviceMesh(second) as there:
            x = mm.distribute(X, here, "R")
            y = redistribute(x, there, "S[1]")
            assert y.is_member == (here.rank >= 2)
            if y.is_member:
                assert np.array_equal(y.full(), X)

    mm.run_virtual(4, main)


@pytest.mark.parametrize("axis", [0, 1])
def test_each_worker_keeps_its_slice(axis):
    def main(mesh):
        x = mm.distribute(X, mesh, "R")
        before = mesh.traffic().total_bytes
        y = redistribute_replica_to_shard(x, mesh.size, axis)
        assert mesh.traffic().total_bytes == before
        n = X.shape[axis]
        mine = range(mesh.rank * n // mesh.size, (mesh.rank + 1) * n // mesh.size)
        assert np.array_equal(y.local, X.take(mine, axis))
        assert str(y.placement) == f"S[{axis}]"

    on("a=2", main)


@pytest.mark.parametrize(
    ("workers", "axis", "placement", "match"),
    [
        (4, 0, "R", "axis 0 of shape .* is not divisible by num_workers 4"),
        (3, 1, "R", "num_workers is 3, but mesh a=4 has 4"),
        (4, 2, "R", "more axes"),
        (4, -1, "R", "-1"),
        (4, 1, "S[1]", "that is R on a mesh of one dim"),
    ],
)
def test_what_cannot_be_sliced(workers, axis, placement, match):
    def main(mesh):
        x = mm.distribute(X, mesh, placement)
        with pytest.raises(ValueError, match=match):
            redistribute_replica_to_shard(x, workers, axis)

    on("a=4", main)


def test_only_one_dim_is_sliced():
    def main(mesh):
        with pytest.raises(LayoutError):
            redistribute_replica_to_shard(mm.ones((4,), mesh, "R, R"), 2, 0)
        with pytest.raises(LayoutError):
            redistribute_replica_to_shard(X, 2, 0)  # type: ignore[arg-type]

    on("a=2,b=1", main)


@pytest.mark.parametrize(
    ("dims", "placement"), [("a=2", "R"), ("a=3", "S[1]"), ("a=2,b=2", "S[0], S[1]")]
)
def test_inputs_come_from_worker_0(dims, placement):
    """R is broadcast and S scattered, on a mesh of any number of dims."""

    def main(mesh):
        x = mm.distribute(X if mesh.rank == 0 else None, mesh, placement, root=0)
        box = tuple(slice(*edges) for edges in x.layout.box(X.shape, mesh.rank))
        assert np.array_equal(x.local, X[box])
        assert str(x.placement) == placement

    on(dims, main)


def test_the_type_of_an_array():
    def main(mesh):
        x = mm.zeros((4, 4), mesh, "S[0], R", dtype="float32")
        kind = dtensor_type(x)
        assert kind == mm.layout.DTensorType((4, 4), "float32", mesh, "S[0], R")
        assert str(kind) == (
            'R.DTensor((4, 4), "float32", R.device_mesh((2, 2), R.Range(0, 4)), "S[0], R")'
        )
        again = mm.distribute(np.ones((4, 4)), mesh, kind)
        assert again.layout == x.layout

    on("a=2,b=2", main)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_v19_scatter_from_worker_0(size):
    mm.run_virtual(size, parts_of_worker_0, None)


def test_v19_a_dropped_array_that_is_an_error_leaves_the_ranks_together():
    def main():
        with mm.DeviceMesh("x=2") as mesh, warned.errors:
            group = mesh.group()
            if mesh.rank == 1:
                with pytest.raises(RuntimeWarning):
                    scatter_from_worker0(np.ones(2), 2, group=group)
            else:
                assert scatter_from_worker0(np.ones(2), 2, group=group).tolist() == [1.0]
            assert group.all_reduce(np.ones(1)).resolve()[0] == 2

    mm.run_virtual(2, main)
