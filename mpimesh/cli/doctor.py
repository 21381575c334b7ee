"""``python -m mpimesh doctor``: look, show, and end all ranks with one exit code."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from rich.console import Console

from mpimesh.arguments import size_text
from mpimesh.cli.clean import SHM, find_leftovers, remove
from mpimesh.cli.diagnosis import Diagnosis, Finding
from mpimesh.cli.examine import examine
from mpimesh.cli.facts_rank import Shm, find_shm
from mpimesh.cli.findings import SHM_CURE, find_findings
from mpimesh.cli.guard import Guard
from mpimesh.cli.report import show
from mpimesh.runtime import Launch, exit_all

__all__ = ["run_clean", "run_doctor", "shm_warning"]

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
        diagnosis = examine(guard, fresh=fresh)
        findings = find_findings(diagnosis)
        guard.step = "showing what was found"
        if _rank_of(diagnosis.launch, diagnosis.world_size) == 0:
            _write(diagnosis, findings, as_json=as_json)
        guard.step = "ending all ranks"
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
