"""TensorFlow's ``tf.experimental.dtensor``, row by row, on virtual ranks."""

from __future__ import annotations

import contextlib
import json
import pickle
import threading
from typing import Any, cast

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.compat import tensorflow as tf
from mpimesh.errors import CollectiveTimeoutError, MismatchError
from tests.helpers.raises import raises
from tests.helpers.ranks import on

# -- T1 to T20: meshes ----------------------------------------------------------------------------


def cpus(count, task=0, job="localhost"):
    return [f"/job:{job}/replica:0/task:{task}/device:CPU:{k}" for k in range(count)]


GRID = tf.Mesh(["x", "y"], np.arange(6).reshape(3, 2), [*range(6)], cpus(6), "M")
LATE = tf.Mesh(["x", "y"], np.arange(4, 10).reshape(3, 2), [6, 7], cpus(2, 1))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((["x"], [0, 1], [0], ["CPU:0"]), "must be an ndarray"),
        ((["x"], np.arange(0), [], []), "empty"),
        ((["x"], np.array([0, 2]), [0, 2], cpus(2)), "sequentially increase"),
        ((["x"], np.arange(4).reshape(2, 2), [0], cpus(1)), "number of dim_names"),
        ((["x"], np.arange(2), (0, 1), cpus(2)), "local_device_ids must be a list"),
        ((["x"], np.arange(2), [0, 1], tuple(cpus(2))), "local_devices must be a list"),
        ((["x"], np.arange(2), [], []), "Empty list of devices not allowed"),
        ((["x"], np.arange(2), [0, 1], ["CPU:0", "TPU:1"]), "device_type"),
        ((["x"], np.arange(2), [0, 1], ["GPU:0", "GPU:0"]), "Duplicate devices"),
        ((["x"], np.arange(2), [0, 1], ["CPU:0", "GPU:0"]), "multiple device_types"),
        ((["x"], np.arange(2), [0, 1], cpus(1)), "local"),
        ((["x", "x"], np.arange(4).reshape(2, 2), [*range(4)], cpus(4)), "repeated"),
        ((["match"], np.arange(2), [0, 1], cpus(2)), "reserved"),
        ((["x"], np.arange(2), [0, 2], cpus(2)), "not in mesh"),
        ((["x"], np.arange(2), [0, 0], cpus(2)), "local"),
        ((["x"], np.arange(3), [0, 1], cpus(2)), "Uneven"),
        ((["x"], np.arange(2), [0, 1], cpus(2), "", None, True), "use_xla_spmd"),
    ],
)
def test_t1_the_constructor_checks(arguments, text):
    with pytest.raises(ValueError, match=text):
        tf.Mesh(*arguments)


def test_t2_names_and_size():
    assert (GRID.dim_names, GRID.name, GRID.size) == (["x", "y"], "M", 6)


def test_t3_shape_and_dim_size():
    assert GRID.shape() == [3, 2]
    assert GRID.dim_size("x") == 3
    with pytest.raises(ValueError, match=r"Dimension z does not exist.*x, y"):
        GRID.dim_size("z")


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((3, 2), [2, 1]), ((2, 4, 2), [8, 2, 1]), ((8, 16, 2, 4), [128, 8, 4, 1]), ((8,), [1])],
)
def test_t4_strides(shape, strides):
    assert tf.create_mesh([(f"d{k}", n) for k, n in enumerate(shape)]).strides == strides


def test_t5_coordinates_wrap():
    expected = [[0, 0], [0, 1], [1, 0], [1, 1], [2, 0], [2, 1]] * 3
    assert [GRID.coords(k).tolist() for k in range(18)] == expected
    assert GRID.coords(-1).tolist() == [2, 1]
    assert GRID.device_location(5).tolist() == [2, 1]
    with pytest.raises(ValueError, match="offset 6"):
        GRID.device_location(6)


def test_t6_unravel_index():
    expected = {2 * x + y: {"x": x, "y": y} for x in range(3) for y in range(2)}
    assert GRID.unravel_index() == LATE.unravel_index() == expected


def test_t7_local_ids_where_ids_do_not_start_at_0():
    assert LATE.local_device_ids() == [6, 7]
    assert LATE.local_device_locations() == [{"x": 1, "y": 0}, {"x": 1, "y": 1}]

    def main():
        with mm.DeviceMesh(mm.Mesh("x=2", [1, 2])) as mesh:
            mine = tf.Mesh.of(mesh)
            assert mine.global_device_ids().tolist() == [1, 2]
            return mine.local_device_ids(), mine.local_device_locations()

    there = [([1 + place], [{"x": place}]) for place in range(2)]
    assert mm.run_virtual(3, main) == [([], []), *there]


def test_t8_local_devices():
    assert LATE.local_devices() == cpus(2, 1)
    assert LATE.num_local_devices() == 2

    def main(mesh):
        there = tf.Mesh.of(mesh)
        return there.local_devices(), there.num_local_devices(), there.local_device_ids()

    expected = [(cpus(1, rank, "worker"), 1, [rank]) for rank in range(2)]
    assert on("x=2", main) == expected


def test_t9_global_devices():
    assert np.array_equal(LATE.global_device_ids(), np.arange(4, 10).reshape(3, 2))
    assert LATE.min_global_device_id() == 4
    assert LATE.global_devices() == []

    def main(mesh):
        return tf.Mesh.of(mesh).global_devices()

    assert on("x=3", main) == [[name for k in range(3) for name in cpus(1, k, "worker")]] * 3


def test_t10_device_type():
    assert GRID.device_type() == "CPU"
    assert tf.create_mesh({"x": 2}, device_type="GPU").device_type() == "GPU"
    assert on("x=2", lambda mesh: tf.Mesh.of(mesh).device_type()) == ["CPU"] * 2


def test_t11_contains():
    assert GRID.contains_dim("x")
    assert "y" in GRID
    assert "z" not in GRID


def test_t12_a_dim_by_name():
    assert GRID["x"] == ("x", 3)
    assert (GRID["y"].name, GRID["y"].size) == ("y", 2)
    with pytest.raises(KeyError):
        GRID["z"]


def test_t13_is_remote():
    remote = tf.Mesh(["x"], np.arange(2), [], [], "", cpus(2))
    assert remote.is_remote()
    assert not GRID.is_remote()

    def main():
        with mm.DeviceMesh(mm.Mesh("x=2", [0, 1])) as mesh:
            return tf.Mesh.of(mesh).is_remote()

    assert mm.run_virtual(3, main) == [False, False, True]


def test_t14_host_mesh():
    assert GRID.host_mesh() is GRID
    gpus = [name.replace("CPU", "GPU") for name in cpus(2)]
    host = tf.Mesh(["x"], np.arange(2), [0, 1], gpus, "M").host_mesh()
    assert host == tf.Mesh(["x"], np.arange(2), [0, 1], cpus(2))


def test_t15_text():
    six = ",".join(cpus(6))
    assert GRID.to_string() == f"M|x=3,y=2|0,1,2,3,4,5|0,1,2,3,4,5|{six}"
    assert LATE.to_string() == f"|x=3,y=2|4,5,6,7,8,9|6,7|{','.join(cpus(2, 1))}"
    remote = tf.Mesh(["x"], np.arange(2), [], [], "", cpus(2))
    assert remote.to_string() == f"|x=2|0,1|||{','.join(cpus(2))}"
    for one in (GRID, LATE, remote, tf.Mesh.from_device("CPU:3")):
        assert tf.Mesh.from_string(one.to_string()) == one
    assert tf.Mesh.from_string("M|x=3,y=2|*CPU") == GRID
    good = GRID.to_string().split("|")
    for text, part in (
        ("", "invalid"),
        ("a", "invalid"),
        ("|".join(good[:4]), "found 4"),
        ("|".join([*good, "a", "b", "c"]), "found 8"),
        ("|".join(["M", "x", *good[2:]]), "dp=2"),
        ("|".join(["M", "x=3,y=3", *good[2:]]), "9"),
        ("|".join(["M", good[1], "0,1,2,3,4,z", *good[3:]]), "whole numbers"),
        ("|".join([*good, "", "use_xla_spmd"]), "use_xla_spmd"),
    ):
        with pytest.raises(ValueError, match=part):
            tf.Mesh.from_string(text)


def test_t16_records():
    record = json.loads(json.dumps(GRID.as_proto()))
    assert tf.Mesh.from_proto(record) == GRID


def test_t17_equality_hash_and_pickle():
    again = tf.Mesh(["x", "y"], np.arange(6).reshape(3, 2), [*range(6)], cpus(6), "M")
    assert again == GRID == pickle.loads(pickle.dumps(GRID))
    assert len({GRID, again, LATE}) == 2
    assert cast(Any, "M") != GRID
    assert "x=3,y=2" in repr(GRID)
    for mesh in on("x=2", lambda mesh: pickle.loads(pickle.dumps(tf.Mesh.of(mesh)))):
        assert mesh.live is None


def test_t18_a_single_device():
    one = tf.Mesh.from_device("/job:localhost/replica:0/task:0/device:CPU:1")
    assert one.is_single_device()
    assert one.single_device == cpus(2)[1] == one.to_string()
    assert not GRID.is_single_device()
    assert GRID.use_xla_spmd() is False
    with pytest.raises(ValueError, match="single device"):
        _ = GRID.single_device


def test_t19_create_mesh():
    assert tf.create_mesh([("x", 3), ("y", 2)], "M") == GRID
    assert tf.create_mesh({"x": 3, "y": 2}, "M") == GRID
    assert tf.create_mesh(devices=cpus(4)).shape() == [4]
    assert tf.create_mesh([("b", -1)], devices=cpus(4)).dim_names == ["b"]
    for dims, devices, text in (
        ([("x", 4)], cpus(6), r"length of devices \(6\) must be equal to total size .* \[4\]"),
        ([("x", -1), ("y", 2)], cpus(4), "must be equal"),
        ([("x", -1)], None, "devices"),
        ([("x", 0)], cpus(1), "at least 1"),
    ):
        with pytest.raises(ValueError, match=text):
            tf.create_mesh(dims, devices=devices)
    with pytest.raises(ValueError, match="device_type"):
        tf.create_mesh(devices=cpus(2), device_type="GPU")


def test_t20_create_distributed_mesh():
    def main():
        with pytest.raises(ValueError, match="initialize_accelerator_system"):
            tf.create_distributed_mesh([("x", 2)])
        tf.initialize_accelerator_system("CPU")
        with pytest.raises(
            ValueError, match=r"1 per client \* 4 clients = 4\) must be equal to total size"
        ):
            tf.create_distributed_mesh([("x", 3)])
        mesh = tf.create_distributed_mesh([("x", 2), ("y", 2)], "M", ["CPU:0"], "cpu", False)
        assert mesh.live is not None
        rank = mesh.live.rank
        assert (mesh.name, mesh.shape(), mesh.local_device_ids()) == ("M", [2, 2], [rank])
        x = tf.copy_to_mesh(np.arange(8.0), tf.Layout(["x"], mesh))
        mesh.live.close()
        tf.shutdown_accelerator_system()
        return x.local.tolist()

    assert mm.run_virtual(4, main) == [[0, 1, 2, 3]] * 2 + [[4, 5, 6, 7]] * 2


# -- T21 to T26: layouts --------------------------------------------------------------------------

ROWS = tf.Layout(["x", tf.UNSHARDED], GRID)


def test_t21_specs_are_checked():
    assert tf.Layout([tf.MATCH, "x"], GRID).sharding_specs == ["match", "x"]
    for specs, mesh, text in (
        (["x", "x"], GRID, "Mesh dimension x was repeated"),
        (["z"], GRID, "must either be a valid mesh dimension or UNSHARDED"),
        (["x"], "mesh", "not a valid Mesh object"),
    ):
        with pytest.raises(ValueError, match=text):
            tf.Layout(specs, mesh)
    with pytest.raises(ValueError, match="match"):
        mm.Layout(GRID, tf.Layout([tf.MATCH], GRID))
    assert mm.Layout(GRID, ROWS).text == "x=S0, y=R"


def test_t22_constructors():
    assert tf.Layout.replicated(GRID, 2).specs == ("unsharded",) * 2
    assert tf.Layout.batch_sharded(GRID, "x", 2) == ROWS
    assert tf.Layout.batch_sharded(GRID, "y", 3, axis=1).specs == ("unsharded", "y", "unsharded")
    assert tf.Layout.inner_sharded(GRID, "y", 3).specs == ("unsharded", "unsharded", "y")
    assert tf.Layout(["x", "unsharded", "y"], GRID).delete([1]).specs == ("x", "y")
    single = tf.Layout.from_device("CPU:1", 2)
    assert single == tf.Layout.from_single_device_mesh(tf.Mesh.from_device("CPU:1"), 2)
    for make in (
        lambda: tf.Layout.batch_sharded(GRID, "x", 0),
        lambda: tf.Layout.inner_sharded(GRID, "x", 0),
        lambda: tf.Layout.from_single_device_mesh(GRID),
        lambda: ROWS.to_parted(),
    ):
        with pytest.raises(ValueError, match=r"axis|single device|parted"):
            make()


def test_t23_queries():
    assert (ROWS.rank, ROWS.sharding_specs, ROWS.mesh) == (2, ["x", "unsharded"], GRID)
    assert ROWS.shape == [3, 1]
    assert [ROWS.num_shards(k) for k in range(2)] == [3, 1]
    assert tf.Layout([tf.MATCH], GRID).num_shards(0) == -1
    with pytest.raises(ValueError, match="axis 2"):
        ROWS.num_shards(2)
    assert not ROWS.is_fully_replicated()
    assert ROWS.is_batch_parallel()
    assert not tf.Layout(["unsharded", "y"], GRID).is_batch_parallel()
    assert tf.Layout.replicated(GRID, 1).is_fully_replicated()
    assert (ROWS.type, tf.Layout.from_device("CPU:0").type) == ("STATIC", "SINGLE_DEVICE")


def test_t24_shards():
    assert ROWS.offset_to_shard() == [(0, 0), (0, 0), (1, 0), (1, 0), (2, 0), (2, 0)]
    both = tf.Layout(["x", "y"], GRID)
    assert [both.offset_tuple_to_global_index(s) for s in both.offset_to_shard()] == [*range(6)]
    assert both.unravel("abcdef").tolist() == [["a", "b"], ["c", "d"], ["e", "f"]]
    with pytest.raises(ValueError, match="shard"):
        both.offset_tuple_to_global_index((3, 0))


def test_t25_shapes():
    assert ROWS.global_shape_from_local_shape([2, 4]) == (6, 4)
    assert ROWS.local_shape_from_global_shape([6, 4]) == (2, 4)
    for shape in ([7, 4], [6]):
        with pytest.raises(ValueError, match=r"divisible|axes"):
            ROWS.local_shape_from_global_shape(shape)


def test_t26_text_and_equality():
    assert ROWS.to_string() == f"sharding_specs:x,unsharded, mesh:{GRID.to_string()}"
    empty = tf.Layout([], GRID)
    assert empty.to_string() == f"sharding_specs: mesh:{GRID.to_string()}"
    for one in (ROWS, empty):
        assert tf.Layout.from_string(one.to_string()) == one
        assert tf.Layout.from_proto(one.as_proto()) == one
    assert len({ROWS, tf.Layout(["x", "unsharded"], GRID), empty}) == 2
    with pytest.raises(ValueError, match="written"):
        tf.Layout.from_string("sharding_specs:x,unsharded,mesh:M")


# -- T27 to T34: arrays and clients ---------------------------------------------------------------

A = np.arange(24.0).reshape(6, 4)


def test_t27_pack_and_unpack():
    def main(mesh):
        layout = tf.Layout(["x", "unsharded"], mesh)
        before = mesh.traffic().total_bytes
        mine = A[2 * mesh.coord("x") :][:2]
        t = tf.pack([mine], layout)
        assert tf.unpack(t)[0].tolist() == mine.tolist()
        assert mesh.traffic().total_bytes - before < 100
        assert np.array_equal(t.full(), A)
        again = tf.pack([mine], layout, check_replicas=True)
        assert np.array_equal(again.full(), A)
        with pytest.raises(MismatchError, match=r"ranks 0 and 1 .* \[0:2, 0:4\]"):
            tf.pack([mine + mesh.rank], layout, check_replicas=True)
        with pytest.raises(ValueError, match="expected 1 inputs to DTensorPack, but got 3"):
            tf.pack([mine] * 3, layout)
        with pytest.raises(ValueError, match="axes"):
            tf.pack([mine[0]], layout)
        for wrong in (np.ones(2 + mesh.rank), np.ones(2, ["f4", "f8"][mesh.rank % 2])):
            with pytest.raises(MismatchError):
                tf.pack([wrong], tf.Layout(["x"], mesh))

    on("x=3,y=2", main)


def test_t28_copy_to_mesh():
    def main(mesh):
        t = tf.copy_to_mesh(A, tf.Layout(["x", "y"], mesh))
        x, y = mesh.coord("x"), mesh.coord("y")
        assert t.local.tolist() == A[2 * x : 2 * x + 2, 2 * y : 2 * y + 2].tolist()
        assert np.array_equal(tf.copy_to_mesh(A, tf.Layout.replicated(mesh, 2)).local, A)

    on("x=3,y=2", main)


@pytest.mark.parametrize(
    ("source", "target", "becomes"),
    [
        (["unsharded", "unsharded"], ["x", "unsharded"], None),
        (["x", "unsharded"], ["unsharded", "unsharded"], None),
        (["x", "unsharded"], ["unsharded", "y"], None),
        (["x", "y"], ["y", "x"], None),
        (["x", "y"], ["match", "unsharded"], ["x", "unsharded"]),
        (["x", "y"], ["unsharded", "match"], ["unsharded", "y"]),
    ],
)
def test_t29_relayout(source, target, becomes):
    def main(mesh):
        t = tf.copy_to_mesh(A[:, :2], tf.Layout(source, mesh))
        moved = tf.relayout(t, tf.Layout(target, mesh))
        expected = tf.Layout(becomes or target, mesh)
        assert tf.fetch_layout(moved) == expected
        assert np.array_equal(moved.full(), A[:, :2])
        assert tf.fetch_layout(tf.relayout_like(t, moved)) == expected
        with pytest.raises(ValueError, match="requires dimension 1 to be divisible by sharding"):
            tf.relayout(
                tf.copy_to_mesh(A[:, :3], tf.Layout(["x", "unsharded"], mesh)),
                tf.Layout(["unsharded", "y"], mesh),
            )

    on("x=2,y=2", main)


def test_t30_fetch_and_check():
    def main(mesh):
        layout = tf.Layout(["x", "unsharded"], mesh)
        t = tf.copy_to_mesh(A, layout)
        assert tf.fetch_layout(t) == layout
        tf.check_layout(t, layout)
        with pytest.raises(ValueError, match=r"x=S0.*did not match expected layout.*x=S1"):
            tf.check_layout(t, tf.Layout(["unsharded", "x"], mesh))
        assert tf.is_dtensor(t)
        assert not tf.is_dtensor(A)
        with pytest.raises(ValueError, match="DTensor"):
            tf.fetch_layout(A)

    on("x=2", main)


def test_t31_default_mesh():
    def main(mesh):
        plain = tf.Layout(["x"], tf.create_mesh({"x": 2}))
        assert tf.get_default_mesh() is None
        name = cpus(1, mesh.rank, "worker")[0]
        with tf.default_mesh(mesh):
            assert tf.get_default_mesh() is mesh
            t = tf.call_with_layout(np.arange, tf.Layout(["x"], mesh), 4)
            assert tf.call_with_layout(np.arange, None, 4).tolist() == [0, 1, 2, 3]
            assert tf.copy_to_mesh(np.arange(4), "x=S0").local.tolist() == t.local.tolist()
        with tf.run_on(tf.Mesh.of(mesh)):
            assert tf.device_name() == name
        with pytest.raises(ValueError, match="default_mesh"):
            tf.copy_to_mesh(np.arange(4), plain)
        with pytest.raises(ValueError, match="live"), tf.default_mesh("mesh"):
            pass
        return t.local.tolist()

    assert on("x=2", main) == [[0, 1], [2, 3]]


def test_t32_barrier():
    def main(mesh):
        started = mesh.group().all_reduce(np.ones(1))
        tf.barrier(mesh, "first")
        assert started.done()
        started.resolve()
        if mesh.rank == 0:
            with raises(CollectiveTimeoutError, "late", "ranks [1]"):
                tf.barrier(mesh, "late", timeout_in_ms=100)
            here.wait()
        else:
            here.wait()
            tf.barrier(mesh, "late", timeout_in_ms=100_000)
        return True

    here = threading.Barrier(2)

    def late(mesh):
        return main(mesh)

    with contextlib.suppress(mm.MpimeshError):
        on("x=2", late)


@pytest.mark.parametrize("size", [1, 3])
def test_t33_clients(size):
    job = "localhost" if size == 1 else "worker"

    def main():
        tf.initialize_accelerator_system()
        assert (tf.num_clients(), tf.num_local_devices(), tf.num_global_devices()) == (
            size,
            1,
            size,
        )
        assert (tf.num_local_devices("CPU"), tf.num_global_devices("cpu")) == (1, size)
        assert (tf.job_name(), tf.full_job_name(0)) == (job, f"{job}/replica:0/task:0")
        assert tf.full_job_name() == f"{job}/replica:0/task:{tf.client_id()}"
        assert tf.local_devices("CPU") == cpus(1, tf.client_id(), job)
        assert tf.local_devices(for_client_id=size - 1) == cpus(1, size - 1, job)
        assert len(tf.jobs()) == size
        assert tf.preferred_device_type() == "CPU"
        with pytest.raises(ValueError, match=f"task_id {size}"):
            tf.full_job_name(size)
        counts: Any = (tf.local_devices, tf.num_local_devices, tf.num_global_devices)
        for count in counts:
            for wrong in ("TPU", "no type", "GPU", 3):
                with pytest.raises(ValueError, match=str(wrong).upper()):
                    count(wrong)
        found = tf.client_id()
        tf.shutdown_accelerator_system()
        for ask in (tf.client_id, tf.jobs, tf.job_name, tf.full_job_name, tf.local_devices):
            with pytest.raises(ValueError, match="initialize_accelerator_system first"):
                ask()
        with pytest.raises(ValueError, match="GPU"):
            tf.initialize_accelerator_system("GPU")
        return found

    assert mm.run_virtual(size, main) == [*range(size)]


def test_t34_the_system_is_started_once():
    def main():
        with pytest.raises(ValueError, match="initialize_accelerator_system first"):
            tf.shutdown_accelerator_system()
        assert tf.initialize_accelerator_system("CPU") == "CPU"
        with pytest.raises(ValueError, match="shutdown_accelerator_system first"):
            tf.initialize_accelerator_system()
        tf.shutdown_accelerator_system()
        assert tf.initialize_multi_client() == "CPU"
        with pytest.raises(ValueError, match="shutdown_accelerator_system first"):
            tf.initialize_multi_client()
        tf.shutdown_tpu_system()
        with pytest.raises(ValueError, match="initialize_accelerator_system first"):
            tf.shutdown_tpu_system()
        with pytest.raises(ValueError, match=r"TPU.*CPU"):
            tf.initialize_tpu_system()

    mm.run_virtual(2, main)


# -- T36, T39 to T41 ------------------------------------------------------------------------------


def test_t36_variables():
    def main(mesh):
        rows, columns = tf.Layout(["x", "unsharded"], mesh), tf.Layout(["unsharded", "x"], mesh)
        v = tf.DVariable(A, layout=rows, name="v")
        v.assign_add(tf.copy_to_mesh(A, columns))
        assert np.array_equal(v.value().full(), 2 * A)
        v.assign(tf.copy_to_mesh(A, columns))
        assert np.array_equal(v.value().full(), A)
        assert tf.fetch_layout(v) == rows
        for wrong in (A, tf.copy_to_mesh(A[:4], rows)):
            with pytest.raises(ValueError, match=r"DTensor|shape"):
                v.assign(wrong)
        with pytest.raises(ValueError, match="conflicts"):
            tf.DVariable(tf.copy_to_mesh(A, columns), layout=rows)

    on("x=2", main)


def test_t39_tpu_meshes_are_refused():
    with pytest.raises(ValueError, match="create_distributed_mesh"):
        tf.create_tpu_mesh(["x"], [2], "M")


def test_t40_numpy():
    def main(mesh):
        layout = tf.Layout(["x", "unsharded"], mesh)
        t = tf.copy_to_mesh(A, layout)  # pack_numpy
        assert np.array_equal(tf.to_numpy(t), A)
        at_root = tf.to_numpy(t, root=1)
        assert np.array_equal(at_root, A) if mesh.rank == 1 else at_root is None
        blocks = tf.unpacked(A, layout)
        assert [one.tolist() for one in blocks] == [A[:3].tolist(), A[3:].tolist()]
        for one in (
            layout,
            tf.Layout(["unsharded", "x"], mesh),
            tf.Layout(["unsharded"] * 2, mesh),
        ):
            assert np.array_equal(tf.unpacked_to_numpy(tf.unpacked(A, one), one), A)
        with pytest.raises(ValueError, match="1 blocks for 2 devices"):
            tf.unpacked_to_numpy(blocks[:1], layout)
        with pytest.raises(ValueError, match="divisible"):
            tf.unpacked(A[:5], layout)

    on("x=2", main)


def test_t41_a_reduction_over_a_dim():
    values = np.array([[0, 1], [2, 3], [4, 5]])

    def main(mesh):
        mine = np.array([values[mesh.coord("x"), mesh.coord("y")]])
        both = mesh.add_group("both", dims="x,y")
        groups = (mesh.group("x"), mesh.group("y"), both)
        return [int(group.all_reduce(mine).resolve()[0]) for group in groups]

    found = np.array(on("x=3,y=2", main)).reshape(3, 2, 3)
    assert np.array_equal(found[:, :, 0], np.broadcast_to(values.sum(0), (3, 2)))
    assert np.array_equal(found[:, :, 1], np.broadcast_to(values.sum(1)[:, None], (3, 2)))
    assert (found[:, :, 2] == 15).all()
