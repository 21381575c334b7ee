"""Poisson's equation on a periodic cube, by the FFT of a split array.

    mpiexec -n 4 python examples/poisson_fft.py
    python examples/poisson_fft.py                   one rank, without mpiexec

    x split, y and z whole            y split, x and z whole
    rank 0   |       |                +--------+--------+--------+--------+
    rank 1   |       |   one exchange | rank 0 | rank 1 | rank 2 | rank 3 |
    rank 2   |       |  ------------> |        |        |        |        |
    rank 3   |       |                +--------+--------+--------+--------+
      FFT along y and z                    FFT along x, divide by -|k|^2

The right-hand side is that of u = exp(sin x + sin y + sin z), so the error is known: it falls
faster than any power of the spacing, down to rounding. On any number of ranks the program prints

            4 x 4 x 4 points: largest error 5.3e+00
            8 x 8 x 8 points: largest error 2.6e-02
         12 x 12 x 12 points: largest error 7.7e-05
         16 x 16 x 16 points: largest error 1.8e-07
         20 x 20 x 20 points: largest error 3.0e-10
         24 x 24 x 24 points: largest error 3.7e-13
         32 x 32 x 32 points: largest error 8.9e-15
    wrote out/poisson_fft.png

and draws a slice of the solution, and the errors.
"""

from __future__ import annotations

import os

# The cores are for the ranks: more threads than cores would make all of them slow.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from functools import partial
from typing import Any

import numpy as np
from common.figure import save_figure

import mpimesh as mm

SIZES = (4, 8, 12, 16, 20, 24, 32)


def axes_of(n: int, index: tuple[slice, ...]) -> list[np.ndarray]:
    """Return the coordinates of a box of the grid, each shaped to be broadcast."""
    points = np.arange(n) * (2 * np.pi / n)
    return list(np.ix_(*(points[part] for part in index)))


def exact(n: int, index: tuple[slice, ...]) -> np.ndarray:
    """Return the solution in a box of the grid."""
    return np.exp(sum(np.sin(x) for x in axes_of(n, index)))


def right_side(n: int, index: tuple[slice, ...]) -> np.ndarray:
    """Return the Laplacian of the solution in a box of the grid."""
    axes = axes_of(n, index)
    return exact(n, index) * sum(np.cos(x) ** 2 - np.sin(x) for x in axes)


def solve(f: mm.DTensor) -> mm.DTensor:
    """Return the u of mean 0 whose Laplacian is f, split as f is. Collective."""
    spectrum = np.fft.fftn(f)  # comes out split along another axis: one exchange

    def divide(values: np.ndarray, *, block: mm.dtensor.BlockPlace) -> np.ndarray:
        waves = (np.fft.fftfreq(n, 1 / n) for n in block.shape)
        kx, ky, kz = np.ix_(*(k[part] for k, part in zip(waves, block.index, strict=True)))
        squares = kx**2 + ky**2 + kz**2
        return np.where(squares == 0, 0, values / -np.where(squares == 0, 1, squares))

    divided = mm.local_map(divide, spectrum.placement)(spectrum)
    return np.fft.ifftn(divided).real.redistribute(f.placement)


def main(sizes: tuple[int, ...] = SIZES) -> list[float]:
    """Run on one rank of the world; return the largest error for each size."""
    errors: list[float] = []
    with mm.DeviceMesh("x=-1") as mesh:
        for n in sizes:
            f, u = (
                mm.from_callback((n,) * 3, mesh, "x=S0", partial(make, n), dtype=float)
                for make in (right_side, exact)
            )
            found = solve(f) + u.mean()  # which the equation leaves open
            errors.append(float(abs(found - u).max().full()))
            if mesh.rank == 0:
                print(f"{f'{n} x {n} x {n} points':>24}: largest error {errors[-1]:.1e}")
        middle = found[:, :, n // 2].full(root=0)
        if mesh.rank == 0:
            save_figure("poisson_fft.png", lambda ax: draw(ax, middle, sizes, errors), columns=2)
    return errors


def draw(axes: Any, middle: np.ndarray, sizes: tuple[int, ...], errors: list[float]) -> None:
    """Draw a slice of the solution, and the errors."""
    left, right = axes
    left.imshow(middle, origin="lower", extent=(0, 2 * np.pi) * 2)
    left.set(title="u in the plane z = pi", xlabel="y", ylabel="x")
    right.semilogy(sizes, errors, "o-")
    right.set(title="largest error", xlabel="points along an axis")


if __name__ == "__main__":
    main()
