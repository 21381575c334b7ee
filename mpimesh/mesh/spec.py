"""Devices and processes in TensorFlow's words: ``/job:worker/replica:0/task:1/device:GPU:0``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mpimesh.arguments import as_int, as_items, shown
from mpimesh.errors import MeshError, RankError

__all__ = ["DEVICE_TYPES", "ClientInfo", "DeviceSpec"]

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


def job_name(num_clients: int) -> str:
    """Return TensorFlow's name for a set of processes."""
    return "localhost" if num_clients == 1 else "worker"


@dataclass(frozen=True, slots=True)
class ClientInfo:
    """The identity of this process: a function of its rank, not of environment variables.

    Every process (client) has the same number of devices of each type.

    Attributes:
        client_id: Rank of the process.
        num_clients: Number of processes.
        num_local_gpus: GPUs of each process.
        num_local_cpus: CPU devices of each process.
        hosts: Name of the host of each process, in rank order; empty if not known.

    Raises:
        MeshError: If a number is too small, or there is not one host for each process.
        RankError: If `client_id` is out of range.
    """

    client_id: int
    num_clients: int
    num_local_gpus: int = 0
    num_local_cpus: int = 1
    hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, least in (("num_clients", 1), ("num_local_gpus", 0), ("num_local_cpus", 1)):
            if as_int(getattr(self, name), name) < least:
                raise MeshError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not 0 <= as_int(self.client_id, "client_id") < self.num_clients:
            raise RankError(f"client_id {self.client_id} is outside of {self.num_clients} clients")
        object.__setattr__(self, "hosts", tuple(self.hosts))
        if self.hosts and len(self.hosts) != self.num_clients:
            raise MeshError(f"{self.num_clients} clients, but {len(self.hosts)} hosts")

    def preferred_device_type(self, wanted: str | None = None) -> str:
        """Return ``"GPU"`` where every process has one, else ``"CPU"``.

        Args:
            wanted: A type to use instead; it must be there.

        Raises:
            MeshError: If `wanted` is no device type, or there is none of it.
        """
        if wanted is None:
            return "GPU" if self.num_local_gpus else "CPU"
        kind = check_device_type(wanted)
        if not self.num_local_devices(kind):
            raise MeshError(f"device_type {kind} is asked for, but no process has a {kind} device")
        return kind

    def num_local_devices(self, device_type: str | None = None) -> int:
        """Return the number of this process's devices of a type, the preferred one if None."""
        kind = self._kind(device_type)
        return self.num_local_gpus if kind == "GPU" else self.num_local_cpus

    def num_global_devices(self, device_type: str | None = None) -> int:
        """Return the number of devices of all processes, of a type as above."""
        return self.num_local_devices(device_type) * self.num_clients

    def local_devices(self, device_type: str | None = None) -> list[str]:
        """Return the full names of this process's devices, of a type as above."""
        kind = self._kind(device_type)
        return [
            str(DeviceSpec(self.job_name, 0, self.client_id, kind, k))
            for k in range(self.num_local_devices(kind))
        ]

    @property
    def job_name(self) -> str:
        """``localhost`` for one process, else ``worker``."""
        return job_name(self.num_clients)

    def full_job_name(self, task_id: int | None = None) -> str:
        """Return the name of a process, this one if `task_id` is None.

        Raises:
            RankError: If there is no such process.
        """
        task = self.client_id if task_id is None else as_int(task_id, "task_id")
        if not 0 <= task < self.num_clients:
            raise RankError(f"task_id {task_id} is outside of {self.num_clients} clients")
        return f"{self.job_name}/replica:0/task:{task}"

    @property
    def jobs(self) -> list[str]:
        """The hosts of all processes, in rank order; empty for one process."""
        return list(self.hosts) if self.num_clients > 1 else []

    def _kind(self, device_type: str | None) -> str:
        return (
            self.preferred_device_type() if device_type is None else check_device_type(device_type)
        )
