"""Layouts of a live mesh, made once."""

from __future__ import annotations

from collections.abc import Hashable

from mpimesh.layout import Layout, Placement, PlacementLike
from mpimesh.runtime import DeviceMesh

__all__ = ["fitting_layout"]

_MOST_KEPT = 256


def fitting_layout(mesh: DeviceMesh, placements: PlacementLike, shape: tuple[int, ...]) -> Layout:
    """Return the layout on `mesh`, the same object for the same question. Local.

    Raises:
        LayoutError: If it does not fit the mesh, or an array of this shape.
    """
    if not isinstance(placements, (str, Placement, tuple)):
        placements = Placement.of(placements, mesh.dim_names)
    kept = mesh.kept
    key: Hashable = ("fits", placements, shape)
    layout = kept.get(key)
    if isinstance(layout, Layout):
        return layout
    given = Placement.of(placements, mesh.dim_names)
    layout = mesh.kept.get(("layout", given))
    if not isinstance(layout, Layout):
        layout = Layout(mesh, given)
    layout.tiling(shape)  # refuses what does not fit
    if len(mesh.kept) >= _MOST_KEPT:
        mesh.kept.clear()
    mesh.kept["layout", given] = mesh.kept[key] = layout
    return layout
