"""Facts of one rank: the place where it runs, and what it has there."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpimesh.mesh import DeviceInfo, pick_device
from mpimesh.mesh.host import memory_limit_bytes
from mpimesh.runtime import Launch

__all__ = ["THREAD_VARIABLES", "Rank", "Shm", "cpu_quota", "find_rank", "find_shm", "node_name"]

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class Shm:
    """The folder where MPI puts memory that ranks of a node share."""

    total_bytes: int = 0
    free_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank.

    Attributes:
        rank: In the world.
        node: Name of its node, as the launcher says, else the host's.
        pid: Its process.
        cores: The cores that it may run on.
        cpu_quota: How many cores' time its control group may use; 0 if all.
        threads: How many threads its array library uses by the environment; 0 if not said.
        local_rank: Its number on the node: as the launcher says, or counted.
        gpu: The GPU that it computes on; "" if none.
        gpu_id: What tells this GPU, or part of one, from all others of the node.
        gpu_driver: Version of its driver.
        gpus_seen: How many GPUs the process sees.
        memory_bytes: What its process may use.
        shm: As its node has it.
        software: Versions, which must be the same on all ranks.
        settings: ``MPIMESH_*``, which must be, too.
    """

    rank: int
    node: str
    pid: int
    cores: tuple[int, ...]
    cpu_quota: float
    threads: int
    local_rank: int
    gpu: str
    gpu_id: str
    gpu_driver: str
    gpus_seen: int
    memory_bytes: int
    shm: Shm
    software: str
    settings: str

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Rank:
        """Read what `dataclasses.asdict` and JSON have written."""
        return cls(
            **{**fields, "cores": tuple(fields["cores"]), "shm": Shm(**fields["shm"])},
        )


def node_name(launch: Launch) -> str:
    """Return the name of this process's node, as all of mpimesh takes it."""
    return launch.node or socket.gethostname()


def find_rank(
    rank: int,
    local_rank: int,
    launch: Launch,
    *,
    software: str,
    environment: Mapping[str, str] | None = None,
    root: Path = Path("/"),
) -> Rank:
    """Return where the calling process, which is `rank`, runs. Local."""
    environment = os.environ if environment is None else environment
    devices = DeviceInfo.probe().devices
    device = pick_device(devices, local_rank)
    gpu = device.backend.is_gpu
    threads = [environment[name] for name in THREAD_VARIABLES if name in environment]
    return Rank(
        rank=rank,
        node=node_name(launch),
        pid=os.getpid(),
        cores=tuple(sorted(os.sched_getaffinity(0))),
        cpu_quota=cpu_quota(root),
        threads=int(threads[0]) if threads and threads[0].isdecimal() else 0,
        local_rank=local_rank,
        gpu=f"{device.id}: {device.name}" if gpu else "",
        gpu_id=(device.identity or str(device.id)) if gpu else "",
        gpu_driver=(device.driver_version or "") if gpu else "",
        gpus_seen=sum(one.backend.is_gpu for one in devices),
        memory_bytes=memory_limit_bytes(root),
        shm=find_shm(root / "dev/shm"),
        software=software,
        settings=" ".join(
            f"{name}={text}"
            for name, text in sorted(environment.items())
            if name.startswith("MPIMESH_")
        ),
    )


def find_shm(folder: Path) -> Shm:
    """Return the size of `folder`; zeros if it is not there."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return Shm()
    return Shm(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


def cpu_quota(root: Path = Path("/")) -> float:
    """Return how many cores' time this process's control group may use; 0 if all.

    A limit may stand at any level above the process's group; the least counts.

    Args:
        root: Where ``proc`` and ``sys`` are; another one for tests.
    """
    quotas = []
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            base = root / ("sys/fs/cgroup/cpu" if controllers else "sys/fs/cgroup")
            levels = [part for part in group.split("/") if part not in ("", "..")]
            folders = [base.joinpath(*levels[:depth]) for depth in range(len(levels) + 1)]
            quotas += [quota for folder in folders if (quota := _quota(folder)) > 0]
    return min(quotas, default=0.0)


def _quota(folder: Path) -> float:
    with suppress(OSError, ValueError):
        if (folder / "cpu.max").exists():  # version 2: "200000 100000", or "max 100000"
            share, period = (folder / "cpu.max").read_text().split()
        else:  # version 1, where -1 is no limit
            share = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        return float(share) / float(period)
    return 0.0
