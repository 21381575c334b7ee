"""Which rank stands at which place of a mesh, as arithmetic where that is possible.

A mesh of a million ranks has no table of a million entries: the rank at a place
is a sum of index times stride. Each dim holds a list of modes (size, stride),
slowest first, so that also a dim made of several others (`Mesh.flatten`), and any
slice of a mesh, stays arithmetic. Ids that follow no strides are in `listed.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, TypeAlias, overload

import numpy as np

from mpimesh.errors import MeshError
from mpimesh.mesh.dims import MAX_RANKS

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["DeviceIds", "StridedIds"]

Mode: TypeAlias = tuple[int, int]
"""(size, stride) of one run of equally spaced ids."""

_CHUNK = 4096


class DeviceIds(Sequence[int]):
    """The ids of a mesh's devices: a grid, and a sequence in row-major order.

    Two of them are equal if they have the same shape and the same ids.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Sizes of the grid's dims."""

    @property
    @abstractmethod
    def smallest(self) -> int:
        """The smallest id."""

    @property
    @abstractmethod
    def largest(self) -> int:
        """The largest id."""

    @abstractmethod
    def at(self, coords: Sequence[int]) -> int:
        """Return the id at `coords`, which must be in range."""

    @abstractmethod
    def coords_of(self, device_id: int) -> tuple[int, ...] | None:
        """Return where `device_id` stands, or None if it is not here."""

    @abstractmethod
    def view(self, dims: Sequence[Sequence[int]], coords: Sequence[int]) -> DeviceIds:
        """Cut and regroup the grid.

        Args:
            dims: For each dim of the result the dims of this grid that it runs
                through, slowest first; the others stay at their place in `coords`.
            coords: One coordinate for each dim of this grid; 0 for those in `dims`.
        """

    @abstractmethod
    def as_range(self) -> range | None:
        """Return the ids in row-major order as a range, if they are equally spaced upwards."""

    @abstractmethod
    def array(self) -> npt.NDArray[np.int64]:
        """Return all ids as a new array of this grid's shape."""

    def __len__(self) -> int:
        return prod(self.shape)

    @overload
    def __getitem__(self, offset: int) -> int: ...
    @overload
    def __getitem__(self, offset: slice) -> list[int]: ...
    def __getitem__(self, offset: int | slice) -> int | list[int]:
        size = len(self)
        if isinstance(offset, slice):
            return [self[k] for k in range(*offset.indices(size))]
        if not -size <= offset < size:
            raise IndexError(f"offset {offset} is outside of {size} device ids")
        return self.at(unravel(offset % size, self.shape))

    def __iter__(self) -> Iterator[int]:
        for start in range(0, len(self), _CHUNK):
            yield from self[start : start + _CHUNK]

    def __contains__(self, device_id: object) -> bool:
        return (
            isinstance(device_id, int | np.integer) and self.coords_of(int(device_id)) is not None
        )

    def index(self, value: int, start: int = 0, stop: int | None = None) -> int:
        """Return the row-major place of id `value`; ValueError if it is not in start..stop."""
        coords = self.coords_of(value)
        offset = -1 if coords is None else ravel(coords, self.shape)
        if offset not in range(len(self))[start:stop]:
            raise ValueError(f"{value} is not among the device ids")
        return offset

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DeviceIds):
            return NotImplemented
        if isinstance(self, StridedIds) and isinstance(other, StridedIds):
            return (self.first, self.modes) == (other.first, other.modes)
        return self.shape == other.shape and np.array_equal(self.array(), other.array())

    def __hash__(self) -> int:
        return hash((self.shape, self.smallest))  # meshes are keys of many caches


@dataclass(frozen=True, slots=True, eq=False)
class StridedIds(DeviceIds):
    """Ids that are `first` plus the sum of index times stride over all modes.

    Attributes:
        first: The id at offset 0.
        modes: For each dim its (size, stride) runs, slowest first; none for a dim
            of size 1. Runs of one dim that continue each other are merged, so equal
            ids have equal modes.
    """

    first: int
    modes: tuple[tuple[Mode, ...], ...]
    _by_stride: tuple[tuple[int, int, int, int], ...] = field(init=False, repr=False)
    """(stride, size, dim, weight in that dim's coordinate), largest stride first."""

    def __post_init__(self) -> None:
        modes = tuple(_coalesce(dim) for dim in self.modes)
        object.__setattr__(self, "modes", modes)
        table = [
            (stride, size, dim, prod(inner for inner, _ in runs[k + 1 :]))
            for dim, runs in enumerate(modes)
            for k, (size, stride) in enumerate(runs)
        ]
        table.sort(reverse=True)
        object.__setattr__(self, "_by_stride", tuple(table))
        # Each stride must jump over all that the smaller ones can reach: then ids
        # are distinct, and dividing by the strides in turn finds the coordinates.
        reach = 0
        for stride, size, _, _ in reversed(table):
            if stride <= reach or size < 1:
                raise MeshError(f"strides of device ids overlap: {self.modes}")
            reach += stride * (size - 1)
        if self.first < 0 or self.first + reach > MAX_RANKS:
            raise MeshError(
                f"device ids must be in 0..{MAX_RANKS}, got {self.first} to {self.first + reach}"
            )

    @classmethod
    def row_major(cls, shape: Sequence[int], first: int = 0, step: int = 1) -> StridedIds:
        """Number a grid from `first` in steps of `step`, last dim fastest."""
        strides = [prod(shape[k + 1 :]) * step for k in range(len(shape))]
        return cls(first, tuple((mode,) for mode in zip(shape, strides, strict=True)))

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the grid's dims."""
        return tuple(prod(size for size, _ in runs) for runs in self.modes)

    @property
    def smallest(self) -> int:
        """The smallest id."""
        return self.first

    @property
    def largest(self) -> int:
        """The largest id."""
        return self.first + sum(stride * (size - 1) for stride, size, _, _ in self._by_stride)

    def at(self, coords: Sequence[int]) -> int:
        """Return the id at `coords`, which must be in range."""
        return self.first + sum(
            coords[dim] // weight % size * stride for stride, size, dim, weight in self._by_stride
        )

    def coords_of(self, device_id: int) -> tuple[int, ...] | None:
        """Return where `device_id` stands, or None if it is not here."""
        rest = device_id - self.first
        coords = [0] * len(self.modes)
        for stride, size, dim, weight in self._by_stride:
            index, rest = divmod(rest, stride)
            if not 0 <= index < size:
                return None
            coords[dim] += index * weight
        return None if rest else tuple(coords)

    def view(self, dims: Sequence[Sequence[int]], coords: Sequence[int]) -> StridedIds:
        """Cut and regroup the grid, see :meth:`DeviceIds.view`."""
        modes = tuple(tuple(run for dim in group for run in self.modes[dim]) for group in dims)
        return StridedIds(self.at(coords), modes)

    def split(self, dim: int, sizes: Sequence[int]) -> StridedIds | None:
        """Turn one dim into several, slowest first; None where no stride breaks there."""
        runs = list(self.modes[dim])
        parts: list[tuple[Mode, ...]] = []
        for size in reversed(sizes):
            taken = _take(runs, size)
            if taken is None:
                return None
            parts.insert(0, taken)
        return StridedIds(self.first, (*self.modes[:dim], *parts, *self.modes[dim + 1 :]))

    def as_range(self) -> range | None:
        """Return the ids in row-major order as a range, if they are equally spaced."""
        runs = _coalesce([run for dim in self.modes for run in dim])
        if len(runs) > 1:
            return None
        size, stride = runs[0] if runs else (1, 1)
        return range(self.first, self.first + size * stride, stride)

    def array(self) -> npt.NDArray[np.int64]:
        """Return all ids as a new array of this grid's shape."""
        ids = np.full((), self.first, dtype=np.int64)
        for runs in self.modes:
            for size, stride in runs:
                ids = ids[..., None] + stride * np.arange(size, dtype=np.int64)
        return ids.reshape(self.shape)

    def __iter__(self) -> Iterator[int]:
        plain = self.as_range()
        return iter(plain) if plain is not None else DeviceIds.__iter__(self)


def ravel(coords: Sequence[int], shape: Sequence[int]) -> int:
    """Return the row-major offset of `coords`."""
    offset = 0
    for index, size in zip(coords, shape, strict=True):
        offset = offset * size + index
    return offset


def unravel(offset: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the coordinates of a row-major `offset`."""
    coords = []
    for size in reversed(shape):
        offset, index = divmod(offset, size)
        coords.append(index)
    return tuple(reversed(coords))


def _coalesce(runs: Sequence[Mode]) -> tuple[Mode, ...]:
    """Drop runs of one id and join each run that starts where the next faster one ends."""
    merged: list[Mode] = []
    for size, stride in runs:
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return tuple(merged)


def _take(runs: list[Mode], size: int) -> tuple[Mode, ...] | None:
    """Take the fastest `size` places off `runs`, which shrinks; None if no run breaks there."""
    taken: list[Mode] = []
    while size > 1:
        length, stride = runs.pop()
        step = min(length, size)
        if length % step or size % step:
            return None
        taken.insert(0, (step, stride))
        if length > step:
            runs.append((length // step, stride * step))
        size //= step
    return tuple(taken)
