"""Arrays carried from layout to layout, against what one writes by hand with mpi4py.

By hand, rows become columns by packing a block for each rank and one `Alltoall` into memory that
is there already; what comes is the new block, in order. On 2 x 2 ranks, blocks that swap both axes
move between two ranks only: there one writes a `Sendrecv`.

`mpimesh` makes a new array each time. `mpimesh, messages` is a mesh whose ranks share no memory.
With PyTorch in this Python its DTensor does the same over gloo.

    limit_s = 2 * bytes of a block / bandwidth of a copy of a block, with all ranks copying

The products are of two matrices whose rows are split, on one BLAS thread for each rank, against
NumPy on one core, with the other ranks idle.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isqrt
from typing import Any

import numpy as np
from mpi4py import MPI

import mpimesh as mm
from benchmarks import gloo, halo
from benchmarks.measure import FULL, Effort, in_turns
from benchmarks.rows import make_rows, size_text

__all__ = ["run"]

SIDES = (64, 512, 2048, 4096)
PRODUCT_SIDE = 2048
_COPY = "copy"
_ITEM_BYTES = 8


def run(mesh: mm.DeviceMesh, effort: Effort = FULL) -> list[dict[str, Any]]:
    """Return a row for each size and way."""
    comm = mesh.group().communicator.native  # type: ignore[attr-defined]
    rows: list[dict[str, Any]] = []
    with _without_memory(mesh.size) as apart:
        for side in SIDES:
            if effort.sizes([side * side * _ITEM_BYTES]) and side % mesh.size == 0:
                rows += _rows_to_columns(mesh, apart, comm, side, effort)
    edge = isqrt(mesh.size)
    if edge > 1 and edge * edge == mesh.size:
        with mm.DeviceMesh(f"a={edge},b={edge}") as grid:
            for side in SIDES:
                if effort.sizes([side * side * _ITEM_BYTES]):
                    rows += _axes_swapped(grid, comm, side, effort)
    return rows + halo.run(comm, effort) + _products(mesh, comm, effort)


def _rows_to_columns(
    mesh: mm.DeviceMesh, apart: mm.DeviceMesh, comm: MPI.Intracomm, side: int, effort: Effort
) -> list[dict[str, Any]]:
    whole = np.arange(float(side * side)).reshape(side, side)
    x = mm.distribute(whole, mesh, "S0")
    y = mm.distribute(whole, apart, "S0")
    block, columns = x.local.copy(), side // mesh.size
    packed = np.empty((mesh.size, columns, columns))
    came = np.empty((side, columns))

    def by_hand() -> None:
        for rank in range(mesh.size):
            packed[rank] = block[:, rank * columns : (rank + 1) * columns]
        comm.Alltoall(packed, came)

    by_hand()
    for found in (x.redistribute("S1").local, y.redistribute("S1").local):
        assert np.array_equal(found, came)
    ways: dict[str, Callable[[], object]] = {
        "pack + Alltoall": by_hand,
        "mpimesh": lambda: x.redistribute("S1"),
        "mpimesh, messages": lambda: y.redistribute("S1"),
    }
    return _timed(f"{side} x {side} float64, S0 to S1", ways, comm, block, effort, "dp", "S0", "S1")


def _axes_swapped(
    grid: mm.DeviceMesh, comm: MPI.Intracomm, side: int, effort: Effort
) -> list[dict[str, Any]]:
    whole = np.arange(float(side * side)).reshape(side, side)
    x = mm.distribute(whole, grid, "S0, S1")
    block = x.local.copy()
    came = np.empty_like(x.redistribute("S1, S0").local)
    partner = grid.rank_at(grid.coord("b"), grid.coord("a"))

    def by_hand() -> None:
        comm.Sendrecv(block, partner, recvbuf=came, source=partner)

    by_hand()
    assert np.array_equal(x.redistribute("S1, S0").local, came)
    ways: dict[str, Callable[[], object]] = {
        "Sendrecv": by_hand,
        "mpimesh": lambda: x.redistribute("S1, S0"),
    }
    what = f"{side} x {side} float64 on 2 x 2, [S0, S1] to [S1, S0]"
    return _timed(what, ways, comm, block, effort, "a,b", "S0,S1", "S1,S0")


def _timed(
    what: str,
    ways: dict[str, Callable[[], object]],
    comm: MPI.Intracomm,
    block: Any,
    effort: Effort,
    *torch_layouts: str,
) -> list[dict[str, Any]]:
    source, target = np.ones_like(block), np.zeros_like(block)

    def copy() -> None:
        target[...] = source

    calls = effort.calls(block.nbytes * comm.size)
    with _torch_way(comm, block, *torch_layouts) as torch_way:
        all_ways = {**ways, **torch_way, _COPY: copy}
        timings = in_turns(comm, all_ways, calls=calls, rounds=effort.rounds)
    return make_rows(f"{what}, {size_text(block.nbytes)} a rank", timings, copy=_COPY)


def _products(mesh: mm.DeviceMesh, comm: MPI.Intracomm, effort: Effort) -> list[dict[str, Any]]:
    side = PRODUCT_SIDE if effort is FULL else 64
    rng = mm.Random(1)
    a, b = (rng.normal((side, side), mesh, "S0") for _ in range(2))
    whole_a, whole_b = a.full(), b.full()
    found = (a @ b).full()
    np.testing.assert_allclose(found, whole_a @ whole_b, rtol=1e-9, atol=1e-9)

    def alone() -> None:
        if mesh.rank == 0:
            whole_a @ whole_b
        # The others sleep meanwhile, so that the core is rank 0's.
        mesh.barrier()

    ways = {"NumPy on one core": alone, "mpimesh": lambda: a @ b}
    timings = in_turns(comm, ways, calls=1, rounds=effort.rounds)
    return make_rows(f"product of two {side} x {side}, rows split", timings)


@contextmanager
def _without_memory(size: int) -> Iterator[mm.DeviceMesh]:
    """Make a mesh whose ranks exchange messages only. Collective."""
    before = os.environ.get("MPIMESH_NODE_SHARED")
    os.environ["MPIMESH_NODE_SHARED"] = "never"
    try:
        mesh = mm.DeviceMesh(f"dp={size}")
    finally:
        if before is None:
            del os.environ["MPIMESH_NODE_SHARED"]
        else:
            os.environ["MPIMESH_NODE_SHARED"] = before
    with mesh:
        yield mesh


@contextmanager
def _torch_way(
    comm: MPI.Intracomm, block: Any, dims: str = "", source: str = "", target: str = ""
) -> Iterator[dict[str, Callable[[], object]]]:
    """Return PyTorch's way to carry the same block, if there is PyTorch. Collective."""
    if gloo.available():
        yield {}
        return
    with gloo.opened(comm) as (torch, _):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        names = tuple(dims.split(","))
        shape = (comm.size,) if len(names) == 1 else (isqrt(comm.size),) * 2
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        before, after = (
            [Shard(int(spec[1:])) for spec in text.split(",")] for text in (source, target)
        )
        x = DTensor.from_local(torch.from_numpy(block), mesh, before)
        yield {"torch over gloo": lambda: x.redistribute(mesh, after)}
