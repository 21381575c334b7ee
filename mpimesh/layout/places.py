"""The places of many ranks of a mesh at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from mpimesh.mesh import Mesh

if TYPE_CHECKING:
    from mpimesh.layout.tiling import Integers

__all__ = ["Places", "places_of"]


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
    ranks: Integers = mesh.ids.array().reshape(-1)
    shape = mesh.shape()
    coords = np.stack(np.unravel_index(np.arange(mesh.size), shape or [1]), axis=1)
    offsets = np.full(mesh.ids.largest + 1, -1, np.int64)
    offsets[ranks] = np.arange(mesh.size)
    return Places(ranks, coords[:, : len(shape)].astype(np.int64), offsets)
