"""Ranks killed at random moments of a run that saves all the time.

    python tests/launch/checkpoint_kills.py 200      # kills, in some minutes

A job trains a model on two or three ranks and saves it after each step, waiting or not. A random
rank is killed at a random moment, the job is started again, and so on, till it comes to its end.
Then the next job begins. After each kill every checkpoint that is seen is read as a whole, and at
the end of a job its weights must be those of a job that nobody has killed, to the bit.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import mpimesh as mm
from mpimesh.testing.launch import mpi_vendor

__all__ = ["Outcome", "kill_many"]

ROOT = Path(__file__).resolve().parents[2]
STEPS = 25
_LIMIT_S = 60.0

PROGRAM = """
import hashlib, json, os, sys, warnings
from pathlib import Path

import numpy as np

import mpimesh as mm
from mpimesh import nn, optim

folder, steps, stage, wait = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
warnings.simplefilter("error", mm.store.DamagedCheckpointWarning)
with mm.DeviceMesh("dp=-1") as mesh:
    with (folder / f"pid-{mesh.rank}.new").open("w") as file:
        file.write(str(os.getpid()))
    (folder / f"pid-{mesh.rank}.new").rename(folder / f"pid-{mesh.rank}")
    layers = [nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)]
    model = mm.fully_shard(
        nn.Sequential(layers), mesh, stage=stage, loss=nn.mse_loss, dtype="float64"
    )
    adam = mm.ParallelOptimizer(optim.AdamW(model.parameters(), lr=0.01), model, zero=stage)
    rng = np.random.default_rng(7)
    with mm.Checkpoints(folder / "run", mesh, keep=2, wait=wait == "wait") as checkpoints:
        state = {"model": model, "adam": adam, "rng": rng, "losses": []}
        state = checkpoints.load(state) or state
        for step in range(checkpoints.step + 1, steps + 1):
            x, target = rng.normal(size=(12, 16)), rng.normal(size=(12, 8))
            state["losses"].append(model.train_step(x, target, optimizer=adam))
            checkpoints.save(step, state)
    whole = model.full_state_dict()
    if mesh.rank == 0:
        digest = hashlib.sha256(b"".join(whole[name].tobytes() for name in sorted(whole)))
        (folder / "end").write_text(json.dumps([digest.hexdigest(), state["losses"]]))
"""


@dataclass(slots=True)
class Outcome:
    """The outcome of many kills.

    Attributes:
        kills: Ranks that were killed.
        jobs: Jobs that came to their end.
        checkpoints: Checkpoints that were seen after kills, and read as a whole.
        leftovers: Folders that saves had not finished.
    """

    kills: int = 0
    jobs: int = 0
    checkpoints: int = 0
    leftovers: int = 0


def kill_many(kills: int, seed: int = 0) -> Outcome:
    """Kill so many ranks; raise if a checkpoint is bad, or a job does not end as it should.

    Raises:
        RuntimeError: If so.
    """
    chance, outcome = random.Random(seed), Outcome()
    ends: dict[tuple[int, int], str] = {}
    while outcome.kills < kills:
        ranks, stage = chance.choice([(2, 0), (2, 3), (3, 1), (3, 3)])
        wait = chance.choice(["wait", "thread"])
        with tempfile.TemporaryDirectory() as name:
            if (ranks, stage) not in ends:
                ends[ranks, stage] = _run(Path(name) / "whole", ranks, stage, wait, 0.0, chance)
            folder = Path(name) / "killed"
            end = ""
            while not end:
                delay_s = chance.uniform(0.01, 0.8) if outcome.kills < kills else 0.0
                end = _run(folder, ranks, stage, wait, delay_s, chance)
                outcome.kills += delay_s > 0 and not end
                for path in (folder / "run").glob("*"):
                    if path.name.startswith("."):
                        outcome.leftovers += 1
                        continue
                    mm.load(path, verify="before")
                    outcome.checkpoints += 1
            if end != ends[ranks, stage]:
                raise RuntimeError(f"{ranks} ranks, stage {stage}, {wait}: another end: {end}")
            outcome.jobs += 1
    return outcome


def _run(
    folder: Path, ranks: int, stage: int, wait: str, delay_s: float, chance: random.Random
) -> str:
    """Run the job until it ends, or a rank is killed; return what it has left at its end."""
    folder.mkdir(exist_ok=True)
    for old in folder.glob("pid-*"):
        old.unlink()
    program = folder / "program.py"
    program.write_text(PROGRAM)
    command = [str(Path(sys.executable).parent / "mpiexec"), "-n", str(ranks)]
    command += ["--oversubscribe", "--allow-run-as-root"] if mpi_vendor() == "Open MPI" else []
    command += [sys.executable, str(program), str(folder), str(STEPS), str(stage), wait]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with (folder / "output").open("w") as output:
        job = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            if delay_s:
                _kill(folder, chance.randrange(ranks), delay_s, job)
            code = job.wait(_LIMIT_S)
        except BaseException:
            job.kill()
            raise
    end = folder / "end"
    if code == 0:
        return end.read_text()
    if not delay_s:
        raise RuntimeError((folder / "output").read_text())
    return ""


def _kill(folder: Path, rank: int, delay_s: float, job: subprocess.Popen[bytes]) -> None:
    """Kill a rank some time after it has begun."""
    file = folder / f"pid-{rank}"
    while not file.exists() and job.poll() is None:
        time.sleep(0.005)
    if job.poll() is None:
        time.sleep(delay_s)
        try:
            os.kill(int(file.read_text()), signal.SIGKILL)
        except ProcessLookupError:
            return  # it was at its end


def main() -> None:
    """Kill as many ranks as the command line says."""
    start_s = time.monotonic()
    outcome = kill_many(int(sys.argv[1]), seed=int(sys.argv[2]) if sys.argv[2:] else 0)
    print(json.dumps({**{name: getattr(outcome, name) for name in Outcome.__slots__}}))
    print(f"0 bad checkpoints, every end as without a kill; {time.monotonic() - start_s:.0f} s")


if __name__ == "__main__":
    main()
