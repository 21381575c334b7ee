"""The CPU that this process may use: its cores and its memory, also inside a container."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from mpimesh.mesh.device import Device, DeviceBackend

__all__ = ["cpu_device", "cpus_of_text", "cpus_text", "memory_limit_bytes"]

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

    A limit may stand at any level above the process's own group, and a container
    sees its own group as the root, so all levels are asked and the least counts.
    0 if the machine does not say.

    Args:
        root: Where ``proc`` and ``sys`` are; another one for tests.
    """
    total = _meminfo_bytes(root)
    limits = [limit for path in _limit_files(root) if (limit := _limit_bytes(path)) is not None]
    if not total:
        return min(limits, default=0)
    return min([total, *limits])


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


def _limit_files(root: Path) -> list[Path]:
    """List the files that may hold a limit, for control groups of version 2 and 1."""
    files = []
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if not controllers:
            base, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        levels = [part for part in group.split("/") if part not in ("", "..")]
        files += [base.joinpath(*levels[:depth], name) for depth in range(len(levels) + 1)]
    return files


def _limit_bytes(path: Path) -> int | None:
    text = "".join(_lines(path)).strip()
    # Version 2 writes "max" for no limit; version 1 a number larger than any memory.
    return int(text) if text.isdigit() and int(text) > 0 else None


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
