from __future__ import annotations

import numpy as np
import pytest

from mpimesh.errors import MeshError, RankError, WorldSizeError
from mpimesh.mesh import (
    DeviceSpec,
    Mesh,
    create_distributed_mesh,
    create_mesh,
    device_mesh,
    mesh_from_device_ids,
)
from tests.helpers.raises import raises

CPUS = [f"CPU:{k}" for k in range(6)]


def test_create_mesh_takes_all_devices_by_default():
    assert create_mesh(devices=CPUS).dims_text == "x=6"
    assert create_mesh({"x": -1}, devices=CPUS).shape() == [6]
    assert create_mesh("a=3,b=-1", devices=CPUS).shape() == [3, 2]
    mesh = create_mesh([("a", 3), ("b", 2)], mesh_name="m", device_type="gpu")
    assert (mesh.name, mesh.device_type(), mesh.num_local_devices()) == ("m", "GPU", 6)
    assert create_mesh(num_devices=4) == create_mesh("x=4") == Mesh.from_string("|x=4|*CPU")


@pytest.mark.parametrize(
    ("options", "error", "values"),
    [
        (
            {"mesh_dims": "x=4", "devices": CPUS},
            WorldSizeError,
            ("devices", 6, [4], "x=6"),
        ),
        ({"mesh_dims": "a=4,b=-1", "devices": CPUS}, WorldSizeError, ("devices", 6, [4, -1])),
        ({}, MeshError, ("devices", "num_devices")),
        ({"mesh_dims": "x=-1"}, MeshError, ("devices", "num_devices")),
        ({"devices": []}, MeshError, ("Empty", "devices")),
        ({"devices": CPUS, "device_type": "GPU"}, MeshError, ("device_type", "GPU", "CPU")),
        ({"devices": ["CPU:0", "GPU:0"]}, MeshError, ("device_types", "CPU, GPU")),
        ({"devices": CPUS, "num_devices": 5}, MeshError, ("num_devices", 5, 6)),
        ({"devices": "CPU:0"}, MeshError, ("devices", "'CPU:0'")),
        ({"device_type": "TPU", "num_devices": 1}, MeshError, ("device_type", "CPU, GPU", "'TPU'")),
    ],
)
def test_create_mesh_refuses(options, error, values):
    with raises(error, *values):
        create_mesh(**options)


def test_each_client_owns_its_slice_of_the_ids():
    for client in range(3):
        mesh = create_distributed_mesh(
            "x=3,y=2", client_id=client, num_clients=3, num_local_devices=2, device_type="GPU"
        )
        assert mesh.local_device_ids() == [2 * client, 2 * client + 1]
        assert mesh.local_devices() == [
            f"/job:worker/replica:0/task:{client}/device:GPU:{k}" for k in range(2)
        ]
    alone = create_distributed_mesh(client_id=0, num_clients=1, local_devices=["CPU:3"])
    assert alone.to_string() == "|x=1|0|0|/job:localhost/replica:0/task:0/device:CPU:3"
    named = DeviceSpec("jobs", 0, 7, "CPU", 1)
    assert create_distributed_mesh(
        client_id=1, num_clients=2, local_devices=[named]
    ).local_devices() == [str(named)]


@pytest.mark.parametrize(
    ("options", "error", "values"),
    [
        (
            {"mesh_dims": "x=4", "num_clients": 3, "num_local_devices": 2},
            WorldSizeError,
            ("2 per client", "3 clients", 6, [4]),
        ),
        ({"client_id": 3, "num_clients": 3}, RankError, ("client_id", 3)),
        ({"num_clients": 0}, MeshError, ("num_clients", 0)),
        ({"num_clients": 2, "local_devices": []}, MeshError, ("Empty", "devices")),
        (
            {"num_clients": 2, "local_devices": ["CPU:0"], "device_type": "GPU"},
            MeshError,
            ("device_type", "GPU", "CPU"),
        ),
    ],
)
def test_create_distributed_mesh_refuses(options, error, values):
    with raises(error, *values):
        create_distributed_mesh(**{"client_id": 0, **options})


def test_tvms_function_is_from_ids():
    assert device_mesh((2, 2), [3, 2, 1, 0]) == Mesh.from_ids((2, 2), [3, 2, 1, 0])


# -- TensorFlow's constructor ----------------------------------------------------

IDS = np.arange(6).reshape(3, 2)


def test_tensorflows_constructor():
    mesh = mesh_from_device_ids(["x", "y"], IDS + 4, [4, 5], ["CPU:0", "CPU:1"], "M")
    assert mesh == Mesh(
        "x=3,y=2", range(4, 10), name="M", local_ids=[4, 5], local_devices=["CPU:0", "CPU:1"]
    )
    remote = mesh_from_device_ids(["x", "y"], IDS, [], [], global_devices=CPUS)
    assert remote.is_remote()


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        ((["x"], [0, 1], [0], ["CPU:0"]), ("global_device_ids", "ndarray")),
        ((["x"], np.array([], int), [0], ["CPU:0"]), ("global_device_ids", "empty")),
        ((["x"], np.array([0, 2]), [0], ["CPU:0"]), ("global_device_ids", np.array([0, 2]))),
        ((["x", "y"], np.array([0, 1]), [0], ["CPU:0"]), ("dim_names", 2, 1)),
        ((["x"], np.array([0, 1]), (0,), ["CPU:0"]), ("local_device_ids", "tuple")),
        ((["x"], np.array([0, 1]), [0], ("CPU:0",)), ("local_devices", "tuple")),
        ((["x"], np.array([0, 1]), [], []), ("Empty", "devices")),
        (
            (["x"], np.array([0, 1]), [0, 1], ["GPU:0", "GPU:0"]),
            ("Duplicate", "/job:localhost/replica:0/task:0/device:GPU:0"),
        ),
        ((["x"], np.array([0, 1]), [0, 1], ["CPU:0"]), ("2 local device ids", "1 local devices")),
        ((["x"], np.array([0]), [0, 1], ["CPU:0", "CPU:1"]), ("2 local devices", 1)),
        ((["x"], np.array([0, 1]), [0, 1], ["CPU:0", "GPU:0"]), ("device_types", "CPU, GPU")),
        ((["x"], np.arange(3), [0, 1], ["CPU:0", "CPU:1"]), ("Uneven", 2, 3)),
        ((["x"], np.array([0, 1]), [2], ["CPU:0"]), ("local device id 2", "x=2")),
        ((["x", "x"], np.zeros((1, 1), int), [0], ["CPU:0"]), ("repeated", "'x'")),
        ((["match"], np.array([0]), [0], ["CPU:0"]), ("reserved", "'match'")),
    ],
)
def test_tensorflows_constructor_refuses(arguments, values):
    with raises(MeshError, *values):
        mesh_from_device_ids(*arguments)


def test_there_is_no_xla():
    with raises(MeshError, "use_xla_spmd"):
        mesh_from_device_ids(["x"], np.array([0]), [0], ["CPU:0"], use_xla_spmd=True)


@pytest.mark.parametrize(
    "text",
    ["CPU:0", "cpu:0", "/cpu:0", "/device:CPU:0", "/job:localhost/replica:0/task:0/device:CPU:0"],
)
def test_device_names_have_one_full_form(text):
    assert str(DeviceSpec.parse(text)) == "/job:localhost/replica:0/task:0/device:CPU:0"


@pytest.mark.parametrize(
    "text", ["", "CPU", "CPU:", "CPU:x", "/job:/device:CPU:0", "device:CPU:0", 3]
)
def test_other_device_names_are_refused(text):
    with raises(MeshError, "device", repr(text)):
        DeviceSpec.parse(text)
