"""A diagnosis as one page of text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mpimesh.arguments import ranks_text, size_text
from mpimesh.cli.clean import SHM
from mpimesh.cli.diagnosis import Capability, Diagnosis, Finding
from mpimesh.cli.texts import rate_text, seconds_text
from mpimesh.comm.mpi_environment import Ucx

__all__ = ["show"]

_STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}
_MOST_RANKS = 16
_MOST_NODES = 16


def show(diagnosis: Diagnosis, findings: Sequence[Finding], console: Console) -> None:
    """Print the page: what is there, what it can do, and last what is wrong."""
    with console.capture() as page:
        _print(diagnosis, findings, console)
    # Tables are padded to their width, which is of no use in a file.
    console.file.write("".join(line.rstrip() + "\n" for line in page.get().splitlines()))


def _print(diagnosis: Diagnosis, findings: Sequence[Finding], console: Console) -> None:
    console.print(_headline(diagnosis, findings))
    _section(console, "Versions", _versions(diagnosis))
    _section(console, "Nodes", _nodes(diagnosis))
    if len(diagnosis.ranks) > 1:
        _section(console, "Ranks", _ranks(diagnosis))
    _section(console, "Who can move bytes", _capabilities(diagnosis.capabilities))
    if diagnosis.measurements:
        _section(console, "How fast", _speeds(diagnosis))
    if diagnosis.algorithms:
        _section(console, "How a mesh of all ranks moves them", _algorithms(diagnosis))
    _section(console, "What is wrong", _findings(findings))


def _section(console: Console, title: str, body: Table | Text) -> None:
    console.print()
    console.print(Text(title, style="bold"))
    console.print(Padding(body, (0, 0, 0, 2)))


def _table(*columns: str, header: bool = True, most: int = 24) -> Table:
    table = Table(box=None, show_header=header, header_style="dim", padding=(0, 2, 0, 0))
    for column in columns[:-1]:
        table.add_column(column, max_width=most)
    table.add_column(columns[-1], overflow="fold")
    return table


def _headline(diagnosis: Diagnosis, findings: Sequence[Finding]) -> Text:
    counts = Counter(finding.severity for finding in findings)
    told = [
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
        (", ".join(told) or "all is well", style),
        f"; {world}{started}",
    )


def _versions(diagnosis: Diagnosis) -> Table:
    software, mpi, cuda = diagnosis.software, diagnosis.mpi, diagnosis.cuda
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
    if not cuda.installed:
        table.add_row("CUDA", "CuPy is not installed")
    elif cuda.problem:
        table.add_row("CUDA", Text(cuda.problem, "red"))
    else:
        nccl = f", NCCL {cuda.nccl}" if cuda.nccl else ""
        table.add_row(
            "CUDA", f"CuPy {cuda.cupy}, runtime {cuda.runtime}, driver {cuda.driver}{nccl}"
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
