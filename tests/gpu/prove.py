"""Prove on a machine with a GPU what mpimesh does there: `make test-gpu`, or by itself

    python tests/gpu/prove.py [facts tests bench programs example ucx]

Every part has its own time limit and its logs in out/gpu; what was found stands in
out/gpu/report.txt. The exit code is 0 if all that ran was right, and a GPU was there to run on.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHON = sys.executable
PARTS = ("facts", "tests", "bench", "programs", "example")
TOLD = re.compile(
    r"\d+ (passed|failed|error)|WRONG|^E  |SKIPPED|Error|all_reduce of|rows? of|accuracy"
)
_NOTHING_RAN = re.compile(r"^\d+ skipped", re.MULTILINE)


class Proof:
    """Runs programs, and keeps what they say.

    Attributes:
        failed: What did not end well.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.failed: list[str] = []
        self._report = folder / "report.txt"
        self._report.write_text("")
        beside = Path(PYTHON).with_name("mpiexec")
        self._mpiexec = str(beside) if beside.exists() else "mpiexec"

    def say(self, text: str) -> None:
        """Print a line, and put it into the report."""
        print(text, flush=True)
        with self._report.open("a") as file:
            file.write(text + "\n")

    def run(
        self, name: str, command: Sequence[str], *, limit_s: float, ranks: int = 0, lines: int = 12
    ) -> str:
        """Run a program; return all that it said.

        Args:
            name: Of the log.
            command: The program.
            limit_s: After that many seconds it is ended.
            ranks: How many, under mpiexec; 0 for a plain program.
            lines: How many of the lines that tell something the report gets; 0 for all lines.
        """
        if ranks:
            name, command = f"{name}-{ranks}", [self._mpiexec, "-n", str(ranks), *command]
        log, start_s, ended = self.folder / f"{name}.log", time.monotonic(), ""
        variables = {**os.environ, "PYTHONUNBUFFERED": "1"}
        variables["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
        )
        for threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            variables[threads] = "1"
        try:
            with log.open("w") as file:
                code = subprocess.run(
                    command,
                    cwd=ROOT,
                    env=variables,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    timeout=limit_s,
                    check=False,
                ).returncode
        except subprocess.TimeoutExpired:
            code, ended = -1, f", ended after {limit_s:g} s"
        except OSError as error:
            code, ended = -1, f", not started: {error}"
        text = log.read_text(errors="replace")
        if code and name != "nvidia-smi":
            self.failed.append(name)
        self.say(f"\n== {name}: exit {code}{ended}, {time.monotonic() - start_s:.0f} s ==")
        every = [line.rstrip()[:200] for line in text.splitlines()]
        found = [line for line in every if lines and TOLD.search(line)]
        for line in (found or every)[-lines:]:
            self.say(line)
        return text


def prove(parts: Sequence[str], folder: Path) -> int:
    """Run the parts; return the exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    proof = Proof(folder)
    proof.say(
        f"mpimesh on a GPU, {time.strftime('%Y-%m-%d %H:%M')}, Python {sys.version.split()[0]}"
    )
    pytest = [PYTHON, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--with-mpi", "--deep"]
    doctor = [PYTHON, "-m", "mpimesh", "doctor"]
    if "facts" in parts:
        proof.run("nvidia-smi", ["nvidia-smi"], limit_s=30, lines=0)
        proof.run("doctor", doctor, limit_s=120, ranks=2, lines=0)
    for ranks in (1, 2, 4):
        if "tests" in parts:
            text = proof.run("tests", [*pytest, "-rs", "tests/gpu"], limit_s=240, ranks=ranks)
            if _NOTHING_RAN.search(text):
                proof.failed.append(f"tests-{ranks}: nothing ran")
        if "bench" in parts:
            bench = [PYTHON, "-m", "benchmarks.worker", "device"]
            proof.run("bench", bench, limit_s=150, ranks=ranks, lines=4)
        if "programs" in parts:
            programs = [PYTHON, "-m", "tests.gpu.programs"]
            proof.run("programs", programs, limit_s=150, ranks=ranks, lines=8)
    for ranks, mesh in ((1, "dp=1"), (2, "dp=2"), (2, "pp=2"), (4, "dp=2,pp=2")):
        if "example" in parts:
            options = ["--device", "gpu", "--mesh", mesh, "--epochs", "10", "--seed", "0"]
            name, program = f"example-{mesh.replace(',', '-')}", "examples/train_digits.py"
            proof.run(name, [PYTHON, program, *options], limit_s=150, ranks=ranks, lines=4)
    if "ucx" in parts:
        _prove_ucx(proof, doctor, pytest)
    proof.say(
        "\nall of it was right" if not proof.failed else f"\nNOT RIGHT: {', '.join(proof.failed)}"
    )
    return int(bool(proof.failed))


def _prove_ucx(proof: Proof, doctor: Sequence[str], pytest: Sequence[str]) -> None:
    """Let the MPI of a wheel load a UCX with CUDA, as `mpimesh ucx-env` says."""
    text = proof.run("ucx-env", [PYTHON, "-m", "mpimesh", "ucx-env"], limit_s=60)
    chosen = dict(re.findall(r"^export (\w+)=['\"]?(.*?)['\"]?$", text, re.MULTILINE))
    before = dict(os.environ)
    os.environ.update(chosen)
    try:
        proof.run("ucx-doctor", doctor, limit_s=120, ranks=2, lines=0)
        tests = [*pytest, "-rs", "tests/gpu/test_device_strategies.py"]
        proof.run("ucx-tests", tests, limit_s=240, ranks=2)
    finally:
        os.environ.clear()
        os.environ.update(before)


if __name__ == "__main__":
    unknown = {*sys.argv[1:]} - {*PARTS, "ucx"}
    if unknown:
        sys.exit(
            f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}, ucx"
        )
    sys.exit(prove(sys.argv[1:] or PARTS, ROOT / "out" / "gpu"))
