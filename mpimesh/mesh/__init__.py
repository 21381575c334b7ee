"""Meshes of ranks as values, and the records of what stands in them."""

from __future__ import annotations

from mpimesh.mesh.device import Device, DeviceBackend, pick_device
from mpimesh.mesh.dims import (
    MAX_RANKS,
    DimsLike,
    MeshDimension,
    NamesLike,
    shapes_that_fit,
    world_size_error,
)
from mpimesh.mesh.mesh import Mesh, MeshLike
from mpimesh.mesh.probe import DeviceInfo, GpuPreference, cpu_device
from mpimesh.mesh.stats import (
    DeviceTable,
    SharedGpu,
    shared_gpus,
    sharing_text,
)
from mpimesh.mesh.topology import (
    WORLD,
    DataParallelTopology,
    GroupSpec,
    MeshTopology,
    MixedTopology,
    PipelineParallelTopology,
    TensorParallelTopology,
)

__all__ = [
    "MAX_RANKS",
    "WORLD",
    "DataParallelTopology",
    "Device",
    "DeviceBackend",
    "DeviceInfo",
    "DeviceTable",
    "DimsLike",
    "GpuPreference",
    "GroupSpec",
    "Mesh",
    "MeshDimension",
    "MeshLike",
    "MeshTopology",
    "MixedTopology",
    "NamesLike",
    "PipelineParallelTopology",
    "SharedGpu",
    "TensorParallelTopology",
    "cpu_device",
    "pick_device",
    "shapes_that_fit",
    "shared_gpus",
    "sharing_text",
    "world_size_error",
]
