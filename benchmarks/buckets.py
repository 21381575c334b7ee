"""500 gradients of 4 KiB: reduced one by one by mpi4py, and in buckets by mpimesh."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

import mpimesh as mm
from benchmarks.measure import FULL, Effort, in_turns
from benchmarks.rows import make_rows
from mpimesh.nn import Constant, Parameter
from mpimesh.parallel import GradientBuckets

GRADIENTS = 500
SHAPE = (1024,)
WHAT = f"{GRADIENTS} gradients of 4 KiB"


def run(mesh: mm.DeviceMesh, effort: Effort = FULL) -> list[dict[str, Any]]:
    """Return a row for each way."""
    group = mesh.group()
    comm = group.communicator.native  # type: ignore[attr-defined]
    single = [np.zeros(SHAPE, np.float32) for _ in range(GRADIENTS)]
    buckets = make_buckets(mesh)
    computed = np.zeros(SHAPE, np.float32)

    def one_by_one() -> None:
        for gradient in single:
            comm.Allreduce(MPI.IN_PLACE, gradient)

    def all_started() -> None:
        requests = [comm.Iallreduce(MPI.IN_PLACE, gradient) for gradient in single]
        MPI.Request.Waitall(requests)

    def in_buckets() -> None:
        # The gradients are views of the buckets: whatever wrote them, they lie there.
        buckets.begin()
        buckets.synchronize()

    def added_one_by_one() -> None:
        for gradient in single:
            np.add(gradient, computed, out=gradient)
            comm.Allreduce(MPI.IN_PLACE, gradient)

    def added_in_buckets() -> None:
        buckets.begin()
        for parameter in reversed(buckets.parameters):
            parameter.accumulate(computed)
        buckets.synchronize()

    ways = {
        "Allreduce, one by one": one_by_one,
        "Iallreduce, all at once": all_started,
        "GradientBuckets": in_buckets,
        "added up, and Allreduce one by one": added_one_by_one,
        "added up in GradientBuckets": added_in_buckets,
    }
    timings = in_turns(comm, ways, calls=min(3, effort.most_calls), rounds=effort.rounds)
    return make_rows(WHAT, timings)


def make_buckets(mesh: mm.DeviceMesh) -> GradientBuckets:
    """Return the gradients of as many parameters, in buckets. Collective."""
    parameters = [Parameter(f"p{k}", SHAPE, Constant(0.0)) for k in range(GRADIENTS)]
    for k, parameter in enumerate(parameters):
        parameter.materialize(seed=0, index=k, dtype=np.float32)
    return GradientBuckets(parameters, mesh.group(), mesh=mesh)
