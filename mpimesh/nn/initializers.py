"""First values of parameters, the same on every mesh, rank, device and dtype.

A value depends on the seed of the model, the global index of the layer, the name of the parameter,
and the place in it, and on nothing else. Random bits come from NumPy's Philox, whose stream of bits
is fixed by NumPy's compatibility policy (that of `Generator.uniform` is not), are turned into
numbers here, in float64 on the host, and rounded to the dtype asked for at the very end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mpimesh.arguments import as_int, as_real
from mpimesh.arrays.namespace import DType, HostArray
from mpimesh.errors import ModuleError
from mpimesh.layout import Box
from mpimesh.layout.boxes import extent, flat_runs, whole

__all__ = ["Constant", "Initializer", "Normal", "Uniform", "first_values"]

_CHUNK_ELEMENTS = 1 << 16
# Elements drawn at a time, so that float64 copies of a large parameter never
# exist as a whole. Even, so that Normal's pairs do not straddle two chunks.


class Initializer(Protocol):
    """A way to draw the first values of a parameter."""

    def draw(self, bits: np.random.Philox, count: int) -> HostArray:
        """Return the next `count` values of the stream `bits`, float64."""
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
        """Return the next `count` values of the stream `bits`."""
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
        """Return the next `count` values of the stream `bits`."""
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
    box: Box | None = None,
) -> HostArray:
    """Return the first values of parameter `name` of the layer at global `index`.

    Of a `box` of it they are those that the whole one has there. The whole one is never in memory:
    it is drawn chunk by chunk, and chunks before and between the runs of the box are skipped, not
    drawn, where the initializer takes one word for each value.

    Shapes:
        shape: that of the whole parameter.
        result: that of `box`, which is all of it if None; C-contiguous, on the host.

    Raises:
        ModuleError: If `seed` or `index` is negative.
    """
    seed = as_int(seed, "seed", ModuleError, least=0)
    index = as_int(index, "index", ModuleError, least=0)
    sequence = np.random.SeedSequence(seed, spawn_key=(index, *name.encode()))
    source = _Chunks(initializer, math.prod(shape), np.random.Philox(sequence))
    box = whole(shape) if box is None else box
    values = np.empty(extent(box), dtype)
    flat = values.reshape(-1)
    done = 0
    for start, stop in flat_runs(box, shape):
        while start < stop:
            drawn = source.at(start)[: stop - start]
            flat[done : done + drawn.size] = drawn
            done += drawn.size
            start += drawn.size
    return values


class _Chunks:
    """The values of a whole parameter, drawn chunk by chunk, never all at once."""

    def __init__(self, initializer: Initializer, size: int, bits: np.random.Philox) -> None:
        self._initializer = initializer
        self._size = size
        self._bits = bits
        self._next = 0
        self._values: HostArray = np.empty(0)

    def at(self, place: int) -> HostArray:
        """Return the values from `place` to the end of its chunk; places never fall."""
        number = place // _CHUNK_ELEMENTS
        while self._next <= number:
            if self._next < number and type(self._initializer) in (Normal, Uniform):
                # They take one word for each value, and a step of the generator is four words.
                self._bits.advance((number - self._next) * (_CHUNK_ELEMENTS // 4))
                self._next = number
                continue
            start = self._next * _CHUNK_ELEMENTS
            count = min(_CHUNK_ELEMENTS, self._size - start)
            self._values = self._initializer.draw(self._bits, count)
            self._next += 1
        return self._values[place - number * _CHUNK_ELEMENTS :]


def _open_unit(bits: np.random.Philox, count: int) -> HostArray:
    """Return `count` multiples of 2^-52, shifted by half a step: never 0, never 1."""
    raw = bits.random_raw(count)
    unit = (raw >> np.uint64(12)).astype(np.float64)
    unit += 0.5
    unit *= 2.0**-52
    return unit
