"""The start of the child that tries CUDA-aware MPI, and the meaning of its end."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from mpimesh.transport.answer import OPERATIONS, TRIAL_BYTES, Answer
from mpimesh.transport.child_process import ChildProcess, Ending
from mpimesh.transport.job_variables import clean_environment

__all__ = ["LIMIT_S", "find_mpiexec", "prove"]

LIMIT_S = 60.0
"""For one child: CuPy and CUDA take some seconds to start where files are far away."""

Trials: TypeAlias = Generator[ChildProcess, None, dict[str, Answer]]


def find_mpiexec(environment: Mapping[str, str]) -> str | None:
    """Return the mpiexec beside this interpreter, else the first in ``PATH``, if there is one."""
    beside = Path(sys.executable).parent / "mpiexec"
    if beside.exists():
        return str(beside)
    return shutil.which("mpiexec", path=environment.get("PATH", os.defpath))


def prove(
    operations: Sequence[str] = OPERATIONS,
    memory: str = "device",
    *,
    environment: Mapping[str, str] | None = None,
    mpiexec: str | None = "",
    limit_s: float = LIMIT_S,
) -> Trials:
    """Try `operations` on `memory` in child processes; yields each child, to be waited for.

    One child tries all. What ends it, by a crash, its limit or wrong data, is the answer for the
    operation that it was at, and another child tries the rest. But where messages crash or
    anything takes too long, nothing else is tried.

    Args:
        operations: Of :data:`~mpimesh.transport.answer.OPERATIONS`.
        memory: One of :data:`~mpimesh.transport.answer.MEMORIES`.
        environment: Of the job at hand; the process's own if None.
        mpiexec: Starts the two ranks; "" looks for it, None lets one process talk to itself.
        limit_s: Limit for each child in seconds.

    Returns:
        The answer for each operation.
    """
    clean = clean_environment(os.environ if environment is None else environment)
    launcher = find_mpiexec(clean) if mpiexec == "" else mpiexec
    how = "" if launcher else "there is no mpiexec beside this Python or on PATH"
    left, answers = [*operations], dict[str, Answer]()
    while left:
        told, ending = yield from _run_child(launcher, [memory, *left], clean, limit_s)
        if launcher and told.world_size != 2:
            launcher, how = None, f"under mpiexec, MPI did not start two ranks: {ending}"
            continue
        where = "two ranks under mpiexec" if launcher else f"one process to itself ({how})"
        if told.no_device or not told.world_size:
            reason = told.no_device or f"MPI did not start in a child process: {ending}"
            return answers | dict.fromkeys(left, Answer(False, reason, lasting=False))
        for operation in [one for one in left if one in told.passed]:
            answers[operation] = Answer(True, f"{where} moved {_sizes()} right")
            left.remove(operation)
        if left:
            operation = left.pop(0)
            reason = f"{told.problems.get(operation, ending)}; {where}"
            answers[operation] = Answer(False, reason, lasting=not ending.timed_out)
            if ending.timed_out or (operation == "messages" and operation not in told.problems):
                return answers | dict.fromkeys(left, answers[operation])
    return {operation: answers[operation] for operation in operations}


def _sizes() -> str:
    texts = [f"{n} B" if n < 1024 else f"{n >> 10} KiB" for n in TRIAL_BYTES]
    return f"{', '.join(texts[:-1])} and {TRIAL_BYTES[-1] >> 20} MiB"


def _run_child(
    launcher: str | None, arguments: list[str], environment: dict[str, str], limit_s: float
) -> Generator[ChildProcess, None, tuple[_Told, Ending]]:
    command = [launcher, "-n", "2"] if launcher else []
    command += [sys.executable, "-m", "mpimesh.transport.proof_child", "{folder}", *arguments]
    child = ChildProcess(command, environment=environment, limit_s=limit_s)
    try:
        yield child
        while not child.test():
            yield child
        told = _Told(child.folder)
    finally:
        child.close()
    if child.ending is None:
        raise RuntimeError("the child process was closed before its end")
    return told, child.ending


class _Told:
    """The output of the ranks of a child.

    Attributes:
        world_size: 2 or 1; 0 if MPI did not start.
        no_device: Why there is no device to try it with, where there is none.
        passed: The operations that all ranks ended well.
        problems: What was wrong, by operation.
    """

    def __init__(self, folder: Path) -> None:
        ranks = [list(_events(path)) for path in sorted(folder.glob("rank*"))]
        lines = [line for rank in ranks for line in rank]
        self.world_size: int = max((line.get("size", 0) for line in lines), default=0)
        self.problems: dict[str, str] = {
            line["operation"]: line["problem"] for line in lines if line["event"] == "failed"
        }
        self.no_device = self.problems.pop("device", "")
        each = [{line["operation"] for line in rank if line["event"] == "passed"} for rank in ranks]
        whole = len(ranks) == self.world_size
        self.passed: set[str] = set.intersection(*each) if each and whole else set()


def _events(path: Path) -> Generator[dict[str, Any], None, None]:
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            return  # its process died while it wrote
