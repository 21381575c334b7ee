"""TensorFlow's spelling of a layout, one spec for each array axis, to and from `Placement`."""

from __future__ import annotations

from collections.abc import Iterable

from mpimesh.arguments import as_items, shown
from mpimesh.errors import LayoutError
from mpimesh.layout.placement import Placement, Replicate, Shard
from mpimesh.mesh import Mesh

__all__ = ["MATCH", "UNSHARDED", "as_specs", "placement_of_specs", "specs_of_placement"]

UNSHARDED = "unsharded"
"""The spec of an axis that no mesh dim splits."""

MATCH = "match"
"""The spec of an axis that stays split as it is; only for what an array is to become."""


def as_specs(specs: object, mesh: Mesh) -> tuple[str, ...]:
    """Return `specs` as a tuple, one for each axis.

    Raises:
        LayoutError: If one is neither a dim of the mesh nor `UNSHARDED` nor `MATCH`, or a dim is
            repeated.
    """
    if isinstance(specs, str) or not isinstance(specs, Iterable):
        raise LayoutError(
            f"sharding specs must be one for each axis, as in ['x', 'unsharded'], got {specs!r}"
        )
    found = as_items(specs, "sharding specs", LayoutError)
    for axis, spec in enumerate(found):
        if isinstance(spec, str) and spec in (UNSHARDED, MATCH):
            continue
        if not isinstance(spec, str) or not mesh.contains_dim(spec):
            raise LayoutError(
                f"a sharding spec must either be a valid mesh dimension or UNSHARDED, but axis "
                f"{axis} of {list(found)} has {shown(spec)}, and the mesh is {_text(mesh)}"
            )
        if spec in found[:axis]:
            raise LayoutError(
                f"Mesh dimension {spec} was repeated in {list(found)}: a dim splits one axis at "
                "most"
            )
    return found


def placement_of_specs(specs: tuple[str, ...], mesh: Mesh) -> Placement:
    """Return the placement in which each dim splits the axis that names it.

    Raises:
        LayoutError: If an axis is `MATCH`.
    """
    if MATCH in specs:
        raise LayoutError(
            f"{list(specs)} says 'match', which stands for how another array is split; say which "
            "with AxisLayout.matching(other)"
        )
    return Placement(
        [Shard(specs.index(name)) if name in specs else Replicate() for name in mesh.dim_names]
    )


def specs_of_placement(placement: Placement, mesh: Mesh, ndim: int) -> tuple[str, ...]:
    """Return the specs of the axes of an array of `ndim` axes.

    Raises:
        LayoutError: If specs cannot say it: a `Partial`, sizes, two dims that split one axis, or
            an axis that the array does not have.
    """
    specs = [UNSHARDED] * ndim
    for name, spec in zip(mesh.dim_names, placement, strict=True):
        if isinstance(spec, Replicate):
            continue
        why = ""
        if not isinstance(spec, Shard):
            why = f"{spec!r}"
        elif spec.sizes is not None:
            why = "sizes of blocks"
        elif spec.axis >= ndim:
            why = f"an axis that an array of {ndim} axes does not have"
        elif specs[spec.axis] != UNSHARDED:
            why = f"axis {spec.axis} split by two dims, {specs[spec.axis]} and {name}"
        else:
            specs[spec.axis] = name
        if why:
            raise LayoutError(
                f"sharding specs cannot say {why}: {placement.named(mesh.dim_names)} on mesh "
                f"{_text(mesh)}"
            )
    return tuple(specs)


def _text(mesh: Mesh) -> str:
    return mesh.dims_text or "()"
