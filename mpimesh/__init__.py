"""mpimesh: a device mesh for MPI.

Named meshes of ranks, collectives with deferred results, and pipelines of stages, for
NumPy and CuPy, on any MPI. Importing this package starts no MPI.
"""

from mpimesh import models, nn, optim
from mpimesh.arrays import ReduceOp
from mpimesh.dtensor import (
    BlockPlace,
    DTensor,
    Halo,
    HaloField,
    Random,
    allow_gather,
    arange,
    default_layout,
    distribute,
    empty,
    eye,
    from_callback,
    full,
    linspace,
    local_map,
    ones,
    shift,
    zeros,
)
from mpimesh.errors import MpimeshError
from mpimesh.layout import Layout, Partial, Placement, Replicate, Shard
from mpimesh.mesh import (
    Device,
    DeviceBackend,
    DeviceInfo,
    GpuPreference,
    GroupBackend,
    Mesh,
    MeshDimension,
    MeshStats,
    MeshTopology,
    create_distributed_mesh,
    create_mesh,
    device_mesh,
)
from mpimesh.parallel import (
    DataParallel,
    GradientBuckets,
    Microbatches,
    ParallelOptimizer,
    PipelineParallel,
    PipelineStage,
    clip_grad_norm,
)
from mpimesh.runtime import (
    CollectiveTensor,
    DeviceMesh,
    Launch,
    ProcessGroup,
    Traffic,
    exit_all,
    run_virtual,
)
from mpimesh.trace import Tracer

__version__ = "0.1.0"

__all__ = [
    "BlockPlace",
    "CollectiveTensor",
    "DTensor",
    "DataParallel",
    "Device",
    "DeviceBackend",
    "DeviceInfo",
    "DeviceMesh",
    "GpuPreference",
    "GradientBuckets",
    "GroupBackend",
    "Halo",
    "HaloField",
    "Launch",
    "Layout",
    "Mesh",
    "MeshDimension",
    "MeshStats",
    "MeshTopology",
    "Microbatches",
    "MpimeshError",
    "ParallelOptimizer",
    "Partial",
    "PipelineParallel",
    "PipelineStage",
    "Placement",
    "ProcessGroup",
    "Random",
    "ReduceOp",
    "Replicate",
    "Shard",
    "Tracer",
    "Traffic",
    "allow_gather",
    "arange",
    "clip_grad_norm",
    "create_distributed_mesh",
    "create_mesh",
    "default_layout",
    "device_mesh",
    "distribute",
    "empty",
    "exit_all",
    "eye",
    "from_callback",
    "full",
    "linspace",
    "local_map",
    "models",
    "nn",
    "ones",
    "optim",
    "run_virtual",
    "shift",
    "zeros",
]
