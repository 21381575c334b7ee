"""The ranks along a dim of a mesh, where the mesh may lack the usual one."""

from __future__ import annotations

from mpimesh.errors import UnknownNameError
from mpimesh.runtime import DeviceMesh, ProcessGroup

__all__ = ["group_along"]


def group_along(mesh: DeviceMesh, dim: str, usual: str) -> ProcessGroup:
    """Return the group along `dim`; this rank alone where the mesh has not the usual dim.

    Raises:
        UnknownNameError: If there is no such dim, and it is not the usual one.
    """
    if mesh.contains_dim(dim):
        return mesh.group(dim)
    if dim != usual:
        raise UnknownNameError(f"the mesh {mesh.dims_text} has no dim {dim!r}")
    return mesh.group().alone()
