"""The CPU that this process may use: its cores and its memory, also inside a container."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from mpimesh.mesh.device import Device, DeviceBackend

__all__ = ["cpu_device", "cpu_quota", "cpus_of_text", "cpus_text", "memory_limit_bytes"]

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
