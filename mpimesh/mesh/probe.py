"""Hardware that this process may use, found without MPI and without importing CuPy."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mpimesh.errors import MeshError
from mpimesh.mesh.device import Device, DeviceBackend
from mpimesh.mesh.gpus import query_cupy, query_nvidia_smi, visible_devices

__all__ = [
    "DeviceInfo",
    "GpuPreference",
    "cpu_device",
    "cpu_quota",
    "cpus_of_text",
    "cpus_text",
    "memory_limit_bytes",
]

PROBE_TIMEOUT_S = 0.8

_PROVIDERS = ("cuda", "metal", "rocm", "oneapi", "directml", "cpu")
"""Backends from the one to take first to the last."""


@dataclass(frozen=True, slots=True)
class GpuPreference:
    """Which GPU somebody asks for.

    | text | kind | takes |
    |---|---|---|
    | ``mig:<id>``, ``partition:<id>`` | partition | the partition whose id starts so |
    | ``cuda:1`` | backend_id | the device of that backend and number |
    | ``0000:3b:00.0`` | pci | the device at that place; the domain may be left out |
    | anything else | name | a device whose name contains it, in any case |

    Attributes:
        kind: As in the table.
        value: What to look for.
        backend: Backend of kind ``backend_id``.
    """

    kind: Literal["partition", "backend_id", "pci", "name"]
    value: str
    backend: DeviceBackend | None = None

    @classmethod
    def parse(cls, text: str) -> GpuPreference | None:
        """Read a preference; None if `text` is empty."""
        text = text.strip()
        if not text:
            return None
        head, colon, rest = text.partition(":")
        if colon and head.lower() in ("mig", "partition") and rest.strip():
            return cls("partition", rest.strip())
        if head and rest.strip().isdecimal():
            return cls("backend_id", str(int(rest)), DeviceBackend(head))
        if colon and "." in text:
            return cls("pci", text.lower())
        return cls("name", text)

    def matches(self, device: Device) -> bool:
        """Tell whether `device` is what is asked for."""
        if self.kind == "partition":
            found = (device.partition_id or "").lower()
            return found.removeprefix("mig-").startswith(self.value.lower().removeprefix("mig-"))
        if self.kind == "backend_id":
            return device.backend == self.backend and str(device.id) == self.value
        if self.kind == "pci":
            place = (device.pci_bus_id or "").lower()
            return bool(place) and self.value in (place, place.partition(":")[2])
        return self.value.lower() in device.name.lower()

    def __str__(self) -> str:
        if self.kind == "partition":
            return f"partition:{self.value}"
        return f"{self.backend}:{self.value}" if self.kind == "backend_id" else self.value


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """The resources that this process may use.

    Attributes:
        cpu_cores: Cores this process may run on.
        total_memory: Memory it may have, in bytes.
        os_type: Like ``Linux``.
        os_release: Of the operating system's kernel.
        has_cuda: Whether there is such a device; so for the next three.
        has_metal: Always False: NumPy and CuPy do not compute there.
        has_rocm: See `has_cuda`.
        has_directml: Always False, as `has_metal`.
        devices: The GPUs, or where there are none one record of the CPU.
    """

    cpu_cores: int
    total_memory: int
    os_type: str
    os_release: str
    has_cuda: bool
    has_metal: bool
    has_rocm: bool
    has_directml: bool
    devices: tuple[Device, ...]

    @classmethod
    def probe(cls) -> DeviceInfo:
        """Look for devices; where that fails, there is the CPU. Raises nothing.

        Takes up to 0.8 s where ``nvidia-smi`` is asked, and keeps nothing: call it once.
        """
        try:
            return cls.try_probe()
        except MeshError:
            return cls._of([])

    @classmethod
    def try_probe(cls) -> DeviceInfo:
        """Look for devices.

        Raises:
            MeshError: If CuPy or ``nvidia-smi`` is there but fails. Having neither is no failure.
        """
        return cls.try_probe_with_timeout(PROBE_TIMEOUT_S)

    @classmethod
    def try_probe_with_timeout(
        cls, timeout_s: float, *, environment: Mapping[str, str] | None = None
    ) -> DeviceInfo:
        """Look for devices for at most `timeout_s` seconds.

        CuPy is asked if it is already imported, else ``nvidia-smi`` if it is installed.

        Args:
            timeout_s: Limit for all programs that are started.
            environment: Where ``CUDA_VISIBLE_DEVICES`` is looked up; the process's own if None.

        Raises:
            MeshError: As for :meth:`try_probe`, or if `timeout_s` is not above 0.
        """
        if not timeout_s > 0:
            raise MeshError(f"timeout_s must be above 0, got {timeout_s}")
        gpus = query_cupy()
        if gpus is None:
            seen = os.environ if environment is None else environment
            gpus = visible_devices(query_nvidia_smi(timeout_s), seen)
        return cls._of(gpus)

    @classmethod
    def _of(cls, gpus: list[Device]) -> DeviceInfo:
        cpu, system = cpu_device(), os.uname()
        backends = {gpu.backend for gpu in gpus}
        return cls(
            cpu_cores=cpu.compute_units,
            total_memory=cpu.memory_mb << 20,
            os_type=system.sysname,
            os_release=system.release,
            has_cuda=DeviceBackend.CUDA in backends,
            has_metal=False,
            has_rocm=DeviceBackend.ROCM in backends,
            has_directml=False,
            devices=tuple(gpus) or (cpu,),
        )

    def best_gpu(self) -> Device | None:
        """Return the GPU with the most memory, of equal ones the newest; None without a GPU."""
        gpus = self._gpus()
        return max(gpus, key=_strength) if gpus else None

    def best_gpu_with_preference(self, preference: GpuPreference | None) -> Device | None:
        """Return the best GPU among those that `preference` matches; None if none does."""
        fitting = [gpu for gpu in self._gpus() if preference is None or preference.matches(gpu)]
        return max(fitting, key=_strength) if fitting else None

    def cuda_devices(self) -> tuple[Device, ...]:
        """Return the CUDA devices."""
        return tuple(device for device in self.devices if device.backend == DeviceBackend.CUDA)

    def get_best_provider(self) -> str:
        """Return the backend to compute on: cuda, metal, rocm, oneapi, directml or cpu."""
        return next(name for name in _PROVIDERS if self.has_provider(name))

    def has_provider(self, name: str) -> bool:
        """Tell whether backend `name` can be used; ``cpu`` always can."""
        backend = DeviceBackend(name)
        return backend == DeviceBackend.CPU or any(d.backend == backend for d in self.devices)

    def _gpus(self) -> list[Device]:
        return [device for device in self.devices if device.backend.is_gpu]


def _strength(device: Device) -> tuple[int, tuple[int, ...], int]:
    capability = tuple(int(part) for part in (device.compute_capability or "0").split("."))
    return device.memory_mb, capability, -device.id


# -- the CPU: cores and memory that this process may use, also inside a container ------------------

_ROOT = Path("/")


def cpu_device() -> Device:
    """Describe the CPU: the cores this process may run on, the memory it may have."""
    # Only Linux tells which cores a process may run on.
    bound = getattr(os, "sched_getaffinity", None)
    cpus: Iterable[int] = bound(0) if bound is not None else range(os.cpu_count() or 1)
    cores = frozenset(cpus)
    return Device(
        id=0,
        name=_model_name(_ROOT),
        backend=DeviceBackend.CPU,
        memory_mb=memory_limit_bytes() >> 20,
        compute_units=len(cores),
        partition_id=cpus_text(cores),
        supports_int8=True,
    )


def memory_limit_bytes(root: Path = _ROOT) -> int:
    """Return the memory this process may use: the machine's, or its control group's limit.

    0 if the machine does not say.

    Args:
        root: Where ``proc`` and ``sys`` are; another one for tests.
    """
    total = _meminfo_bytes(root)
    limits = [total] if total else []
    for folder in _group_folders(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):  # of version 2 and 1
            text = "".join(_lines(folder / name)).strip()
            # Version 2 writes "max" for no limit; version 1 a number larger than any memory.
            if text.isdigit() and int(text) > 0:
                limits.append(int(text))
    return min(limits, default=0)


def cpu_quota(root: Path = _ROOT) -> float:
    """Return how many cores' time this process's control group may use; 0 if all.

    Args:
        root: Where ``proc`` and ``sys`` are; another one for tests.
    """
    quotas = []
    for folder in _group_folders(root, "cpu"):
        text = " ".join(_lines(folder / "cpu.max"))  # version 2: "200000 100000", or "max 100000"
        if not text:  # version 1, where -1 is no limit
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            text = " ".join(line for name in names for line in _lines(folder / name))
        with suppress(ValueError):
            share, period = map(float, text.split())
            quotas += [share / period] if share > 0 < period else []
    return min(quotas, default=0.0)


def cpus_text(cpus: Iterable[int]) -> str:
    """Write CPU numbers as the kernel does, ``cpus:0-3,8``."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return "cpus:" + ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


def cpus_of_text(text: str | None) -> frozenset[int] | None:
    """Read what :func:`cpus_text` writes; None for any other text."""
    if text is None or not text.startswith("cpus:"):
        return None
    cpus: set[int] = set()
    try:
        for run in text[len("cpus:") :].split(","):
            first, _, last = run.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    except ValueError:
        return None
    return frozenset(cpus)


def _meminfo_bytes(root: Path) -> int:
    for line in _lines(root / "proc/meminfo"):
        label, _, value = line.partition(":")
        if label == "MemTotal" and value.split()[:1] and value.split()[0].isdigit():
            return int(value.split()[0]) * 1024
    return 0


def _group_folders(root: Path, controller: str) -> list[Path]:
    """List the folders that may hold a limit, for control groups of version 2 and 1.

    A limit may stand at any level above the process's own group, and a container sees its own
    group as the root, so all levels are asked and the least counts.
    """
    folders = []
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / (controller if controllers else "")
        levels = [part for part in group.split("/") if part not in ("", "..")]
        folders += [base.joinpath(*levels[:depth]) for depth in range(len(levels) + 1)]
    return folders


def _model_name(root: Path) -> str:
    # Read line by line: on a large machine the file has thousands, slow to make.
    with suppress(OSError), (root / "proc/cpuinfo").open(encoding="utf-8", errors="replace") as f:
        for line in f:
            label, _, value = line.partition(":")
            if label.strip() in ("model name", "Model", "cpu model") and value.strip():
                return value.strip()
    return os.uname().machine + " CPU"


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
