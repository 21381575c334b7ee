"""Arrays that are split over a mesh: made, moved between layouts, and computed with."""

from __future__ import annotations

from mpimesh.dtensor import (  # noqa: F401  their import registers the rules for NumPy's functions
    array_api,
    contract,
    elementwise,
    fft,
    indexing,
    joining,
    linalg,
    reduce,
    reshape,
    scans,
    sorting,
    statistics,
    tables,
    writes,
)
from mpimesh.dtensor.creation import (
    Random,
    arange,
    distribute,
    empty,
    eye,
    from_callback,
    full,
    linspace,
    ones,
    zeros,
)
from mpimesh.dtensor.defaults import default_layout
from mpimesh.dtensor.dispatch import allow_gather
from mpimesh.dtensor.dtensor import DTensor
from mpimesh.dtensor.halo_exchange import Halo, HaloField, shift
from mpimesh.dtensor.local_map import BlockPlace, local_map
from mpimesh.dtensor.variable import DVariable

__all__ = [
    "BlockPlace",
    "DTensor",
    "DVariable",
    "Halo",
    "HaloField",
    "Random",
    "allow_gather",
    "arange",
    "default_layout",
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
