"""Arrays that are split over a mesh: made, moved between layouts, and computed with."""

from __future__ import annotations

from mpimesh.dtensor.create import distribute, empty, from_callback, full, ones, zeros
from mpimesh.dtensor.halo import Halo, HaloField
from mpimesh.dtensor.local_map import BlockPlace, local_map
from mpimesh.dtensor.ranges import Random, arange, eye, linspace
from mpimesh.dtensor.registry import allow_gather
from mpimesh.dtensor.shift import shift
from mpimesh.dtensor.tensor import DTensor

__all__ = [
    "BlockPlace",
    "DTensor",
    "Halo",
    "HaloField",
    "Random",
    "allow_gather",
    "arange",
    "distribute",
    "empty",
    "eye",
    "from_callback",
    "full",
    "linspace",
    "local_map",
    "ones",
    "shift",
    "zeros",
]
