"""Queries of the devices of a mesh: their owners and their names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpimesh.errors import MeshError
from mpimesh.mesh.queries import MeshQueries
from mpimesh.mesh.spec import check_distinct, common_type

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["DeviceQueries"]


class DeviceQueries(MeshQueries):
    """Questions that device ids and device names answer, in TensorFlow's words."""

    __slots__ = ()

    local_ids: tuple[int, ...]
    local_names: tuple[str, ...]
    global_names: tuple[str, ...]

    def global_device_ids(self) -> npt.NDArray[np.int64]:
        """Return the ids as an array of the mesh's shape."""
        return self.ids.array()

    def min_global_device_id(self) -> int:
        """Return the smallest id, which is the first one where ids increase."""
        return self.ids.smallest

    def local_device_ids(self) -> list[int]:
        """Return the ids that this process owns."""
        return list(self.local_ids)

    def local_device_locations(self) -> list[dict[str, int]]:
        """Return {dim: coordinate} for each local id, also where ids do not start at 0."""
        return [self._named(self.offset_of(rank)) for rank in self.local_ids]

    def local_devices(self) -> list[str]:
        """Return the local devices' full names."""
        return list(self.local_names)

    def num_local_devices(self) -> int:
        """Return the number of devices that this process owns."""
        return len(self.local_ids)

    def global_devices(self) -> list[str]:
        """Return the full names of all devices, empty where not known."""
        return list(self.global_names)

    def device_type(self) -> str:
        """Return ``"CPU"`` or ``"GPU"``.

        Raises:
            MeshError: If the mesh holds no device names.
        """
        kind = common_type(self.local_names or self.global_names)
        if kind is None:
            raise MeshError(f"device_type is required: mesh {self.dims_text} has no device names")
        return kind

    def is_remote(self) -> bool:
        """Tell whether this process owns none of the mesh's ranks."""
        return not self.local_ids

    def is_single_device(self) -> bool:
        """Tell whether the mesh is one device, without dims."""
        return self.ndim == 0 and len(self.local_names) == 1

    @property
    def single_device(self) -> str:
        """The full name of the one device.

        Raises:
            MeshError: If the mesh is not a single device.
        """
        if not self.is_single_device():
            raise MeshError(f"mesh {self.dims_text or '()'} is not a single device")
        return self.local_names[0]

    def use_xla_spmd(self) -> bool:
        """Return False: there is no XLA here."""
        return False

    def _check_devices(self) -> None:
        """Check ids and names against each other; MeshError says which breaks a rule."""
        local, names = self.local_ids, self.local_names
        if len(set(local)) != len(local):
            raise MeshError(f"a local device id is given twice in {local}")
        for rank in local:
            if rank not in self.ids:
                raise MeshError(f"local device id {rank} is not in mesh {self.dims_text or '()'}")
        if names and len(names) != len(local):
            raise MeshError(f"{len(local)} local device ids, but {len(names)} local devices")
        if self.global_names and len(self.global_names) != self.size:
            raise MeshError(f"{len(self.global_names)} global devices in a mesh of {self.size}")
        check_distinct(names)
        check_distinct(self.global_names)
        common_type(names + self.global_names)


def check_even(size: int, num_local: int) -> None:
    """Refuse a number of local devices that not every process of the mesh can have."""
    if num_local and size % num_local:
        raise MeshError(
            f"Uneven local clusters: {num_local} local devices do not divide {size} devices"
        )
