from __future__ import annotations

import pytest

from mpimesh.errors import MeshError, RankError
from mpimesh.mesh import ClientInfo, create_distributed_mesh
from tests.helpers.raises import raises


def test_one_process():
    client = ClientInfo(0, 1, hosts=("a",))
    assert client.job_name == "localhost"
    assert client.full_job_name() == "localhost/replica:0/task:0"
    assert client.jobs == []
    assert client.preferred_device_type() == "CPU"
    assert client.local_devices() == ["/job:localhost/replica:0/task:0/device:CPU:0"]


def test_many_processes():
    client = ClientInfo(2, 3, num_local_gpus=2, hosts=("a", "a", "b"))
    assert client.job_name == "worker"
    assert client.full_job_name() == "worker/replica:0/task:2"
    assert client.full_job_name(0) == "worker/replica:0/task:0"
    assert client.jobs == ["a", "a", "b"]
    assert client.preferred_device_type() == "GPU"
    assert client.preferred_device_type("cpu") == "CPU"
    assert (client.num_local_devices(), client.num_global_devices()) == (2, 6)
    assert (client.num_local_devices("CPU"), client.num_global_devices("CPU")) == (1, 3)
    mesh = create_distributed_mesh(
        "x=6", client_id=2, num_clients=3, num_local_devices=2, device_type="GPU"
    )
    assert mesh.local_devices() == client.local_devices()


@pytest.mark.parametrize("ask", ["preferred_device_type", "num_local_devices", "local_devices"])
def test_a_bad_device_type(ask):
    with raises(MeshError, "device_type", "CPU, GPU", "XPU"):
        getattr(ClientInfo(0, 1), ask)("xpu")


def test_a_device_type_that_is_not_there():
    assert ClientInfo(0, 1).num_local_devices("GPU") == 0
    with raises(MeshError, "device_type", "GPU"):
        ClientInfo(0, 1).preferred_device_type("GPU")


@pytest.mark.parametrize(
    ("options", "error", "values"),
    [
        ({"client_id": 2}, RankError, ("client_id", 2)),
        ({"client_id": -1}, RankError, ("client_id", -1, 2)),
        ({"num_clients": 0}, MeshError, ("num_clients", 0)),
        ({"num_local_gpus": -1}, MeshError, ("num_local_gpus", -1)),
        ({"num_local_cpus": 0}, MeshError, ("num_local_cpus", 0)),
        ({"hosts": ("a",)}, MeshError, ("2 clients", "1 hosts")),
    ],
)
def test_clients_that_break_a_rule(options, error, values):
    with raises(error, *values):
        ClientInfo(**{"client_id": 0, "num_clients": 2, **options})


def test_full_job_name_of_no_process():
    with raises(RankError, "task_id", 2):
        ClientInfo(0, 2).full_job_name(2)
