"""Start a program under the ``mpiexec`` of the running interpreter, and end it for sure.

For tests of what only a real launcher shows: how a job fails, what its exit code
is, what it prints. Every launch has a limit, a folder of its own for temporary
files, and a mark in its environment by which its processes are found again,
whatever sessions and process groups the launcher put them in.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from mpimesh.comm.mpi_environment import find_mpiexec, processes_with

__all__ = ["LaunchResult", "Program", "launch", "mpi_vendor", "mpiexec", "mpiexec_environment"]

Program: TypeAlias = str | Path | Sequence[str]
"""A script's text, a script's path, or the arguments after ``python``."""

_MARK: Final = "LAUNCH_MARK"
_ROOT: Final = Path(__file__).resolve().parents[2]
_TERM_GRACE_S: Final = 2.0
_STRAY_GRACE_S: Final = 2.0
_NAP_S: Final = 0.02

_ONE_THREAD: Final = {
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
_OPENMPI: Final = {
    # More ranks than cores, not bound to them, also as root in a container.
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    # One machine: no probing of fabrics, which takes a second, and no chatter about UCX.
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,sm,tcp",
    "OMPI_MCA_osc": "^ucx",
    # It gives its ranks a terminal to write to, even where its own output is a file.
    "NO_COLOR": "1",
}


@dataclass(frozen=True, slots=True)
class LaunchResult:
    """The outcome of a launch.

    Attributes:
        returncode: Exit code of the launcher; negative if a signal ended it.
        stdout: What all ranks wrote to standard output.
        stderr: What all ranks and the launcher wrote to standard error.
        seconds: From start to end.
        timed_out: True if it was ended because it ran past its limit.
        strays: Processes that outlived the launcher, ``"<pid> <command>"``. They
            have been killed.
    """

    returncode: int
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool
    strays: tuple[str, ...]

    def __str__(self) -> str:
        ending = "ended at its limit" if self.timed_out else f"exit code {self.returncode}"
        strays = "".join(f"\nstray process {stray}" for stray in self.strays)
        return (
            f"{ending} after {self.seconds:.1f} s{strays}"
            f"\n--- stdout ---\n{self.stdout}\n--- stderr ---\n{self.stderr}"
        )


@functools.cache
def mpiexec() -> Path:
    """Return the ``mpiexec`` beside the running interpreter, else the first in ``PATH``.

    Raises:
        FileNotFoundError: If there is none.
    """
    path = find_mpiexec(os.environ)
    if path is None:
        raise FileNotFoundError(
            f"no mpiexec beside {sys.executable} nor in PATH; pip install mpich brings one"
        )
    return Path(path)


@functools.cache
def mpi_vendor() -> str:
    """Return whose ``mpiexec`` it is: ``"mpich"`` or ``"openmpi"``."""
    output = subprocess.run([mpiexec(), "--version"], capture_output=True, text=True, check=True)
    return "openmpi" if "Open MPI" in output.stdout else "mpich"


def mpiexec_environment() -> dict[str, str]:
    """Return the variables for several ranks per core on this one machine."""
    return _ONE_THREAD | (_OPENMPI if mpi_vendor() == "openmpi" else {})


def launch(
    nprocs: int,
    program: Program,
    *,
    folder: Path,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
    launcher: Sequence[str | Path] | None = None,
) -> LaunchResult:
    """Run `program` on `nprocs` ranks and wait for its end.

    Args:
        nprocs: Number of ranks.
        program: A script's text as `str`, its place as `Path`, or, as a sequence,
            the arguments after ``python``.
        folder: An existing, empty folder of this launch alone: the ranks' working
            directory, which also gets the outputs and the temporary files.
        env: Variables to add to this process's environment, of which PYTHONUNBUFFERED is left out.
        timeout_s: Limit in seconds, after which all its processes are killed.
        launcher: Command that the interpreter is appended to, for instance
            ``["srun", "-n", "4"]``; ``mpiexec -n nprocs`` if None.

    Returns:
        How it ended; neither a non-zero exit code nor the limit raises.
    """
    command: list[str | Path] = [mpiexec(), "-n", str(nprocs)]
    if launcher is not None:
        command = [*launcher]
    command += [sys.executable, *_arguments(program, folder)]
    mark = uuid.uuid4().hex
    (folder / "tmp").mkdir()
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        **mpiexec_environment(),
        "PYTHONPATH": os.pathsep.join(paths),
        "TMPDIR": str(folder / "tmp"),
        # Else print() writes its arguments one by one, and lines of several ranks mix.
        "PYTHONUNBUFFERED": "",
        _MARK: mark,
        **(env or {}),
    }
    stdout, stderr = folder / "stdout", folder / "stderr"
    start_s = time.monotonic()
    # To files: a stray process that holds a pipe would keep us waiting for its end.
    with stdout.open("wb") as out, stderr.open("wb") as err:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            timed_out = not _ends(process, timeout_s)
            if timed_out:
                # The launcher is asked first: it knows how to clean up after its ranks.
                process.terminate()
                _ends(process, _TERM_GRACE_S)
            seconds = time.monotonic() - start_s
            strays = () if timed_out else _strays(mark, process.pid)
        finally:
            _kill_all(mark, process)
    return LaunchResult(
        returncode=process.returncode,
        stdout=stdout.read_text(errors="replace"),
        stderr=stderr.read_text(errors="replace"),
        seconds=seconds,
        timed_out=timed_out,
        strays=strays,
    )


def _arguments(program: Program, folder: Path) -> list[str]:
    if isinstance(program, Path):
        return [str(program)]
    if isinstance(program, str):
        script = folder / "script.py"
        script.write_text(textwrap.dedent(program))
        return [str(script)]
    return list(program)


def _ends(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _strays(mark: str, launcher_pid: int) -> tuple[str, ...]:
    """The processes of a launch that are there a moment after its launcher has gone."""
    end_s = time.monotonic() + _STRAY_GRACE_S
    while (found := _processes(mark, launcher_pid)) and time.monotonic() < end_s:
        time.sleep(_NAP_S)
    return tuple(f"{pid} {command}" for pid, command in found.items())


def _processes(mark: str, launcher_pid: int) -> dict[int, str]:
    """The living processes that have the mark, by process id, with their commands."""
    commands: dict[int, str] = {}
    for pid in processes_with(f"{_MARK}={mark}"):
        with contextlib.suppress(OSError):  # it may vanish while it is looked at
            if pid != launcher_pid:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                commands[pid] = b" ".join(words).decode(errors="replace").strip()
    return commands


def _kill_all(mark: str, process: subprocess.Popen[bytes]) -> None:
    process.kill()
    end_s = time.monotonic() + _STRAY_GRACE_S
    # Again until none is left: between the look and the kill one may have started another.
    while (pids := [*_processes(mark, process.pid)]) and time.monotonic() < end_s:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_NAP_S)
    process.wait()
