"""A job that comes back, as small as it can be: weights, steps, a guard, one file.

Each rank prints a line of JSON about where it runs, and rank 0 one about each run. The first run
takes its time, so that it is stopped before it is done.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import numpy as np

import mpimesh as mm
from mpimesh.runtime.launch import Launch
from mpimesh.store import run_guard
from mpimesh.store.files import replaced

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint", type=Path)
parser.add_argument("--steps", type=int, default=1)
parser.add_argument("--step-s", type=float, default=0.0, help="for each step of the first run")
parser.add_argument("--fail-rank", type=int, default=-1)
parser.add_argument("--ready", type=Path, help="a file to write once some steps are done")
parser.add_argument("--margin-s", type=float)
args = parser.parse_args()

guard = run_guard(margin_s=args.margin_s)
restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))


def say(**facts: object) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")  # in one piece: the ranks write at the same time
    sys.stdout.flush()


if Launch.detect().rank == args.fail_rank:
    from mpi4py import MPI  # noqa: F401  -- the others wait for it in a mesh, no longer in MPI_Init

    os._exit(3)
with mm.DeviceMesh("dp=-1") as mesh:
    keys = ["SLURM_LOCALID", "SLURMD_NODENAME", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"]
    where = {key: os.environ.get(key) for key in keys}
    say(rank=mesh.rank, size=mesh.world_size, **where)

    path = args.checkpoint / "weights.npz" if args.checkpoint else None
    weights, first = np.linspace(-1, 1, 1000), 0
    if path and path.exists():
        with np.load(path) as saved:
            weights, first = saved["weights"], int(saved["step"])
    step = first
    for step in range(first, args.steps):
        time.sleep(0 if restarts else args.step_s)
        draw = np.random.default_rng([step, mesh.rank]).normal(size=weights.size)
        weights -= 0.1 * mesh.group().all_reduce(draw * weights, op="mean").resolve()
        if args.ready and step == first + 3:
            args.ready.touch()
        if guard.stopping(mesh):
            break
    if mesh.rank == 0:
        if path:
            with replaced(path) as fresh, fresh.open("wb") as file:
                np.savez(file, weights=weights, step=step + 1)
        say(restarts=restarts, first=first, last=step, reason=guard.reason)
guard.exit()
