"""A mesh whose dims run either inside nodes or between them.

A dim of which some coordinates share a node is split in two: of 8 ranks on nodes of 4 in a
row, the dim has a far part of 2 and a near part of 4. The ranks, and their order, stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from mpimesh.layout.tiling import Tiling
from mpimesh.mesh import Mesh

if TYPE_CHECKING:
    from mpimesh.layout.tiling import Integers

__all__ = ["NodeDims", "node_dims"]


@dataclass(frozen=True, slots=True, eq=False)
class NodeDims:
    """The split dims of a mesh.

    Attributes:
        mesh: The same ranks in the new dims.
        parts: For each dim of the old mesh its new ones, outermost first.
        near: The new dims along which all ranks are on one node, of more than one rank.
    """

    mesh: Mesh
    parts: tuple[tuple[int, ...], ...]
    near: frozenset[int]

    def dims(self, old: tuple[int, ...]) -> tuple[int, ...]:
        """Return the new dims of old ones."""
        return tuple(part for dim in old for part in self.parts[dim])

    def tiling(self, old: Tiling) -> Tiling:
        """Return the same tiles over the new dims."""
        axis_dims = tuple(self.dims(dims) for dims in old.axis_dims)
        return Tiling(self.mesh, old.shape, axis_dims, old.bounds, self.dims(old.first_only))


@lru_cache(maxsize=16)
def node_dims(mesh: Mesh, nodes: tuple[int, ...]) -> NodeDims:
    """Split the dims of a mesh by the node of each rank.

    Where nodes follow no dims, nothing is near.

    Cost:
        O(ranks) for each divisor of a dim's size, once.
    """
    grid = np.array(nodes, np.int64)[mesh.ids.array().reshape(mesh.shape())]
    dims: list[tuple[str, int]] = []
    parts: list[tuple[int, ...]] = []
    near: set[int] = set()
    names = set(mesh.dim_names)
    for number, (name, size) in enumerate(mesh.dims):
        outer, inner, first_is_near = _factors(np.moveaxis(grid, number, 0))
        if inner == 1 or outer == 1:
            if outer == 1 and size > 1:
                near.add(len(dims))
            parts.append((len(dims),))
            dims.append((name, size))
            continue
        split = [(_unused(f"{name}_far", names), outer), (_unused(f"{name}_near", names), inner)]
        near.add(len(dims) + (not first_is_near))
        parts.append((len(dims), len(dims) + 1))
        dims += split[::-1] if first_is_near else split
    return NodeDims(Mesh(dims, mesh.ids.array()), tuple(parts), frozenset(near))


def _factors(grid: Integers) -> tuple[int, int, bool]:
    """Return how many ranks along the first axis are far and near, and whether near is outermost.

    Of all ways to split it, that with the most near ranks.
    """
    size = len(grid)
    for inner in range(size, 1, -1):
        if size % inner:
            continue
        rows = grid.reshape(size // inner, inner, *grid.shape[1:])
        if (rows == rows[:, :1]).all():
            return size // inner, inner, False
        rows = grid.reshape(inner, size // inner, *grid.shape[1:])
        if (rows == rows[:1]).all():
            return size // inner, inner, True
    return size, 1, False


def _unused(name: str, names: set[str]) -> str:
    while name in names:
        name += "_"
    names.add(name)
    return name
