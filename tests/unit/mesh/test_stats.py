from __future__ import annotations

import pytest

from mpimesh.errors import MeshError, RankError
from mpimesh.mesh import Device, DeviceBackend, DeviceTable, GroupSpec
from tests.helpers.raises import raises


def gpu(number=0, memory=16000, units=80, **more):
    return Device(number, "gpu", DeviceBackend.CUDA, memory, units, **more)


def cpu(cores, memory=1000):
    count = sum(1 + int(run.split("-")[-1]) - int(run.split("-")[0]) for run in cores.split(","))
    return Device(0, "cpu", DeviceBackend.CPU, memory, count, partition_id=f"cpus:{cores}")


@pytest.mark.parametrize(
    ("devices", "hosts", "memory", "units"),
    [
        # Two ranks on one GPU.
        ([gpu(partition_id="GPU-1")] * 2, ("a", "a"), 16000, 80),
        ([gpu(pci_bus_id="0000:01:00.0")] * 2, (), 16000, 80),
        # The same PCI place on two hosts is two GPUs.
        ([gpu(pci_bus_id="0000:01:00.0")] * 2, ("a", "b"), 32000, 160),
        # Two MIG instances of one GPU share its PCI place, but nothing else.
        ([gpu(pci_bus_id="p", partition_id=f"MIG-{k}") for k in range(2)], (), 32000, 160),
        # Ranks of one host on the same cores, on other cores, on some of both; other hosts.
        ([cpu("0-3")] * 4, (), 1000, 4),
        ([cpu("0"), cpu("1")], (), 1000, 2),
        ([cpu("0-2"), cpu("2-3")], (), 1000, 4),
        ([cpu("0-3")] * 4, ("a", "a", "b", "b"), 2000, 8),
        # A CPU record that does not say which cores counts for each rank.
        ([Device(0, "cpu", DeviceBackend.CPU, 10, 2)] * 2, (), 20, 4),
        ([Device(0, "cpu", DeviceBackend.CPU, 10, 2, partition_id="cpus:x")] * 2, (), 10, 2),
        ([], (), 0, 0),
    ],
)
def test_shared_hardware_counts_once(devices, hosts, memory, units):
    table = DeviceTable(tuple(devices), hosts)
    assert (table.total_memory_mb, table.total_compute_units) == (memory, units)


def test_devices_by_rank_backend_and_group():
    npu = Device(0, "n", DeviceBackend("npu"))
    other = Device(0, "o", DeviceBackend("npu2"))
    table = DeviceTable((gpu(0), npu, other, gpu(1)))
    assert table.get(1) is npu
    assert table.get(4) is None
    assert table.get(-1) is None
    assert table[1:3] == (npu, other)
    assert list(table) == list(table.devices)
    assert table.by_backend("npu") == [npu]
    assert [device.id for device in table.by_backend(DeviceBackend.CUDA)] == [0, 1]
    assert table.in_group(GroupSpec("g", [3, 1])) == [gpu(1), npu]
    with raises(RankError, "Rank 4", "world size 4", "'g'"):
        table.in_group(GroupSpec("g", [4]))


def test_one_host_for_each_device():
    with raises(MeshError, "1 devices", "2 hosts"):
        DeviceTable((gpu(),), ("a", "b"))
