"""TVM's ``relax.distributed``, row by row, with its golden facts, on virtual ranks."""

from __future__ import annotations

import json
from typing import Any, cast

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.compat.tvm import (
    DTensorStructInfo,
    Placement,
    PlacementSpec,
    PlacementSpecKind,
    ThreadedSession,
    allgather,
    allreduce,
    annotate_sharding,
    broadcast_from_worker0,
    device_mesh,
    gather_to_worker0,
    recv_from_prev_group,
    recv_from_worker,
    recv_from_worker0,
    redistribute,
    redistribute_replica_to_shard,
    scatter_from_worker0,
    send_to_next_group,
    send_to_worker,
    struct_info,
)
from mpimesh.errors import GroupError, LayoutError, RankError, ShapeError
from tests.helpers import warned
from tests.helpers.compat_programs import parts_of_worker_0
from tests.helpers.raises import raises
from tests.helpers.ranks import on

X = np.arange(48.0).reshape(6, 8)
SQUARE = device_mesh((2, 2), range(4))


def test_v1_a_mesh_of_a_shape_and_ids():
    mesh = device_mesh((2, 2), device_ids=[3, 1, 0, 2])
    assert [dim.size for dim in mesh.dims] == [2, 2]
    assert np.asarray(mesh.ids).reshape(-1).tolist() == [3, 1, 0, 2]
    assert SQUARE.rank_at(1, 0) == 2
    with raises(ValueError, 3, 4):
        device_mesh((2, 2), [0, 1, 2])
    for shape, ids in (((2, 2), [0, 1, 2, 2]), ((2,), [0, -1]), ((0,), [])):
        with pytest.raises(ValueError, match=r"device id|at least 1|ids"):
            device_mesh(shape, ids)


def test_v2_the_function_makes_the_same_mesh():
    assert device_mesh((4,), range(4)) == mm.Mesh("d0=4")
    assert device_mesh([2, 3], list(range(6))) == device_mesh((2, 3), range(6))


def test_v3_specs_have_an_axis_and_a_kind():
    split, copies = PlacementSpec.sharding(1), PlacementSpec.replica()
    assert (split.axis, split.kind) == (1, PlacementSpecKind.kSharding)
    assert (copies.axis, copies.kind) == (-1, PlacementSpecKind.kReplica)
    assert [one.value for one in PlacementSpecKind] == [0, 1]
    assert split == PlacementSpec.sharding(1) != copies
    with pytest.raises(RuntimeError, match="sharding"):
        PlacementSpec(1)
    with raises(ValueError, -1):
        PlacementSpec.sharding(-1)


def test_v4_a_placement_is_a_spec_for_each_dim_of_the_mesh():
    placement = Placement([PlacementSpec.sharding(0), PlacementSpec.replica()])
    assert str(placement) == "S[0], R"
    assert placement.dim_specs[0].axis == 0
    assert mm.Layout(mm.Mesh("a=2,b=2"), placement).text == "a=S0, b=R"
    with pytest.raises(ValueError, match="dim"):
        mm.Layout(mm.Mesh("a=2,b=2"), Placement([PlacementSpec.replica()]))


def test_v5_text():
    for text in ("S[0], R", "S[0],R", "S[0] R", "S[0]R"):
        assert str(Placement.from_text(text)) == "S[0], R"
    assert str(Placement.from_text("RR")) == "R, R"
    assert Placement.from_text("").dim_specs == ()
    for text in (
        "S[1",
        "S[]",
        "S[-1]",
        ",R",
        "R,",
        ",,R,",
        "s[0]",
        "X",
        "S[a]",
        "S[1.5]",
        "S[1 ]",
        "P",
    ):
        with pytest.raises(ValueError, match="placement"):
            Placement.from_text(text)


def test_v6_the_type_of_an_array_is_checked():
    made = DTensorStructInfo(
        ((4, 4), "float32"), SQUARE, Placement.from_text("S[0], R"), span="x:1"
    )
    assert (made.shape, made.dtype, made.ndim, made.span) == ((4, 4), "float32", 2, "x:1")
    with pytest.raises(ValueError, match="dim"):
        DTensorStructInfo(((4, 4), "float32"), SQUARE, "R")
    with pytest.raises(ValueError, match="smaller than tensor ndim"):
        DTensorStructInfo(((4, 4), "float32"), SQUARE, "S[2], R")
    # Two dims on one axis cut its blocks again; uneven blocks are even by one.
    nested = DTensorStructInfo(((6, 2), "int8"), SQUARE, "S[0], S[0]")
    shapes = [nested.layout.local_shape((6, 2), rank) for rank in range(4)]
    assert sum(rows for rows, _ in shapes) == 6


def test_v7_types_compare_hash_and_come_back():
    made = DTensorStructInfo(((4, 4), "float32"), SQUARE, "S[0], R")
    again = DTensorStructInfo.from_record(json.loads(json.dumps(made.to_record())))
    assert again == made
    assert hash(again) == hash(made)
    assert made == DTensorStructInfo(((4, 4), "float32"), SQUARE, "S[0], R", span="elsewhere")
    assert made != DTensorStructInfo(((4, 4), "float32"), SQUARE, "R, S[0]")
    assert str(made) == (
        'R.DTensor((4, 4), "float32", R.device_mesh((2, 2), R.Range(0, 4)), "S[0], R")'
    )
    listed = DTensorStructInfo(([4], np.float64), device_mesh((2,), [3, 1]), "S0")
    assert str(listed) == 'R.DTensor((4,), "float64", R.device_mesh((2,), [3, 1]), "S[0]")'


def test_v8_annotate_sharding():
    def main(mesh):
        x = mm.distribute(X, mesh, "S[0], R")
        assert annotate_sharding(x, mesh, "S[0], R") is x
        assert annotate_sharding(x, mesh, Placement.from_text("S[0]R")) is x
        with pytest.raises(LayoutError, match=r"a=S0, b=R.*a=R, b=S0"):
            annotate_sharding(x, mesh, "R, S[0]")
        with pytest.raises(LayoutError):
            annotate_sharding(X, mesh, "S[0], R")  # type: ignore[arg-type]

    on("a=2,b=2", main)


@pytest.mark.parametrize("source", ["R", "S[0]", "S[1]"])
@pytest.mark.parametrize("target", ["R", "S[0]", "S[1]"])
def test_v9_redistribute(source, target):
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


def test_v24_to_another_mesh():
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
def test_v10_redistribute_replica_to_shard(axis):
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
def test_v10_what_cannot_be_sliced(workers, axis, placement, match):
    def main(mesh):
        x = mm.distribute(X, mesh, placement)
        with pytest.raises(ValueError, match=match):
            redistribute_replica_to_shard(x, workers, axis)

    on("a=4", main)


def test_v10_only_one_dim_is_sliced():
    def main(mesh):
        with pytest.raises(LayoutError):
            redistribute_replica_to_shard(mm.ones((4,), mesh, "R, R"), 2, 0)
        with pytest.raises(LayoutError):
            redistribute_replica_to_shard(X, 2, 0)  # type: ignore[arg-type]

    on("a=2,b=1", main)


@pytest.mark.parametrize(
    ("dims", "placement"), [("a=2", "R"), ("a=3", "S[1]"), ("a=2,b=2", "S[0], S[1]")]
)
def test_v15_inputs_come_from_worker_0(dims, placement):
    """R is broadcast and S scattered, on a mesh of any number of dims."""

    def main(mesh):
        x = mm.distribute(X if mesh.rank == 0 else None, mesh, placement, root=0)
        box = tuple(slice(*edges) for edges in x.layout.box(X.shape, mesh.rank))
        assert np.array_equal(x.local, X[box])
        assert str(x.placement) == placement

    on(dims, main)


def test_v6_the_type_of_a_split_array():
    def main(mesh):
        x = mm.zeros((4, 4), mesh, "S[0], R", dtype="float32")
        kind = struct_info(x)
        assert kind == DTensorStructInfo(((4, 4), "float32"), mesh, "S[0], R")
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


def test_v11_call_tir_local_view_is_local_map():
    def main(mesh):
        x = mm.distribute(X, mesh, "S[0]")
        doubled = mm.local_map(lambda block: 2 * block, "a=S0")(x)
        assert str(doubled.placement) == "S[0]"
        assert np.array_equal(doubled.full(), 2 * X)

    on("a=3", main)


def test_v12_layouts_propagate():
    def main(mesh):
        x = mm.distribute(X, mesh, "S[0], R")
        w = mm.distribute(X.T, mesh, "R, S[1]")
        assert str((x + 1).placement) == "S[0], R"
        y = x @ w
        assert str(y.placement) == "S[0], S[1]"
        assert np.array_equal(y.full(), X @ X.T)

    on("a=2,b=2", main)


def test_v13_a_reduction_over_a_split_axis_is_reduced_over_the_ranks():
    def main(mesh):
        x = mm.distribute(X, mesh, "S[1]")
        w = mm.distribute(X.T, mesh, "S[0]")
        assert np.array_equal((x @ w).full(), X @ X.T)
        assert np.array_equal(x.sum(1).full(), X.sum(1))

    on("a=2", main)


@pytest.mark.parametrize("target", ["R, R", "S[0], S[1]", "S[1], S[0]", "S[0], S[0]", "R, S[1]"])
def test_v14_every_pair_on_a_grid_is_planned(target):
    def main(mesh):
        for source in ("R, R", "S[0], S[1]", "S[1], R", "S[1], S[1]"):
            x = mm.distribute(X, mesh, source)
            masks = []
            for layout in (x.layout, mm.Layout(mesh, target)):
                masks.append(np.zeros((4, *X.shape), bool))
                for rank in range(4):
                    box = layout.box(X.shape, rank)
                    masks[-1][rank][tuple(slice(*edges) for edges in box)] = True
            missing = (masks[1] & ~masks[0]).sum()
            assert x.plan(target).total_bytes == 8 * missing
            assert np.array_equal(x.redistribute(target).full(), X)

    on("a=2,b=2", main)


@pytest.mark.parametrize("op", ["sum", "prod", "min", "max", "avg"])
def test_v16_allreduce(op):
    rows = np.array([[1.0, 5.0], [4.0, 2.0], [3.0, 3.0], [2.0, 8.0]])
    numpy: Any = {"sum": np.sum, "prod": np.prod, "min": np.min, "max": np.max, "avg": np.mean}[op]

    def main(mesh):
        x = rows[mesh.rank]
        return [allreduce(x, op, group=mesh.group(name)) for name in ("worker", "world")]

    for rank, (inside, everywhere) in enumerate(ThreadedSession(4, 2).run(main)):
        assert np.allclose(inside, numpy(rows[rank // 2 * 2 :][:2], axis=0))
        assert np.allclose(everywhere, numpy(rows, axis=0))


def test_v16_an_unknown_operation():
    def main(mesh):
        with pytest.raises(ValueError, match="xor"):
            allreduce(np.ones(1), cast(Any, "xor"), group=mesh.group())

    ThreadedSession(2).run(main)


def test_v17_allgather():
    def main(mesh):
        x = np.full((2, 1), mesh.rank)
        group = mesh.group("worker")
        with raises(GroupError, "num_workers", 4, 2):
            allgather(x, 4, group=group)
        return allgather(x, 2, group=group), allgather(x, 2, 1, group=group)

    for rank, (rows, columns) in enumerate(ThreadedSession(4, 2).run(main)):
        first = rank // 2 * 2
        assert rows.tolist() == [[first]] * 2 + [[first + 1]] * 2
        assert columns.tolist() == [[first, first + 1]] * 2


def test_v18_broadcast_from_worker0():
    def main(mesh):
        x = np.full(2, float(mesh.rank))
        return [broadcast_from_worker0(x, group=mesh.group(n))[0] for n in ("worker", "world")]

    assert ThreadedSession(4, 2).run(main) == [[0, 0], [0, 0], [2, 0], [2, 0]]


def test_v20_gather_to_worker0():
    def main(mesh):
        return gather_to_worker0(np.full(2, mesh.rank), group=mesh.group("worker"))

    found = [None if x is None else x.tolist() for x in ThreadedSession(4, 2).run(main)]
    assert found == [[0, 0, 1, 1], None, [2, 2, 3, 3], None]

    def wrong(mesh):
        if mesh.rank == 0:
            with pytest.raises(ShapeError):
                mesh.group().gather(np.ones(2), out=np.zeros(3))
            mesh.group().gather(np.ones(2)).resolve()
        else:
            mesh.group().gather(np.ones(2)).resolve()

    ThreadedSession(2).run(wrong)


def test_v21_groups_of_workers():
    def main(mesh):
        return mesh.coord("group"), mesh.coord("worker"), [*map(int, mesh.group("worker").ranks)]

    expected = [(rank // 3, rank % 3, [rank // 3 * 3 + k for k in range(3)]) for rank in range(6)]
    assert ThreadedSession(6, 2).run(main) == expected
    with raises(GroupError, 5, 2):
        ThreadedSession(5, 2)


def test_v22_neighbours_of_a_pipeline():
    def main(mesh):
        here, received = mesh.coord("group"), None
        if here > 0:
            received = recv_from_prev_group(mesh=mesh).tolist()
        else:
            with raises(RankError, "previous"):
                recv_from_prev_group(mesh=mesh)
        if here < 2:
            send_to_next_group(np.array([mesh.rank]), mesh=mesh)
        else:
            with raises(RankError, "next"):
                send_to_next_group(np.ones(1), mesh=mesh)
        world = mesh.group()
        for worker in (mesh.rank, 6):
            with pytest.raises(RankError):
                send_to_worker(np.ones(1), worker, group=world)
        if mesh.rank == 2:
            send_to_worker(np.array([7]), 0, group=world)
        if mesh.rank == 0:
            assert recv_from_worker(2, group=world).tolist() == [7]
            for worker in range(1, 6):
                send_to_worker(np.array([10 * worker]), worker, group=world)
            with raises(RankError, 0):
                recv_from_worker0(group=world)
        else:
            assert recv_from_worker0(group=world).tolist() == [10 * mesh.rank]
        return received

    assert ThreadedSession(6, 3).run(main) == [None, None, [0], [1], [2], [3]]


def test_v23_a_session_is_a_program():
    def main(mesh):
        mesh.group().barrier()  # sync_worker
        return mesh.rank, mesh.world_size, str(mesh.local_device().backend)

    assert ThreadedSession(3).run(main) == [(0, 3, "cpu"), (1, 3, "cpu"), (2, 3, "cpu")]
