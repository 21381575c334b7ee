"""`ClientInfo`: who this process is among the others, in TensorFlow's words."""

from __future__ import annotations

from dataclasses import dataclass

from mpimesh.arguments import as_int
from mpimesh.errors import MeshError, RankError
from mpimesh.mesh.create import job_name
from mpimesh.mesh.spec import DeviceSpec, check_device_type

__all__ = ["ClientInfo"]


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
