"""Start and end by name, as TensorFlow DTensor's programs do it.

Nothing here is needed to use mpimesh: making a :class:`~mpimesh.DeviceMesh` starts what it
needs. What these functions give is a place at which a wrong start shows, before any work.
"""

from __future__ import annotations

from mpimesh.errors import MeshError
from mpimesh.runtime.device_mesh import DeviceMesh
from mpimesh.runtime.world import current_world

__all__ = [
    "initialize_accelerator_system",
    "initialize_multi_client",
    "shutdown_accelerator_system",
]


def initialize_accelerator_system(device_type: str | None = None) -> str:
    """Start MPI, find the devices of all ranks, and return the type of device to use.

    Collective over all ranks.

    Args:
        device_type: ``"CPU"`` or ``"GPU"``, which every rank must have; if None, GPU where
            every rank has one, else CPU.

    Raises:
        MeshError: On every rank, if it was called before without a shutdown since, or if there is
            no such device. It is a `ValueError`.
        LaunchError: If MPI sees one rank where the launcher started more.
    """
    world = current_world()
    if world.system is not None:
        raise MeshError(
            "the accelerator system is initialized already; call shutdown_accelerator_system first"
        )
    with DeviceMesh("world_ranks=-1") as mesh:
        client = mesh.client()
    world.system = client.preferred_device_type(device_type)
    return world.system


def shutdown_accelerator_system() -> None:
    """Undo :func:`initialize_accelerator_system`, so that it may be called again. Local.

    MPI itself goes on: it is mpi4py's, which ends it with the process, and other libraries may use
    it. Meshes are closed by those who made them.

    Raises:
        MeshError: If the system is not initialized. It is a `ValueError`.
    """
    world = current_world()
    if world.system is None:
        raise MeshError(
            "the accelerator system is not initialized; call initialize_accelerator_system first"
        )
    world.system = None


initialize_multi_client = initialize_accelerator_system
"""TensorFlow's older name."""
