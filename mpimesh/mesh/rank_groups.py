"""The groups of ranks along some dims of a mesh, without a table of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import overload

from mpimesh.errors import RankError
from mpimesh.mesh.ids import DeviceIds, ravel, unravel

__all__ = ["RankGroups"]


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
