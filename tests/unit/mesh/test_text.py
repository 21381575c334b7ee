from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpimesh.errors import MeshError, MpimeshError
from mpimesh.mesh import Mesh, create_distributed_mesh, create_mesh
from tests.helpers.mesh_strategies import meshes
from tests.helpers.raises import raises

LOCAL = "/job:localhost/replica:0/task:0/device:CPU:"
WORKER = "/job:worker/replica:0/task:1/device:CPU:"


def test_golden_texts():
    full = create_mesh("x=3,y=2", mesh_name="M")
    devices = ",".join(f"{LOCAL}{k}" for k in range(6))
    assert full.to_string() == f"M|x=3,y=2|0,1,2,3,4,5|0,1,2,3,4,5|{devices}"
    second = create_distributed_mesh("x=3,y=2", client_id=1, num_clients=3, num_local_devices=2)
    assert second.to_string() == f"|x=3,y=2|0,1,2,3,4,5|2,3|{WORKER}0,{WORKER}1"
    remote = Mesh("x=2", global_devices=["CPU:0", "CPU:1"])
    assert remote.to_string() == f"|x=2|0,1|||{LOCAL}0,{LOCAL}1"
    assert Mesh.from_device(f"{LOCAL}3").to_string() == f"{LOCAL}3"
    assert Mesh("x=2", [7, 3]).to_string() == "|x=2|7,3||"
    for mesh in (full, second, remote, Mesh.from_device(f"{LOCAL}3"), Mesh("x=2", [7, 3])):
        assert Mesh.from_string(mesh.to_string()) == mesh


@pytest.mark.parametrize("kind", ["CPU", "GPU"])
def test_the_short_form_makes_its_devices(kind):
    mesh = Mesh.from_string(f"name|x=2,y=2|*{kind}")
    assert mesh == create_mesh("x=2,y=2", mesh_name="name", device_type=kind)
    assert mesh.device_type() == kind


mesh_names = st.text(st.characters(min_codepoint=32, max_codepoint=126, exclude_characters="|"))


@st.composite
def meshes_with_devices(draw):
    mesh, _ = draw(meshes())
    kind = draw(st.sampled_from(["CPU", "GPU"]))
    parts = draw(st.sampled_from([k for k in range(mesh.size + 1) if not k or mesh.size % k == 0]))
    named = draw(st.booleans())
    return Mesh(
        mesh.dims,
        mesh.ids,
        name=draw(
            st.text(st.characters(codec="ascii", exclude_characters="|"), max_size=5).filter(
                str.isprintable
            )
        ),
        local_ids=list(mesh.ids)[:parts],
        local_devices=[f"{kind}:{k}" for k in range(parts)] if named else [],
        global_devices=[f"{kind}:{k}" for k in range(mesh.size)] if draw(st.booleans()) else [],
    )


@given(meshes_with_devices())
def test_text_and_record_come_back(mesh):
    assert Mesh.from_string(mesh.to_string()) == mesh
    record = json.loads(json.dumps(mesh.as_proto()))
    assert Mesh.from_proto(record) == mesh


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("", ("name|x=3,y=2|ids|local ids|local devices", "''")),
        ("a", ("name|x=3,y=2|ids|local ids|local devices", "'a'")),
        ("m|x=2", ("5, 6, 7 or 3", 2)),
        ("m|x=2|0,1|0,1", ("5, 6, 7 or 3", 4)),
        ("m|x=2|0,1|||||", ("5, 6, 7 or 3", 8)),
        ("m|x=2|0,1|||a|use_xla_spmd", ("use_xla_spmd",)),
        ("m|x=2|0,1|||use_xla_spmd", ("use_xla_spmd",)),
        ("m|x|0,1||", ("'x=3'", "'x'")),
        ("m|x=|0,1||", ("'x=3'", "'x='")),
        ("m|x=0|||", ("'x=3'", "'x=0'")),
        ("m|x=-1|0||", ("'x=3'", "'x=-1'")),
        ("m|x=2,x=2|0,1,2,3||", ("repeated", "'x'")),
        ("m|unsharded=2|0,1||", ("reserved", "'unsharded'")),
        ("m|match=2|0,1||", ("reserved", "'match'")),
        ("m|x=2|0,a||", ("id", "'a'")),
        ("m|x=2|0,||", ("id", "''")),
        ("m|x=2|0,-1||", ("id", "'-1'")),
        ("m|x=2|0,1,2||", ("ids", 3, 2)),
        ("m|x=2|1,1||", ("id 1", "twice")),
        (f"m|x=3|0,1,2|0,1|{LOCAL}0,{LOCAL}1", ("Uneven", 2, 3)),
        (f"m|x=2|0,1|0,1|{LOCAL}0", ("2 local device ids", "1 local devices")),
        (f"m|x=2|0,1|2|{LOCAL}0", ("local device id 2", "x=2")),
        ("m|x=2|0,1|0|CPU:0", ("job, replica, task and type", "'CPU:0'")),
        ("m|x=2|0,1|0|/job:a/replica:0/task:0/device:TPU:0", ("device_type", "CPU, GPU", "'TPU'")),
        (f"m|x=2|0,1|0|{LOCAL}0|{LOCAL}0", ("1 global devices", 2)),
        ("m|x=2|CPU", ("'*CPU'", "'*GPU'", "'CPU'")),
        ("m|x=2|*TPU", ("device_type", "CPU, GPU", "'TPU'")),
        ("m|x=9999999|*CPU", ("'*CPU'", 9999999)),
        ("m|x=99999999999|0||", (99999999999, 2147483647)),
        ("m\n|x=1|0||", ("name", r"'m\n'")),
    ],
)
def test_malformed_texts(text, values):
    with raises(MeshError, *values):
        Mesh.from_string(text)


def test_a_text_must_be_text():
    text: Any = 3
    with raises(MeshError, "text", "int"):
        Mesh.from_string(text)
    with raises(MeshError, "text", 3):
        Mesh.parse(text)


PIECES = st.sampled_from(
    [
        "|",
        "|",
        "x=2",
        "y=1",
        "=",
        ",",
        "0",
        "1",
        "0,1",
        "-1",
        "*CPU",
        "*",
        LOCAL + "0",
        "a",
        "\n",
        "é",
        "²",
    ]
)


@given(st.one_of(st.text(max_size=40), st.lists(PIECES, max_size=14).map("".join)))
def test_any_text_gives_a_mesh_or_an_error_of_ours(text):
    for read in (Mesh.from_string, Mesh.parse):
        try:
            mesh = read(text)
        except MpimeshError:
            continue
        assert Mesh.from_string(mesh.to_string()) == mesh


@pytest.mark.parametrize(
    ("change", "values"),
    [
        ({"name": 3}, ("name", "str", 3)),
        ({"mesh_dimensions": "x"}, ("mesh_dimensions", "list", "'x'")),
        ({"mesh_dimensions": [{"name": "x"}]}, ("size", {"name": "x"})),
        ({"mesh_dimensions": [{"name": "x", "size": 2.0}]}, ("size", "'x'", 2.0)),
        ({"global_device_ids": ["0", "1"]}, ("id", "'0'")),
        ({"use_xla_spmd": True}, ("use_xla_spmd",)),
        ({"other": 1}, ("fields", "other")),
    ],
)
def test_malformed_records(change, values):
    with raises(MeshError, *values):
        Mesh.from_proto({**Mesh("x=2").as_proto(), **change})


def test_a_record_must_be_a_mapping():
    with raises(MeshError, "mapping", "list"):
        Mesh.from_proto([])  # type: ignore[arg-type]
    with raises(MeshError, "global_device_ids", "mesh_dimensions"):
        Mesh.from_proto({})
