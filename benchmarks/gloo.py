"""torch.distributed's gloo beside mpimesh: gradients, and all-reduce of every size.

The same processes are ranks of both, so that the ratios are of one run. Rows need PyTorch, which
mpimesh does not depend on; without, there are none. The first way is gloo at its best: gradients
in one flat bucket, as DistributedDataParallel has them.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from mpi4py import MPI

import mpimesh as mm
from benchmarks import buckets
from benchmarks.measure import FULL, Effort, in_turns
from benchmarks.rows import make_rows, size_text

__all__ = ["available", "opened", "run"]

SIZES_BYTES = (8, 1 << 10, 8 << 10, 64 << 10, 1 << 20, 16 << 20)
BUCKET_BYTES = 64 << 20
_MOST_CALLS = 50
_MOST_ROUNDS = 9


def available() -> str:
    """Return why there is nothing to be measured, or nothing."""
    if importlib.util.find_spec("torch") is None:
        return (
            "this Python has no torch; pip install torch==2.13.0, "
            "or name a Python that has it, mpi4py and an MPI in TORCH_PYTHON"
        )
    return ""


def run(mesh: mm.DeviceMesh, effort: Effort = FULL) -> list[dict[str, Any]]:
    """Return a row for each way; none without PyTorch."""
    if available():
        return []
    comm = mesh.group().communicator.native  # type: ignore[attr-defined]
    with opened(comm) as (torch, distributed):
        rows = _gradients(mesh, comm, effort, torch, distributed)
        for nbytes in effort.sizes((*SIZES_BYTES, BUCKET_BYTES)):
            rows += _all_reduce(mesh, comm, nbytes, effort, torch, distributed)
    return rows


@contextmanager
def opened(comm: MPI.Intracomm) -> Iterator[tuple[Any, Any]]:
    """Make the ranks of `comm` ranks of gloo, too. Collective."""
    # All are on this machine, and its loopback is the fastest that gloo can take there.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:  # rank 0's is used: it outlives the others' use of it
        file = Path(comm.bcast(folder)) / "store"
        store = distributed.FileStore(str(file), comm.size)
        distributed.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)
        yield torch, distributed
        distributed.destroy_process_group()
        comm.Barrier()


def _gradients(
    mesh: mm.DeviceMesh, comm: MPI.Intracomm, effort: Effort, torch: Any, distributed: Any
) -> list[dict[str, Any]]:
    single = [torch.zeros(buckets.SHAPE) for _ in range(buckets.GRADIENTS)]
    flat = torch.zeros(buckets.GRADIENTS * buckets.SHAPE[0])
    own = buckets.make_buckets(mesh)

    def one_by_one() -> None:
        for gradient in single:
            distributed.all_reduce(gradient)

    def all_started() -> None:
        for work in [distributed.all_reduce(gradient, async_op=True) for gradient in single]:
            work.wait()

    def in_buckets() -> None:
        own.begin()
        own.synchronize()

    ways = {
        "gloo, one flat bucket": lambda: distributed.all_reduce(flat),
        "gloo, one by one": one_by_one,
        "gloo, all at once": all_started,
        "GradientBuckets": in_buckets,
    }
    return make_rows(buckets.WHAT, in_turns(comm, ways, calls=1, rounds=_rounds(effort)))


def _all_reduce(
    mesh: mm.DeviceMesh,
    comm: MPI.Intracomm,
    nbytes: int,
    effort: Effort,
    torch: Any,
    distributed: Any,
) -> list[dict[str, Any]]:
    group = mesh.group()
    size = nbytes // 4
    # Zeros: their sums stay zeros however often they are added up.
    tensor, raw, ordinary = torch.zeros(size), np.zeros(size, "f4"), np.zeros(size, "f4")
    shared = mesh.shared_empty(size, np.float32)
    shared[...] = ordinary[...] = raw[...] = 0  # takes pages
    ways = {
        "gloo": lambda: distributed.all_reduce(tensor),
        "Allreduce in place": lambda: comm.Allreduce(MPI.IN_PLACE, raw),
        "ordinary arrays": lambda: group.all_reduce(ordinary, out=ordinary).resolve(),
        "shared arrays": lambda: group.all_reduce(shared, out=shared).resolve(),
    }
    calls = min(_MOST_CALLS, effort.calls(nbytes))
    what = f"all-reduce, {size_text(nbytes)}"
    return make_rows(what, in_turns(comm, ways, calls=calls, rounds=_rounds(effort)))


def _rounds(effort: Effort) -> int:
    return min(_MOST_ROUNDS, effort.rounds)
