"""Arrays that are split over a mesh: made, moved between layouts, and computed with."""

from __future__ import annotations

from mpimesh.dtensor import (  # noqa: F401 - each enters its functions in the registry
    ops_argument,
    ops_contract,
    ops_elementwise,
    ops_histogram,
    ops_linalg,
    ops_reduce,
    ops_statistics,
    ops_ufunc,
)
from mpimesh.dtensor.create import distribute, empty, from_callback, full, ones, zeros
from mpimesh.dtensor.ranges import Random, arange, eye, linspace
from mpimesh.dtensor.registry import allow_gather
from mpimesh.dtensor.tensor import DTensor

__all__ = [
    "DTensor",
    "Random",
    "allow_gather",
    "arange",
    "distribute",
    "empty",
    "eye",
    "from_callback",
    "full",
    "linspace",
    "ones",
    "zeros",
]
