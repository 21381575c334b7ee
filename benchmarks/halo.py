"""Elements around the blocks of a grid, against what one writes by hand with mpi4py.

By hand, each rank sends its first and last rows to its neighbours with two `Sendrecv`, and on a
grid of two dims then its columns, with the corners, by way of two more and of packed buffers. Both
ways are periodic, one element wide, in float64, and both write into padded arrays that are there
already: nothing is worked out in between.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt
from typing import Any

import numpy as np
from mpi4py import MPI

import mpimesh as mm
from benchmarks.measure import Effort, in_turns
from benchmarks.rows import make_rows

__all__ = ["run"]

SIDES = (64, 256, 1024)
_ITEM_BYTES = 8
_MOST_CALLS = 300


def run(comm: MPI.Intracomm, effort: Effort) -> list[dict[str, Any]]:
    """Return a row for each grid, size of a block, and way. Collective."""
    rows: list[dict[str, Any]] = []
    edge = isqrt(comm.size)
    grids = [(comm.size, 1)] + ([(edge, edge)] if edge > 1 and edge * edge == comm.size else [])
    for grid in grids:
        cart = comm.Create_cart(grid, periods=(True, True))
        with mm.DeviceMesh(f"a={grid[0]},b={grid[1]}") as mesh:
            for side in SIDES:
                if effort.sizes([side * side * _ITEM_BYTES]):
                    rows += _around(mesh, cart, grid, side, effort)
        cart.Free()
    return rows


def _around(
    mesh: mm.DeviceMesh, cart: MPI.Cartcomm, grid: tuple[int, int], side: int, effort: Effort
) -> list[dict[str, Any]]:
    two = grid[1] > 1
    whole = np.arange(float(grid[0] * side * grid[1] * side)).reshape(grid[0] * side, -1)
    x = mm.distribute(whole, mesh, "S0, S1" if two else "S0, R")
    halo = mm.Halo(x, width=1 if two else {0: 1})
    field = halo.field(x)
    padded = field.padded.copy()
    padded[halo.interior] = x.local
    by_hand = _by_hand(cart, padded, columns=two)
    by_hand()
    assert np.array_equal(halo.exchange(field), padded)
    ways: dict[str, Callable[[], object]] = {
        "Sendrecv": by_hand,
        "mpimesh": lambda: halo.exchange(field),
    }
    calls = min(_MOST_CALLS, effort.most_calls)
    timings = in_turns(mesh.group().communicator.native, ways, calls=calls, rounds=effort.rounds)  # type: ignore[attr-defined]
    dims = "2 dims" if two else "1 dim"
    return make_rows(f"halo around {side} x {side} float64, grid of {dims}", timings)


def _by_hand(cart: MPI.Cartcomm, padded: Any, *, columns: bool) -> Callable[[], None]:
    """Return what fills the halo of a padded array."""
    up, down = cart.Shift(0, 1)
    left, right = cart.Shift(1, 1)
    out, came = np.empty(len(padded)), np.empty(len(padded))

    def exchange() -> None:
        cart.Sendrecv(padded[1], up, recvbuf=padded[-1], source=down)
        cart.Sendrecv(padded[-2], down, recvbuf=padded[0], source=up)
        if columns:
            out[...] = padded[:, 1]
            cart.Sendrecv(out, left, recvbuf=came, source=right)
            padded[:, -1] = came
            out[...] = padded[:, -2]
            cart.Sendrecv(out, right, recvbuf=came, source=left)
            padded[:, 0] = came

    return exchange
