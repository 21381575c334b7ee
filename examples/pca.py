"""Principal components of a tall array whose rows are split over the ranks.

    mpiexec -n 4 python examples/pca.py
    python examples/pca.py                           one rank, without mpiexec

                     64 columns
    rank 0         rows      0-49,999          x.T @ x is 64 x 64: each rank multiplies its
    rank 1         rows 50,000-99,999          own rows, and only these sums travel
    rank 2         rows 100,000-149,999
    rank 3         rows 150,000-199,999

The rows are mixtures of three curves, with noise. On any number of ranks they are the same rows,
and the program prints the same but for the sizes; out/pca.svg shows the curves that were found:

    200,000 x 64 numbers on 4 rank(s): 25.6 MB on each
    the first 3 components explain 94.6% of the variance: 63.5%, 24.8%, 6.3%
    the curves in the data are found to 0.16 degrees
    each rank received 50 kB, whatever the number of rows
    wrote out/pca.svg
"""

from __future__ import annotations

import os

# The cores are for the ranks: more threads than cores would make all of them slow.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from typing import Any

import numpy as np
from common.figure import save_figure

import mpimesh as mm

ROWS, COLUMNS, COMPONENTS = 200_000, 64, 3
T = np.linspace(0, 1, COLUMNS, endpoint=False)
CURVES = np.sqrt(2 / COLUMNS) * np.array([np.sin(2 * np.pi * k * T) for k in (1, 2, 5)])
"""Of length 1, and at right angles to each other."""


def make_data(mesh: mm.DeviceMesh, rows: int) -> mm.DTensor:
    """Return the data, of which each rank makes its rows: nothing is sent."""
    rng = mm.Random(seed=0)
    weights = rng.normal((rows, COMPONENTS), mesh, "rows=S0") * np.array([16.0, 10.0, 5.0])
    return 3.0 + weights @ CURVES + rng.normal((rows, COLUMNS), mesh, "rows=S0") * 0.6


def pca(x: mm.DTensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the variances along the principal components, the largest first, and these.

    Shapes:
        x: (rows, columns), split along the rows.
        result: (columns,) and (columns, columns), a component in each row; the same on every rank.
    """
    centred = x - x.mean(axis=0)
    covariance = (centred.T @ centred) / (len(x) - 1)
    variances, vectors = np.linalg.eigh(covariance.full())
    return variances[::-1], vectors.T[::-1]


def main(rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    """Run on one rank of the world; return what `pca` finds."""
    with mm.DeviceMesh("rows=-1") as mesh:
        x = make_data(mesh, rows)
        variances, components = pca(x)
        received = mesh.traffic().received_bytes
        if mesh.rank == 0:
            share = variances[:COMPONENTS] / variances.sum()
            cosines = np.abs((components[:COMPONENTS] * CURVES).sum(axis=1))
            angle = np.degrees(np.arccos(np.minimum(cosines, 1.0))).max()
            print(
                f"{rows:,} x {COLUMNS} numbers on {mesh.size} rank(s): "
                f"{x.local.nbytes / 1e6:.1f} MB on each\n"
                f"the first {COMPONENTS} components explain {share.sum():.1%} of the variance: "
                f"{', '.join(f'{one:.1%}' for one in share)}\n"
                f"the curves in the data are found to {angle:.2f} degrees\n"
                f"each rank received {received / 1000:.0f} kB, whatever the number of rows"
            )
            save_figure("pca.svg", lambda axes: draw(axes, variances, components), columns=2)
    return variances, components


def draw(axes: Any, variances: np.ndarray, components: np.ndarray) -> None:
    """Draw the components over the curves, and the variances."""
    left, right = axes
    for number, (curve, vector) in enumerate(zip(CURVES, components, strict=False), start=1):
        left.plot(T, curve, color="0.8", linewidth=5)
        left.plot(T, np.sign(curve @ vector) * vector, linewidth=1.2, label=f"component {number}")
    left.set_title("components found, over the curves in the data")
    left.legend(fontsize=8)
    right.semilogy(range(1, 11), variances[:10], "o")
    right.set(title="variance along each component", xlabel="component")


if __name__ == "__main__":
    main()
