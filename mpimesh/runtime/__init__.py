"""The live part: the world of ranks, meshes, groups, and results to come."""

from mpimesh.runtime.device_mesh import DeviceMesh
from mpimesh.runtime.failure import exit_all
from mpimesh.runtime.group import ProcessGroup
from mpimesh.runtime.launch import Launch
from mpimesh.runtime.messages import MAX_TAG
from mpimesh.runtime.system import (
    initialize_accelerator_system,
    initialize_multi_client,
    shutdown_accelerator_system,
)
from mpimesh.runtime.traffic import Traffic
from mpimesh.runtime.work import CollectiveTensor
from mpimesh.runtime.world import run_virtual

__all__ = [
    "MAX_TAG",
    "CollectiveTensor",
    "DeviceMesh",
    "Launch",
    "ProcessGroup",
    "Traffic",
    "exit_all",
    "initialize_accelerator_system",
    "initialize_multi_client",
    "run_virtual",
    "shutdown_accelerator_system",
]
