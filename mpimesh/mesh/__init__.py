"""Meshes of ranks as values, and the records of what stands in them."""

from __future__ import annotations

from mpimesh.mesh.device import (
    Device,
    DeviceBackend,
    DeviceTable,
    SharedGpu,
    pick_device,
    shared_gpus,
    sharing_text,
)
from mpimesh.mesh.dims import MAX_RANKS, DimsLike, MeshDimension, NamesLike
from mpimesh.mesh.mesh import Mesh, MeshLike
from mpimesh.mesh.probe import cpu_device, find_devices
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
    "DeviceTable",
    "DimsLike",
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
    "find_devices",
    "pick_device",
    "shared_gpus",
    "sharing_text",
]
