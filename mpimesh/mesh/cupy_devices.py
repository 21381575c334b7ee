"""GPUs as CuPy describes them, and the GPU of a rank as CuPy's current device."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from mpimesh.errors import MeshError
from mpimesh.mesh.device import Device, DeviceBackend

__all__ = ["cupy_in_use", "cupy_number", "make_current", "query_cupy"]


def cupy_in_use() -> bool:
    """Tell whether this process has imported CuPy."""
    return sys.modules.get("cupy") is not None


def query_cupy() -> list[Device] | None:
    """List the devices that CuPy sees; None if CuPy is not imported.

    CuPy's runtime is NVIDIA's or AMD's. It heeds ``CUDA_VISIBLE_DEVICES`` and reports
    the real number of multiprocessors. No context is made on any device.

    Raises:
        MeshError: If CuPy is there but its driver fails.
    """
    cupy = sys.modules.get("cupy")
    if cupy is None:
        return None
    runtime = cupy.cuda.runtime
    try:
        return [_device(runtime, k) for k in range(_count(runtime))]
    except (runtime.CUDARuntimeError, KeyError, TypeError, ValueError) as error:
        raise MeshError(f"CuPy cannot describe its devices: {error}") from None


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
    cupy.cuda.Device(cupy_number(device, query_cupy() or ())).use()


def cupy_number(device: Device, seen: Sequence[Device]) -> int:
    """Return the number of `device` among those that CuPy sees.

    Where the record is from ``nvidia-smi``, CUDA may count in another order, and counts
    only what it shows: so the UUID decides, else the place on the bus.

    Raises:
        MeshError: If none of them is it.
    """
    for field in ("identity", "pci_bus_id"):
        value = getattr(device, field)
        numbers = [other.id for other in seen if getattr(other, field) == value is not None]
        if len(numbers) == 1:
            return numbers[0]
    if len(seen) == 1:
        return seen[0].id
    if any(other.id == device.id for other in seen) and device.identity is None:
        return device.id
    raise MeshError(
        f"CuPy sees {len(seen)} GPUs, but not GPU {device.id}, {device.name}, "
        f"{device.partition_id or device.pci_bus_id}, that was chosen when the mesh was made; "
        "CUDA_VISIBLE_DEVICES may have changed since"
    )


def _count(runtime: Any) -> int:
    try:
        return int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError:
        # Without a GPU or a driver, counting is an error of its own kind.
        return 0


def _device(runtime: Any, number: int) -> Device:
    facts = runtime.getDeviceProperties(number)
    capability = (int(facts["major"]), int(facts["minor"]))
    hip = bool(runtime.is_hip)
    return Device(
        id=number,
        name=facts["name"].decode("utf-8", "replace"),
        backend=DeviceBackend.ROCM if hip else DeviceBackend.CUDA,
        memory_mb=int(facts["totalGlobalMem"]) >> 20,
        compute_units=int(facts["multiProcessorCount"]),
        pci_bus_id=str(runtime.deviceGetPCIBusId(number)).lower(),
        partition_id=None if hip else _uuid_text(facts.get("uuid")),
        cuda_version=None if hip else _version_text(int(runtime.driverGetVersion())),
        compute_capability=None if hip else "{}.{}".format(*capability),
        supports_fp16=hip or capability >= (5, 3),
        supports_int8=hip or capability >= (6, 1),
    )


def _uuid_text(raw: object) -> str | None:
    """Write 16 bytes as the driver does, ``GPU-...``; older CuPy does not report them.

    CuPy takes them for text that a zero ends: it cuts them off there, or reads on past them.
    """
    if not isinstance(raw, bytes) or len(raw) < 16:
        return None
    text = raw[:16].hex()
    return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def _version_text(number: int) -> str | None:
    """Write 12040 as ``12.4``; 0 stands for no driver."""
    return f"{number // 1000}.{number % 1000 // 10}" if number else None
