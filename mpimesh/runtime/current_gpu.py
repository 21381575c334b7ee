"""The GPU of a rank as CuPy's current device."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mpimesh.errors import MeshError
from mpimesh.mesh import Device
from mpimesh.mesh.cupy_devices import query_cupy

__all__ = ["cupy_in_use", "make_current", "number_of"]


def cupy_in_use() -> bool:
    """Tell whether somebody has imported CuPy."""
    return sys.modules.get("cupy") is not None


def make_current(device: Device) -> None:
    """Make `device` current in CuPy, for the calling thread; nothing if it is no GPU.

    Raises:
        MeshError: If CuPy cannot be imported or does not find the GPU.
    """
    if not device.backend.is_gpu:
        return
    try:
        import cupy
    except ImportError as error:
        raise MeshError(f"CuPy is needed to use GPU {device.id}, {device.name}: {error}") from None
    cupy.cuda.Device(number_of(device, query_cupy() or ())).use()


def number_of(device: Device, seen: Sequence[Device]) -> int:
    """Return the number of `device` among those that CuPy sees.

    Where the record is from ``nvidia-smi``, CUDA may count in another order, and counts
    only what it shows: so the UUID decides, else the place on the bus.

    Raises:
        MeshError: If none of them is it.
    """
    for known in ("identity", "pci_bus_id"):
        wanted = getattr(device, known)
        found = [one.id for one in seen if getattr(one, known) == wanted is not None]
        if len(found) == 1:
            return found[0]
    if len(seen) == 1:
        return seen[0].id
    if any(one.id == device.id for one in seen) and device.identity is None:
        return device.id
    raise MeshError(
        f"CuPy sees {len(seen)} GPUs, but not GPU {device.id}, {device.name}, "
        f"{device.partition_id or device.pci_bus_id}, that was chosen when the mesh was made; "
        "CUDA_VISIBLE_DEVICES may have changed since"
    )
