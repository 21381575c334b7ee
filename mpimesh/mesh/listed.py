"""Device ids that follow no strides, and the choice between the two kinds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from mpimesh.arguments import as_int
from mpimesh.errors import MeshError
from mpimesh.mesh.dims import MAX_RANKS
from mpimesh.mesh.ids import DeviceIds, Mode, StridedIds, unravel

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["ListedIds", "make_ids", "split_ids"]


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
