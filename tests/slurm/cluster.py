"""A one-machine Slurm for tests: start, submit, wait, look, stop."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SCRIPT = Path(__file__).with_name("tinyslurm.sh")
DAEMONS = ("munged", "slurmctld", "slurmd")
NODES = 4
_PATH = os.pathsep.join([os.environ["PATH"], "/usr/sbin"])
_ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}


def missing() -> list[str]:
    """What this machine lacks for a Slurm of its own."""
    lacks = [daemon for daemon in DAEMONS if shutil.which(daemon, path=_PATH) is None]
    return lacks + (["root"] if os.geteuid() != 0 else [])


@dataclass(frozen=True)
class Job:
    """A job as Slurm tells of it."""

    state: str
    exit_code: int
    restarts: int
    output: str


class Slurm:
    """Four nodes of two CPUs and two make-believe GPUs. A context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            **{name: text for name, text in os.environ.items() if not name.startswith("SLURM")},
            "PATH": _PATH,
            "SLURM_CONF": str(folder / "slurm.conf"),
            # One machine without a fabric: Open MPI need not look for one.
            "OMPI_MCA_pml": "ob1",
            "OMPI_MCA_btl": "self,tcp",
            # Over UCX, MPICH starts by sending 4 KiB of its memory by PMI, and Slurm's PMI-2 cuts
            # long lines: whether a job starts depends on what lay there. Over OFI it is 16 bytes.
            "MPIR_CVAR_CH4_NETMOD": "ofi",
            # Else print() writes its arguments one by one, and lines of several ranks mix.
            "PYTHONUNBUFFERED": "",
        }

    def __enter__(self) -> Slurm:
        self._control("start", str(_free_ports(1 + NODES)), str(NODES))
        return self

    def __exit__(self, *_: object) -> None:
        self._control("stop")

    def run(self, *command: str | Path) -> str:
        """Run one of Slurm's commands and return what it wrote."""
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=True, timeout=60
        ).stdout

    def submit(
        self,
        script: Path,
        *arguments: str | Path,
        options: Sequence[str] = (),
        folder: Path,
        env: Mapping[str, str],
    ) -> int:
        """Submit `script` from `folder` with sbatch's `options`, and return the job's number."""
        command = ["sbatch", "--parsable", "--output=%j.out", *options, script, *arguments]
        done = subprocess.run(
            command,
            env={**self.environment, **env},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    def wait(self, job: int, *, folder: Path, timeout_s: float = 60, task: str = "") -> Job:
        """Wait for the end of `job`, which `folder` was submitted from.

        Args:
            job: Its number.
            folder: Where it was submitted from.
            timeout_s: Longest wait.
            task: The name of a task of an array, as in ``7_1``; its number may be the array's, too.
        """
        end_s = time.monotonic() + timeout_s
        while (fields := self.fields(task or job))["JobState"] not in _ENDED:
            assert time.monotonic() < end_s, f"{fields}\n{self._output(job, folder)}"
            time.sleep(0.2)
        return Job(
            state=fields["JobState"],
            exit_code=int(fields["ExitCode"].partition(":")[0]),
            restarts=int(fields["Restarts"]),
            output=self._output(job, folder),
        )

    def fields(self, job: int | str) -> dict[str, str]:
        """Return what Slurm says of a job."""
        words = self.run("scontrol", "--oneliner", "show", "job", str(job)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def _output(self, job: int, folder: Path) -> str:
        path = folder / f"{job}.out"
        return path.read_text() if path.exists() else ""

    def _control(self, action: str, *arguments: str) -> None:
        done = subprocess.run(
            [SCRIPT, action, self.folder, *arguments],
            capture_output=True,
            text=True,
            timeout=90,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def _free_ports(count: int) -> int:
    """The first of `count` ports in a row that nobody listens on."""
    for first in range(16800, 32000, 50):
        with socket.socket() as probe:
            if all(probe.connect_ex(("127.0.0.1", first + k)) for k in range(count)):
                return first
    raise OSError("no free ports for a Slurm")
