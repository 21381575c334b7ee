"""First values of parameters: the same on every mesh, rank, device and dtype.

A value depends on the seed of the model, the global index of the layer, the
name of the parameter, and the place in it, and on nothing else. Random bits
come from NumPy's Philox, whose stream of bits is fixed by NumPy's compatibility
policy (that of `Generator.uniform` is not), are turned into numbers here, in
float64 on the host, and rounded to the dtype asked for at the very end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mpimesh.arrays.types import DType, HostArray
from mpimesh.errors import ModuleError

__all__ = ["Constant", "Initializer", "Normal", "Uniform", "first_values"]

_CHUNK_ELEMENTS = 1 << 16
# Elements drawn at a time, so that float64 copies of a large parameter never
# exist as a whole. Even, so that Normal's pairs do not straddle two chunks.


class Initializer(Protocol):
    """How the first values of a parameter are drawn."""

    def draw(self, bits: np.random.Philox, count: int) -> HostArray:
        """Return the next `count` values, float64."""
        ...


@dataclass(frozen=True, slots=True)
class Constant:
    """All values are `value`."""

    value: float

    def draw(self, bits: np.random.Philox, count: int) -> HostArray:
        """Return `count` times the value; takes no bits."""
        return np.full(count, self.value, np.float64)


@dataclass(frozen=True, slots=True)
class Uniform:
    """Values between ``-bound`` and ``bound``."""

    bound: float

    def draw(self, bits: np.random.Philox, count: int) -> HostArray:
        """Return the next `count` values."""
        values = _open_unit(bits, count)
        values *= 2.0 * self.bound
        values -= self.bound
        return values


@dataclass(frozen=True, slots=True)
class Normal:
    """Values of a normal distribution around 0, by the Box-Muller transform."""

    std: float

    def draw(self, bits: np.random.Philox, count: int) -> HostArray:
        """Return the next `count` values."""
        pairs = _open_unit(bits, count + count % 2).reshape(-1, 2)
        radius = np.sqrt(-2.0 * np.log(pairs[:, 0])) * self.std
        angle = 2.0 * math.pi * pairs[:, 1]
        pairs[:, 0] = radius * np.cos(angle)
        pairs[:, 1] = radius * np.sin(angle)
        return pairs.reshape(-1)[:count]


def first_values(
    initializer: Initializer,
    shape: tuple[int, ...],
    dtype: DType,
    *,
    seed: int,
    index: int,
    name: str,
) -> HostArray:
    """Return the first values of parameter `name` of the layer at global `index`.

    Shapes:
        result: `shape`, C-contiguous, on the host.

    Raises:
        ModuleError: If `seed` or `index` is negative.
    """
    if seed < 0 or index < 0:
        raise ModuleError(f"seed and layer index must not be negative, got {seed} and {index}")
    sequence = np.random.SeedSequence(seed, spawn_key=(index, *name.encode()))
    bits = np.random.Philox(sequence)
    values = np.empty(shape, dtype)
    flat = values.reshape(-1)
    for start in range(0, flat.size, _CHUNK_ELEMENTS):
        chunk = flat[start : start + _CHUNK_ELEMENTS]
        chunk[...] = initializer.draw(bits, chunk.size)
    return values


def _open_unit(bits: np.random.Philox, count: int) -> HostArray:
    """Return `count` multiples of 2^-52, shifted by half a step: never 0, never 1."""
    raw = bits.random_raw(count)
    unit = (raw >> np.uint64(12)).astype(np.float64)
    unit += 0.5
    unit *= 2.0**-52
    return unit
