"""`Device`: a record of the hardware one rank computes on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from mpimesh.arguments import as_int
from mpimesh.errors import MeshError

__all__ = ["Device", "DeviceBackend", "pick_device"]

_KNOWN = ("cpu", "cuda", "metal", "rocm", "directml", "opencl", "vulkan", "webgpu", "oneapi")


@dataclass(frozen=True, slots=True)
class DeviceBackend:
    """The driver of a device: one of nine known names, or any other text.

    Known names are lowercase and read in any case; another text is kept as it is,
    so that it comes back from a record unchanged and equals only itself.

    Attributes:
        name: The text form.
    """

    name: str

    CPU: ClassVar[DeviceBackend]
    CUDA: ClassVar[DeviceBackend]
    METAL: ClassVar[DeviceBackend]
    ROCM: ClassVar[DeviceBackend]
    DIRECTML: ClassVar[DeviceBackend]
    OPENCL: ClassVar[DeviceBackend]
    VULKAN: ClassVar[DeviceBackend]
    WEBGPU: ClassVar[DeviceBackend]
    ONEAPI: ClassVar[DeviceBackend]

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise MeshError(f"a device backend must be a text like 'cuda', got {self.name!r}")
        if self.name.lower() in _KNOWN:
            object.__setattr__(self, "name", self.name.lower())

    @property
    def is_custom(self) -> bool:
        """Whether it is none of the known ones."""
        return self.name not in _KNOWN

    @property
    def is_gpu(self) -> bool:
        """Whether it is a known backend other than ``cpu``."""
        return self.name != "cpu" and not self.is_custom

    def __str__(self) -> str:
        return self.name


for _name in _KNOWN:
    setattr(DeviceBackend, _name.upper(), DeviceBackend(_name))


@dataclass(frozen=True, slots=True)
class Device:
    """The hardware one rank computes on, as a record that can be written as JSON.

    Attributes:
        id: Number of the device among those of its process, as the driver counts.
        name: What the vendor calls it.
        backend: What drives it.
        memory_mb: Memory in MiB (2**20 bytes).
        compute_units: Streaming multiprocessors of a GPU, cores of a CPU; 0 if not known.
        pci_bus_id: Place on the host's PCI bus, like ``0000:3b:00.0``.
        partition_id: What is used of the hardware: UUID of a GPU or of a MIG instance,
            ``cpus:0-3`` for the cores a process may use.
        driver_version: As the driver says.
        cuda_version: The newest CUDA that the driver supports, like ``12.4``.
        compute_capability: Like ``9.0``.
        utilization_gpu_pct: Share of the last moments in which the GPU was busy.
        temperature_c: In degrees Celsius.
        supports_fp16: Whether it computes in float16.
        supports_int8: Whether it multiplies int8.
    """

    id: int
    name: str
    backend: DeviceBackend
    memory_mb: int = 0
    compute_units: int = 0
    pci_bus_id: str | None = None
    partition_id: str | None = None
    driver_version: str | None = None
    cuda_version: str | None = None
    compute_capability: str | None = None
    utilization_gpu_pct: int | None = None
    temperature_c: int | None = None
    supports_fp16: bool = False
    supports_int8: bool = False

    def __post_init__(self) -> None:
        for field, kind in _KINDS.items():
            _check(field, kind, getattr(self, field))

    @property
    def is_mig(self) -> bool:
        """Whether it is an instance of a GPU in MIG mode."""
        return (self.partition_id or "").upper().startswith("MIG-")

    @property
    def identity(self) -> str | None:
        """Text that tells it from every other device of its node; None if the record has none.

        CuPy writes the UUID of a MIG instance as that of a GPU, so what stands before the digits
        does not count.
        """
        text = (self.partition_id or self.pci_bus_id or "").lower()
        return text.removeprefix("mig-").removeprefix("gpu-") or None

    def to_record(self) -> dict[str, Any]:
        """Write the record in JSON's types."""
        return {**asdict(self), "backend": str(self.backend)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Device:
        """Read the record that :meth:`to_record` writes.

        Raises:
            MeshError: If a field is missing, unknown or malformed.
        """
        names = [field.name for field in fields(cls)]
        if not isinstance(record, Mapping) or set(record) != set(names):
            raise MeshError(f"a device record has the fields {', '.join(names)}; got {record!r}")
        return cls(**{**record, "backend": DeviceBackend(record["backend"])})

    def to_json(self) -> str:
        """Write the record as JSON."""
        return json.dumps(self.to_record())

    @classmethod
    def from_json(cls, text: str | bytes) -> Device:
        """Read what :meth:`to_json` writes.

        Raises:
            MeshError: If `text` is no JSON or no such record.
        """
        try:
            record = json.loads(text)
        except (ValueError, TypeError) as error:
            raise MeshError(f"a device must be a JSON record: {error}") from None
        return cls.from_record(record)


def pick_device(devices: Sequence[Device], local_rank: int) -> Device:
    """Choose the device of the process with rank `local_rank` on its node.

    A launcher that gives each process one device shows it only that one: it is
    taken. Otherwise processes take devices in turn, so with more processes than
    devices some share one. Where MIG instances are visible, CUDA shows a process only the first
    of them, and no GPU beside it: that one is taken.

    Raises:
        MeshError: If there is no device or `local_rank` is negative.
    """
    if as_int(local_rank, "local_rank") < 0 or not devices:
        raise MeshError(f"cannot pick one of {len(devices)} devices for local rank {local_rank}")
    instance = next((device for device in devices if device.is_mig), None)
    return devices[local_rank % len(devices)] if instance is None else instance


_OPTIONAL_TEXT = (str, type(None))
_OPTIONAL_INT = (int, type(None))
_KINDS: dict[str, type | tuple[type, ...]] = {
    "id": int,
    "name": str,
    "backend": DeviceBackend,
    "memory_mb": int,
    "compute_units": int,
    "pci_bus_id": _OPTIONAL_TEXT,
    "partition_id": _OPTIONAL_TEXT,
    "driver_version": _OPTIONAL_TEXT,
    "cuda_version": _OPTIONAL_TEXT,
    "compute_capability": _OPTIONAL_TEXT,
    "utilization_gpu_pct": _OPTIONAL_INT,
    "temperature_c": _OPTIONAL_INT,
    "supports_fp16": bool,
    "supports_int8": bool,
}


def _check(field: str, kind: type | tuple[type, ...], value: object) -> None:
    wrong = not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)
    least = None if field == "temperature_c" else 0
    if wrong or (least is not None and isinstance(value, int) and value < least):
        raise MeshError(f"{field} of a device cannot be {value!r}")
