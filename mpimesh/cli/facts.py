"""Facts that the doctor finds: software, ranks, nodes, files of dead jobs."""

from __future__ import annotations

import os
import platform
import re
import socket
import stat
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mpi4py
import numpy as np

from mpimesh.comm.algorithms import Row
from mpimesh.comm.cuda_probe import has_cupy
from mpimesh.comm.mpi_environment import loaded_ucx
from mpimesh.comm.nccl import nccl_library
from mpimesh.mesh import find_devices, pick_device
from mpimesh.mesh.probe import cpu_quota, cuda_version_text, memory_limit_bytes
from mpimesh.runtime import Launch

__all__ = [
    "SHM",
    "THREAD_VARIABLES",
    "Capability",
    "Cuda",
    "Diagnosis",
    "Finding",
    "Leftover",
    "Measurement",
    "Mpi",
    "Rank",
    "Shm",
    "Software",
    "find_cuda",
    "find_leftovers",
    "find_mpi",
    "find_rank",
    "find_shm",
    "find_software",
    "node_name",
    "nodes_of",
    "remove",
]

SHM = Path("/dev/shm")  # noqa: S108 - it is that very folder
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

# -- software --------------------------------------------------------------------------------------

# How many communicators there can be at once, where somebody has counted.
_COMMUNICATORS = {"MPICH": 2046, "Open MPI": 65532}


@dataclass(frozen=True, slots=True)
class Software:
    """Versions, and the path of the interpreter."""

    mpimesh: str
    python: str
    numpy: str
    mpi4py: str
    interpreter: str

    def __str__(self) -> str:
        return (
            f"mpimesh {self.mpimesh}, Python {self.python}, NumPy {self.numpy}, "
            f"mpi4py {self.mpi4py}"
        )


@dataclass(frozen=True, slots=True)
class Mpi:
    """The MPI library that this process has loaded.

    Attributes:
        problem: Why there is none; the rest is empty then.
        vendor: Such as ``"MPICH"``.
        version: Of the library.
        standard: The MPI standard that it keeps, such as ``"4.1"``.
        device: Its network layer, where it says so.
        path: Its file.
        ucx: Version of the UCX that it has loaded; "" if none.
        ucx_path: Where that one is.
        ucx_cuda: Whether that one's CUDA transports are ``"loaded"`` or ``"not loaded"``; "" if it
            has none.
        thread_level: ``"single"``, ``"funneled"``, ``"serialized"`` or ``"multiple"``.
        tag_limit: The largest tag of a message.
        communicator_limit: How many communicators there can be; 0 if not known.
        large_counts: Whether one call moves more than 2^31 elements.
    """

    problem: str = ""
    vendor: str = ""
    version: str = ""
    standard: str = ""
    device: str = ""
    path: str = ""
    ucx: str = ""
    ucx_path: str = ""
    ucx_cuda: str = ""
    thread_level: str = ""
    tag_limit: int = 0
    communicator_limit: int = 0
    large_counts: bool = False


@dataclass(frozen=True, slots=True)
class Cuda:
    """CuPy and CUDA.

    Attributes:
        installed: Whether CuPy is.
        problem: Why it cannot be used.
        cupy: Its version.
        runtime: CUDA's version that CuPy uses.
        driver: CUDA's version that the driver can do.
        nccl: Its version; "" if CuPy has none.
        gpus: How many GPUs this process sees.
    """

    installed: bool = False
    problem: str = ""
    cupy: str = ""
    runtime: str = ""
    driver: str = ""
    nccl: str = ""
    gpus: int = 0


def find_software() -> Software:
    """Return the versions of what mpimesh is made of."""
    import mpimesh

    return Software(
        mpimesh=mpimesh.__version__,
        python=platform.python_version(),
        numpy=np.__version__,
        mpi4py=mpi4py.__version__,
        interpreter=sys.executable,
    )


def find_mpi() -> Mpi:
    """Start MPI, and return what it is."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        return Mpi(problem=f"no MPI library could be loaded: {' '.join(str(error).split())}")
    vendor, version = MPI.get_vendor()
    ucx = loaded_ucx()
    tag_limit = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
    levels = {
        MPI.THREAD_SINGLE: "single",
        MPI.THREAD_FUNNELED: "funneled",
        MPI.THREAD_SERIALIZED: "serialized",
        MPI.THREAD_MULTIPLE: "multiple",
    }
    return Mpi(
        vendor=vendor,
        version=".".join(map(str, version)),
        standard=".".join(map(str, MPI.Get_version())),
        device=_device(MPI.Get_library_version()),
        path=_library_path(),
        ucx=ucx.version,
        ucx_path=ucx.path,
        ucx_cuda=ucx.cuda,
        thread_level=levels.get(MPI.Query_thread(), "unknown"),
        tag_limit=32767 if tag_limit is None else int(tag_limit),
        communicator_limit=_COMMUNICATORS.get(vendor, 0),
        large_counts=MPI.VERSION >= 4,
    )


def _device(text: str) -> str:
    """Return the network layer that a library's description names; "" if it names none."""
    fields = dict(line.partition(":")[::2] for line in text.splitlines() if ":" in line)
    return fields.get("MPICH Device", "").strip()


def _library_path(maps: Path = Path("/proc/self/maps")) -> str:
    """Return the file of the MPI library that is loaded; "" where it cannot be told."""
    with suppress(OSError):
        for line in maps.read_text().splitlines():
            path = Path(line.split(maxsplit=5)[-1])
            if path.name.startswith(("libmpi.so", "libmpich.so", "libmpi_", "libmpi-")):
                return str(path)
    return ""


def find_cuda() -> Cuda:
    """Return what CuPy sees; imports it if it is installed."""
    if not has_cupy():
        return Cuda()
    try:
        import cupy

        runtime = cupy.cuda.runtime
        return Cuda(
            installed=True,
            cupy=str(cupy.__version__),
            runtime=cuda_version_text(runtime.runtimeGetVersion()),
            driver=cuda_version_text(runtime.driverGetVersion()),
            nccl=_nccl_version(),
            gpus=int(runtime.getDeviceCount()),
        )
    except Exception as error:  # whatever it is, it is what the person must read
        return Cuda(installed=True, problem=f"{type(error).__name__}: {error}")


def _nccl_version() -> str:
    with suppress(Exception):
        nccl = nccl_library()
        if nccl is not None:
            number = int(nccl.get_version())
            return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    return ""


# -- ranks -----------------------------------------------------------------------------------------


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
    devices = find_devices()
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


# -- files that MPI leaves in /dev/shm when a job is aborted ---------------------------------------

# MPI's libraries put the memory that ranks of a node share into files there, and remove them once
# all ranks have opened them, or at the end. A job that is aborted leaves them behind: 1 to 16 MB
# for each rank. mpimesh's own shared memory has no name.
_LIKE_MPI = re.compile(r"mpich_(shm|vci)_|sm_segment\.|vader_segment\.|psm[23]?_shm\.")
_MPI_NAMES = (
    r"mpich_(shm|vci)_[0-9a-f]{1,8}_\d{1,9}",
    r"sm_segment\.[\w.-]+\.{uid}\.[0-9a-f]{1,8}\.\d{1,9}",  # Open MPI 5: node, user, job, rank
    r"vader_segment\.[\w.-]+(\.{uid})?\.[0-9a-f]{1,8}\.\d{1,9}",  # Open MPI 4: some without user
    r"psm_shm\.[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    r"psm[23]_shm\.{uid}([0-9a-f]{16}|\.[0-9a-f:]+\.)\d{1,10}",
)
"""Patterns of the names that they write, with the user's number for uid."""
_MPI_MODE = 0o600
_YOUNG_S = 60.0
"""Younger files may be of a rank that is about to open them."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """A file with a name like those of MPI's.

    Attributes:
        path: Where it is.
        nbytes: What it takes.
        doubt: Why it may be something else than a dead job's; "" if nothing speaks for that.
        key: Its device and number there.
    """

    path: str
    nbytes: int
    doubt: str = ""
    key: tuple[int, int] = (0, 0)


def find_leftovers(
    folder: Path = SHM, proc: Path = Path("/proc"), *, now_s: float | None = None
) -> tuple[Leftover, ...]:
    """Return this user's files in `folder` with names like MPI's, and what is in doubt of each.

    A dead job's file is an ordinary one with a name, a mode and an age as MPI's, which no process
    maps or has open. Processes in other containers that share the folder cannot be seen: do not
    clean while they run MPI.

    Args:
        folder: Where to look.
        proc: Where the processes are.
        now_s: The time now, by :func:`time.time`.
    """
    now_s = time.time() if now_s is None else now_s
    try:
        names = sorted(one.name for one in folder.iterdir() if _LIKE_MPI.match(one.name))
    except OSError:
        return ()
    used, hidden = _files_in_use(proc) if names else ({}, None)
    found = []
    for name in names:
        path = str(folder / name)
        with suppress(OSError):  # it is gone by now
            facts = os.lstat(path)
            if facts.st_uid == os.geteuid():
                key = facts.st_dev, facts.st_ino
                doubt = _doubt(name, facts, now_s)
                process = used.get(path, used.get(key, hidden))
                if not doubt and process is not None:
                    doubt = f"process {process} uses it"
                    if process == hidden:
                        doubt = f"process {process}, which may not be looked at, may use it"
                found.append(Leftover(path, facts.st_blocks * 512, doubt, key))
    return tuple(found)


def _doubt(name: str, facts: os.stat_result, now_s: float) -> str:
    if not stat.S_ISREG(facts.st_mode):
        return "it is no ordinary file"
    uid = str(os.geteuid())
    if not any(re.fullmatch(each.replace("{uid}", uid), name, re.ASCII) for each in _MPI_NAMES):
        return "its name is not quite as MPI writes it"
    mode = stat.S_IMODE(facts.st_mode)
    if mode != _MPI_MODE or facts.st_nlink != 1:
        return f"MPI's files have mode 600 and one name; this has {mode:o} and {facts.st_nlink}"
    if now_s - max(facts.st_mtime, facts.st_ctime) <= _YOUNG_S:
        return "it is younger than a minute"
    return ""


def remove(leftovers: Iterable[Leftover]) -> tuple[Leftover, ...]:
    """Remove those files that are not in doubt, and return those that this call has removed."""
    removed = []
    for leftover in leftovers:
        with suppress(OSError):  # such as another rank's doctor was faster
            facts = os.lstat(leftover.path)
            if not leftover.doubt and leftover.key == (facts.st_dev, facts.st_ino):
                Path(leftover.path).unlink()
                removed.append(leftover)
    return tuple(removed)


def _files_in_use(proc: Path) -> tuple[dict[str | tuple[int, int], str], str | None]:
    """Return which process has a file mapped or open, by the file's path, and by its key.

    And one of this user's that has shared memory and may not be looked at, if there is one.
    """
    used: dict[str | tuple[int, int], str] = {}
    hidden = None
    for process in proc.iterdir():
        pid = process.name
        if not pid.isdecimal():
            continue
        try:
            for line in (process / "maps").read_text(errors="replace").splitlines():
                words = line.split(maxsplit=5)
                if len(words) == 6 and words[4] != "0":
                    major, minor = (int(part, 16) for part in words[3].split(":"))
                    used[os.makedev(major, minor), int(words[4])] = pid
                    used[words[5].removesuffix(" (deleted)")] = pid
            for descriptor in (process / "fd").iterdir():
                with suppress(OSError):
                    used[str(descriptor.readlink())] = pid
                    facts = descriptor.stat()
                    used[facts.st_dev, facts.st_ino] = pid
        except PermissionError:
            with suppress(OSError):  # others may not open a file of mode 600
                status = (process / "status").read_text(errors="replace")
                owner, shared = (
                    re.search(rf"^{name}:\s+(\d+)", status, re.MULTILINE)
                    for name in ("Uid", "RssShmem")
                )
                own = owner is not None and int(owner[1]) == os.geteuid()
                if own and (shared is None or int(shared[1])):
                    hidden = pid
        except OSError:  # it has ended meanwhile
            pass
    return used, hidden


# -- all of them -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Measurement:
    """The speed of bytes from one place to another.

    Attributes:
        level: Between what.
        how: Who moves them.
        ranks: The two ranks, or the one.
        latency_s: Of 8 bytes one way; 0 if not measured.
        bytes_per_s: Of 16 MiB one way; 0 if it cannot be done.
        problem: Why it cannot be done.
    """

    level: str
    how: str
    ranks: tuple[int, ...]
    latency_s: float = 0.0
    bytes_per_s: float = 0.0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that a person should know.

    Attributes:
        severity: ``"error"`` if programs will fail or give wrong results, ``"warning"`` if they
            will be slow or may fail, else ``"note"``.
        what: What is so.
        cure: What mends it, a command where there is one; "" if there is nothing to do.
    """

    severity: str
    what: str
    cure: str = ""


@dataclass(frozen=True, slots=True)
class Capability:
    """The answer if a transport may be used for an operation on a kind of memory.

    Attributes:
        transport: Who moves the bytes, such as ``"mpi_cuda"``.
        operation: A collective, ``"messages"``, or ``"*"`` for all.
        memory: ``"host"``, ``"shared"`` or ``"device"``.
        usable: Whether it may be used.
        proof: How that is known.
    """

    transport: str
    operation: str
    memory: str
    usable: bool
    proof: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All facts, before and beside the findings.

    Attributes:
        software: Versions.
        mpi: The MPI library.
        cuda: CuPy and CUDA on rank 0.
        launch: What the launcher says.
        world_size: How many ranks MPI has.
        ranks: Each of them.
        capabilities: Who can move what.
        measurements: How fast.
        algorithms: How the world's group of a mesh moves its bytes.
        leftovers: Files of dead jobs on rank 0's node.
        problems: What did not work while the doctor looked.
    """

    software: Software
    mpi: Mpi
    cuda: Cuda
    launch: Launch
    world_size: int
    ranks: tuple[Rank, ...]
    capabilities: tuple[Capability, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    algorithms: tuple[Row, ...] = ()
    leftovers: tuple[Leftover, ...] = ()
    problems: tuple[Finding, ...] = ()

    @property
    def nodes(self) -> dict[str, list[Rank]]:
        """The ranks of each node, in the order of their first ranks."""
        return nodes_of(self.ranks)

    def to_fields(self, findings: Sequence[Finding]) -> dict[str, Any]:
        """Return everything in JSON's types."""
        fields = asdict(self)
        del fields["problems"]
        healthy = all(finding.severity != "error" for finding in findings)
        return {
            "healthy": healthy,
            "findings": [asdict(finding) for finding in findings],
            "nodes": [
                {"name": node, "ranks": [one.rank for one in ranks]}
                for node, ranks in self.nodes.items()
            ],
            **fields,
        }


def nodes_of(ranks: Iterable[Rank]) -> dict[str, list[Rank]]:
    """Return the ranks of each node, in the order of their first ranks."""
    members: dict[str, list[Rank]] = {}
    for one in ranks:
        members.setdefault(one.node, []).append(one)
    return members
