"""The mesh that is meant where none is named, within a block of code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mpimesh.dtensor.defaults import current_mesh, default_layout
from mpimesh.errors import LayoutError
from mpimesh.mesh import DeviceSpec
from mpimesh.runtime import DeviceMesh

__all__ = ["default_mesh", "device_name", "get_default_mesh", "mesh_for", "run_on"]


@contextmanager
def default_mesh(mesh: DeviceMesh) -> Iterator[DeviceMesh]:
    """Let functions that are given a layout, and no live mesh, take `mesh`, within the block.

    It is :func:`~mpimesh.default_layout` with copies along all dims, by TensorFlow's name. Local.

    Args:
        mesh: A live mesh.

    Raises:
        LayoutError: If it is none. It is a `ValueError`.

    Example:
        >>> with mm.DeviceMesh("x=-1") as mesh, mm.dtensor.default_mesh(mesh):
        ...     layout = AxisLayout(["x", "unsharded"], mesh)
        ...     print(mm.dtensor.copy_to_mesh(np.ones((4, 2)), layout).layout.text)
        x=S0
    """
    with default_layout(mesh):
        yield mesh


run_on = default_mesh
"""TensorFlow's other name for :func:`default_mesh`."""


def get_default_mesh() -> DeviceMesh | None:
    """Return the mesh of the innermost block around here; None if there is none. Local.

    A block of :func:`default_mesh`, or of :func:`~mpimesh.default_layout`.
    """
    return current_mesh()


def device_name(mesh: DeviceMesh | None = None) -> str:
    """Return the full name of the device of this rank, in TensorFlow's form. Local.

    Args:
        mesh: The mesh; the default one if None.

    Raises:
        LayoutError: If there is no mesh.

    Example:
        >>> with mm.DeviceMesh("x=-1") as mesh:
        ...     print(mm.dtensor.device_name(mesh))
        /job:localhost/replica:0/task:0/device:CPU:0
    """
    live = mesh_for(mesh)
    client = live.client()
    kind = "GPU" if live.local_device().backend.is_gpu else "CPU"
    return str(DeviceSpec(client.job_name, 0, client.client_id, kind, 0))


def mesh_for(mesh: DeviceMesh | None) -> DeviceMesh:
    """Return `mesh`, or the default one if that is None.

    Raises:
        LayoutError: If there is none, or it is no live mesh.
    """
    live = current_mesh() if mesh is None else mesh
    if not isinstance(live, DeviceMesh):
        raise LayoutError(
            "a layout says on which ranks, and a live DeviceMesh is what moves data between them: "
            f"give mesh=, or work within `with mpimesh.dtensor.default_mesh(mesh):`; got {live!r}"
        )
    return live
