from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpimesh.errors import MeshError, MpimeshError
from mpimesh.mesh import Mesh, create_distributed_mesh, create_mesh
from tests.pure.mesh_strategies import meshes

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
    ("text", "message"),
    [
        ("", "Input string is invalid"),
        ("a", "Input string is invalid"),
        ("m|x=2", "Expected either 5, 6, 7 or 3 mesh parts but found 2"),
        ("m|x=2|0,1|0,1", "Expected either 5, 6, 7 or 3 mesh parts but found 4"),
        ("m|x=2|0,1|||||", "Expected either 5, 6, 7 or 3 mesh parts but found 8"),
        ("m|x=2|0,1|||a|use_xla_spmd", "use_xla_spmd is not supported"),
        ("m|x=2|0,1|||use_xla_spmd", "use_xla_spmd is not supported"),
        ("m|x|0,1||", "written 'x=3' with a size of at least 1, got 'x'"),
        ("m|x=|0,1||", "written 'x=3'"),
        ("m|x=0|||", "written 'x=3'"),
        ("m|x=-1|0||", "written 'x=3'"),
        ("m|x=2,x=2|0,1,2,3||", "repeated mesh dimension 'x'"),
        ("m|unsharded=2|0,1||", "'unsharded' is reserved"),
        ("m|match=2|0,1||", "'match' is reserved"),
        ("m|x=2|0,a||", "must be a whole number, got 'a'"),
        ("m|x=2|0,||", "must be a whole number, got ''"),
        ("m|x=2|0,-1||", "must be a whole number, got '-1'"),
        ("m|x=2|0,1,2||", "must match the product of the shape, 3 vs. 2"),
        ("m|x=2|1,1||", "device id 1 is given twice"),
        (f"m|x=3|0,1,2|0,1|{LOCAL}0,{LOCAL}1", "Uneven local clusters"),
        (f"m|x=2|0,1|0,1|{LOCAL}0", "2 local device ids, but 1 local devices"),
        (f"m|x=2|0,1|2|{LOCAL}0", "local device id 2 is not in mesh x=2"),
        ("m|x=2|0,1|0|CPU:0", "with job, replica, task and type"),
        ("m|x=2|0,1|0|/job:a/replica:0/task:0/device:TPU:0", "must be one of CPU, GPU, got 'TPU'"),
        (f"m|x=2|0,1|0|{LOCAL}0|{LOCAL}0", "1 global devices in a mesh of 2"),
        ("m|x=2|CPU", "third of three mesh parts must be"),
        ("m|x=2|*TPU", "device_type must be one of"),
        ("m|x=9999999|*CPU", "9999999 are too many"),
        ("m|x=99999999999|0||", "has more than 2147483647 ranks"),
        ("m\n|x=1|0||", "printable text"),
    ],
)
def test_malformed_texts(text, message):
    with pytest.raises(MeshError, match=message):
        Mesh.from_string(text)


def test_a_text_must_be_text():
    readers: list[Any] = [Mesh.from_string, Mesh.parse]
    for read in readers:
        with pytest.raises(MeshError, match="text"):
            read(3)


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
    ("change", "message"),
    [
        ({"name": 3}, "name in a mesh record must be a str"),
        ({"mesh_dimensions": "x"}, "mesh_dimensions in a mesh record must be a list"),
        ({"mesh_dimensions": [{"name": "x"}]}, "has a name and a size"),
        ({"mesh_dimensions": [{"name": "x", "size": 2.0}]}, "must be a whole number"),
        ({"global_device_ids": ["0", "1"]}, "must be a whole number"),
        ({"use_xla_spmd": True}, "use_xla_spmd is not supported"),
        ({"other": 1}, "has exactly the fields"),
    ],
)
def test_malformed_records(change, message):
    with pytest.raises(MeshError, match=message):
        Mesh.from_proto({**Mesh("x=2").as_proto(), **change})


def test_a_record_must_be_a_mapping():
    with pytest.raises(MeshError, match="must be a mapping"):
        Mesh.from_proto([])  # type: ignore[arg-type]
    with pytest.raises(MeshError, match="has exactly the fields"):
        Mesh.from_proto({})
