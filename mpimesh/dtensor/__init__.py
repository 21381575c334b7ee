"""Arrays that are split over a mesh: made, moved between layouts, and computed with."""

from __future__ import annotations

from mpimesh.dtensor import facts, indexing, masks, scans, setting, sorting, uniques, shape_axes, shape_join, shape_repeat, shape_reshape
from mpimesh.dtensor.create import distribute, empty, from_callback, full, ones, zeros
from mpimesh.dtensor.registry import allow_gather
from mpimesh.dtensor.tensor import DTensor

__all__ = [
    "DTensor",
    "allow_gather",
    "distribute",
    "empty",
    "from_callback",
    "full",
    "ones",
    "zeros",
]
