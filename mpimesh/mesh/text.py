"""TensorFlow's forms of a mesh: ``name|x=3,y=2|ids|local ids|local devices``, and its record."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mpimesh.errors import MeshError
from mpimesh.mesh.dims import dims_text, parse_dims
from mpimesh.mesh.spec import DeviceSpec

__all__ = [
    "MeshFields",
    "fields_of_record",
    "join_mesh_text",
    "record_of_fields",
    "split_mesh_text",
]

_DIM = re.compile(r"([^=,|\s]+)=([1-9][0-9]{0,17})")
_ID = re.compile(r"[0-9]{1,18}")
_FULL_DEVICE = re.compile(r"/job:[^/]+/replica:[0-9]+/task:[0-9]+/device:[A-Za-z_]+:[0-9]+")

_FIELDS = {
    "name": str,
    "mesh_dimensions": list,
    "global_device_ids": list,
    "local_device_ids": list,
    "local_devices": list,
    "global_devices": list,
    "use_xla_spmd": bool,
}


class MeshFields(NamedTuple):
    """The fields of a mesh as text or record, not yet checked against each other."""

    dims: Sequence[tuple[str, int]]
    ids: Sequence[int]
    name: str = ""
    local_ids: Sequence[int] = ()
    local_devices: Sequence[str] = ()
    global_devices: Sequence[str] = ()


def join_mesh_text(fields: MeshFields) -> str:
    """Write the text form; the sixth part only where there are global devices."""
    parts = [
        fields.name,
        dims_text(fields.dims),
        ",".join(map(str, fields.ids)),
        ",".join(map(str, fields.local_ids)),
        ",".join(fields.local_devices),
    ]
    if fields.global_devices:
        parts.append(",".join(fields.global_devices))
    return "|".join(parts)


def split_mesh_text(text: str) -> MeshFields:
    """Read the text form, also the short ``name|x=2,y=2|*CPU`` and a single device's name.

    Raises:
        MeshError: If any part is malformed.
    """
    if not isinstance(text, str):
        raise MeshError(f"a mesh text must be a str, got {type(text).__name__}")
    parts = text.split("|")
    if len(parts) == 1:
        return _single_device(text)
    if len(parts) == 3:
        return _short_form(*parts)
    if len(parts) not in (5, 6, 7):
        raise MeshError(f"Expected either 5, 6, 7 or 3 mesh parts but found {len(parts)}")
    if len(parts) == 7 or parts[-1] == "use_xla_spmd":
        raise MeshError("use_xla_spmd is not supported: mpimesh has no XLA")
    return MeshFields(
        name=parts[0],
        dims=_dims(parts[1]),
        ids=_ids(parts[2]),
        local_ids=_ids(parts[3]),
        local_devices=_devices(parts[4]),
        global_devices=_devices(parts[5]) if len(parts) == 6 else (),
    )


def _single_device(text: str) -> MeshFields:
    if not _FULL_DEVICE.fullmatch(text):
        raise MeshError(
            f"Input string is invalid: a mesh is written 'name|x=3,y=2|ids|local ids|local devices'"
            f", got {text!r}"
        )
    return MeshFields(dims=(), ids=[0], local_ids=[0], local_devices=[text])


def _short_form(name: str, dims_part: str, kind: str) -> MeshFields:
    if not kind.startswith("*"):
        raise MeshError(f"the third of three mesh parts must be '*CPU' or '*GPU', got {kind!r}")
    dims = _dims(dims_part)
    size = 1
    for _, n in dims:
        size *= n
    if size > 2**20:
        raise MeshError(f"{kind!r} makes a device for each place; {size} are too many")
    devices = [str(DeviceSpec(device_type=kind[1:].upper(), index=k)) for k in range(size)]
    return MeshFields(dims, range(size), name, range(size), devices)


def _dims(part: str) -> list[tuple[str, int]]:
    dims = []
    for item in part.split(",") if part else []:
        found = _DIM.fullmatch(item)
        if found is None:
            raise MeshError(f"a mesh dim is written 'x=3' with a size of at least 1, got {item!r}")
        dims.append((found[1], int(found[2])))
    return list(parse_dims(dims))


def _ids(part: str) -> list[int]:
    items = part.split(",") if part else []
    for item in items:
        if not _ID.fullmatch(item):
            raise MeshError(f"a device id must be a whole number, got {item!r} in {part!r}")
    return [int(item) for item in items]


def _devices(part: str) -> list[str]:
    items = part.split(",") if part else []
    for item in items:
        if not _FULL_DEVICE.fullmatch(item):
            raise MeshError(
                f"a mesh text needs devices with job, replica, task and type, like "
                f"'/job:localhost/replica:0/task:0/device:CPU:0', got {item!r}"
            )
    return items


def record_of_fields(fields: MeshFields) -> dict[str, Any]:
    """Write the record: ``MeshProto`` in JSON's types."""
    return {
        "name": fields.name,
        "mesh_dimensions": [{"name": name, "size": size} for name, size in fields.dims],
        "global_device_ids": list(fields.ids),
        "local_device_ids": list(fields.local_ids),
        "local_devices": list(fields.local_devices),
        "global_devices": list(fields.global_devices),
        "use_xla_spmd": False,
    }


def fields_of_record(record: Mapping[str, Any]) -> MeshFields:
    """Read the record, all fields of which must be there and of their type.

    Raises:
        MeshError: Naming the field that is not as it must be.
    """
    if not isinstance(record, Mapping):
        raise MeshError(f"a mesh record must be a mapping, got {type(record).__name__}")
    if set(record) != set(_FIELDS):
        wrong = ", ".join(sorted(map(str, set(record) ^ set(_FIELDS))))
        raise MeshError(f"a mesh record has exactly the fields {', '.join(_FIELDS)}; see {wrong}")
    for field, kind in _FIELDS.items():
        if not isinstance(record[field], kind):
            raise MeshError(
                f"{field} in a mesh record must be a {kind.__name__}, got {record[field]!r}"
            )
    if record["use_xla_spmd"]:
        raise MeshError("use_xla_spmd is not supported: mpimesh has no XLA")
    return MeshFields(
        dims=[_dim(item) for item in record["mesh_dimensions"]],
        ids=record["global_device_ids"],
        name=record["name"],
        local_ids=record["local_device_ids"],
        local_devices=record["local_devices"],
        global_devices=record["global_devices"],
    )


def _dim(item: object) -> tuple[str, int]:
    if not isinstance(item, Mapping) or set(item) != {"name", "size"}:
        raise MeshError(f"a mesh dimension in a record has a name and a size, got {item!r}")
    return item["name"], item["size"]
