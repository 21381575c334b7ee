"""Time of a job's first mesh beside that of its imports, and of MPI's `Dup` and two `Split`.

The ranks may be more than the cores: then the time is that of all their work, and what one rank
does while it waits delays the others. The processor time of a rank is steadier.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.measure import FULL, Effort
from mpimesh.testing.launch import launch

__all__ = ["RANKS", "run"]

RANKS = (16, 32, 64)
_LIMIT_S = 300.0
_STEPS = ("import numpy, mpi4py.MPI, mpimesh", "Dup and two Split", "the first mesh", "another")

_PROGRAM = """
import time
marks = [(time.perf_counter(), time.process_time())]

def mark():
    world.Barrier()
    marks.append((time.perf_counter(), time.process_time()))

import numpy, mpi4py, mpimesh as mm
from mpi4py import MPI
world = MPI.COMM_WORLD
mark()
copy = world.Dup()
copy.Split(0, world.rank), copy.Split(world.rank, 0)
mark()
first = mm.DeviceMesh("a=1,b=-1")
mark()
second = mm.DeviceMesh("a=1,b=-1")
mark()
spent = numpy.diff(numpy.array(marks), axis=0)
total = numpy.zeros_like(spent)
world.Reduce(spent, total)
second.close(), first.close()
if world.rank == 0:
    import json
    print(json.dumps((total / world.size).tolist()))
"""


def run(ranks: int, effort: Effort = FULL) -> list[dict[str, Any]]:
    """Return a row for each step of `ranks` processes, and its processor time. Local."""
    spent: list[list[list[float]]] = []
    for number in range(max(3, effort.rounds // 3)):
        with TemporaryDirectory() as folder:
            # As installed: with compiled modules, whatever this shell says about writing them.
            env = {"PYTHONDONTWRITEBYTECODE": ""}
            result = launch(ranks, _PROGRAM, folder=Path(folder), env=env, timeout_s=_LIMIT_S)
        if result.returncode:
            raise SystemExit(str(result))
        if number:  # the first round compiles
            spent.append(json.loads(result.stdout.strip().splitlines()[-1]))
    rows = []
    for kind, words in enumerate(("", ", processor time of a rank")):
        times = [[one[step][kind] for one in spent] for step in range(len(_STEPS))]
        first = times[0]
        rows += [
            {
                "what": f"{what}{words}",
                "us": statistics.median(own) * 1e6,
                "ratio": statistics.median(a / b for a, b in zip(own, first, strict=True)),
                "over_us": statistics.median(a - b for a, b in zip(own, first, strict=True)) * 1e6,
            }
            for what, own in zip(_STEPS, times, strict=True)
        ]
    return rows
