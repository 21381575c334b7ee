"""Lloyd's k-means on points that are split over the ranks.

    mpiexec -n 4 python examples/kmeans.py
    python examples/kmeans.py                        one rank, without mpiexec

                     points split            centres the same everywhere
    rank 0         points      0-24,999      the sums of the points that are
    rank 1         points 25,000-49,999      nearest to each centre are added
    rank 2         points 50,000-74,999      up over the ranks: 8 x 3 numbers
    rank 3         points 75,000-99,999      an iteration

On any number of ranks the points are the same ones. It prints, and draws in out/kmeans.png:

    100,000 points on 4 rank(s), 8 centres
    iteration  1: mean squared distance 3.6889
    iteration  2: mean squared distance 1.8065
    iteration  5: mean squared distance 0.9397
    iteration 10: mean squared distance 0.9338
    iteration 11: mean squared distance 0.9338
    wrote out/kmeans.png
"""

from __future__ import annotations

import os

# The cores are for the ranks: more threads than cores would make all of them slow.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from typing import Any

import numpy as np
from common.figure import save_figure

import mpimesh as mm

POINTS, CENTRES = 100_000, 8


def make_points(mesh: mm.DeviceMesh, count: int) -> mm.DTensor:
    """Return points around eight places on a circle, of which each rank makes its own."""
    rng = mm.Random(seed=1)
    angles = 2 * np.pi * np.arange(CENTRES) / CENTRES
    places = 4.0 * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    which = rng.integers(0, CENTRES, (count,), mesh, "rows=S0")
    near = mm.local_map(lambda index: places[index], "rows=S0")(which)
    return near + rng.normal((count, 2), mesh, "rows=S0") * 0.7


def assign(points: mm.DTensor, centres: np.ndarray) -> tuple[mm.DTensor, float]:
    """Return which centre is nearest to each point, and the mean of the squared distances."""
    # |p - c|^2 less |p|^2, which is the same for all centres.
    distances = (centres**2).sum(axis=1) - 2 * (points @ centres.T)
    squares = distances.min(axis=1).sum() + (points**2).sum()
    return distances.argmin(axis=1), float(squares.full()) / len(points)


def move(points: mm.DTensor, nearest: mm.DTensor, centres: np.ndarray) -> np.ndarray:
    """Return the means of the points that are nearest to each centre."""
    member = (nearest[:, None] == np.arange(len(centres))).astype(points.dtype)
    sums, counts = (member.T @ points).full(), member.sum(axis=0).full()
    return np.where(counts[:, None] > 0, sums / np.maximum(counts, 1)[:, None], centres)


def kmeans(
    points: mm.DTensor, centres: np.ndarray, iterations: int
) -> tuple[np.ndarray, list[float]]:
    """Return the centres, and the mean squared distance before each iteration. Collective."""
    history = []
    for _ in range(iterations):
        nearest, cost = assign(points, centres)
        history.append(cost)
        moved = move(points, nearest, centres)
        if np.array_equal(moved, centres):
            break
        centres = moved
    return centres, history


def main(count: int = POINTS) -> tuple[np.ndarray, list[float]]:
    """Run on one rank of the world; return the centres and the costs."""
    with mm.DeviceMesh("rows=-1") as mesh:
        points = make_points(mesh, count)
        start = points[:CENTRES].full()  # the first points, on every rank
        centres, history = kmeans(points, start, 50)
        shown = points[:3000]
        nearest, _ = assign(shown, centres)
        shown, nearest = shown.full(root=0), nearest.full(root=0)
        if mesh.rank == 0:
            print(f"{count:,} points on {mesh.size} rank(s), {CENTRES} centres")
            for number, cost in enumerate(history, start=1):
                if number in (1, 2, 5, 10, 20, len(history)):
                    print(f"iteration {number:2}: mean squared distance {cost:.4f}")
            save_figure(
                "kmeans.png", lambda axes: draw(axes, shown, nearest, centres, history), columns=2
            )
    return centres, history


def draw(
    axes: Any, points: np.ndarray, nearest: np.ndarray, centres: np.ndarray, history: list[float]
) -> None:
    """Draw some of the points in the colour of their centre, and the costs."""
    left, right = axes
    left.scatter(*points.T, c=nearest, s=2, cmap="tab10")
    left.plot(*centres.T, "k+", markersize=12)
    left.set(title="points and centres", aspect="equal")
    right.plot(range(1, len(history) + 1), history, "o-", markersize=3)
    right.set(title="mean squared distance", xlabel="iteration")


if __name__ == "__main__":
    main()
