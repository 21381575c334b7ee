"""A parameter of which each rank of a group holds a part, with the values of the whole one.

First values are those that the whole parameter has in an unsplit model: a rank draws the same
random bits in the same order and keeps what falls into its part, so that no rank ever holds the
whole. What lies before its part is skipped, not drawn, where the initializer takes one word for
each value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from mpimesh.arrays import Array
from mpimesh.arrays.types import HostArray
from mpimesh.errors import ModuleError, ShapeError
from mpimesh.nn import Normal, Parameter, Uniform
from mpimesh.nn.initializers import Initializer
from mpimesh.nn.parameter import float_dtype
from mpimesh.parallel.microbatch import replica_rows

__all__ = ["Runs", "TensorParameter", "describe_parts", "even_parts", "whole_shape"]

_CHUNK_ELEMENTS = 1 << 16
# As in mpimesh.nn.initializers: even, so that Normal's pairs do not straddle two chunks.

Runs = tuple[tuple[int, int], ...]
"""A rank's part of an axis: pairs of start and stop, rising."""


def even_parts(extent: int, size: int, unit: int = 1) -> tuple[Runs, ...]:
    """Return for each of `size` ranks its run of ``extent * unit`` places, cut at whole units."""
    rows = (replica_rows(extent, size, rank) for rank in range(size))
    return tuple(((part.start * unit, part.stop * unit),) for part in rows)


class TensorParameter(Parameter):
    """This rank's part of a parameter that is split over a group, or repeated on it.

    Several ranks may hold the same part. They have equal values, and each of them has the
    gradient of what it has computed itself: the true one is the sum over these ranks, which
    training makes once a step, see :func:`~mpimesh.parallel.sum_shared_gradients`.

    Args:
        name: Its name inside its layer.
        whole_shape: The shape of the whole parameter.
        initializer: How the whole parameter's first values are drawn.
        axis: The axis that is split.
        parts: What each rank holds along it.
        rank: This rank's place in the group.

    Attributes:
        whole_shape: As given.
        axis: As given.
        parts: As given.
        rank: As given.

    Raises:
        ModuleError: If two parts overlap and are not the same, or a place is in no part.
    """

    __slots__ = ("axis", "parts", "rank", "whole_shape")

    def __init__(
        self,
        name: str,
        whole_shape: tuple[int, ...],
        initializer: Initializer,
        *,
        axis: int,
        parts: Sequence[Runs],
        rank: int,
        requires_grad: bool = True,
    ) -> None:
        runs = sorted({run for part in set(parts) for run in part if run[0] < run[1]})
        edges = [0, *(edge for run in runs for edge in run), whole_shape[axis]]
        if any(one != other for one, other in zip(edges[::2], edges[1::2], strict=True)):
            raise ModuleError(
                f"parameter {name!r} of shape {whole_shape}: parts must be alike or apart, and "
                f"together all of axis {axis}, got {parts}"
            )
        self.whole_shape = tuple(whole_shape)
        self.axis = axis
        self.parts = tuple(parts)
        self.rank = rank
        shape = list(whole_shape)
        shape[axis] = sum(stop - start for start, stop in self.parts[rank])
        super().__init__(name, tuple(shape), initializer)
        self.requires_grad = requires_grad

    def materialize(
        self, *, seed: int, dtype: Any = np.float32, xp: ModuleType = np, index: int = 0
    ) -> None:
        """Give this part the first values of its places; see `Parameter.materialize`."""
        if seed < 0 or index < 0:
            raise ModuleError(f"seed and layer index must not be negative, got {seed} and {index}")
        values = np.empty(self.shape, float_dtype(dtype, xp=xp))
        self._draw(values, seed, index)
        self.data = values if xp is np else xp.asarray(values)
        self.grad = None
        self._attached = False

    def part_of(self, whole: Array, rank: int | None = None) -> Array:
        """Return what `rank`, or this rank, holds of an array of the whole shape: a copy.

        Raises:
            ShapeError: If it has another shape.
        """
        if tuple(whole.shape) != self.whole_shape:
            raise ShapeError(
                f"parameter {self.name!r} has the shape {self.whole_shape} as a whole, got "
                f"{tuple(whole.shape)}"
            )
        runs = self.parts[self.rank if rank is None else rank]
        return np.concatenate([whole[self._at(start, stop)] for start, stop in runs], self.axis)

    def joined(self, parts: Sequence[Array]) -> HostArray:
        """Return the whole array, from the parts of all ranks."""
        whole: HostArray = np.empty(self.whole_shape, parts[0].dtype)
        for part, runs in zip(parts, self.parts, strict=True):
            done = 0
            for start, stop in runs:
                whole[self._at(start, stop)] = part[self._at(done, done + stop - start)]
                done += stop - start
        return whole

    @property
    def holders(self) -> tuple[int, ...]:
        """The ranks that have the same part as this rank, with it; none if it has nothing."""
        return self._holders_of(self.parts[self.rank])

    @property
    def all_holders(self) -> list[tuple[int, ...]]:
        """The sets of several ranks that have the same part, in the order of the parts."""
        sets = map(self._holders_of, dict.fromkeys(self.parts))
        return [holders for holders in sets if len(holders) > 1]

    def _holders_of(self, part: Runs) -> tuple[int, ...]:
        if not any(start < stop for start, stop in part):
            return ()  # nothing is nobody's
        return tuple(rank for rank, other in enumerate(self.parts) if other == part)

    def size_of(self, part: Runs) -> int:
        """Return the number of elements of a part."""
        width = sum(stop - start for start, stop in part)
        inner = [extent for axis, extent in enumerate(self.whole_shape) if axis != self.axis]
        return width * math.prod(inner)

    def _at(self, start: int, stop: int) -> tuple[slice, ...]:
        return (slice(None),) * self.axis + (slice(start, stop),)

    def _draw(self, values: HostArray, seed: int, index: int) -> None:
        flat = values.reshape(-1)
        source = _Chunks(self.initializer, math.prod(self.whole_shape), seed, index, self.name)
        done = 0
        for start, stop in self._flat_runs():
            while start < stop:
                values_there = source.at(start)[: stop - start]
                flat[done : done + values_there.size] = values_there
                done += values_there.size
                start += values_there.size

    def _flat_runs(self) -> Iterator[tuple[int, int]]:
        """Yield the runs of this part in the whole parameter, laid out flat, in order."""
        inner = math.prod(self.whole_shape[self.axis + 1 :])
        stride = self.whole_shape[self.axis] * inner
        for outer in range(math.prod(self.whole_shape[: self.axis])):
            for start, stop in self.parts[self.rank]:
                yield outer * stride + start * inner, outer * stride + stop * inner


def describe_parts(parameter: Parameter) -> object:
    """Return what must be alike on all ranks that share a model: nothing of the rank itself."""
    if not isinstance(parameter, TensorParameter):
        return parameter.shape
    return parameter.whole_shape, parameter.axis, parameter.parts


def whole_shape(parameter: Parameter) -> tuple[int, ...]:
    """Return the shape that a parameter has in the unsplit model."""
    return parameter.whole_shape if isinstance(parameter, TensorParameter) else parameter.shape


class _Chunks:
    """The values of a whole parameter, drawn chunk by chunk, never all at once."""

    def __init__(
        self, initializer: Initializer, size: int, seed: int, index: int, name: str
    ) -> None:
        self._initializer = initializer
        self._size = size
        self._bits = np.random.Philox(
            np.random.SeedSequence(seed, spawn_key=(index, *name.encode()))
        )
        self._next = 0
        self._values: HostArray = np.empty(0)

    def at(self, place: int) -> HostArray:
        """Return the values from `place` to the end of its chunk; places never fall much."""
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
