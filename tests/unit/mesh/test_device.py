from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from mpimesh.errors import MeshError
from mpimesh.mesh import Device, DeviceBackend, pick_device
from tests.helpers.raises import raises

KNOWN = ["cpu", "cuda", "metal", "rocm", "directml", "opencl", "vulkan", "webgpu", "oneapi"]


def optional(strategy):
    return st.one_of(st.none(), strategy)


devices = st.builds(
    Device,
    id=st.integers(0, 9),
    name=st.text(),
    backend=st.builds(DeviceBackend, st.sampled_from([*KNOWN, "My-NPU", "npu"])),
    memory_mb=st.integers(0, 10**6),
    compute_units=st.integers(0, 1000),
    pci_bus_id=optional(st.text()),
    partition_id=optional(st.text()),
    driver_version=optional(st.text()),
    cuda_version=optional(st.text()),
    compute_capability=optional(st.text()),
    utilization_gpu_pct=optional(st.integers(0, 100)),
    temperature_c=optional(st.integers(-40, 120)),
    supports_fp16=st.booleans(),
    supports_int8=st.booleans(),
)


@given(devices)
def test_json_comes_back(device):
    assert Device.from_json(device.to_json()) == device
    record = json.loads(device.to_json())
    assert len(record) == 14 == len(dataclasses.fields(Device))
    assert Device.from_record(record) == device
    assert isinstance(record["backend"], str)


@pytest.mark.parametrize("name", KNOWN)
def test_known_backends_are_lowercase_in_any_case(name):
    backend = DeviceBackend(name.upper())
    assert backend == getattr(DeviceBackend, name.upper())
    assert str(backend) == name
    assert not backend.is_custom
    assert backend.is_gpu is (name != "cpu")


def test_custom_backends_keep_their_text():
    assert str(DeviceBackend("My-NPU")) == "My-NPU"
    assert DeviceBackend("a") != DeviceBackend("b")
    assert DeviceBackend("npu").is_custom
    assert not DeviceBackend("npu").is_gpu
    wrongs: list[Any] = ["", " ", None]
    for wrong in wrongs:
        with raises(MeshError, "backend", repr(wrong)):
            DeviceBackend(wrong)


@pytest.mark.parametrize(
    ("change", "values"),
    [
        ({"id": -1}, ("id", -1)),
        ({"id": True}, ("id", True)),
        ({"memory_mb": 1.5}, ("memory_mb", 1.5)),
        ({"name": None}, ("name", None)),
        ({"supports_fp16": 1}, ("supports_fp16", 1)),
        ({"pci_bus_id": 3}, ("pci_bus_id", 3)),
        ({"backend": ""}, ("backend", "''")),
        ({"other": 1}, ("fields", "other")),
    ],
)
def test_records_that_break_a_rule(change, values):
    record = {**Device(0, "n", DeviceBackend.CPU).to_record(), **change}
    with raises(MeshError, *values):
        Device.from_record(record)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("", ("JSON", "line 1 column 1")),
        ("{", ("JSON", "line 1 column 2")),
        ("3", ("id, name, backend", 3)),
        ("[]", ("id, name, backend", [])),
        ("{}", ("id, name, backend", {})),
        (None, ("JSON", "NoneType")),
    ],
)
def test_texts_that_are_no_device(text, values):
    with raises(MeshError, "device", *values):
        Device.from_json(text)


def test_backend_must_be_a_backend():
    with raises(MeshError, "backend", "'cuda'"):
        Device(0, "n", "cuda")  # type: ignore[arg-type]


@given(st.integers(1, 8), st.integers(0, 40))
def test_processes_take_devices_in_turn(visible, local_rank):
    gpus = [Device(k, f"gpu {k}", DeviceBackend.CUDA) for k in range(visible)]
    assert pick_device(gpus, local_rank).id == local_rank % visible


def test_pick_device_refuses():
    with raises(MeshError, 0, "local rank 0"):
        pick_device([], 0)
    with raises(MeshError, 1, "local rank -1"):
        pick_device([Device(0, "n", DeviceBackend.CPU)], -1)
