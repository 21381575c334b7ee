"""Devices at each rank of a live mesh, their totals, TensorFlow's clients."""

from __future__ import annotations

import socket
import warnings
from collections.abc import Sequence
from typing import Any

from mpimesh.comm import Communicator
from mpimesh.errors import MeshError, SharedGpuWarning, UnknownNameError, on_all_ranks
from mpimesh.mesh import (
    WORLD,
    ClientInfo,
    Device,
    DeviceBackend,
    DeviceSpec,
    DeviceTable,
    GroupSpec,
    MeshStats,
    SharedGpu,
    pick_device,
    shared_gpus,
    sharing_text,
)
from mpimesh.mesh.cupy_devices import cupy_in_use, make_current
from mpimesh.runtime.agreement import exchange
from mpimesh.runtime.call import Call, call_site, site_line
from mpimesh.runtime.launch import Launch
from mpimesh.runtime.mesh_groups import MeshGroups
from mpimesh.runtime.progress import Progress

__all__ = ["MeshDevices"]


class MeshDevices(MeshGroups):
    """The device records of all ranks, exchanged once when the mesh is made."""

    _control: Communicator
    _progress: Progress
    _devices: DeviceTable

    def _gather_devices(self, control: Communicator) -> None:
        """Collective: choose a device for every rank, and give all ranks its record.

        Raises:
            MeshError: On every rank, if ranks share a GPU and ``MPIMESH_SHARED_GPU`` is refuse.
        """
        world, call = self._context.world, Call("DeviceMesh", WORLD)
        launch = Launch.detect()
        host = launch.node or socket.gethostname()
        # Virtual ranks are all of one task.
        said = launch.local_rank if world.virtual is None else None
        self._local_rank = _local_rank(self._everyone([host, said], call), control.rank)
        mine = pick_device(world.devices(), self._local_rank)
        in_use = world.virtual is None and cupy_in_use()
        records = self._everyone([host, mine.to_record(), in_use], call)
        self._devices = DeviceTable(
            tuple(Device.from_record(record) for _, record, _ in records),
            tuple(host for host, _, _ in records),
        )
        shared = shared_gpus(self._devices)
        if shared and self._context.settings.shared_gpu == "refuse":
            raise on_all_ranks(MeshError(sharing_text(shared)))
        users = [one for one in shared if sum(records[rank][2] for rank in one.ranks) > 1]
        if control.rank == 0:
            self._tell(users)
        if cupy_in_use():
            make_current(mine)

    def _everyone(self, value: Any, call: Call) -> list[Any]:
        """Collective: return the values of all ranks."""
        return exchange(self._progress, self._control, value, what=call)

    def _tell(self, shared: Sequence[SharedGpu]) -> None:
        """Warn of shared GPUs, once for each process."""
        text = sharing_text(shared)
        told = self._context.world.told
        if shared and self._context.settings.shared_gpu == "warn" and text not in told:
            told.add(text)
            filename, line = site_line(call_site(2))
            warnings.warn_explicit(text, SharedGpuWarning, filename, line)

    def use_device(self) -> Device:
        """Make this rank's GPU current in CuPy, for the calling thread, and return its record.

        Local. Making the mesh does it, where CuPy is imported by then. Call it yourself where
        CuPy comes later, and in every further thread that makes arrays. Nothing happens on a rank
        whose device is a CPU.

        Raises:
            MeshError: If CuPy cannot be imported or does not find the GPU.
        """
        device = self.local_device()
        if device.backend.is_gpu:
            make_current(device)
            mine = self._control.rank
            if self._context.world.virtual is None:
                # The first of those who share it tells: the others may not come here at all.
                self._tell([one for one in shared_gpus(self._devices) if one.ranks[0] == mine])
        return device

    @property
    def local_rank(self) -> int:
        """This rank among those of its node: as the launcher says, or counted where it does not."""
        return self._local_rank

    @property
    def hosts(self) -> tuple[str, ...]:
        """Name of the node of each rank."""
        return self._devices.hosts

    def local_devices(self) -> list[str]:
        """Return the full name of this rank's device; none on a rank that the mesh leaves out."""
        return list(self.local_names)

    def global_devices(self) -> list[str]:
        """Return the full names of the devices of all ranks of the mesh, in its order. Local."""
        return list(self.global_names) or [self._device_name(rank) for rank in self.ids]

    def device_type(self) -> str:
        """Return ``"GPU"`` where every rank of `comm` has one, else ``"CPU"``."""
        if self.local_names or self.global_names:
            return super().device_type()
        return self.client().preferred_device_type()

    def _device_name(self, rank: int) -> str:
        """Return what TensorFlow calls the device of `rank`."""
        client = self.client()
        kind = client.preferred_device_type()
        return str(DeviceSpec(client.job_name, 0, rank, kind, 0))

    def get_device(self, rank: int) -> Device | None:
        """Return the device of `rank`, None if there is no such rank. Local."""
        return self._devices.get(rank)

    def local_device(self) -> Device:
        """Return the device of this rank. Local."""
        return self._devices[self._control.rank]

    def all_devices(self) -> DeviceTable:
        """Return the devices of all ranks, in rank order. Local."""
        return self._devices

    def devices_by_backend(self, backend: DeviceBackend | str) -> list[Device]:
        """Return the devices of exactly this backend. Local."""
        return self._devices.by_backend(backend)

    def devices_in_group(self, name: str) -> list[Device]:
        """Return the devices of a group's ranks, in group order. Local.

        Raises:
            UnknownNameError: If there is no such group.
        """
        group = self.get_group(name)
        if group is None:
            known = ", ".join(self.group_names)
            raise UnknownNameError(f"Group {name!r} not found; there are {known}")
        return self._devices.in_group(GroupSpec(group.name, group.ranks, group.backend))

    @property
    def total_memory_mb(self) -> int:
        """Memory of all devices in MiB, shared hardware counted once."""
        return self._devices.total_memory_mb

    @property
    def total_compute_units(self) -> int:
        """Multiprocessors and cores of all devices, shared hardware counted once."""
        return self._devices.total_compute_units

    def stats(self) -> MeshStats:
        """Return totals over all ranks, and the number of groups. Local."""
        return self._devices.stats(len(self.group_names))

    def client(self) -> ClientInfo:
        """Return who this process is, in TensorFlow's words. Local."""
        gpus = int(all(device.backend.is_gpu for device in self._devices))
        return ClientInfo(
            self._control.rank, self._control.size, num_local_gpus=gpus, hosts=self.hosts
        )


def _local_rank(facts: Sequence[tuple[str, int | None]], rank: int) -> int:
    """Return the local rank of `rank`, from the host and the launcher's word of every rank."""
    host, said = facts[rank]
    if said is not None:
        return said
    return [one for one, (other, _) in enumerate(facts) if other == host].index(rank)
