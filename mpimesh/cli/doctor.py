"""``mpimesh doctor``: look, show, and end all ranks with one exit code."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mpimesh.arguments import ranks_text, size_text
from mpimesh.cli.console import print_page, rate_text, seconds_text
from mpimesh.cli.examine import examine
from mpimesh.cli.facts import (
    SHM,
    Capability,
    Diagnosis,
    Finding,
    Shm,
    find_leftovers,
    find_shm,
    remove,
)
from mpimesh.cli.findings import SHM_CURE, find_findings
from mpimesh.comm.mpi_environment import Ucx
from mpimesh.runtime import Launch, exit_all

__all__ = ["Guard", "run_clean", "run_doctor", "shm_warning", "show"]

_WIDTH = 100
_LEAST_SHM_BYTES = 1 << 20
"""With less, MPI's libraries crash when they start, even on one rank."""


def run_doctor(*, as_json: bool, fresh: bool, limit_s: float) -> None:
    """Examine this machine and show what was found. Collective over MPI's world.

    Rank 0 writes. All ranks end with exit code 1 if a finding is an error, else 0; but if each is
    a world of its own, only the launcher's first one ends so.

    Args:
        as_json: Write one JSON object instead of a page.
        fresh: Forget first what earlier jobs have measured and proven.
        limit_s: Seconds after which the job is ended.
    """
    # Before MPI starts: where it dies of this, no finding would be shown.
    warning = shm_warning(find_shm(SHM))
    if warning and Launch.detect().rank == 0:
        sys.stderr.write(f"{warning}\n")
        sys.stderr.flush()
    with Guard(limit_s) as guard:
        diagnosis = examine(guard.at, fresh=fresh)
        findings = find_findings(diagnosis)
        guard.at("showing what was found")
        if _rank_of(diagnosis.launch, diagnosis.world_size) == 0:
            _write(diagnosis, findings, as_json=as_json)
        guard.at("ending all ranks")
        wrong = any(finding.severity == "error" for finding in findings)
        if diagnosis.launch.size > 1 == diagnosis.world_size and diagnosis.launch.rank != 0:
            # Worlds of their own: a launcher that ends all tasks with the first failed one must
            # not end the one that writes.
            wrong = False
        exit_all(_agree_on_code(int(wrong)))


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

    Under a launcher one rank of each node does it.

    Args:
        as_json: Write one JSON object.
        dry_run: Only say what would be removed.
    """
    launch = Launch.detect()
    if launch.local_rank:
        return
    found = find_leftovers()
    gone = found if dry_run else remove(found)
    total = sum(one.nbytes for one in gone)
    if as_json:
        fields = {"removed": not dry_run, "bytes": total, "files": [one.path for one in gone]}
        sys.stdout.write(json.dumps(fields, indent=1) + "\n")
        return
    where = f"{launch.node}: " if launch.node else ""
    for one in gone:
        sys.stdout.write(f"{where}{one.path} {size_text(one.nbytes)}\n")
    did = "would remove" if dry_run else "removed"
    sys.stdout.write(f"{where}{did} {len(gone)} files, {size_text(total)}\n")


# -- ending a job that hangs -----------------------------------------------------------------------

_GRACE_S = 5.0


class Guard:
    """Ends the whole job when this rank fails or is not done in time. A context manager.

    Two clocks run. One says in which step the rank is and ends the job through MPI. Some steps,
    such as the start of MPI, let no other thread of Python run: for them there is the second one,
    in C, which ends this process.

    Args:
        limit_s: Seconds from now.

    """

    def __init__(self, limit_s: float) -> None:
        self._step = "starting"
        self._limit_s = limit_s
        self._clock = threading.Timer(limit_s, self._too_late)
        self._clock.daemon = True

    def at(self, step: str) -> None:
        """Note the step that begins, for the message."""
        self._step = step

    def __enter__(self) -> Self:
        """Start the clocks."""
        faulthandler.dump_traceback_later(self._limit_s + _GRACE_S, exit=True)
        self._clock.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop them; after an error end the job, for the other ranks wait for this one."""
        if error is not None and not isinstance(error, SystemExit):
            traceback.print_exception(error)
            _end_job()
        self._clock.cancel()
        faulthandler.cancel_dump_traceback_later()

    def _too_late(self) -> None:
        sys.stderr.write(
            f"mpimesh doctor: not done within {self._limit_s:g} s, in the step: {self._step}; "
            "--limit gives it more time\n"
        )
        sys.stderr.flush()
        _end_job()


def _end_job() -> None:
    """End all ranks with exit code 1."""
    sys.stdout.flush()
    mpi = getattr(sys.modules.get("mpi4py"), "MPI", None)
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        # Abort may hang, too, as over a cut cable; then this process at least ends.
        ending = threading.Timer(_GRACE_S, os._exit, [1])
        ending.daemon = True
        ending.start()
        mpi.COMM_WORLD.Abort(1)
    os._exit(1)


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
    words = [
        f"{count} {severity}{'s' * (count > 1)}"
        for severity in _STYLES
        if (count := counts[severity])
    ]
    size, nodes = diagnosis.world_size, len(diagnosis.nodes)
    world = f"{size} rank{'s' * (size > 1)} on {nodes} node{'s' * (nodes > 1)}"
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
        f"{software.mpimesh}, Python {software.python}, NumPy {software.numpy}, "
        f"mpi4py {software.mpi4py}",
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
    for node in diagnosis.nodes[:_MOST_NODES]:
        ranks = [diagnosis.ranks[rank] for rank in node.ranks]
        cores = {core for one in ranks for core in one.cores}
        quota = min((one.cpu_quota for one in ranks if one.cpu_quota), default=0)
        limit = f" (time of {quota:g})" if quota else ""
        used, seen = len({one.gpu_id for one in ranks if one.gpu}), ranks[0].gpus_seen
        shm = ranks[0].shm
        table.add_row(
            node.name,
            ranks_text(sorted(node.ranks)),
            f"{len(cores)}{limit}",
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
