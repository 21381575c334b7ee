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

from mpimesh.arguments import as_int, as_real
from mpimesh.arrays.types import DType, HostArray
from mpimesh.errors import ModuleError

__all__ = ["Constant", "Initializer", "Normal", "Uniform", "first_values"]

_CHUNK_ELEMENTS = 1 << 16
# Elements drawn at a time, so that float64 copies of a large parameter never
# exist as a whole. Even, so that Normal's pairs do not straddle two chunks.


class Initializer(Protocol):
    """A way to draw the first values of a parameter."""

    def draw(self, bits: np.random.Philox, count: int) -> HostArray:
        """Return the next `count` values, float64."""
        ...


@dataclass(frozen=True, slots=True)
class Constant:
    """All values are `value`.

    Raises:
        ModuleError: If it is no number.
    """

    value: float

    def __post_init__(self) -> None:
        value = as_real(self.value, "value", ModuleError, finite=False)
        object.__setattr__(self, "value", value)

    def draw(self, bits: np.random.Philox, count: int) -> HostArray:
        """Return `count` times the value; takes no bits."""
        return np.full(count, self.value, np.float64)


@dataclass(frozen=True, slots=True)
class Uniform:
    """Values between ``-bound`` and ``bound``.

    Raises:
        ModuleError: If `bound` is no finite number of at least 0.
    """

    bound: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "bound", as_real(self.bound, "bound", ModuleError, least=0))

    def draw(self, bits: np.random.Philox, count: int) -> HostArray:
        """Return the next `count` values."""
        values = _open_unit(bits, count)
        values *= 2.0 * self.bound
        values -= self.bound
        return values


@dataclass(frozen=True, slots=True)
class Normal:
    """Values of a normal distribution around 0, by the Box-Muller transform.

    Raises:
        ModuleError: If `std` is no finite number of at least 0.
    """

    std: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "std", as_real(self.std, "std", ModuleError, least=0))

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
    seed = as_int(seed, "seed", ModuleError, least=0)
    index = as_int(index, "index", ModuleError, least=0)
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
