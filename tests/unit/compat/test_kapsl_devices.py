"""kapsl's records of the devices of a process, and its choice among them."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, strategies as st

from mpimesh.compat.kapsl import DeviceInfo, GpuPreference
from mpimesh.mesh import Device, DeviceBackend

GPUS = [
    Device(0, "NVIDIA A100", DeviceBackend.CUDA, 40960, pci_bus_id="0000:3b:00.0",
           partition_id="GPU-bb22", compute_capability="8.0"),
    Device(1, "NVIDIA H200", DeviceBackend.CUDA, 40960, pci_bus_id="0000:18:00.0",
           partition_id="MIG-cc33", compute_capability="10.0"),
    Device(2, "NVIDIA T4", DeviceBackend.CUDA, 16000, pci_bus_id=None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "kind", "ids"),
    [
        ("cuda:1", "backend_id", [1]),
        ("CUDA:01", "backend_id", [1]),
        ("rocm:1", "backend_id", []),
        ("mig:cc33", "partition", [1]),
        ("MIG:MIG-cc", "partition", [1]),
        ("partition:GPU-bb22", "partition", [0]),
        ("0000:3B:00.0", "pci", [0]),
        ("3b:00.0", "pci", [0]),
        ("b:00.0", "pci", []),
        ("h200", "name", [1]),
        (" nvidia ", "name", [0, 1, 2]),
        ("a:b", "name", []),
    ],
)
def test_preferences(text, kind, ids):
    preference = GpuPreference.parse(text)
    assert preference is not None
    assert preference.kind == kind
    assert [gpu.id for gpu in GPUS if preference.matches(gpu)] == ids
    assert GpuPreference.parse(str(preference)) == preference
    info = DeviceInfo(1, 1, "Linux", "1", True, False, False, False, tuple(GPUS))
    best = info.best_gpu_with_preference(preference)
    # Of equal memory the newer one, and 10.0 is newer than 8.0.
    assert (best and best.id) == (None if not ids else 1 if 1 in ids else ids[0])


@given(st.text())
def test_any_preference_can_be_read(text):
    preference = GpuPreference.parse(text)
    assert (preference is None) == (not text.strip())
    if preference is not None:
        assert all(preference.matches(gpu) in (True, False) for gpu in GPUS)
        assert GpuPreference.parse(str(preference)) == preference


def test_what_a_process_has_without_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    info = DeviceInfo.try_probe()
    assert info == DeviceInfo.probe() == DeviceInfo.try_probe_with_timeout(30)
    (cpu,) = info.devices
    assert info.cpu_cores == cpu.compute_units == len(os.sched_getaffinity(0))
    assert info.total_memory >> 20 == cpu.memory_mb
    assert (info.os_type, info.os_release) == (os.uname().sysname, os.uname().release)
    assert not any([info.has_cuda, info.has_metal, info.has_rocm, info.has_directml])
    assert info.best_gpu() is None
    assert info.best_gpu_with_preference(None) is None
    assert info.cuda_devices() == ()
    assert info.get_best_provider() == "cpu"
    assert info.has_provider("CPU")
    assert not info.has_provider("cuda")


@pytest.mark.parametrize("backend", ["cuda", "rocm"])
def test_what_a_process_has_with_gpus(monkeypatch, backend):
    gpus = tuple(Device(number, "gpu", DeviceBackend(backend), 10 + number) for number in (0, 1))
    monkeypatch.setattr("mpimesh.compat.kapsl.probe_devices", lambda: gpus)
    info = DeviceInfo.try_probe()
    assert (info.has_cuda, info.has_rocm) == (backend == "cuda", backend == "rocm")
    assert info.cuda_devices() == (gpus if backend == "cuda" else ())
    assert info.best_gpu() is gpus[1]
    assert info.get_best_provider() == backend
