"""The blocks of one array over a mesh: which rank has which, and which of them meet.

A tiling is a grid of tiles: each axis is cut at its own bounds, and a tile is the product of one
interval of each axis. The coordinates of a rank along the splitting dims select its tile; along all
other dims tiles have copies. So all questions are answered axis by axis, and nothing here is as
long as the number of ranks times the number of tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from mpimesh.errors import LayoutError
from mpimesh.layout.boxes import Box
from mpimesh.layout.placement import Placement, Shard
from mpimesh.mesh import Mesh

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Cut", "Places", "Tiling", "axis_bounds", "cut_further", "places_of"]


@dataclass(frozen=True, slots=True)
class Cut:
    """The cut of one mesh dim through what is left of an axis.

    Attributes:
        parts: How many parts.
        sizes: Their sizes; None for parts that differ by one at most, the larger ones first.
    """

    parts: int
    sizes: tuple[int, ...] | None = None


@lru_cache(maxsize=1024)
def axis_bounds(length: int, cuts: tuple[Cut, ...]) -> npt.NDArray[np.int64]:
    """Return where each block of an axis begins, and at last `length`.

    The first of `cuts` is the outermost, so the blocks stand in the row-major order of the
    coordinates: block k is ``bounds[k]`` to ``bounds[k + 1]``.

    Shapes:
        result: (product of all parts + 1,), read-only.

    Raises:
        LayoutError: If sizes do not add up to what they split.
    """
    bounds = np.array([0, length], np.int64)
    for cut in cuts:
        bounds = cut_further(bounds, cut)
    bounds.flags.writeable = False
    return bounds


def cut_further(bounds: npt.NDArray[np.int64], cut: Cut) -> npt.NDArray[np.int64]:
    """Return where the parts begin when each block is cut, and at last where the last one ends.

    Shapes:
        bounds: (blocks + 1,).
        result: (blocks * parts + 1,).

    Raises:
        LayoutError: If sizes do not add up to what they split.
    """
    lengths = np.diff(bounds)
    offsets: npt.NDArray[np.int64]
    if cut.sizes is None:
        part = np.arange(cut.parts)
        quotients, rests = np.divmod(lengths[:, None], cut.parts)
        offsets = part * quotients + np.minimum(part, rests)
    else:
        _check_sizes(cut, lengths)
        sizes = np.array(cut.sizes, np.int64)
        offsets = (np.cumsum(sizes) - sizes)[None, :]
    return np.append(bounds[:-1, None] + offsets, bounds[-1])


def _check_sizes(cut: Cut, lengths: Sequence[int] | npt.NDArray[np.int64]) -> None:
    sizes = cut.sizes or ()
    if len(sizes) != cut.parts:
        raise LayoutError(
            f"sizes {sizes} are {len(sizes)}, but the mesh dim that they are for has {cut.parts} "
            "ranks; give one size for each"
        )
    wrong = [int(length) for length in lengths if length != sum(sizes)]
    if wrong:
        raise LayoutError(
            f"sizes {sizes} add up to {sum(sizes)}, but split {wrong[0]} elements of the axis"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Tables of one mesh, each as long as its number of ranks.

    Attributes:
        ranks: The ranks in row-major order.
        coords: Their coordinates: (ranks, mesh dims).
        offsets: The offset of each rank up to the largest; -1 for those that are not in the mesh.
    """

    ranks: Integers
    coords: Integers
    offsets: Integers

    def offsets_of(self, ranks: Integers) -> Integers:
        """Return where `ranks` stand; -1 for those that are not in the mesh."""
        known = np.minimum(ranks, len(self.offsets) - 1)
        return np.where(ranks < len(self.offsets), self.offsets[known], -1)


@lru_cache(maxsize=16)
def places_of(mesh: Mesh) -> Places:
    """Return the tables of a mesh.

    Cost:
        O(ranks) once for each mesh.
    """
    ranks: Integers = mesh.ids
    shape = mesh.shape
    coords = np.stack(np.unravel_index(np.arange(mesh.size), shape or [1]), axis=1)
    offsets = np.full(int(ranks.max()) + 1, -1, np.int64)
    offsets[ranks] = np.arange(mesh.size)
    return Places(ranks, coords[:, : len(shape)].astype(np.int64), offsets)


Integers: TypeAlias = "npt.NDArray[np.int64]"


@dataclass(frozen=True, slots=True, eq=False)
class Tiling:
    """The tiles of an array of one shape.

    Attributes:
        mesh: The ranks.
        shape: The array's global shape.
        axis_dims: For each axis the numbers of the mesh dims that split it, outermost first.
        bounds: For each axis where its intervals begin, and at last its length.
        first_only: Dims along which only the ranks at coordinate 0 hold anything.
    """

    mesh: Mesh
    shape: tuple[int, ...]
    axis_dims: tuple[tuple[int, ...], ...]
    bounds: tuple[Integers, ...]
    first_only: tuple[int, ...] = ()

    @classmethod
    def of(cls, mesh: Mesh, placement: Placement, shape: tuple[int, ...]) -> Tiling:
        """Return the tiles of an array that is placed so; `Partial` counts as a copy.

        Raises:
            LayoutError: If the array has no such axis, or sizes do not add up to its length.
        """
        splits: list[list[tuple[int, Cut]]] = [[] for _ in shape]
        for number, spec in enumerate(placement):
            if not isinstance(spec, Shard):
                continue
            if spec.axis >= len(shape):
                raise LayoutError(
                    f"{spec!r} along mesh dim {mesh.dims[number]} needs an array of more axes than "
                    f"{len(shape)}: its shape is {shape}"
                )
            splits[spec.axis].append((number, Cut(mesh.dims[number].size, spec.sizes)))
        return cls.of_cuts(mesh, shape, splits)

    @classmethod
    def of_cuts(
        cls,
        mesh: Mesh,
        shape: tuple[int, ...],
        splits: Sequence[Sequence[tuple[int, Cut]]],
        first_only: tuple[int, ...] = (),
    ) -> Tiling:
        """Return the tiles for which each axis is cut by (dim, cut), outermost first."""
        axis_dims, bounds = [], []
        for axis, (length, row) in enumerate(zip(shape, splits, strict=True)):
            axis_dims.append(tuple(number for number, _ in row))
            try:
                bounds.append(axis_bounds(length, tuple(cut for _, cut in row)))
            except LayoutError as error:
                raise LayoutError(f"axis {axis} of shape {shape}: {error}") from None
        return cls(mesh, shape, tuple(axis_dims), tuple(bounds), first_only)

    # -- one rank --------------------------------------------------------------------

    def box(self, rank: int) -> Box:
        """Return (start, stop) along each axis of the tile of `rank`; empty if it holds none."""
        coords = self.mesh.coords_of(rank)
        if any(coords[dim] for dim in self.first_only):
            return ((0, 0),) * len(self.shape)
        box = []
        for dims, bounds in zip(self.axis_dims, self.bounds, strict=True):
            leaf = 0
            for dim in dims:
                leaf = leaf * self.mesh.dims[dim].size + coords[dim]
            box.append((int(bounds[leaf]), int(bounds[leaf + 1])))
        return tuple(box)

    def holds(self, rank: int) -> bool:
        """Tell whether `rank` is in the mesh and holds a tile, be it without elements."""
        if not self.mesh.contains_rank(rank):
            return False
        coords = self.mesh.coords_of(rank)
        return not any(coords[dim] for dim in self.first_only)

    # -- tiles -----------------------------------------------------------------------

    @property
    def free_dims(self) -> tuple[int, ...]:
        """The dims that split no axis, and along which all ranks hold the same tile."""
        taken = {dim for dims in self.axis_dims for dim in dims}.union(self.first_only)
        return tuple(dim for dim in range(self.mesh.ndim) if dim not in taken)

    def meeting(self, box: Box) -> list[Integers]:
        """Return, for each axis, which of its intervals have an element of `box`."""
        return [
            _meeting(bounds, start, stop)
            for bounds, (start, stop) in zip(self.bounds, box, strict=True)
        ]

    def coords_of_leaves(self, leaves: Sequence[Integers]) -> dict[int, Integers]:
        """Return the coordinates, by dim, of tiles given by their interval of each axis."""
        coords: dict[int, Integers] = {}
        for dims, rest in zip(self.axis_dims, leaves, strict=True):
            for dim in reversed(dims):
                rest, coords[dim] = np.divmod(rest, self.mesh.dims[dim].size)
        return coords

    def leaves_of(self, coords: Integers) -> list[Integers]:
        """Return, for each axis, the intervals of the ranks at `coords`.

        Shapes:
            coords: (ranks, mesh dims).
            result: (ranks,) for each axis.
        """
        rows = []
        for dims in self.axis_dims:
            leaf = np.zeros(len(coords), np.int64)
            for dim in dims:
                leaf = leaf * self.mesh.dims[dim].size + coords[:, dim]
            rows.append(leaf)
        return rows


def _meeting(bounds: Integers, start: int, stop: int) -> Integers:
    if stop <= start:
        return np.zeros(0, np.int64)
    first = int(np.searchsorted(bounds, start, "right")) - 1
    last = int(np.searchsorted(bounds, stop, "left"))
    leaves = np.arange(first, last)
    return leaves[bounds[first:last] < bounds[first + 1 : last + 1]]  # not those without elements
