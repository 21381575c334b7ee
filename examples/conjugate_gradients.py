"""Conjugate gradients for Poisson's equation, three ways, and what an iteration of each costs.

    OMP_NUM_THREADS=1 mpiexec -n 2 python examples/conjugate_gradients.py
    python examples/conjugate_gradients.py --points 2048

                  rows of the grid
    rank 0          0-31                 an iteration is the five-point stencil, for which a row
    rank 1         32-63                 of each neighbour is needed, and two scalar products

The same iterations are written as a NumPy user would, on split arrays; on the blocks of the ranks,
with a halo and a reduction that are planned once; and with mpi4py by hand. All three find the same
solution. On small blocks the price of a call decides, on large ones the memory. It prints:

    64 x 64 points on 2 rank(s): residual 9.6e-10 after 165 iterations, in each way
    split arrays        1358 us an iteration
    blocks and plans      58 us an iteration
    mpi4py by hand        37 us an iteration
"""

from __future__ import annotations

import os

# The cores are for the ranks: more threads than cores would make all of them slow.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import mpimesh as mm

Result = tuple[np.ndarray, float, int]
"""This rank's block of the solution, the length of the residual, the number of iterations."""


def right_side(points: int, rows: slice) -> np.ndarray:
    """Return some rows of the right side, of length 1."""
    y, x = np.ogrid[rows, 0:points]
    wave = np.sin(3 * np.pi * (y + 1) / (points + 1)) * np.sin(2 * np.pi * (x + 1) / (points + 1))
    spots = np.where((y % 16 == 5) & (x % 16 == 9), 1.0, 0.0)
    return (wave + spots) / points


def split_arrays(mesh: mm.DeviceMesh, points: int, tolerance: float) -> Result:
    """Solve with NumPy's functions on split arrays. Collective."""

    def stencil(p: mm.DTensor) -> mm.DTensor:
        down, up = mm.shift(p, 1, axis=0, wrap=False), mm.shift(p, -1, axis=0, wrap=False)
        right, left = mm.shift(p, 1, axis=1, wrap=False), mm.shift(p, -1, axis=1, wrap=False)
        return 4.0 * p - down - up - right - left

    b = mm.from_callback((points, points), mesh, "y=S0", lambda index: right_side(points, index[0]))
    x, r, p = np.zeros_like(b), b.copy(), b.copy()
    rr, count = float((r * r).sum()), 0
    while rr > tolerance**2:
        ap = stencil(p)
        alpha = rr / float((p * ap).sum())
        x += alpha * p
        r -= alpha * ap
        old, rr = rr, float((r * r).sum())
        p = r + (rr / old) * p
        count += 1
    return x.local, rr**0.5, count


class Block:
    """The arrays of one rank, and what is done to them without other ranks."""

    def __init__(self, padded: np.ndarray, b: np.ndarray) -> None:
        self.padded, self.p = padded, padded[1:-1, 1:-1]
        self.x, self.r, self.ap = np.zeros_like(b), b.copy(), np.empty_like(b)
        self.scratch = np.empty_like(b)
        self.p[...] = b

    def stencil(self) -> float:
        """Apply the stencil to p, of which the halo is there; return this rank's p * ap."""
        u, ap = self.padded, self.ap
        np.multiply(self.p, 4.0, out=ap)
        for near in (u[:-2, 1:-1], u[2:, 1:-1], u[1:-1, :-2], u[1:-1, 2:]):
            ap -= near
        return float(np.multiply(self.p, ap, out=self.scratch).sum())

    def step(self, alpha: float) -> float:
        """Move x and r; return this rank's r * r."""
        self.x += np.multiply(self.p, alpha, out=self.scratch)
        self.r -= np.multiply(self.ap, alpha, out=self.scratch)
        return float(np.vdot(self.r, self.r))

    def turn(self, beta: float) -> None:
        """Go on in the next direction."""
        self.p *= beta
        self.p += self.r


def iterate(
    block: Block,
    exchange: Callable[[], object],
    total: Callable[[float], float],
    tolerance: float,
) -> Result:
    """Solve on blocks, by what brings halos and adds up numbers."""
    rr, count = total(float(np.vdot(block.r, block.r))), 0
    while rr > tolerance**2:
        exchange()
        alpha = rr / total(block.stencil())
        old, rr = rr, total(block.step(alpha))
        block.turn(rr / old)
        count += 1
    return block.x, rr**0.5, count


def blocks_and_plans(mesh: mm.DeviceMesh, points: int, tolerance: float) -> Result:
    """Solve on this rank's block, by a halo and a reduction that are planned once. Collective."""
    halo = mm.Halo.of_shape((points, points), mesh, "y=S0", width=1, boundary=0.0)
    field = halo.field()
    start, stop = halo.plan.layout.box((points, points), mesh.rank)[0]
    number = np.zeros(1)
    reduction = mesh.group().all_reduce_init(number, out=number)

    def total(mine: float) -> float:
        number[0] = mine
        return float(reduction.start().resolve()[0])

    block = Block(field.padded, right_side(points, slice(start, stop)))
    return iterate(block, lambda: halo.exchange(field), total, tolerance)


def by_hand(mesh: mm.DeviceMesh, points: int, tolerance: float) -> Result:
    """Solve with mpi4py alone. Collective."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()
    start, stop = rank * points // size, (rank + 1) * points // size
    u = np.zeros((stop - start + 2, points + 2))
    above = rank - 1 if rank > 0 else MPI.PROC_NULL
    below = rank + 1 if rank < size - 1 else MPI.PROC_NULL
    number = np.zeros(1)

    def exchange() -> None:
        comm.Sendrecv(u[1], dest=above, recvbuf=u[-1], source=below)
        comm.Sendrecv(u[-2], dest=below, recvbuf=u[0], source=above)

    def total(mine: float) -> float:
        number[0] = mine
        comm.Allreduce(MPI.IN_PLACE, number)
        return float(number[0])

    return iterate(Block(u, right_side(points, slice(start, stop))), exchange, total, tolerance)


WAYS: dict[str, Callable[[mm.DeviceMesh, int, float], Result]] = {
    "split arrays": split_arrays,
    "blocks and plans": blocks_and_plans,
    "mpi4py by hand": by_hand,
}


def measure(
    mesh: mm.DeviceMesh, points: int, tolerance: float, rounds: int
) -> dict[str, tuple[Any, float]]:
    """Return the result of each way, and its seconds an iteration: medians of turns. Collective."""
    virtual = mesh.group().backend == "virtual"  # threads of one process have no mpi4py
    ways = {name: way for name, way in WAYS.items() if not (virtual and way is by_hand)}
    results, seconds = dict[str, Any](), {name: list[float]() for name in ways}
    for _ in range(rounds):
        for name, solve in ways.items():
            mesh.barrier()
            begin = time.perf_counter()
            results[name] = solve(mesh, points, tolerance)
            seconds[name].append((time.perf_counter() - begin) / results[name][2])
    return {name: (results[name], float(np.median(seconds[name]))) for name in ways}


def main(points: int = 64, tolerance: float = 1e-9, rounds: int = 5) -> dict[str, Any]:
    """Run on one rank of the world; return what each way found."""
    with mm.DeviceMesh("y=-1") as mesh:
        found = measure(mesh, points, tolerance, rounds)
        (_, residual, count), _ = found["split arrays"]
        if mesh.rank == 0:
            grid = f"{points} x {points} points on {mesh.size} rank(s)"
            print(f"{grid}: residual {residual:.1e} after {count} iterations, in each way")
            for name, (_, seconds) in found.items():
                print(f"{name:17} {seconds * 1e6:6.0f} us an iteration")
    return {name: result for name, (result, _) in found.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=64, help="points along each side")
    parser.add_argument("--tolerance", type=float, default=1e-9, help="length of the residual")
    parser.add_argument("--rounds", type=int, default=5, help="times that each way is measured")
    main(**vars(parser.parse_args()))
