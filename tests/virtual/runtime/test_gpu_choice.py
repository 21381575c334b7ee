"""Which GPU each rank takes, who shares one, and what is said about it."""

from __future__ import annotations

import sys
import threading

import pytest

import mpimesh as mm
from mpimesh.errors import MeshError
from mpimesh.mesh import (
    Device,
    DeviceBackend,
    DeviceTable,
    pick_device,
    shared_gpus,
    sharing_text,
)
from mpimesh.mesh.probe import cupy_number, parse_mig, parse_row, visible_devices
from mpimesh.runtime.world import Hardware
from tests.devices.gpu_runtime import CupyOfDevices, uuid_of
from tests.helpers.raises import raises

DIGITS = [f"{k:032x}" for k in range(0xA0, 0xA4)]
ROWS = [
    f"{k}, NVIDIA A100-SXM4-40GB, {uuid_of(digits)}, 40960, 00000000:{digits[-2:].upper()}:00.0, "
    "570.86.15, 0, 30, Disabled, 8.0"
    for k, digits in enumerate(DIGITS)
]
GPUS = [parse_row(row)[0] for row in ROWS]
MIG = parse_mig(f"""GPU 0: NVIDIA A100-SXM4-40GB (UUID: {uuid_of(DIGITS[0])})
  MIG 3g.20gb     Device  0: (UUID: MIG-c0ffee00-0000-0000-0000-000000000001)
  MIG 3g.20gb     Device  1: (UUID: MIG-c0ffee00-0000-0000-0000-000000000002)
""")
INSTANCES = [
    Device(0, f"NVIDIA A100 MIG {profile}", DeviceBackend.CUDA, 20480, partition_id=uuid)
    for profile, uuid in MIG[uuid_of(DIGITS[0])]
]


def chosen(gpus, environments, hosts=None):
    """Let one rank of a node choose in each environment."""
    hosts = hosts or ["n0"] * len(environments)
    local = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
    picked = [
        pick_device(visible_devices(gpus, environment), local[rank])
        for rank, environment in enumerate(environments)
    ]
    return DeviceTable(tuple(picked), tuple(hosts))


def ids(table):
    return [device.partition_id for device in table.devices]


def visible(text):
    return {"CUDA_VISIBLE_DEVICES": text}


@pytest.mark.parametrize(
    ("gpus", "environments", "numbers", "sharing"),
    [
        (GPUS, [{}] * 4, [0, 1, 2, 3], []),
        (GPUS[:1], [{}] * 4, [0, 0, 0, 0], [(0, 1, 2, 3)]),
        (GPUS[:2], [{}] * 4, [0, 1, 0, 1], [(0, 2), (1, 3)]),
        # --gpus-per-task: each sees one, and calls it 0.
        (GPUS, [visible(str(k)) for k in range(4)], [0, 1, 2, 3], []),
        (GPUS, [visible(uuid_of(digits)) for digits in DIGITS[::-1]], [3, 2, 1, 0], []),
        # The same one for all, by an export in a job script.
        (GPUS, [visible("2")] * 2, [2, 2], [(0, 1)]),
        (GPUS, [visible("3,1")] * 2, [3, 1], []),
        (GPUS, [visible("1,7,0")] * 2, [1, 1], [(0, 1)]),
    ],
)
def test_each_rank_takes_the_gpu_of_its_local_rank(gpus, environments, numbers, sharing):
    table = chosen(gpus, environments)
    assert ids(table) == [uuid_of(DIGITS[number]) for number in numbers]
    assert [one.ranks for one in shared_gpus(table)] == sharing


def test_gpus_per_task_gives_number_0_to_all():
    table = chosen(GPUS, [visible(str(k)) for k in range(4)])
    assert [device.id for device in table.devices] == [0, 0, 0, 0]
    assert not shared_gpus(table)


@pytest.mark.parametrize("text", ["", "-1", "NoDevFiles"])
def test_no_gpu_is_visible(text):
    assert visible_devices(GPUS, visible(text)) == []


def test_the_same_gpu_number_on_two_nodes_is_not_shared():
    hosts = ["n0", "n0", "n1", "n1"]
    table = chosen(GPUS[:2], [{}] * 4, hosts)
    assert ids(table) == [uuid_of(DIGITS[k]) for k in (0, 1, 0, 1)]
    assert not shared_gpus(table)
    both = chosen(GPUS[:1], [{}] * 4, hosts)
    assert [(one.host, one.ranks) for one in shared_gpus(both)] == [("n0", (0, 1)), ("n1", (2, 3))]


def test_of_mig_instances_cuda_shows_the_first_and_nothing_else():
    table = chosen([*INSTANCES, GPUS[1]], [{}] * 2)
    assert ids(table) == [INSTANCES[0].partition_id] * 2
    (shared,) = shared_gpus(table)
    assert shared.ranks == (0, 1)
    assert "CUDA_VISIBLE_DEVICES=MIG-..." in sharing_text([shared])
    own = chosen(INSTANCES, [visible(one.partition_id) for one in INSTANCES])
    assert ids(own) == [one.partition_id for one in INSTANCES]
    assert not shared_gpus(own)


def test_a_number_in_cuda_visible_devices_counts_gpus_and_not_mig_instances():
    (second,) = visible_devices([*INSTANCES, GPUS[1]], visible("1"))
    assert second.partition_id == uuid_of(DIGITS[1])


def test_cpus_and_unknown_gpus_are_not_shared():
    cpu = Device(0, "a CPU", DeviceBackend.CPU, partition_id="cpus:0-3")
    unknown = Device(0, "a GPU", DeviceBackend.CUDA)
    assert not shared_gpus(DeviceTable((cpu, cpu, unknown, unknown), ("n0",) * 4))


def test_what_is_said_names_ranks_node_and_gpu_and_the_way_out():
    text = sharing_text(shared_gpus(chosen(GPUS[:2], [{}] * 4)))
    first, second = uuid_of(DIGITS[0]), uuid_of(DIGITS[1])
    assert f"ranks 0, 2: GPU 0 of node n0, NVIDIA A100-SXM4-40GB, {first}" in text
    assert f"ranks 1, 3: GPU 1 of node n0, NVIDIA A100-SXM4-40GB, {second}" in text
    assert "--gpus-per-task=1" in text
    assert "SharedGpuWarning" in text
    many = shared_gpus(chosen(GPUS[:1], [{}] * 12, [f"n{k // 2}" for k in range(12)]))
    assert "and 2 more" in sharing_text(many)


def test_cupy_and_nvidia_smi_mean_the_same_instance():
    digits = "c0ffee00000000000000000000000001"
    by_cupy = Device(0, "A100 MIG", DeviceBackend.CUDA, partition_id=uuid_of(digits))
    assert by_cupy.identity == INSTANCES[0].identity != INSTANCES[1].identity
    assert GPUS[0].identity == DIGITS_TEXT


DIGITS_TEXT = uuid_of(DIGITS[0]).removeprefix("GPU-")


# -- CuPy's numbers -------------------------------------------------------------------------


def seen(*places, uuids=True):
    return [
        Device(
            number,
            "A100",
            DeviceBackend.CUDA,
            pci_bus_id=GPUS[place].pci_bus_id,
            partition_id=GPUS[place].partition_id if uuids else None,
        )
        for number, place in enumerate(places)
    ]


def test_the_number_is_cupys_own():
    assert cupy_number(GPUS[2], seen(3, 2, 1, 0)) == 1  # CUDA counts the fastest first
    assert cupy_number(GPUS[2], seen(3, 2, uuids=False)) == 1
    assert cupy_number(GPUS[2], seen(2)) == 0
    assert cupy_number(INSTANCES[1], seen(0, uuids=False)) == 0  # the only one there is
    assert cupy_number(Device(1, "old", DeviceBackend.ROCM), seen(0, 1, uuids=False)) == 1
    with raises(MeshError, "2 GPUs", "GPU 3", "CUDA_VISIBLE_DEVICES"):
        cupy_number(GPUS[3], seen(0, 1))
    with raises(MeshError, "0 GPUs", "GPU 3", "CUDA_VISIBLE_DEVICES"):
        cupy_number(GPUS[3], [])


# -- meshes ---------------------------------------------------------------------------------


@pytest.fixture
def cupy(monkeypatch):
    def install(*uuids):
        fake = CupyOfDevices(uuids)
        monkeypatch.setitem(sys.modules, "cupy", fake)
        return fake

    return install


def current(fake):
    return fake.cuda.runtime.getDevice()


def test_the_mesh_makes_the_gpu_current(cupy):
    fake = cupy(*DIGITS)

    def main():
        with mm.DeviceMesh("x=-1") as mesh:
            assert mesh.local_rank == mesh.rank
            assert mesh.local_device().partition_id == uuid_of(DIGITS[mesh.rank])
            return current(fake)

    assert mm.run_virtual(4, main) == [0, 1, 2, 3]
    assert current(fake) == 0


def test_cupy_that_comes_later_is_told_by_use_device(cupy, monkeypatch):
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(Hardware, "devices", lambda _: tuple(GPUS))
    come = threading.Barrier(4)

    def main():
        with mm.DeviceMesh("x=-1") as mesh:
            come.wait(30)
            if mesh.rank == 0:
                cupy(*DIGITS[::-1])
            come.wait(30)
            assert mesh.use_device() == GPUS[mesh.rank]
            return current(sys.modules["cupy"])

    assert mm.run_virtual(4, main) == [3, 2, 1, 0]


def test_use_device_without_cupy_or_without_a_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with mm.DeviceMesh("x=1") as mesh:
        if not mesh.local_device().backend.is_gpu:
            assert mesh.use_device() == mesh.local_device()
    monkeypatch.setattr(Hardware, "devices", lambda _: tuple(GPUS))

    def main():
        mesh = mm.DeviceMesh("x=-1")
        with raises(MeshError, "CuPy", f"GPU {mesh.rank}"):
            mesh.use_device()
        mesh.close()

    mm.run_virtual(2, main)


@pytest.mark.filterwarnings("error")
def test_virtual_ranks_share_by_nature_and_nothing_is_said(cupy):
    cupy(DIGITS[0])

    def main():
        with mm.DeviceMesh("x=-1") as mesh:
            mesh.use_device()

    mm.run_virtual(2, main)
