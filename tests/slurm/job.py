"""A training that comes back, as small as it can be: a model split over all ranks, a guard.

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
from mpimesh import nn, optim
from mpimesh.runtime.launch import Launch
from mpimesh.store import run_guard

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

    net = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, 4))
    model = mm.fully_shard(net, mesh, stage=3, loss=nn.cross_entropy)
    optimizer = mm.ParallelOptimizer(optim.AdamW(model.parameters(), lr=0.01), model)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    checkpoints = mm.Checkpoints(args.checkpoint, mesh, every=10) if args.checkpoint else None
    if checkpoints:
        state = checkpoints.load(state) or state
    first = state["step"]
    for step in range(first + 1, args.steps + 1):
        time.sleep(0 if restarts else args.step_s)
        rng = np.random.default_rng(step)
        x, y = rng.normal(size=(12, 16)).astype("float32"), rng.integers(0, 4, 12)
        model.train_step(x, y)
        optimizer.step()
        if args.ready and step == first + 4:
            args.ready.touch()
        state["step"] = step
        stopping = guard.stopping(mesh)
        if checkpoints:
            checkpoints.save(step, state, force=stopping or step == args.steps)
        if stopping:
            break
    if mesh.rank == 0:
        say(restarts=restarts, first=first, last=state["step"], reason=guard.reason)
guard.exit()
