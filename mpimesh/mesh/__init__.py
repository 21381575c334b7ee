"""Meshes of ranks as values, and the records of what stands in them."""

from __future__ import annotations

from mpimesh.mesh.client import ClientInfo
from mpimesh.mesh.create import (
    create_distributed_mesh,
    create_mesh,
    device_mesh,
    mesh_from_device_ids,
)
from mpimesh.mesh.device import Device, DeviceBackend, pick_device
from mpimesh.mesh.device_queries import DeviceQueries
from mpimesh.mesh.dims import MAX_RANKS, DimsLike, MeshDimension, NamesLike
from mpimesh.mesh.fit import shapes_that_fit, world_size_error
from mpimesh.mesh.groups import WORLD, GroupBackend, GroupSpec
from mpimesh.mesh.host import cpu_device
from mpimesh.mesh.ids import DeviceIds, StridedIds
from mpimesh.mesh.listed import ListedIds
from mpimesh.mesh.mesh import Mesh
from mpimesh.mesh.probe import DeviceInfo, GpuPreference
from mpimesh.mesh.queries import MeshQueries
from mpimesh.mesh.rank_groups import RankGroups
from mpimesh.mesh.sharing import SharedGpu, shared_gpus, sharing_text
from mpimesh.mesh.spec import DEVICE_TYPES, DeviceSpec
from mpimesh.mesh.stats import DeviceTable, MeshStats
from mpimesh.mesh.topology import (
    DataParallelTopology,
    MeshTopology,
    MixedTopology,
    PipelineParallelTopology,
    TensorParallelTopology,
)

__all__ = [
    "DEVICE_TYPES",
    "MAX_RANKS",
    "WORLD",
    "ClientInfo",
    "DataParallelTopology",
    "Device",
    "DeviceBackend",
    "DeviceIds",
    "DeviceInfo",
    "DeviceQueries",
    "DeviceSpec",
    "DeviceTable",
    "DimsLike",
    "GpuPreference",
    "GroupBackend",
    "GroupSpec",
    "ListedIds",
    "Mesh",
    "MeshDimension",
    "MeshQueries",
    "MeshStats",
    "MeshTopology",
    "MixedTopology",
    "NamesLike",
    "PipelineParallelTopology",
    "RankGroups",
    "SharedGpu",
    "StridedIds",
    "TensorParallelTopology",
    "cpu_device",
    "create_distributed_mesh",
    "create_mesh",
    "device_mesh",
    "mesh_from_device_ids",
    "pick_device",
    "shapes_that_fit",
    "shared_gpus",
    "sharing_text",
    "world_size_error",
]
