"""A job that keeps the requeue protocol, as small as it can be.

Counts steps in a file per rank, so that a lost or repeated step shows. Prints one
JSON line per rank about where it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

from mpimesh import exit_all

STOP_CODE = 85

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint", type=Path)
parser.add_argument("--steps", type=int, default=1)
parser.add_argument("--step-s", type=float, default=0.05)
parser.add_argument("--fail-rank", type=int, default=-1)
parser.add_argument("--ready", type=Path, help="a file to write once the handlers stand")
args = parser.parse_args()

stop = np.zeros(1, np.int32)


def on_signal(_number: int, _frame: object) -> None:
    stop[0] = 1


signal.signal(signal.SIGUSR1, on_signal)
signal.signal(signal.SIGTERM, on_signal)

comm = MPI.COMM_WORLD
keys = ["SLURM_LOCALID", "SLURMD_NODENAME", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"]
where = {key: os.environ.get(key) for key in keys}
print(json.dumps({"rank": comm.rank, "size": comm.size} | where), flush=True)

if comm.rank == args.fail_rank:
    os._exit(3)
state = args.checkpoint / f"rank{comm.rank}.json" if args.checkpoint else None
done = json.loads(state.read_text()) if state and state.exists() else []
if args.ready:
    comm.Barrier()
    args.ready.touch()
first = len(done)
for step in range(first, args.steps):
    time.sleep(args.step_s)
    agreed = np.zeros(1, np.int32)
    comm.Allreduce(stop, agreed, MPI.MAX)
    done.append([step, int(os.environ.get("SLURM_RESTART_COUNT", "0"))])
    if agreed[0]:
        break
if state:
    state.write_text(json.dumps(done))
code = 0 if len(done) >= args.steps else STOP_CODE
exit_all(code)
