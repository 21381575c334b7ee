"""The exact solution: sine waves on the unit square, each of which decays at its own rate."""

from __future__ import annotations

import numpy as np

MODES = ((1, 1, 1.0), (2, 1, 0.5), (1, 3, 0.25))
"""Waves along y and x, and their height at the start."""

RATE = 0.2
"""dt / h^2: the step in time over the square of the step in space. Above 0.25 it would blow up."""


class Waves:
    """The heat equation du/dt = div grad u with known solution, on a grid of points.

    Args:
        points: How many steps of h an axis has. Fixed ends are points that never change, so
            there is one less on the grid.
        ends: "periodic", or "fixed": 0 all around, half a wave where periodic ends have a whole.
    """

    def __init__(self, points: int, ends: str) -> None:
        self.boundary = "periodic" if ends == "periodic" else 0.0
        self.first = 0 if ends == "periodic" else 1
        self.shape = (points - self.first, points - self.first)
        self.h = 1 / points
        self.dt = RATE * self.h**2
        self.wave = 2 * np.pi if ends == "periodic" else np.pi

    def exact(self, index: tuple[slice, ...], time: float) -> np.ndarray:
        """Return the solution at the points of a block."""
        y, x = ((np.arange(part.start, part.stop) + self.first) * self.h for part in index)
        field = np.zeros((y.size, x.size))
        for in_y, in_x, height in MODES:
            decay = np.exp(-(self.wave**2) * (in_y**2 + in_x**2) * time)
            field += (
                height
                * decay
                * np.outer(np.sin(in_y * self.wave * y), np.sin(in_x * self.wave * x))
            )
        return field
