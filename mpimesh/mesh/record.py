"""A mesh as a plain record: TensorFlow's ``MeshProto`` in JSON's types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpimesh.errors import MeshError
from mpimesh.mesh.text import MeshFields

__all__ = ["fields_of_record", "record_of_fields"]

_FIELDS = {
    "name": str,
    "mesh_dimensions": list,
    "global_device_ids": list,
    "local_device_ids": list,
    "local_devices": list,
    "global_devices": list,
    "use_xla_spmd": bool,
}


def record_of_fields(fields: MeshFields) -> dict[str, Any]:
    """Write the record."""
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
