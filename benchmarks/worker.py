"""Run the benchmarks of one world size on every rank; rank 0 prints the tables as JSON.

`python -m benchmarks.worker [--tiny] [suite ...] [--operations ...] [--sizes ...]`, under mpiexec.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial

import numpy as np
from mpi4py import MPI

import mpimesh as mm
from benchmarks import (
    all_reduce,
    array_files,
    buckets,
    checkpoints,
    device,
    gloo,
    gpt,
    messages,
    minilm,
    operators,
    pipeline,
    recompute,
    redistribute,
    sharded,
    shared,
    step,
    torch_ddp,
    training,
)
from benchmarks.measure import FULL, TINY
from benchmarks.rows import size_text

SUITES = {
    "all_reduce": all_reduce.run,
    "shared": shared.run,
    "messages": messages.run,
    "buckets": buckets.run,
    "pipeline": pipeline.run,
    "training": training.run,
    "redistribute": redistribute.run,
    "operators": operators.run,
    "recompute": recompute.run,
    "step": step.run,
    "array_files": array_files.run,
    "minilm": minilm.run,
    "sharded": sharded.run,
    "checkpoints": checkpoints.run,
    "gpt": gpt.run,
    "gloo": gloo.run,
    "torch_ddp": torch_ddp.run,
    "device": device.run,
}


def main(arguments: list[str]) -> None:
    """Run the suites that are named, or all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("suites", nargs="*")
    parser.add_argument("--tiny", action="store_true")
    shared.add_choices(parser)
    options = parser.parse_args(arguments)
    effort = TINY if options.tiny else FULL
    chosen = {"operations": options.operations, "sizes_bytes": options.sizes}
    suites = SUITES | {"shared": partial(shared.run, **chosen)}
    with mm.DeviceMesh("dp=-1") as mesh:
        tables = {name: suites[name](mesh, effort) for name in options.suites or suites}
        if mesh.rank == 0:
            vendor, version = MPI.get_vendor()
            mpi = f"{vendor} {'.'.join(map(str, version))}"
            report = {"mpi": mpi, "numpy": np.__version__, "algorithms": _algorithms(mesh)}
            print(json.dumps(report | {"tables": tables}))


def _algorithms(mesh: mm.DeviceMesh) -> str:
    """Say which collectives go another way than by MPI's messages."""
    ways = [
        f"{row.operation}, {row.memory}, by {row.algorithm} from {size_text(row.from_bytes)}"
        for row in mesh.group().algorithms()
        if row.memory != "device" and row.algorithm != "mpi"
    ]
    return ", ".join(ways) or "all by messages"


if __name__ == "__main__":
    main(sys.argv[1:])
