"""Data parallelism of one PyTorch model: mpimesh beside DistributedDataParallel over gloo.

The same processes are ranks of both. Each rank has so many rows that a step without sums takes
about half as long as one of DistributedDataParallel: communication takes the other half. Both have
their gradients in buckets that are reduced while backward runs, one thread a rank, and PyTorch's
own SGD. DistributedDataParallel has what its manual says makes it fast: gradients that are views of
its buckets, a graph that is known to stay as it is, gradients set to None between steps. It runs
with its own size of buckets, two layers in each, and with a bucket for each layer, as mpimesh has
them. At the end all have the same gradients.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

import mpimesh as mm
from benchmarks import gloo
from benchmarks.measure import FULL, TINY, Effort, in_turns
from benchmarks.rows import make_rows

__all__ = ["available", "run"]

LAYERS = 7
_WIDTH, _TINY_WIDTH = 2048, 64  # 29.4 million parameters
_LAYER_MIB = 16  # of a layer's weight, which fills a bucket of that size
_MOST_ROWS = 512
_ROUNDS = 5

available = gloo.available


def run(mesh: mm.DeviceMesh, effort: Effort = FULL) -> list[dict[str, Any]]:
    """Return a row for each way; none without PyTorch."""
    if available():
        return []
    comm = mesh.group().communicator.native  # type: ignore[attr-defined]
    with gloo.opened(comm) as (torch, _):
        width = _TINY_WIDTH if effort is TINY else _WIDTH
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            *(
                one
                for _ in range(LAYERS)
                for one in (torch.nn.Linear(width, width), torch.nn.ReLU())
            )
        )
        rows = _rows(mesh, comm, model, torch)
        x = np.random.default_rng(0).normal(size=(rows * comm.size, width)).astype(np.float32)
        models = [model, *(copy.deepcopy(model) for _ in range(3))]
        ways = {
            "DistributedDataParallel over gloo": _ddp(mesh, models[0], x, torch),
            "the same, a bucket for each layer": _ddp(mesh, models[1], x, torch, _LAYER_MIB),
            "mpimesh": _own(mesh, models[2], x, torch),
            "nothing summed": _step(models[3], _mine(mesh, x, torch), torch),
        }
        timings = in_turns(comm, ways, calls=1, rounds=min(_ROUNDS, effort.rounds))
        for other in models[1:3]:
            _compare(models[0], other)
    number = sum(one.numel() for one in model.parameters())
    return make_rows(f"a step, {number:,} parameters, {rows} rows a rank", timings)


def _rows(mesh: mm.DeviceMesh, comm: MPI.Intracomm, model: Any, torch: Any) -> int:
    """Return with how many rows a step alone takes half as long as one of gloo's. Collective."""
    few, many = 16, 128
    excess_s = []  # of two steps alone over one with sums
    for rows in (few, many):
        x = np.zeros((rows * comm.size, model[0].in_features), np.float32)
        # Copies: what DistributedDataParallel hooks to a module stays there.
        alone_s = _seconds(comm, _step(copy.deepcopy(model), _mine(mesh, x, torch), torch))
        summed_s = _seconds(comm, _ddp(mesh, copy.deepcopy(model), x, torch))
        excess_s.append(2 * alone_s - summed_s)
    # Both grow evenly with the rows.
    slope_s = max(excess_s[1] - excess_s[0], 1e-9) / (many - few)
    return max(1, min(_MOST_ROWS, round(few - excess_s[0] / slope_s)))


def _seconds(comm: MPI.Intracomm, way: Callable[[], object]) -> float:
    spent_s = []
    for _ in range(7):
        comm.Barrier()
        start_s = time.perf_counter()
        way()
        spent_s.append(comm.allreduce(time.perf_counter() - start_s, MPI.MAX))
    return statistics.median(spent_s[1:])


def _ddp(
    mesh: mm.DeviceMesh, model: Any, x: Any, torch: Any, bucket_mib: int | None = None
) -> Callable[[], object]:
    replica = torch.nn.parallel.DistributedDataParallel(
        model, gradient_as_bucket_view=True, static_graph=True, bucket_cap_mb=bucket_mib
    )
    return _step(replica, _mine(mesh, x, torch), torch)


def _mine(mesh: mm.DeviceMesh, x: Any, torch: Any) -> Any:
    rows = len(x) // mesh.size
    return torch.from_numpy(x[mesh.rank * rows : (mesh.rank + 1) * rows])


def _step(replica: Any, rows: Any, torch: Any) -> Callable[[], object]:
    optimizer = torch.optim.SGD(replica.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(replica(rows), rows).backward()
        optimizer.step()

    return step


def _own(mesh: mm.DeviceMesh, model: Any, x: Any, torch: Any) -> Callable[[], object]:
    from mpimesh.interop import torch as mt

    loss = mt.wrap_loss(torch.nn.functional.mse_loss)
    replicas = mm.DataParallel(mt.wrap(model), mesh, mesh.dim_names[0], loss=loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return lambda: replicas.train_step(x, x, optimizer=optimizer)


def _compare(model: Any, other: Any) -> None:
    """Raise if two models have not come to the same gradients, up to rounding."""
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        if (one.grad - two.grad).norm() > 1e-3 * one.grad.norm():
            raise RuntimeError(f"the ways differ in the gradient of {name}")
