"""Defaults for arrays whose maker names no mesh: within a block, as the program decides."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from mpimesh.arguments import shown
from mpimesh.errors import LayoutError
from mpimesh.layout import Layout, Placement, PlacementLike, Replicate, Shard
from mpimesh.mesh import Mesh
from mpimesh.runtime import DeviceMesh, ProcessGroup

__all__ = ["as_live", "current_mesh", "default_layout", "layout_for"]

_current: ContextVar[tuple[DeviceMesh, Placement] | None] = ContextVar(
    "default_layout", default=None
)


@contextmanager
def default_layout(mesh: DeviceMesh, placements: PlacementLike | None = None) -> Iterator[None]:
    """Let the creation functions of the array namespace make arrays on `mesh`, within the block.

    The block is that of this thread, or of this task of asyncio; no other sees it. Blocks may
    stand in each other, and the innermost counts.

    Args:
        mesh: The mesh.
        placements: As for :class:`Layout`; None to replicate. A split of an axis that a new array
            does not have counts as a copy.

    Raises:
        LayoutError: If the mesh is no live one, or the placements do not fit it.

    Example:
        >>> xp = x.__array_namespace__()
        >>> with mm.default_layout(mesh, "dp=S0"):
        ...     y = xp.arange(12)
    """
    mesh = as_live(mesh)
    chosen = [Replicate()] * mesh.ndim if placements is None else placements
    token = _current.set((mesh, Layout(mesh, chosen).placement))
    try:
        yield
    finally:
        _current.reset(token)


def current_mesh() -> DeviceMesh | None:
    """Return the mesh of the innermost block around here; None outside of all."""
    found = _current.get()
    return None if found is None else found[0]


def layout_for(
    ndim: int, device: DeviceMesh | None, placements: PlacementLike | None
) -> tuple[DeviceMesh, Placement]:
    """Return where to make an array of so many axes.

    Args:
        ndim: Its number of axes.
        device: A mesh; None for that of the block.
        placements: None for those of the block; on another mesh, copies.

    Raises:
        LayoutError: If there is neither a mesh nor a block that has one.
    """
    current = _current.get()
    if device is None and current is None:
        raise LayoutError(
            "an array is made on a mesh: give device=mesh, or make it within `with "
            "mm.default_layout(mesh, placements):`"
        )
    mesh = device if device is not None else current[0] if current is not None else None
    mesh = as_live(mesh, "device")
    if placements is not None:
        return mesh, Layout(mesh, placements).placement
    if current is None or current[0] is not mesh:
        return mesh, Layout.replicated(mesh).placement
    return mesh, Placement(
        Replicate() if isinstance(spec, Shard) and spec.axis >= ndim else spec
        for spec in current[1]
    )


def as_live(mesh: object, what: str = "mesh") -> DeviceMesh:
    """Return what is given for `what` if ranks can talk over it.

    Raises:
        LayoutError: If it is no DeviceMesh.
    """
    if not isinstance(mesh, DeviceMesh):
        hint = ""
        if isinstance(mesh, Mesh):
            hint = "; make one of it: DeviceMesh(mesh)"
        elif hasattr(mesh, "Get_rank"):
            hint = "; make one on this communicator: DeviceMesh('dp=-1', comm)"
        elif isinstance(mesh, ProcessGroup):
            hint = "; take the mesh that the group is of"
        raise LayoutError(f"{what} must be a live DeviceMesh, got {shown(mesh)}{hint}")
    return mesh
