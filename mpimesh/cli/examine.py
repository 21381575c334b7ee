"""Gather the facts of all ranks. Every function here that takes a communicator is collective."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from mpimesh.arguments import counted
from mpimesh.cli.facts import (
    Capability,
    Cuda,
    Diagnosis,
    Finding,
    Measurement,
    Mpi,
    Rank,
    Software,
    find_cuda,
    find_leftovers,
    find_mpi,
    find_rank,
    find_software,
    node_name,
    nodes_of,
)
from mpimesh.comm import Communicator
from mpimesh.comm.algorithms import Row
from mpimesh.comm.arena import Node
from mpimesh.comm.cuda_probe import PROCESS_PROBE, ProbeResult
from mpimesh.comm.device_communicator import device_communicator
from mpimesh.comm.mpi_environment import cache_problem, clear_cache
from mpimesh.errors import MpimeshError, SettingsError, TransportError
from mpimesh.runtime import DeviceMesh, Launch, ProcessGroup
from mpimesh.runtime.agreement import agree
from mpimesh.runtime.link_speeds import best_s, ping_pong
from mpimesh.runtime.world import solo_communicator
from mpimesh.settings import Settings, unknown_variables

__all__ = ["SHARED_MEMORY", "capability_table", "examine", "measure", "measure_device"]

SHARED_MEMORY = "shared memory, in place"

_LARGE_BYTES = 16 << 20
_TAG = 7

_CHECKED_ELEMENTS = (1, 1 << 18)
_REPORT = "run the tests of this MPI; if they pass, report it to mpimesh"


def examine(at: Callable[[str], None], *, fresh: bool = False) -> Diagnosis:
    """Find everything out; whole on rank 0 only.

    Args:
        at: Called with the name of each step.
        fresh: Forget first what earlier jobs have proven.
    """
    launch, software = Launch.detect(), find_software()
    leftovers = tuple(one for one in find_leftovers() if not one.doubt)
    at("looking for CUDA")
    cuda = find_cuda()
    at("starting MPI")
    mpi = find_mpi()
    communicator = _open_world(mpi)
    if fresh:
        clear_cache()  # before any rank can come to read it: what is next waits for all
    at("asking all ranks where they are")
    places = _everyone(communicator, [node_name(launch), launch.local_rank])
    local_rank = _local_rank(places, communicator.rank)
    facts = _everyone(communicator, _about_me(communicator.rank, local_rank, launch, software, mpi))
    ranks = tuple(Rank.from_fields(one["rank"]) for one in facts)
    problems = [
        Finding("error", f"rank {rank}: {one['problem']}", "unset that variable, or mend it")
        for rank, one in enumerate(facts)
        if one["problem"]
    ][:1]
    # From here on only what all ranks can do.
    whole = not problems and launch.size in (1, communicator.size)
    unknown = dict.fromkeys(text for one in facts for text in one["unknown"])
    problems += [Finding("warning", text, "unset it, or mend its name") for text in unknown]
    why_not_kept = cache_problem()
    if why_not_kept:
        what = f"what is proven is not kept for later jobs: {why_not_kept}"
        cure = "export XDG_CACHE_HOME=..., a folder that can be written"
        problems.append(Finding("warning", what, cure))
    at("measuring")
    speeds = _speeds(communicator, ranks, cuda)
    algorithms: Sequence[Row] = ()
    ways: Mapping[str, ProbeResult] = {}
    probed: dict[str, ProbeResult] = {}
    if whole:
        at("trying CUDA-aware MPI in a child process")
        on_device = all(_everyone(communicator, bool(cuda.gpus and not cuda.problem)))
        if on_device:
            probed = PROCESS_PROBE.run(communicator, fresh=fresh)
            problems += [Finding("note", note) for note in PROCESS_PROBE.notes]
        at("making a mesh and reducing over all ranks")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "MPIMESH_")  # it is found above
            algorithms, ways, wrong = _try_mesh(communicator, on_device=on_device)
        problems += [Finding("error", what, _REPORT) for what in wrong]
    communicator.free()
    return Diagnosis(
        software=software,
        mpi=mpi,
        cuda=cuda,
        launch=launch,
        world_size=communicator.size,
        ranks=ranks,
        capabilities=capability_table(mpi, cuda, communicator.size, speeds, probed, ways),
        measurements=speeds,
        algorithms=tuple(algorithms),
        leftovers=leftovers,
        problems=tuple(problems),
    )


def _open_world(mpi: Mpi) -> Communicator:
    if mpi.problem:
        return solo_communicator()
    # Imported late: importing it starts MPI.
    from mpi4py import MPI

    from mpimesh.comm.mpi import MPICommunicator

    return MPICommunicator.duplicate(MPI.COMM_WORLD)


class _World(NamedTuple):
    """All ranks, before there is a mesh."""

    communicator: Communicator


def _everyone(communicator: Communicator, value: Any) -> list[Any]:
    return agree(_World(communicator), "the doctor", value)


def _local_rank(places: Sequence[tuple[str, int | None]], rank: int) -> int:
    node, said = places[rank]
    if said is not None:
        return said
    return sum(other == node for other, _ in places[:rank])


def _about_me(
    rank: int, local_rank: int, launch: Launch, software: Software, mpi: Mpi
) -> dict[str, Any]:
    problem = ""
    try:
        Settings.from_environment()
    except SettingsError as error:
        problem = str(error)
    versions = f"{software}, {mpi.vendor} {mpi.version}"
    mine = find_rank(rank, local_rank, launch, software=versions)
    return {"rank": asdict(mine), "problem": problem, "unknown": unknown_variables()}


def _speeds(
    communicator: Communicator, ranks: Sequence[Rank], cuda: Cuda
) -> tuple[Measurement, ...]:
    if communicator.native is None:
        return ()
    nodes = [[one.rank for one in members] for members in nodes_of(ranks).values()]
    speeds = measure(communicator.native, nodes)
    if communicator.rank == 0 and cuda.gpus:
        speeds += measure_device()
    # The others wait here without spinning until rank 0 is done.
    _everyone(communicator, None)
    return speeds


def _try_mesh(
    communicator: Communicator, *, on_device: bool
) -> tuple[Sequence[Row], Mapping[str, ProbeResult], Iterable[str]]:
    """Make a mesh of all ranks, and reduce over it.

    Returns:
        The algorithms of its group, the ways of its device memory, and what was wrong.
    """
    ways: Mapping[str, ProbeResult] = {}
    try:
        with DeviceMesh("ranks=-1") as mesh:
            group = mesh.group("world")
            wrong = _wrong_sums(group, mesh.rank, np)
            if on_device:
                mesh.use_device()
                wrong += _wrong_sums(group, mesh.rank, sys.modules["cupy"])
                ways = device_communicator(group.communicator).strategies()
            algorithms = group.algorithms()
    except MpimeshError as error:
        if not error.agreed:
            raise
        return (), {}, [f"a mesh of all ranks failed: {error}"]
    # A sum may be wrong on one rank only.
    every = [what for one in _everyone(communicator, wrong) for what in one]
    return algorithms, ways, dict.fromkeys(every)


def _wrong_sums(group: ProcessGroup, rank: int, library: ModuleType) -> list[str]:
    """Reduce arrays of `library`, and return what was wrong."""
    wrong = []
    for elements in _CHECKED_ELEMENTS:
        mine = library.full(elements, rank + 1.0)
        total = group.all_reduce(mine).resolve()
        if not bool((total == group.size * (group.size + 1) / 2).all()):
            wrong.append(
                f"an all-reduce of {mine.nbytes} bytes of {library.__name__} over all ranks gave a "
                "wrong sum"
            )
    return wrong


def _node_shared_setting() -> str:
    try:
        return Settings.from_environment().node_shared
    except SettingsError:  # a finding of its own
        return Settings().node_shared


def capability_table(
    mpi: Mpi,
    cuda: Cuda,
    world_size: int,
    speeds: Sequence[Measurement],
    probed: Mapping[str, ProbeResult],
    ways: Mapping[str, ProbeResult],
) -> tuple[Capability, ...]:
    """Return which transport can be used for what; nothing on devices where there is none.

    Args:
        mpi: The MPI library.
        cuda: CuPy and CUDA.
        world_size: How many ranks MPI has.
        speeds: What was measured on rank 0.
        probed: The results of the probe of CUDA-aware MPI, by operation.
        ways: The ways of device memory in a mesh, by name; empty if there was none.
    """
    has_mpi = not mpi.problem
    world = mpi.problem or f"a world of {counted(world_size, 'rank')}"
    counts = "in one call" if mpi.large_counts else "in pieces: this MPI is older than 4"
    in_place = _in_place(next((one for one in speeds if one.how == SHARED_MEMORY), None))
    threads = "threads of one process (run_virtual), without MPI"
    rows = [
        ("mpi", "*", "host", has_mpi, world),
        ("mpi", "counts above 2^31", "host", has_mpi, counts),
        ("node_shared", "*", "host", *in_place),
        ("node_shared", "*", "shared", *in_place),
        ("virtual", "*", "host", True, threads),
    ]
    seen = cuda.problem or f"CuPy sees {counted(cuda.gpus, 'GPU')}"
    if cuda.gpus:
        alone = "there is one rank" if world_size == 1 else "no mesh could be made"
        found = [("mpi_cuda", operation, result) for operation, result in probed.items()]
        found += [
            (name, "*", ways.get(name, ProbeResult(False, alone))) for name in ("nccl", "cuda_ipc")
        ]
        rows += [(name, what, "device", one.usable, one.reason) for name, what, one in found]
        staged = f"copied through host memory, with any MPI; {seen}"
        rows.append(("staged", "*", "device", has_mpi, staged))
    else:
        why = seen if cuda.installed else "CuPy is not installed"
        names = ("mpi_cuda", "nccl", "cuda_ipc", "staged")
        rows += [(name, "*", "device", False, why) for name in names]
    return tuple(Capability(*row) for row in rows)


def _in_place(shared: Measurement | None) -> tuple[bool, str]:
    """Tell whether ranks of one node can read each other's memory, and how that is known."""
    if shared is None:
        return False, "rank 0 is alone on its node"
    if shared.problem:
        return False, shared.problem
    if _node_shared_setting() == "never":
        return False, "off (MPIMESH_NODE_SHARED=never)"
    return True, f"rank 0 has read an array of rank {shared.ranks[1]} in place"


# -- speeds: the order of magnitude, to find what is far off, such as TCP on a fabric --------------


def measure(comm: Any, nodes: Sequence[Sequence[int]]) -> tuple[Measurement, ...]:
    """Collective over `comm`: measure between rank 0 and another one of each level.

    Args:
        comm: An mpi4py communicator.
        nodes: The ranks of each node; rank 0 is in the first.

    Returns:
        What this rank has taken part in: on rank 0 all.
    """
    found = [_copy()] if comm.rank == 0 else []
    for neighbour in nodes[0][1:2]:  # behind rank 0 itself
        if comm.rank in (0, neighbour):
            found.append(_messages(comm, neighbour, "within a node"))
            found.append(_shared_memory(comm, neighbour))
    for other, *_ in nodes[1:2]:
        if comm.rank in (0, other):
            found.append(_messages(comm, other, "between nodes"))
    return tuple(found)


def _copy() -> Measurement:
    source, target = np.ones(_LARGE_BYTES, np.uint8), np.empty(_LARGE_BYTES, np.uint8)
    seconds = best_s(lambda: np.copyto(target, source))
    return Measurement("within a rank", "copy by NumPy", (0,), bytes_per_s=_LARGE_BYTES / seconds)


def _messages(comm: Any, other: int, level: str) -> Measurement:
    """Let rank 0 send to `other` and back."""
    peer = other if comm.rank == 0 else 0
    latency_s, bytes_per_s = ping_pong(
        lambda buffer: comm.Send(buffer, peer, _TAG),
        lambda buffer: comm.Recv(buffer, peer, _TAG),
        first=comm.rank == 0,
        large_bytes=_LARGE_BYTES,
    )
    return Measurement(
        level,
        "MPI messages",
        (0, other),
        latency_s=latency_s,
        bytes_per_s=bytes_per_s,
    )


def _shared_memory(comm: Any, other: int) -> Measurement:
    """Let rank 0 read an array of `other` in place."""
    level, how = "within a node", SHARED_MEMORY
    node = Node()
    if comm.rank == other:
        array = None if node.arena is None else node.arena.empty(_LARGE_BYTES)
        at = -1
        if node.arena is not None and array is not None:
            array[...] = 1
            at = node.arena.find(array)
        comm.Send(np.array([*node.address, at], np.int64), 0, _TAG)
        comm.Recv(np.empty(1, np.uint8), 0, _TAG)  # until then the other one reads
        return Measurement(level, how, (0, other))
    message = np.empty(len(node.address) + 1, np.int64)
    comm.Recv(message, other, _TAG)
    *address, at = message.tolist()
    try:
        if at < 0:
            raise TransportError(node.why_not or f"rank {other} has no memory for others")
        theirs = node.open(tuple(address))[at : at + _LARGE_BYTES]
        mine = np.empty(_LARGE_BYTES, np.uint8)
        seconds = best_s(lambda: np.copyto(mine, theirs))
        if not mine.all():
            raise TransportError(f"rank 0 does not read what rank {other} has written")
        return Measurement(level, how, (0, other), bytes_per_s=_LARGE_BYTES / seconds)
    except TransportError as error:
        return Measurement(level, how, (0, other), problem=str(error))
    finally:
        comm.Send(np.zeros(1, np.uint8), other, _TAG)


def measure_device() -> tuple[Measurement, ...]:
    """Measure copies of this process's GPU, if CuPy and a GPU are there. Local."""
    with suppress(Exception):  # the capability table says what is wrong with CUDA
        return tuple(_device_copies())
    return ()


def _device_copies() -> list[Measurement]:
    import cupy
    import cupyx

    host = cupyx.empty_pinned(_LARGE_BYTES, np.uint8)
    first, second = (cupy.zeros(_LARGE_BYTES, np.uint8) for _ in range(2))
    stream = cupy.cuda.get_current_stream()
    copies: dict[str, Callable[[], object]] = {
        "to the GPU": lambda: first.set(host),
        "from the GPU": lambda: first.get(out=host),
        "within the GPU": lambda: cupy.copyto(second, first),
    }

    def finished(copy: Callable[[], object]) -> Callable[[], object]:
        def step() -> None:
            copy()
            stream.synchronize()

        return step

    return [
        Measurement(level, "copy by CUDA", (0,), bytes_per_s=_LARGE_BYTES / best_s(finished(copy)))
        for level, copy in copies.items()
    ]
