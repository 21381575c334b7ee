"""Ranks by their places in a mesh, as arithmetic where that is possible.

A mesh of a million ranks has no table of a million entries: the rank at a place
is a sum of index times stride. Each dim holds a list of modes (size, stride),
slowest first, so that also a dim made of several others (`Mesh.flatten`), and any
slice of a mesh, stays arithmetic. Ids that follow no strides are listed. Groups of
ranks along some dims are views, too.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, TypeAlias, overload

import numpy as np

from mpimesh.arguments import as_int
from mpimesh.errors import MeshError, RankError
from mpimesh.mesh.dims import MAX_RANKS

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["DeviceIds", "ListedIds", "RankGroups", "StridedIds", "make_ids", "split_ids"]

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


@dataclass(frozen=True, slots=True, eq=False)
class ListedIds(DeviceIds):
    """Ids that follow no strides, kept as a read-only array of the grid's shape."""

    ids: npt.NDArray[np.int64]
    _order: npt.NDArray[np.intp] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        ids = np.array(self.ids, dtype=np.int64)
        flat = ids.reshape(-1)
        order = np.argsort(flat, kind="stable")
        ranked = flat[order]
        twice = np.flatnonzero(ranked[1:] == ranked[:-1])
        if twice.size:
            raise MeshError(f"device id {ranked[twice[0]]} is given twice")
        if ranked.size and not 0 <= ranked[0] <= ranked[-1] <= MAX_RANKS:
            worst = ranked[0] if ranked[0] < 0 else ranked[-1]
            raise MeshError(f"device ids must be in 0..{MAX_RANKS}, got {worst}")
        for array in (ids, order):
            array.flags.writeable = False
        object.__setattr__(self, "ids", ids)
        object.__setattr__(self, "_order", order)

    def __reduce__(self) -> tuple[type[ListedIds], tuple[npt.NDArray[np.int64]]]:
        return ListedIds, (self.ids,)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the grid's dims."""
        return self.ids.shape

    @property
    def smallest(self) -> int:
        """The smallest id."""
        return int(self.ids.min())

    @property
    def largest(self) -> int:
        """The largest id."""
        return int(self.ids.max())

    def at(self, coords: Sequence[int]) -> int:
        """Return the id at `coords`, which must be in range."""
        return int(self.ids[tuple(coords)])

    def coords_of(self, device_id: int) -> tuple[int, ...] | None:
        """Return where `device_id` stands, or None if it is not here."""
        flat = self.ids.reshape(-1)
        place = int(np.searchsorted(flat, device_id, sorter=self._order))
        if place == flat.size or flat[self._order[place]] != device_id:
            return None
        return unravel(int(self._order[place]), self.shape)

    def view(self, dims: Sequence[Sequence[int]], coords: Sequence[int]) -> DeviceIds:
        """Cut and regroup the grid, see :meth:`DeviceIds.view`."""
        kept = [dim for group in dims for dim in group]
        dropped = [dim for dim in range(self.ids.ndim) if dim not in kept]
        # Dropped dims in front, so that one index takes them all away.
        cut = self.ids.transpose(dropped + kept)[tuple(coords[dim] for dim in dropped)]
        shape = [prod(self.ids.shape[dim] for dim in group) for group in dims]
        return make_ids(shape, np.asarray(cut))

    def as_range(self) -> range | None:
        """Return the ids in row-major order as a range, if they are equally spaced."""
        flat = make_ids([self.ids.size], self.ids)
        return flat.as_range() if isinstance(flat, StridedIds) else None

    def array(self) -> npt.NDArray[np.int64]:
        """Return all ids as a new array of this grid's shape."""
        return self.ids.copy()

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids.reshape(-1).tolist())


def make_ids(shape: Sequence[int], ids: Sequence[int] | npt.NDArray[np.integer]) -> DeviceIds:
    """Arrange `ids`, given in row-major order, in a grid of `shape`.

    Raises:
        MeshError: If their number is not the product of `shape`, one is negative,
            given twice, or no whole number.
    """
    if isinstance(ids, DeviceIds) and ids.shape == tuple(shape):
        return ids
    plain = ids.as_range() if isinstance(ids, DeviceIds) else ids
    count = np.size(ids) if isinstance(ids, np.ndarray) else len(ids)
    if count != prod(shape):
        raise MeshError(
            f"The number of device ids must match the product of the shape, {count} vs. "
            f"{prod(shape)}"
        )
    if isinstance(plain, range) and (plain.step > 0 or count == 1):
        return StridedIds.row_major(shape, plain.start, max(plain.step, 1))
    return _strided(_array_of(ids).reshape(tuple(shape)))


def split_ids(ids: DeviceIds, dim: int, sizes: Sequence[int]) -> DeviceIds:
    """Turn dim number `dim` into several, slowest first; `sizes` must multiply to its size."""
    split = ids.split(dim, sizes) if isinstance(ids, StridedIds) else None
    shape = (*ids.shape[:dim], *sizes, *ids.shape[dim + 1 :])
    return make_ids(shape, ids.array()) if split is None else split


def _array_of(ids: Sequence[int] | npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    if isinstance(ids, DeviceIds):
        return ids.array()
    if isinstance(ids, np.ndarray):
        if not np.issubdtype(ids.dtype, np.integer):
            raise MeshError(f"device ids must be whole numbers, got an array of {ids.dtype}")
    else:
        ids = np.array([_checked(value) for value in ids], dtype=np.int64)
    return ids.astype(np.int64)


def _checked(value: object) -> int:
    device_id = as_int(value, "a device id")
    if not 0 <= device_id <= MAX_RANKS:
        raise MeshError(f"device ids must be in 0..{MAX_RANKS}, got {device_id}")
    return device_id


def _strided(ids: npt.NDArray[np.int64]) -> DeviceIds:
    """Find the strides of `ids`; list them if there are none."""
    first = ids.flat[0]
    sums = np.asarray(first)
    modes: list[tuple[Mode, ...]] = []
    for dim, size in enumerate(ids.shape):
        line = np.moveaxis(ids, dim, 0).reshape(size, -1)[:, 0]
        sums = sums[..., None] + (line - first)
        modes.append(((size, int(line[1] - first) if size > 1 else 1),))
    ascending = all(stride > 0 for runs in modes for _, stride in runs)
    if ascending and np.array_equal(sums, ids):
        try:
            grid = StridedIds(int(first), tuple(modes))
        except MeshError:
            return ListedIds(ids)
        if np.array_equal(grid.array(), ids):
            return grid
    return ListedIds(ids)


@dataclass(frozen=True, slots=True)
class RankGroups(Sequence[Sequence[int]]):
    """All groups of ranks that differ only in the coordinates along some dims.

    A lazy sequence: item i holds the ranks of group i. Groups are numbered
    row-major over the other dims, in the mesh's order; inside a group the ranks
    are ordered row-major over the group's dims, in the order they were asked for.
    Every rank of the mesh is in exactly one group.

    Attributes:
        ids: The ranks of the mesh.
        along: Numbers of the dims that a group runs through, slowest first.

    Cost:
        No communication. Ranks that follow strides take memory independent of the
        number of ranks and of groups.
    """

    ids: DeviceIds
    along: tuple[int, ...]

    @property
    def others(self) -> tuple[int, ...]:
        """Numbers of the dims along which the groups differ."""
        return tuple(dim for dim in range(len(self.ids.shape)) if dim not in self.along)

    @property
    def group_size(self) -> int:
        """Number of ranks in each group."""
        return prod(self._sizes(self.along))

    def __len__(self) -> int:
        return prod(self._sizes(self.others))

    @overload
    def __getitem__(self, index: int) -> Sequence[int]: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sequence[int]]: ...
    def __getitem__(self, index: int | slice) -> Sequence[int] | list[Sequence[int]]:
        count = len(self)
        if isinstance(index, slice):
            return [self[k] for k in range(*index.indices(count))]
        if not -count <= index < count:
            raise IndexError(f"group {index} is outside of {count} groups")
        coords = [0] * len(self.ids.shape)
        places = unravel(index % count, self._sizes(self.others))
        for dim, place in zip(self.others, places, strict=True):
            coords[dim] = place
        return self._group_at(coords)

    def __iter__(self) -> Iterator[Sequence[int]]:
        return (self[k] for k in range(len(self)))

    def of(self, rank: int) -> Sequence[int]:
        """Return the ranks of the group that `rank` is in.

        Raises:
            RankError: If `rank` is not in the mesh; as in the two methods below.
        """
        coords = list(self._coords(rank))
        for dim in self.along:
            coords[dim] = 0
        return self._group_at(coords)

    def index_of(self, rank: int) -> int:
        """Return the number of the group that `rank` is in."""
        coords = self._coords(rank)
        return ravel([coords[dim] for dim in self.others], self._sizes(self.others))

    def place_of(self, rank: int) -> int:
        """Return the place of `rank` in its group."""
        coords = self._coords(rank)
        return ravel([coords[dim] for dim in self.along], self._sizes(self.along))

    def _group_at(self, coords: Sequence[int]) -> Sequence[int]:
        group = self.ids.view([self.along], coords)
        plain = group.as_range()
        return group if plain is None else plain

    def _coords(self, rank: int) -> tuple[int, ...]:
        return coords_of_rank(self.ids, rank)

    def _sizes(self, dims: Sequence[int]) -> tuple[int, ...]:
        shape = self.ids.shape
        return tuple(shape[dim] for dim in dims)


def coords_of_rank(ids: DeviceIds, rank: int) -> tuple[int, ...]:
    """Return the coordinates of `rank`, or say which ranks there are."""
    coords = ids.coords_of(rank)
    if coords is None:
        plain = ids.as_range()
        if plain is not None and plain.step == 1:
            known = f"ranks {plain.start}..{plain.stop - 1}"
        else:
            few = ", ".join(map(str, ids[:8]))
            known = f"ranks {few}, ..." if len(ids) > 8 else f"ranks {few}"
        raise RankError(f"rank {rank} is not in the mesh, which has {known}")
    return coords
