"""Device names in TensorFlow's form: ``/job:worker/replica:0/task:1/device:GPU:0``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mpimesh.arguments import as_items, shown
from mpimesh.errors import MeshError

__all__ = ["DEVICE_TYPES", "DeviceSpec"]

DEVICE_TYPES = ("CPU", "GPU")

_SPEC = re.compile(
    r"(?:/job:(?P<job>[A-Za-z][A-Za-z0-9_]*))?"
    r"(?:/replica:(?P<replica>[0-9]{1,9}))?"
    r"(?:/task:(?P<task>[0-9]{1,9}))?"
    r"/?(?:(?<=/)device:)?(?P<type>[A-Za-z_]+):(?P<index>[0-9]{1,9})"
)


@dataclass(frozen=True, slots=True, order=True)
class DeviceSpec:
    """The name of one device of one process.

    Attributes:
        job: Name of the set of processes.
        replica: Always 0 in mpimesh.
        task: Number of the process: its rank.
        device_type: ``"CPU"`` or ``"GPU"``.
        index: Number of the device among those of its type in the process.
    """

    job: str = "localhost"
    replica: int = 0
    task: int = 0
    device_type: str = "CPU"
    index: int = 0

    def __post_init__(self) -> None:
        check_device_type(self.device_type)

    @classmethod
    def parse(cls, text: str, *, job: str = "localhost", task: int = 0) -> DeviceSpec:
        """Read a full name, or a short one like ``CPU:0`` of the given job and task.

        Raises:
            MeshError: If `text` is no device name, or of an unknown device type.
        """
        found = _SPEC.fullmatch(text) if isinstance(text, str) else None
        if found is None:
            raise MeshError(
                f"a device is written '/job:localhost/replica:0/task:0/device:CPU:0' or 'CPU:0', "
                f"got {shown(text)}"
            )
        return cls(
            job=found["job"] or job,
            replica=int(found["replica"] or 0),
            task=int(found["task"] or task),
            device_type=check_device_type(found["type"]),
            index=int(found["index"]),
        )

    def on_host(self) -> DeviceSpec:
        """Return the CPU device of the same process and index."""
        return replace(self, device_type="CPU")

    def __str__(self) -> str:
        return (
            f"/job:{self.job}/replica:{self.replica}/task:{self.task}"
            f"/device:{self.device_type}:{self.index}"
        )


def check_device_type(device_type: object) -> str:
    """Return `device_type` in capitals if it is one of `DEVICE_TYPES`."""
    name = device_type.upper() if isinstance(device_type, str) else device_type
    if not isinstance(name, str) or name not in DEVICE_TYPES:
        raise MeshError(f"device_type must be one of {', '.join(DEVICE_TYPES)}, got {shown(name)}")
    return name


def canonical(devices: Sequence[str | DeviceSpec], what: str) -> tuple[str, ...]:
    """Write each of the devices that were given for `what` in full."""
    return tuple(
        str(device if isinstance(device, DeviceSpec) else DeviceSpec.parse(device))
        for device in as_items(devices, what)
    )


def common_type(devices: Sequence[str]) -> str | None:
    """Return the one type of all `devices` (in full form), None if there are none.

    Raises:
        MeshError: If they are of several types.
    """
    types = sorted({device.rsplit(":", 2)[1] for device in devices})
    if len(types) > 1:
        raise MeshError(f"Mesh has multiple device_types: {', '.join(types)}")
    return types[0] if types else None


def check_distinct(devices: Sequence[str]) -> None:
    """Refuse a device given twice, but for one CPU that stands for all places.

    Raises:
        MeshError: Naming the first device that is repeated.
    """
    different = set(devices)
    if len(different) == len(devices):
        return
    if len(different) == 1 and common_type(devices) == "CPU":
        return
    twice = next(device for k, device in enumerate(devices) if device in devices[:k])
    raise MeshError(f"Duplicate devices in mesh: {twice} is given more than once")
