"""Hardware that this process may use, found without MPI and without importing CuPy."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING, Any, TextIO

from mpimesh.errors import MeshError
from mpimesh.mesh.device import Device, DeviceBackend, cpus_text

# Importing pathlib takes longer than all that is looked for here.
if TYPE_CHECKING:
    from pathlib import Path
    from subprocess import Popen

__all__ = [
    "cpu_device",
    "cpu_quota",
    "cuda_version_text",
    "cupy_in_use",
    "cupy_number",
    "find_devices",
    "make_current",
    "memory_limit_bytes",
    "probe_devices",
    "visible_devices",
]

PROBE_TIMEOUT_S = 0.8


def find_devices() -> tuple[Device, ...]:
    """Return what :func:`probe_devices` does; where that fails, there is the CPU.

    Takes up to 0.8 s where ``nvidia-smi`` is asked, and keeps nothing: call it once.
    """
    try:
        return probe_devices()
    except MeshError:
        return (cpu_device(),)


def probe_devices(
    timeout_s: float | None = None, *, environment: Mapping[str, str] | None = None
) -> tuple[Device, ...]:
    """Return the GPUs that this process may use, or where there are none its CPU.

    CuPy is asked if it is already imported, else ``nvidia-smi`` if it is installed.

    Args:
        timeout_s: Limit for all programs that are started; `PROBE_TIMEOUT_S` if None.
        environment: Where ``CUDA_VISIBLE_DEVICES`` is looked up; the process's own if None.

    Raises:
        MeshError: If CuPy or ``nvidia-smi`` is there but fails, or `timeout_s` is not above 0.
            Having neither is no failure.
    """
    timeout_s = PROBE_TIMEOUT_S if timeout_s is None else timeout_s
    if not timeout_s > 0:
        raise MeshError(f"timeout_s must be above 0, got {timeout_s}")
    gpus = query_cupy()
    if gpus is None:
        seen = os.environ if environment is None else environment
        gpus = visible_devices(query_nvidia_smi(timeout_s), seen)
    return tuple(gpus) or (cpu_device(),)


# -- the CPU: cores and memory that this process may use, also inside a container ------------------

_ROOT: str | Path = ""


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


def memory_limit_bytes(root: str | Path = _ROOT) -> int:
    """Return the memory this process may use: the machine's, or its control group's limit.

    0 if the machine does not say.

    Args:
        root: Where ``proc`` and ``sys`` are; another one for tests.
    """
    total = _meminfo_bytes(root)
    limits = [total] if total else []
    for folder in _group_folders(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):  # of version 2 and 1
            text = "".join(_lines(f"{folder}/{name}")).strip()
            # Version 2 writes "max" for no limit; version 1 a number larger than any memory.
            if text.isdigit() and int(text) > 0:
                limits.append(int(text))
    return min(limits, default=0)


def cpu_quota(root: str | Path = _ROOT) -> float:
    """Return how many cores' time this process's control group may use; 0 if all.

    Args:
        root: Where ``proc`` and ``sys`` are; another one for tests.
    """
    quotas = []
    for folder in _group_folders(root, "cpu"):
        text = " ".join(_lines(f"{folder}/cpu.max"))  # version 2: "200000 100000", or "max 100000"
        if not text:  # version 1, where -1 is no limit
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            text = " ".join(line for name in names for line in _lines(f"{folder}/{name}"))
        with suppress(ValueError):
            share, period = map(float, text.split())
            quotas += [share / period] if share > 0 < period else []
    return min(quotas, default=0.0)


def _meminfo_bytes(root: str | Path) -> int:
    for line in _lines(f"{root}/proc/meminfo"):
        label, _, value = line.partition(":")
        if label == "MemTotal" and value.split()[:1] and value.split()[0].isdigit():
            return int(value.split()[0]) * 1024
    return 0


def _group_folders(root: str | Path, controller: str) -> list[str]:
    """List the folders that may hold a limit, for control groups of version 2 and 1.

    A limit may stand at any level above the process's own group, and a container sees its own
    group as the root, so all levels are asked and the least counts.
    """
    folders = []
    for line in _lines(f"{root}/proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        base = f"{root}/sys/fs/cgroup" + (f"/{controller}" if controllers else "")
        levels = [part for part in group.split("/") if part not in ("", "..")]
        folders += ["/".join([base, *levels[:depth]]) for depth in range(len(levels) + 1)]
    return folders


def _model_name(root: str | Path) -> str:
    # Read line by line: on a large machine the file has thousands, slow to make.
    with suppress(OSError), _open(f"{root}/proc/cpuinfo") as file:
        for line in file:
            label, _, value = line.partition(":")
            if label.strip() in ("model name", "Model", "cpu model") and value.strip():
                return value.strip()
    return os.uname().machine + " CPU"


def _lines(path: str) -> list[str]:
    try:
        with _open(path) as file:
            return file.read().splitlines()
    except OSError:
        return []


def _open(path: str) -> TextIO:
    return open(path, encoding="utf-8", errors="replace")  # noqa: PTH123 - see the imports


# -- GPUs by CuPy, and the current one ------------------------------------------------------------


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
        count = int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError:
        return []  # without a GPU or a driver, counting is an error of its own kind
    try:
        return [_device(runtime, number) for number in range(count)]
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
        cuda_version=None if hip else cuda_version_text(int(runtime.driverGetVersion())) or None,
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


def cuda_version_text(number: int) -> str:
    """Write 12040 as ``12.4``; empty for 0, no driver."""
    return f"{number // 1000}.{number % 1000 // 10}" if number else ""


# -- GPUs by nvidia-smi, for a process without CuPy ------------------------------------------------

_COLUMNS = (
    "index",
    "name",
    "uuid",
    "memory.total",
    "pci.bus_id",
    "driver_version",
    "utilization.gpu",
    "temperature.gpu",
    "mig.mode.current",
    "compute_cap",
)

# nvidia-smi does not report the number of streaming multiprocessors. It is fixed for
# each product; a GPU that is not here gets 0. First match counts.
_MULTIPROCESSORS = (
    ("GB200", 148),
    ("B200", 148),
    ("H100 PCIe", 114),
    ("GH200", 132),
    ("H200", 132),
    ("H100", 132),
    ("A100", 108),
    ("A40", 84),
    ("A30", 56),
    ("A10G", 80),
    ("A10", 72),
    ("L40", 142),
    ("L40S", 142),
    ("L4", 58),
    ("V100", 80),
    ("P100", 56),
    ("T4", 40),
)

_MIG_LINE = re.compile(r"\s+MIG (?P<profile>\S+)\s+Device\s+\d+:\s+\(UUID: (?P<uuid>MIG-[^)\s]+)\)")
_GPU_LINE = re.compile(r"GPU \d+: .*\(UUID: (?P<uuid>GPU-[^)\s]+)\)")
_PROFILE_MEMORY = re.compile(r"\.(?P<gb>\d+)gb")


def query_nvidia_smi(timeout_s: float) -> list[Device]:
    """Ask ``nvidia-smi`` for all GPUs of this machine; none if it is not installed.

    A GPU in MIG mode is replaced by its instances, since nothing runs on the whole
    of it; their memory is what the profile's name says and their multiprocessors
    are 0, not known. All programs together get `timeout_s` seconds.

    Raises:
        MeshError: If it is installed but fails, takes too long, or writes what cannot be read.
    """
    # No `shutil.which`: to import it takes longer than to look.
    places = [os.path.join(folder, "nvidia-smi") for folder in os.get_exec_path()]  # noqa: PTH118
    program = next((path for path in places if os.access(path, os.X_OK)), None)
    if program is None:
        return []
    end = monotonic() + timeout_s

    def table(columns: Sequence[str]) -> str:
        query = f"--query-gpu={','.join(columns)}"
        return _run([program, query, "--format=csv,noheader,nounits"], end)

    try:
        text = table(_COLUMNS)
    except MeshError as error:
        # Drivers before 510 do not know compute_cap and refuse the whole query.
        if "not a valid field" not in str(error):
            raise
        text = table(_COLUMNS[:-1])
    if text.strip() == "No devices were found":
        return []
    rows = [parse_row(line) for line in text.splitlines() if line.strip()]
    if not any(mig for _, mig in rows):
        return [device for device, _ in rows]
    instances = parse_mig(_run([program, "-L"], end))
    return [found for device, mig in rows for found in _parts(device, mig, instances)]


def parse_row(line: str) -> tuple[Device, bool]:
    """Read one GPU and whether it is in MIG mode.

    Raises:
        MeshError: If the line has not the columns that were asked for.
    """
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) not in (len(_COLUMNS), len(_COLUMNS) - 1) or _number(cells[0]) is None:
        raise MeshError(f"cannot read this line of nvidia-smi: {line!r}")
    row = dict(zip(_COLUMNS, cells, strict=False))
    capability = row.get("compute_cap", "")
    known = re.fullmatch(r"\d+\.\d+", capability) is not None
    device = Device(
        id=int(row["index"]),
        name=row["name"],
        backend=DeviceBackend.CUDA,
        memory_mb=_number(row["memory.total"]) or 0,
        compute_units=multiprocessors(row["name"]),
        pci_bus_id=pci_text(row["pci.bus_id"]),
        partition_id=_text(row["uuid"]),
        driver_version=_text(row["driver_version"]),
        compute_capability=capability if known else None,
        utilization_gpu_pct=_number(row["utilization.gpu"]),
        temperature_c=_number(row["temperature.gpu"]),
        supports_fp16=not known or float(capability) >= 5.3,
        supports_int8=not known or float(capability) >= 6.1,
    )
    return device, row["mig.mode.current"] == "Enabled"


def parse_mig(text: str) -> dict[str, list[tuple[str, str]]]:
    """Read ``nvidia-smi -L``: for each GPU's UUID its MIG instances as (profile, UUID)."""
    instances: dict[str, list[tuple[str, str]]] = {}
    gpu = ""
    for line in text.splitlines():
        if found := _GPU_LINE.match(line):
            gpu = found["uuid"]
        elif found := _MIG_LINE.match(line):
            instances.setdefault(gpu, []).append((found["profile"], found["uuid"]))
    return instances


def visible_devices(devices: Sequence[Device], environment: Mapping[str, str]) -> list[Device]:
    """Keep the devices that this process may use, in CUDA's order.

    ``nvidia-smi`` does not heed ``CUDA_VISIBLE_DEVICES``. As in CUDA, an entry is a
    number or the start of a UUID, and the first that fits no device ends the list.
    Devices are numbered anew from 0. Numbers count as with
    ``CUDA_DEVICE_ORDER=PCI_BUS_ID``.
    """
    wanted = environment.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return _numbered(devices)
    kept: list[Device] = []
    for entry in wanted.split(","):
        device = _named(devices, entry.strip())
        if device is None or device in kept:
            break
        kept.append(device)
    return _numbered(kept)


def multiprocessors(name: str) -> int:
    """Return the streaming multiprocessors of a product, 0 if it is not in the table."""
    words = set(name.replace("-", " ").split())
    fitting = (n for product, n in _MULTIPROCESSORS if words.issuperset(product.split()))
    return next(fitting, 0)


def pci_text(bus_id: str) -> str | None:
    """Write a PCI address as the kernel does: lowercase, with a domain of four digits."""
    found = re.fullmatch(
        r"(?:0{4})?([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f])", bus_id.lower()
    )
    return found[1] if found else None


def _run(command: Sequence[str], end: float) -> str:
    import subprocess

    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "LC_ALL": "C"},
            start_new_session=True,
        )
    except OSError as error:
        raise MeshError(f"nvidia-smi could not be started: {error}") from None
    try:
        output, _ = child.communicate(timeout=max(end - monotonic(), 0.01))
    except subprocess.TimeoutExpired:
        _give_up(child)
        raise MeshError("nvidia-smi did not answer in time") from None
    text = str(output, "utf-8", "replace")
    if child.returncode == 0:
        return text
    raise MeshError(f"nvidia-smi ended with code {child.returncode}: {text.strip()[:200]}")


def _give_up(child: Popen[bytes]) -> None:
    """Kill a child and hardly wait for it: under a hung driver it cannot die."""
    from subprocess import TimeoutExpired

    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    if child.stdout is not None:
        child.stdout.close()
    with suppress(TimeoutExpired):
        child.wait(0.1)


def _parts(
    device: Device, mig: bool, instances: Mapping[str, Sequence[tuple[str, str]]]
) -> list[Device]:
    if not mig:
        return [device]
    return [
        replace(
            device,
            name=f"{device.name} MIG {profile}",
            memory_mb=int(found["gb"]) * 1024 if (found := _PROFILE_MEMORY.search(profile)) else 0,
            compute_units=0,
            partition_id=uuid,
            utilization_gpu_pct=None,
        )
        for profile, uuid in instances.get(device.partition_id or "", ())
    ]


def _named(devices: Sequence[Device], entry: str) -> Device | None:
    if re.fullmatch(r"[0-9]{1,9}", entry):
        # Of a GPU in MIG mode, its first instance: they all have the number of their GPU.
        return next((device for device in devices if device.id == int(entry)), None)
    fitting = [d for d in devices if entry and (d.partition_id or "").startswith(entry)]
    return fitting[0] if len(fitting) == 1 else None


def _numbered(devices: Sequence[Device]) -> list[Device]:
    return [replace(device, id=k) for k, device in enumerate(devices)]


def _number(cell: str) -> int | None:
    return int(cell) if re.fullmatch(r"[0-9]{1,12}", cell) else None


def _text(cell: str) -> str | None:
    # What a GPU does not report is written "[N/A]" or "[Not Supported]".
    return None if not cell or cell.startswith("[") else cell
