from __future__ import annotations

import os
import subprocess
import sys
from time import perf_counter
from types import SimpleNamespace

import pytest

from mpimesh.errors import MeshError
from mpimesh.mesh import Device, DeviceBackend, find_devices
from mpimesh.mesh.probe import probe_devices
from tests.helpers.raises import raises

H200 = "0, NVIDIA H200, GPU-aa11, 143771, 00000000:18:00.0, 570.86.15, 3, 32, Disabled, 9.0"
A100 = (
    "1, NVIDIA A100-SXM4-40GB, GPU-bb22, 40960, 00000000:3B:00.0, 570.86.15, [N/A], [N/A], "
    "Disabled, 8.0"
)
SPLIT = A100.replace("Disabled", "Enabled")
LIST = """GPU 0: NVIDIA H200 (UUID: GPU-aa11)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-bb22)
  MIG 3g.20gb     Device  0: (UUID: MIG-cc33)
  MIG 1g.5gb      Device  1: (UUID: MIG-dd44)
"""


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Give a function that installs a program as nvidia-smi; none is installed at first."""
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))

    def install(rows, listing="", before=""):
        (tmp_path / "rows").write_text(rows)
        (tmp_path / "list").write_text(listing)
        script = tmp_path / "nvidia-smi"
        script.write_text(
            f'#!/bin/sh\nPATH=/usr/bin:/bin\necho "$@" >> {tmp_path}/calls\n{before}\n'
            f"case $1 in -L) cat {tmp_path}/list;; *) cat {tmp_path}/rows;; esac\n"
        )
        script.chmod(0o755)
        return tmp_path / "calls"

    return install


def probe(**environment):
    # A slow machine must not turn a fake program into a time-out.
    return probe_devices(30, environment=environment)


@pytest.mark.usefixtures("smi")
def test_without_a_gpu_there_is_the_cpu():
    (cpu,) = probe_devices()
    assert find_devices() == (cpu,)
    assert cpu.backend == DeviceBackend.CPU
    assert cpu.compute_units == len(os.sched_getaffinity(0))
    assert 0 < cpu.memory_mb <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20


def test_gpus_of_nvidia_smi(smi):
    smi(f"{H200}\n{A100}\n\n")
    h200, a100 = probe()
    assert h200 == Device(
        id=0,
        name="NVIDIA H200",
        backend=DeviceBackend.CUDA,
        memory_mb=143771,
        compute_units=132,
        pci_bus_id="0000:18:00.0",
        partition_id="GPU-aa11",
        driver_version="570.86.15",
        compute_capability="9.0",
        utilization_gpu_pct=3,
        temperature_c=32,
        supports_fp16=True,
        supports_int8=True,
    )
    assert (a100.id, a100.compute_units, a100.pci_bus_id) == (1, 108, "0000:3b:00.0")
    assert a100.utilization_gpu_pct is a100.temperature_c is None


def test_mig_instances_take_the_place_of_their_gpu(smi):
    smi(f"{H200}\n{SPLIT}\n", LIST)
    devices = probe()
    assert [device.name for device in devices] == [
        "NVIDIA H200",
        "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    ]
    assert [device.id for device in devices] == [0, 1, 2]
    assert [device.memory_mb for device in devices] == [143771, 20 * 1024, 5 * 1024]
    assert [device.partition_id for device in devices] == ["GPU-aa11", "MIG-cc33", "MIG-dd44"]
    assert devices[1].pci_bus_id == devices[2].pci_bus_id == "0000:3b:00.0"
    assert [device.compute_units for device in devices] == [132, 0, 0]


def test_an_old_driver_without_compute_cap(smi):
    calls = smi(
        H200.removesuffix(", 9.0"),
        before='case "$*" in *compute_cap*) '
        "echo 'Field \"compute_cap\" is not a valid field to query.'; exit 2;; esac",
    )
    (device,) = probe()
    assert device.compute_capability is None
    assert device.supports_fp16
    assert len(calls.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        ("0,1", ["GPU-aa11", "GPU-bb22"]),
        ("1,0", ["GPU-bb22", "GPU-aa11"]),
        ("1", ["GPU-bb22"]),
        ("GPU-b", ["GPU-bb22"]),
        ("1,7,0", ["GPU-bb22"]),
        ("1,1", ["GPU-bb22"]),
        ("GPU-", ["cpus"]),
        ("-1", ["cpus"]),
        ("", ["cpus"]),
        ("²", ["cpus"]),
    ],
)
def test_cuda_visible_devices_is_heeded(smi, wanted, names):
    smi(f"{H200}\n{A100}\n")
    devices = probe(CUDA_VISIBLE_DEVICES=wanted)
    assert [device.id for device in devices] == list(range(len(names)))
    for device, name in zip(devices, names, strict=True):
        assert device.partition_id.startswith(name)


@pytest.mark.parametrize(
    ("rows", "before", "values"),
    [
        ("what is this", "", ("nvidia-smi", "'what is this'")),
        ("x" + H200, "", ("nvidia-smi", "'x0, NVIDIA H200")),
        ("a,b,c,d,e,f,g,h,i,j", "", ("nvidia-smi", "'a,b,c,d,e,f,g,h,i,j'")),
        (H200, "echo no driver >&2; exit 9", ("nvidia-smi", "code 9", "no driver")),
        ("\xff\x00,,", "", ("nvidia-smi", "line")),
    ],
)
def test_a_failing_nvidia_smi(smi, rows, before, values):
    smi(rows, before=before)
    with raises(MeshError, *values):
        probe()
    assert [device.backend for device in find_devices()] == [DeviceBackend.CPU]


def test_unknown_cells_are_left_out(smi):
    smi("0, Some GPU, [N/A], [N/A], weird, [Not Supported], x, y, [N/A], [N/A]")
    (device,) = probe()
    assert device == Device(
        0, "Some GPU", DeviceBackend.CUDA, supports_fp16=True, supports_int8=True
    )


def test_no_devices_were_found(smi):
    smi("No devices were found\n")
    assert probe()[0].backend == DeviceBackend.CPU


def test_a_hanging_nvidia_smi_is_left_behind(smi):
    smi(H200, before="sleep 60")
    start = perf_counter()
    with raises(MeshError, "nvidia-smi", "time"):
        probe_devices(0.2)
    assert find_devices()[0].backend == DeviceBackend.CPU
    assert perf_counter() - start < 20


def test_an_nvidia_smi_that_cannot_start(smi, tmp_path):
    smi(H200)
    (tmp_path / "nvidia-smi").write_text("#!/no/such/shell\n")
    with raises(MeshError, "nvidia-smi", "started"):
        probe()


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan")])
def test_a_timeout_must_be_above_zero(timeout_s):
    with raises(MeshError, "timeout_s", timeout_s):
        probe_devices(timeout_s)


# -- CuPy ------------------------------------------------------------------------


class FakeRuntime:
    """The part of ``cupy.cuda.runtime`` that is asked."""

    CUDARuntimeError = type("CUDARuntimeError", (RuntimeError,), {})
    is_hip = False

    def __init__(self, count=2, **facts):
        self.count = count
        self.facts = {
            "name": b"NVIDIA H200",
            "totalGlobalMem": 150 << 30,
            "multiProcessorCount": 132,
            "major": 9,
            "minor": 0,
            "uuid": bytes(range(1, 17)),
            **facts,
        }

    def getDeviceCount(self):
        if self.count is None:
            raise self.CUDARuntimeError("cudaErrorNoDevice")
        return self.count

    def getDeviceProperties(self, number):
        return self.facts

    def deviceGetPCIBusId(self, number):
        return f"0000:3B:0{number}.0"

    def driverGetVersion(self):
        return 12040


@pytest.fixture
def cupy(smi, monkeypatch):
    smi("nvidia-smi must not be asked")

    def install(runtime):
        fake = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
        monkeypatch.setitem(sys.modules, "cupy", fake)

    return install


def test_cupy_is_asked_where_it_is_imported(cupy):
    cupy(FakeRuntime())
    devices = probe_devices()
    assert devices[1] == Device(
        id=1,
        name="NVIDIA H200",
        backend=DeviceBackend.CUDA,
        memory_mb=150 << 10,
        compute_units=132,
        pci_bus_id="0000:3b:01.0",
        partition_id="GPU-01020304-0506-0708-090a-0b0c0d0e0f10",
        cuda_version="12.4",
        compute_capability="9.0",
        supports_fp16=True,
        supports_int8=True,
    )


def test_cupy_for_rocm_or_of_an_older_version(cupy):
    runtime = FakeRuntime(count=1, uuid=None)
    runtime.is_hip = True
    cupy(runtime)
    info = probe_devices()
    assert info[0].backend == DeviceBackend.ROCM
    assert (info[0].partition_id, info[0].compute_capability) == (None, None)


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (bytes(range(1, 17)) + b"\x07", "GPU-01020304-0506-0708-090a-0b0c0d0e0f10"),
        (bytes(range(1, 9)), None),
        (b"", None),
    ],
    ids=["read on past the end", "cut off at a zero", "zero at once"],
)
def test_cupy_takes_the_bytes_of_a_uuid_for_text(raw, text, cupy):
    cupy(FakeRuntime(count=1, uuid=raw))
    device = probe_devices()[0]
    assert device.partition_id == text
    assert device.identity is not None


def test_cupy_without_a_gpu(cupy):
    cupy(FakeRuntime(count=None))
    assert probe_devices()[0].backend == DeviceBackend.CPU


def test_cupy_that_cannot_describe_its_devices(cupy):
    cupy(FakeRuntime(major="?"))
    with raises(MeshError, "CuPy", "'?'"):
        probe_devices()
    assert find_devices()[0].backend == DeviceBackend.CPU


def test_probing_imports_neither_mpi_nor_cupy():
    code = (
        "import sys; from mpimesh.mesh import find_devices; find_devices(); "
        "print([m for m in ('mpi4py.MPI', 'cupy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
