"""Arrays that are split over a mesh: made, moved between layouts, and computed with."""

from __future__ import annotations

from mpimesh.dtensor import (
    facts,
    indexing,
    masks,
    scans,
    setting,
    shape_axes,
    shape_join,
    shape_repeat,
    shape_reshape,
    sorting,
    uniques,
)
from mpimesh.dtensor.create import distribute, empty, from_callback, full, ones, zeros
from mpimesh.dtensor.defaults import default_layout
from mpimesh.dtensor.registry import allow_gather
from mpimesh.dtensor.tensor import DTensor

_RULES = (
    facts,
    indexing,
    masks,
    scans,
    setting,
    shape_axes,
    shape_join,
    shape_repeat,
    shape_reshape,
    sorting,
    uniques,
)  # imported, they tell NumPy's functions what to do with split arrays

__all__ = [
    "DTensor",
    "allow_gather",
    "default_layout",
    "distribute",
    "empty",
    "from_callback",
    "full",
    "ones",
    "zeros",
]
