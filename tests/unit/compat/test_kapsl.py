"""kapsl's device mesh, row by row, on virtual ranks."""

from __future__ import annotations

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mpimesh as mm
from mpimesh.compat.kapsl import (
    DeviceInfo,
    DeviceMesh,
    DistributedOps,
    GpuPreference,
    GroupBackend,
    MeshRouter,
    MeshStats,
    MockComm,
    RoutingStrategy,
    dist_ops,
)
from mpimesh.errors import (
    ClosedError,
    DTypeError,
    GroupError,
    MeshError,
    MismatchError,
    RankError,
    ShapeError,
    UnknownNameError,
    WorldSizeError,
)
from mpimesh.mesh import Device, DeviceBackend, DeviceTable, MeshTopology
from tests.helpers.compat_programs import every_kapsl_operation
from tests.helpers.raises import raises
from tests.helpers.ranks import on

MIXED = MeshTopology.mixed(tp=2, pp=2, dp=2)


def gpu(number=0, backend=DeviceBackend.CUDA, **more):
    return Device(number, "gpu", backend, 16000, 80, **more)


def test_k1_world_size_and_rank():
    def main(mesh):
        with pytest.raises(AttributeError):
            mesh.rank = 0
        with pytest.raises(AttributeError):
            mesh.world_size = 7
        return mesh.rank, mesh.world_size

    assert on("dp=3", main) == [(0, 3), (1, 3), (2, 3)]


def test_k2_topologies_are_values_of_numbers_from_one_on():
    four = [
        MeshTopology.data_parallel(),
        MeshTopology.tensor_parallel(4, (2, 2)),
        MeshTopology.pipeline_parallel(3),
        MIXED,
    ]
    assert len({*four, *(MeshTopology.parse(str(one)) for one in four)}) == 4
    assert on("dp=2", lambda mesh: mesh.topology) == [None, None]
    for make in (
        lambda: MeshTopology.tensor_parallel(0),
        lambda: MeshTopology.pipeline_parallel(-1),
        lambda: MeshTopology.mixed(2, 0, 1),
        lambda: MeshTopology.tensor_parallel(4, (2, 4)),
    ):
        with pytest.raises(ValueError, match=r"at least 1|2 x 4 = 8"):
            make()


def test_k3_expected_world_size():
    assert MeshTopology.data_parallel().expected_world_size == 1
    assert MeshTopology.tensor_parallel(4).expected_world_size == 4
    assert MeshTopology.pipeline_parallel(5).expected_world_size == 5
    assert MeshTopology.mixed(2, 3, 4).expected_world_size == 24


@pytest.mark.parametrize(
    ("topology", "few", "many", "text"),
    [
        (
            MeshTopology.tensor_parallel(4),
            3,
            6,
            "Tensor parallel degree 4 requires at least 4 devices, got 3",
        ),
        (
            MeshTopology.pipeline_parallel(4),
            2,
            5,
            "Pipeline parallel requires 4 stages, got 2 devices",
        ),
        (
            MIXED,
            7,
            9,
            r"Mixed parallelism \(TP=2, PP=2, DP=2\) requires 8 devices, got 7",
        ),
    ],
)
def test_k4_validate(topology, few, many, text):
    with pytest.raises(ValueError, match=text):
        topology.validate(few)
    with raises(WorldSizeError, many, "allow_idle=True"):
        topology.validate(many)
    topology.validate(many, allow_idle=True)
    topology.validate(topology.expected_world_size)


def test_k5_the_communicator_of_a_mesh_is_exchanged_for_one_of_the_same_ranks():
    def main(mesh):
        with mm.DeviceMesh("x=2,y=-1", mesh.comm) as other:
            old = mesh.group()
            mesh.set_comm(other.comm)
            assert mesh.group().all_reduce(np.ones(1)).resolve()[0] == 4
            with pytest.raises(ClosedError):
                old.barrier()
            with pytest.raises(RankError):
                mesh.set_comm(other.group("x").communicator)

    on("dp=4", main)


def test_k6_new():
    def main():
        with DeviceMesh.new() as mesh:
            assert (mesh.rank, mesh.world_size, mesh.group_names[0]) == (
                mesh.group().rank,
                2,
                "world",
            )
            assert mesh.topology == MeshTopology.data_parallel()
            devices = mesh.all_devices()
        with DeviceMesh.new(devices) as mesh:
            assert mesh.all_devices() == devices
        with raises(WorldSizeError, 2, 1):
            DeviceMesh.new(devices[:1])

    MockComm.run(2, main)


def test_k6_new_takes_the_devices_that_it_is_given():
    given = [Device(k, f"card {k}", DeviceBackend.CUDA, 1000 + k, 100 + k) for k in range(2)]

    def main():
        with DeviceMesh.new(given) as mesh:
            assert [*mesh.all_devices()] == given
            assert mesh.local_device() == mesh.get_device(mesh.rank) == given[mesh.rank]
            assert mesh.devices_by_backend("cuda") == given
            assert mesh.devices_in_group("world") == given
            assert (mesh.total_memory_mb, mesh.total_compute_units) == (2001, 201)
            assert mesh.group_names == ["world"]
            assert mesh.stats() == MeshStats(2, 2001, 201, {"cuda": 2}, 1)
            mesh.add_group("mine", [1])
            assert mesh.group_names == ["world", "mine"]
        with raises(MeshError, "devices", "'card'"):
            DeviceMesh.new(["card", "card"])  # type: ignore[list-item]
        rank = mesh.rank
        with pytest.raises(MismatchError):
            DeviceMesh.new(given[::-1] if rank else given)

    MockComm.run(2, main)


def test_k7_new_with_mock_comm_waits_and_honours_groups():
    def main():
        with pytest.raises(RankError):
            DeviceMesh.new_with_mock_comm(None, 5).close()
        with mm.DeviceMesh("pair=2,dp=2") as mesh:
            data = np.array([2.0**mesh.rank])
            mesh.group("dp").all_reduce(data, out=data).resolve()
            return data[0]

    assert MockComm.run(4, main) == [3.0, 3.0, 12.0, 12.0]

    def ranked():
        with DeviceMesh.new() as mesh:
            rank = mesh.rank
        with DeviceMesh.new_with_mock_comm(None, rank) as mesh:
            return mesh.rank

    assert MockComm.run(2, ranked) == [0, 1]


def test_k8_new_with_nccl_is_refused_where_there_is_none():
    def main():
        with DeviceMesh.new() as mesh:
            rank = mesh.rank
        with raises(GroupError, "nccl"):
            DeviceMesh.new_with_nccl(None, rank)

    MockComm.run(2, main)


def test_k9_with_topology():
    def main():
        with DeviceMesh.with_topology(None, MIXED) as mesh:
            members = {name: [*map(int, mesh.group(name).ranks)] for name in mesh.group_names}
            sums = mesh.group("tp").all_reduce(np.array([mesh.rank])).resolve()
            return mesh.rank, members, int(sums[0])

    found = MockComm.run(8, main)
    for rank, members, total in found:
        d, p, t = rank // 4, rank // 2 % 2, rank % 2
        assert members[f"tp_dp{d}_pp{p}"] == [(d * 2 + p) * 2 + k for k in range(2)]
        assert members[f"pp_dp{d}_tp{t}"] == [(d * 2 + k) * 2 + t for k in range(2)]
        assert members[f"dp_pp{p}_tp{t}"] == [(k * 2 + p) * 2 + t for k in range(2)]
        assert total == 2 * (rank - t) + 1
    plans = [{k: v for k, v in members.items() if "_" in k} for _, members, _ in found]
    assert plans == [plans[0]] * 8
    assert len(plans[0]) == 12

    def refused():
        with pytest.raises(ValueError, match="requires at least 4 devices, got 2"):
            DeviceMesh.with_topology(None, MeshTopology.tensor_parallel(4))

    MockComm.run(2, refused)


def test_k10_set_rank():
    def main(mesh):
        mesh.set_rank(mesh.rank)
        with pytest.raises(RankError, match="Rank 2 out of bounds for world size 2"):
            mesh.set_rank(2)
        with raises(RankError, mesh.rank, 1 - mesh.rank):
            mesh.set_rank(1 - mesh.rank)

    on("dp=2", main)


def test_k11_devices_by_rank():
    def main(mesh):
        devices = mesh.all_devices()
        assert len(devices) == 2
        assert mesh.get_device(mesh.rank) == mesh.local_device() == devices[mesh.rank]
        assert mesh.get_device(2) is mesh.get_device(-1) is None
        with pytest.raises(TypeError):
            devices[0] = devices[1]

    on("dp=2", main)


def test_k12_devices_by_backend():
    a, b = (gpu(k, DeviceBackend(name)) for k, name in enumerate(("npu-a", "npu-b")))
    table = DeviceTable((gpu(7), a, b))
    assert table.by_backend("npu-a") == [a]
    assert table.by_backend(DeviceBackend.CUDA) == [gpu(7)]
    assert on("dp=2", lambda mesh: len(mesh.devices_by_backend("cpu"))) == [2, 2]


def test_k13_devices_in_group():
    def main(mesh):
        mesh.add_group("back", [2, 0])
        devices = mesh.all_devices()
        assert mesh.devices_in_group("back") == [devices[2], devices[0]]
        with pytest.raises(UnknownNameError, match="Group 'x' not found"):
            mesh.devices_in_group("x")

    on("dp=3", main)


def test_k14_add_group():
    def main(mesh):
        group = mesh.add_group("back", [2, 0])
        assert [*group.ranks] == [2, 0]
        assert mesh.group_rank("back") == {2: 0, 0: 1}.get(mesh.rank)
        if mesh.in_group("back"):
            gathered = group.all_gather(np.array([mesh.rank])).resolve()
            assert gathered.tolist() == [2, 0]
        for name, ranks, error in (
            ("far", [0, 3], RankError),
            ("twice", [1, 1], GroupError),
            ("empty", [], GroupError),
            ("back", [0], GroupError),
            ("world", [0], GroupError),
        ):
            with pytest.raises(error):
                mesh.add_group(name, ranks)
        with pytest.raises(MismatchError):
            mesh.add_group("mine", [mesh.rank])

    on("dp=3", main)


def test_k15_get_group():
    def main(mesh):
        mesh.add_group("pair", [0, 1])
        group = mesh.get_group("pair")
        assert (group.name, [*group.ranks], group.backend) == ("pair", [0, 1], "virtual")
        assert mesh.get_group("other") is None
        if mesh.rank == 2:
            with pytest.raises(RankError):
                group.barrier()

    on("dp=3", main)


def test_k16_backends_are_acted_on_or_refused():
    def main():
        with DeviceMesh.new() as mesh:
            assert mesh.add_group("mock", [0, 1], GroupBackend.Mock).backend == "virtual"
            for backend in (GroupBackend.Nccl, GroupBackend.Gloo, GroupBackend.MPI):
                with raises(GroupError, backend.value, "virtual"):
                    mesh.add_group("other", [0, 1], backend)

    MockComm.run(2, main)


def test_k17_group_names_are_in_one_order_on_every_rank():
    def main(mesh):
        mesh.add_group("late", [2, 3])
        mesh.add_group("early", [0])
        return mesh.group_names

    assert on("dp=2,pp=2", main) == [["world", "dp", "pp", "late", "early"]] * 4


def test_k18_in_group_and_group_rank():
    def main(mesh):
        mesh.add_group("some", [2, 0])
        assert mesh.in_group("unknown") is False
        assert mesh.group_rank("unknown") is None
        return mesh.in_group("some"), mesh.group_rank("some")

    assert on("dp=3", main) == [(True, 1), (False, None), (True, 0)]


def test_k19_totals_count_shared_hardware_once():
    table = DeviceTable(tuple(gpu(k, partition_id=f"GPU-{k}") for k in range(4)))
    assert (table.total_memory_mb, table.total_compute_units) == (64000, 320)
    shared = DeviceTable((gpu(partition_id="GPU-1"),) * 2, ("a", "a"))
    assert (shared.total_memory_mb, shared.total_compute_units) == (16000, 80)

    def main(mesh):
        mine = mesh.local_device()
        return mesh.total_memory_mb == mine.memory_mb, mesh.total_compute_units, mine.compute_units

    for memory, total, mine in on("dp=2", main):
        assert memory
        assert total == mine


def test_k20_reshape_rebuilds_the_groups():
    def main(mesh):
        mesh.add_group("mine", [3, 1])
        before = mesh.group_names
        with pytest.raises(WorldSizeError):
            mesh.reshape(MeshTopology.tensor_parallel(3))
        assert mesh.group_names == before
        old = mesh.group("dp")
        mesh.reshape(MeshTopology.tensor_parallel(2))
        assert mesh.get_group("dp") is not old
        assert mesh.topology == MeshTopology.tensor_parallel(2)
        assert {"mine", "tp_0", "tp_1", "dp_0"} <= {*mesh.group_names}
        assert mesh.group("tp").all_reduce(np.array([mesh.rank])).resolve()[0] in (1, 5)
        if mesh.in_group("mine"):
            assert mesh.group("mine").all_reduce(np.array([mesh.rank])).resolve()[0] == 4

    on("dp=4", main)


def test_k21_stats():
    def main():
        with DeviceMesh.with_topology(None, MeshTopology.tensor_parallel(2)) as mesh:
            mine = mesh.local_device()
            expected = MeshStats(
                2, mine.memory_mb, mine.compute_units, {"cpu": 2}, len(mesh.group_names)
            )
            assert mesh.stats() == expected
            return mesh.stats()

    first, second = MockComm.run(2, main)
    assert first == second


def test_k22_a_copy_has_groups_of_its_own():
    def main(mesh):
        mesh.add_group("mine", [1, 0])
        with mesh.copy() as other:
            assert type(other) is mm.DeviceMesh
            assert other.group_names == mesh.group_names
            handle = mesh.group("mine").all_reduce(np.ones(1))
            assert other.group("mine").all_reduce(np.full(1, 2.0)).resolve()[0] == 4
            assert handle.resolve()[0] == 2
            text = repr(other)
        assert "dp=2" in text
        assert f"rank={mesh.rank}/2" in text
        assert "'mine'" in text
        mesh.group("mine").barrier()

    on("dp=2", main)


def test_k22_the_copy_of_a_kapsl_mesh_is_one():
    given = [Device(k, f"card {k}", DeviceBackend.CUDA, 1000, 100) for k in range(2)]

    def main():
        with DeviceMesh.new(given) as mesh:
            mesh.add_group("mine", [1, 0])
            with mesh.copy() as other:
                assert type(other) is DeviceMesh
                assert other.stats() == mesh.stats()
                assert [*other.all_devices()] == given
                group = other.add_group("more", [0, 1], GroupBackend.Mock)
                assert group.all_reduce(np.ones(1)).resolve()[0] == 2
            mesh.group("mine").barrier()

    MockComm.run(2, main)


def test_k23_devices_and_backends_come_back_from_json():
    device = gpu(
        3,
        pci_bus_id="0000:18:00.0",
        partition_id="MIG-cc33",
        driver_version="570.86",
        cuda_version="12.8",
        compute_capability="9.0",
        utilization_gpu_pct=3,
        temperature_c=32,
        supports_fp16=True,
        supports_int8=True,
    )
    assert Device.from_json(device.to_json()) == device
    assert len(json.loads(device.to_json())) == 14
    names = ["cpu", "cuda", "metal", "rocm", "directml", "opencl", "vulkan", "webgpu", "oneapi"]
    for name in names:
        assert str(DeviceBackend(name.upper())) == name
        assert not DeviceBackend(name).is_custom
    assert str(DeviceBackend("My-NPU")) == "My-NPU"
    assert DeviceBackend("My-NPU").is_custom


def test_k24_probing_and_preferences(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    info = DeviceInfo.try_probe_with_timeout(30, environment={})
    assert info.best_gpu() is None
    assert info.get_best_provider() == "cpu"
    assert info.has_provider("cpu")
    assert info.cuda_devices() == ()
    split = gpu(1, pci_bus_id="0000:3b:00.0", partition_id="MIG-dd44")
    for text, device in (
        ("cuda:1", split),
        ("0000:3b:00.0", split),
        ("mig:MIG-dd44", split),
        ("gpu", split),
    ):
        wanted = GpuPreference.parse(text)
        assert wanted is not None, text
        assert wanted.matches(device), text
    first = GpuPreference.parse("cuda:0")
    assert first is not None
    assert not first.matches(split)
    assert GpuPreference.parse("") is None


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i4", "i8", "u1", ml_dtypes.bfloat16])
def test_k25_all_reduce_of_every_dtype_and_operation(dtype):
    rows = np.array([[1, 2, 3], [4, 1, 2]]).astype(dtype)
    integer = np.dtype(dtype).kind in "iu"

    def main(mesh):
        ops = dist_ops(mesh)
        expectations: dict[Any, Any] = {
            "sum": rows.sum(0),
            "product": rows.prod(0),
            "min": rows.min(0),
            "max": rows.max(0),
        }
        for op, expected in expectations.items():
            data = rows[mesh.rank].copy()
            assert ops.all_reduce(data, op, "dp") is data
            assert data.tolist() == expected.tolist()
        data = rows[mesh.rank].copy()
        if integer:
            with raises(DTypeError, "mean", np.dtype(dtype).name):
                ops.all_reduce(data, "average")
        else:
            assert ops.all_reduce(data, "average").tolist() == [2.5, 1.5, 2.5]

    on("dp=2", main)


def test_k26_all_gather():
    def main(mesh):
        mesh.add_group("back", [1, 0])
        ops, output = dist_ops(mesh), np.zeros(4)
        ops.all_gather(np.full(2, mesh.rank + 1.0), output, "back")
        assert output.tolist() == [2.0, 2.0, 1.0, 1.0]
        for size in (3, 5):
            with raises(ShapeError, (size,)):
                ops.all_gather(np.ones(2), np.zeros(size), "world")

    on("dp=2", main)


def test_k27_the_root_of_a_broadcast_is_a_rank_of_the_mesh():
    def main(mesh):
        ops, data = dist_ops(mesh), np.full(2, float(mesh.rank))
        root = mesh.rank // 2 * 2 + 1
        ops.broadcast(data, root, "b")
        assert data.tolist() == [root] * 2
        with raises(RankError, "root_rank", 3 - mesh.rank, "'b'"):
            ops.broadcast(data, 3 - mesh.rank, "b")

    on("a=2,b=2", main)


def test_k28_reduce_scatter():
    def main(mesh):
        ops, part = dist_ops(mesh), np.zeros(2, "i8")
        ops.reduce_scatter(np.arange(4) * (mesh.rank + 1), part, "sum", "world")
        assert part.tolist() == [[0, 3], [6, 9]][mesh.rank]
        with raises(ShapeError, 2):
            ops.reduce_scatter(np.ones(3), np.zeros(2))

    on("dp=2", main)


def test_k29_barrier():
    seen = []

    def main(mesh):
        seen.append(mesh.rank)
        dist_ops(mesh).barrier("dp")
        assert sorted(seen) == [0, 1, 2]

    on("dp=3", main)


def test_k30_send_and_recv():
    def main(mesh):
        ops = dist_ops(mesh)
        if mesh.rank == 2:
            ops.send(np.arange(3), 0)
            ops.send(np.arange(3), 0)
        if mesh.rank == 0:
            data = np.zeros(3, "i8")
            assert ops.recv(data, 2).tolist() == [0, 1, 2]
            with raises(ShapeError, (3,), (2,)):
                ops.recv(np.zeros(2, "i8"), 2)
        # Messages of one's own and those of collectives do not meet.
        assert mesh.group().all_reduce(np.ones(1)).resolve()[0] == 3
        with raises(RankError, "dest_rank", 3):
            ops.send(np.ones(1), 3)

    on("dp=3", main)


@pytest.mark.parametrize("checks", ["0", "1"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_k31_every_operation(size, checks, monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", checks)
    mm.run_virtual(size, every_kapsl_operation, None)


def test_k31_without_a_communicator():
    ops = dist_ops(mm.Mesh("dp=2"))
    assert isinstance(ops, DistributedOps)
    x = np.ones(2, "f4")
    for call in (
        lambda: ops.all_reduce_f32(x, "sum", "world"),
        lambda: ops.broadcast(x, 0),
        lambda: ops.all_gather(x, x),
        lambda: ops.scatter(x, x, 0),
        lambda: ops.gather(x, x, 0),
        lambda: ops.reduce_scatter(x, x),
        lambda: ops.barrier(),
        lambda: ops.send(x, 1),
        lambda: ops.recv(x, 1),
    ):
        with raises(MeshError, "No communication backend configured", "dp=2"):
            call()
    with raises(MeshError, "mesh", 3):
        dist_ops(3)  # type: ignore[arg-type]


def test_k31_a_group_of_some_ranks():
    """A root is a rank of the mesh; one that is not in the group is refused."""

    def main():
        with mm.DeviceMesh("a=2,b=2") as mesh:
            ops = dist_ops(mesh)
            data = np.full(2, float(mesh.rank))
            ops.broadcast(data, mesh.rank // 2 * 2 + 1, "b")
            assert data.tolist() == [mesh.rank // 2 * 2 + 1] * 2
            chunk = np.zeros(1)
            root = 2 + mesh.rank % 2
            ops.scatter(np.array([10.0, 20.0]) + mesh.rank, chunk, root, mesh.group("a"))
            assert chunk.tolist() == [10 * (1 + mesh.rank // 2) + root]
            with raises(RankError, "root_rank", 3 - mesh.rank, "'b'"):
                ops.broadcast(data, 3 - mesh.rank, "b")
        with pytest.raises(ClosedError):
            ops.barrier()

    mm.run_virtual(4, main)


def test_k31_an_output_that_does_not_fit_leaves_the_ranks_together():
    def main():
        with mm.DeviceMesh("x=2") as mesh:
            ops = dist_ops(mesh)
            for output in (np.zeros(3), np.zeros(4, "f4"), [0.0] * 4):
                if mesh.rank == 0:
                    with pytest.raises((ShapeError, DTypeError)):
                        ops.gather(np.ones(2), output, 0)
                else:
                    ops.gather(np.ones(2), None, 0)
            chunk = np.zeros(2 + mesh.rank)
            if mesh.rank == 1:
                with raises(ShapeError, (2,), (3,)):
                    ops.scatter(None, chunk, 0)
            else:
                ops.scatter(np.ones(4), chunk, 0)
            assert mesh.group().all_reduce(np.ones(1)).resolve()[0] == 2

    mm.run_virtual(2, main)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_k32_ranks_in_threads_agree_with_numpy(size):
    rows = np.random.default_rng(0).integers(0, 9, (size, 4 * size)).astype(float)

    def main():
        with DeviceMesh.new() as mesh:
            group, x = mesh.group(), rows[mesh.rank]
            started = [
                group.all_reduce(x, "sum"),
                group.all_reduce(x, "max"),
                group.all_gather(x),
                group.reduce_scatter(x),
                group.broadcast(x, root=size - 1),
                group.all_to_all(x),
            ]
            return [one.resolve() for one in started]

    for rank, found in enumerate(MockComm.run(size, main)):
        own = slice(4 * rank, 4 * rank + 4)
        expected = [
            rows.sum(0),
            rows.max(0),
            rows.reshape(-1),
            rows.sum(0)[own],
            rows[-1],
            rows[:, own].reshape(-1),
        ]
        for one, other in zip(found, expected, strict=True):
            assert np.array_equal(one, other)


def test_k33_routes():
    mesh = MIXED.to_mesh(8)
    router = MeshRouter(mesh)
    assert [router.route() for _ in range(9)] == [*range(8), 0]
    assert [router.get_tp_group(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert router.get_tp_group_workers(2) == [4, 5]
    same = MeshRouter(mesh, RoutingStrategy.SessionAffinity)
    assert {same.route(session=3) for _ in range(4)} == {3}
    tensor = MeshRouter(mesh, RoutingStrategy.TensorParallel)
    assert [tensor.route() for _ in range(5)] == [0, 2, 4, 6, 0]
    assert tensor.route(tp_group_hint=3) == 6
    pipeline = MeshRouter(mesh, RoutingStrategy.PipelineParallel)
    assert {pipeline.route() for _ in range(8)} == {0, 1, 4, 5}  # the first stages
    assert MeshRouter(mm.Mesh("dp=2")).get_tp_group(0) is None


def test_k33_the_totals_of_a_routers_mesh():
    def main(mesh):
        stats = MeshRouter(mesh).mesh_stats()
        assert (stats.world_size, stats.total_memory_mb) == (2, mesh.total_memory_mb)
        assert stats.group_count == len(mesh.group_names)

    on("dp=2", main)
    with raises(MeshError, "DeviceMesh", "'dp=2'"):
        MeshRouter(mm.Mesh("dp=2")).mesh_stats()
