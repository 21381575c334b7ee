"""Arrays that are split over a mesh: made, moved between layouts, and computed with."""

from __future__ import annotations

from mpimesh.dtensor import (
    array_api,
    facts,
    indexing,
    masks,
    numpy_util,
    ops_argument,
    ops_contract,
    ops_covariance,
    ops_elementwise,
    ops_fft,
    ops_grids,
    ops_histogram,
    ops_linalg,
    ops_lines,
    ops_matrices,
    ops_neighbours,
    ops_reduce,
    ops_sets,
    ops_statistics,
    ops_tables,
    ops_ufunc,
    ops_writes,
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
from mpimesh.dtensor.halo import Halo, HaloField
from mpimesh.dtensor.local_map import BlockPlace, local_map
from mpimesh.dtensor.mesh_context import default_mesh, device_name, get_default_mesh, run_on
from mpimesh.dtensor.packing import pack, unpack
from mpimesh.dtensor.ranges import Random, arange, eye, linspace
from mpimesh.dtensor.registry import allow_gather
from mpimesh.dtensor.relayout import (
    call_with_layout,
    check_layout,
    copy_to_mesh,
    fetch_layout,
    is_dtensor,
    relayout,
    relayout_like,
)
from mpimesh.dtensor.shift import shift
from mpimesh.dtensor.tensor import DTensor
from mpimesh.dtensor.variable import DVariable

_RULES = (
    array_api,
    facts,
    indexing,
    masks,
    ops_argument,
    ops_contract,
    ops_covariance,
    ops_elementwise,
    ops_fft,
    ops_grids,
    ops_histogram,
    ops_linalg,
    ops_lines,
    ops_matrices,
    ops_neighbours,
    ops_reduce,
    ops_sets,
    ops_statistics,
    ops_tables,
    ops_ufunc,
    ops_writes,
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
    "BlockPlace",
    "DTensor",
    "DVariable",
    "Halo",
    "HaloField",
    "Random",
    "allow_gather",
    "arange",
    "call_with_layout",
    "check_layout",
    "copy_to_mesh",
    "default_layout",
    "default_mesh",
    "device_name",
    "distribute",
    "empty",
    "eye",
    "fetch_layout",
    "from_callback",
    "full",
    "get_default_mesh",
    "is_dtensor",
    "linspace",
    "local_map",
    "numpy_util",
    "ones",
    "pack",
    "relayout",
    "relayout_like",
    "run_on",
    "shift",
    "unpack",
    "zeros",
]
