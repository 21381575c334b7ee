"""TensorFlow's functions on split arrays: put on a mesh, laid out anew, asked for their layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpimesh.arguments import as_function
from mpimesh.dtensor.creation import distribute
from mpimesh.dtensor.dtensor import DTensor
from mpimesh.dtensor.mesh_context import mesh_for
from mpimesh.errors import LayoutError
from mpimesh.layout import (
    MATCH,
    UNSHARDED,
    AxisLayout,
    Layout,
    Placement,
    PlacementLike,
    PlacementSpec,
    Replicate,
    Shard,
)
from mpimesh.runtime import DeviceMesh
from mpimesh.runtime.operands import host_array

__all__ = [
    "call_with_layout",
    "check_layout",
    "copy_to_mesh",
    "fetch_layout",
    "is_dtensor",
    "placed_as",
    "relayout",
    "relayout_like",
    "tensor_of",
]


def copy_to_mesh(x: Any, layout: PlacementLike, *, mesh: DeviceMesh | None = None) -> DTensor:
    """Put an array that every rank has on a mesh: each rank keeps its shard.

    Nothing moves. A :class:`DTensor`, which may be on another mesh, is brought as
    :meth:`DTensor.redistribute` brings it; that is collective.

    Args:
        x: The whole array, the same on every rank; or a split one.
        layout: An :class:`AxisLayout`, a :class:`Layout`, or placements.
        mesh: The live mesh; the default one if None.

    Raises:
        LayoutError: If the layout does not fit the array or the mesh; with an `AxisLayout`, also if
            the shards would not be equal. It is a `ValueError`.

    Example:
        >>> with mm.DeviceMesh("x=3,y=2") as mesh:
        ...     layout = AxisLayout(["x", "unsharded"], mesh)
        ...     t = mm.dtensor.copy_to_mesh(np.arange(12).reshape(6, 2), layout, mesh=mesh)
        ...     print(mesh.rank, t.local.tolist())  # rank 2
        2 [[4, 5], [6, 7]]
    """
    if isinstance(x, DTensor):
        return _brought(x, layout, mesh)
    live = mesh_for(mesh)
    whole = host_array(x)
    return distribute(whole, live, placed_as(layout, live, whole.shape))


def relayout(x: DTensor, layout: PlacementLike, *, mesh: DeviceMesh | None = None) -> DTensor:
    """Return the same array in another layout. Collective, and waits.

    Any layout to any other, also such as ``["x", "y"]`` to ``["z", "y"]``. Each rank
    receives only what it lacks.

    Args:
        x: The array.
        layout: An :class:`AxisLayout`, in which ``"match"`` keeps how an axis is split; a
            :class:`Layout`; or placements.
        mesh: The mesh to bring it to; the one that it is on if None.

    Returns:
        A tensor with a block of its own; `x` itself if the layout is the same.

    Raises:
        LayoutError: If `x` is no DTensor; if the layout does not fit it or the mesh; with an
            `AxisLayout`, also if shards would not be equal.

    Example:
        >>> y = mm.dtensor.relayout(x, AxisLayout(["unsharded", "match"], mesh))
    """
    return _brought(tensor_of(x, "relayout"), layout, mesh)


def relayout_like(x: DTensor, other: DTensor) -> DTensor:
    """Return `x` in the layout and on the mesh of `other`. Collective, and waits.

    Raises:
        LayoutError: If one is no DTensor, or the layout does not fit the shape of `x`.
    """
    x, other = tensor_of(x, "relayout_like"), tensor_of(other, "relayout_like")
    if x.ndim != other.ndim:
        raise LayoutError(f"relayout_like takes arrays of as many axes, got {x!r} and {other!r}")
    return x.redistribute(other.placement, mesh=other.mesh)


def fetch_layout(x: DTensor) -> AxisLayout:
    """Return the layout of an array in TensorFlow's spelling. Local.

    Raises:
        LayoutError: If `x` is no DTensor, or that spelling cannot say it (several dims on one axis,
            sizes, summands); ``x.layout`` can.

    Example:
        >>> mm.dtensor.fetch_layout(x).sharding_specs
        ['x', 'unsharded']
    """
    return AxisLayout.of(tensor_of(x, "fetch_layout").layout, x.ndim)


def check_layout(x: DTensor, layout: PlacementLike) -> None:
    """Return if the array has this layout. Local.

    Args:
        x: The array.
        layout: An :class:`AxisLayout`, a :class:`Layout`, or placements.

    Raises:
        LayoutError: With both layouts, if it has another, or is no DTensor. It is a `ValueError`.
    """
    found = tensor_of(x, "check_layout").layout
    axes = layout.rank if isinstance(layout, AxisLayout) else x.ndim
    placed = hasattr(layout, "mesh")
    expected = Layout(layout.mesh if placed else found.mesh, layout)  # type: ignore[union-attr]
    if axes != x.ndim or not found.agrees_with(expected):
        raise LayoutError(
            f"Layout of tensor: {found}, of {x.ndim} axes, did not match expected layout: "
            f"{expected}, of {axes} axes; bring it there with relayout"
        )


def is_dtensor(x: Any) -> bool:
    """Tell whether `x` is a :class:`DTensor`. Local."""
    return isinstance(x, DTensor)


def call_with_layout(
    function: Callable[..., Any],
    layout: PlacementLike | None,
    *args: Any,
    mesh: DeviceMesh | None = None,
    **kwargs: Any,
) -> Any:
    """Call a function and lay its result out.

    Collective if the function is, or if its result has to be moved. An array of NumPy's is
    taken for the whole array, as every rank has made it, and each keeps its part.
    (:func:`zeros` and the like make that part only.)

    Args:
        function: Gives an array, or a tuple or list of arrays, which are all laid out so.
        layout: The layout; None leaves the result as it is.
        args: What the function is called with.
        mesh: The live mesh; the default one if None. A function that has an argument of this name
            gets it by ``functools.partial``.
        kwargs: The same as `args`, by name.

    Raises:
        LayoutError: If the layout does not fit a result, or there is no default mesh.

    Example:
        >>> with mm.dtensor.default_mesh(mesh):
        ...     grid = mm.dtensor.call_with_layout(np.identity, "x=S0", 4)
    """
    found = as_function(function, "function", LayoutError)(*args, **kwargs)
    if layout is None:
        return found
    if isinstance(found, tuple | list) and not hasattr(found, "_fields"):
        return type(found)(copy_to_mesh(one, layout, mesh=mesh) for one in found)
    return copy_to_mesh(found, layout, mesh=mesh)


# -- for the other words -----------------------------------------------------------------


def tensor_of(x: Any, what: str) -> DTensor:
    """Return `x`, which must be a split array.

    Raises:
        LayoutError: If it is not.
    """
    if not isinstance(x, DTensor):
        raise LayoutError(
            f"{what} takes a DTensor, got {type(x).__name__}, which has no layout; make one with "
            "distribute or copy_to_mesh"
        )
    return x


def placed_as(
    layout: PlacementLike,
    mesh: DeviceMesh,
    shape: Sequence[int],
    source: Layout | None = None,
) -> Layout:
    """Return a layout in any spelling as one on `mesh`, for an array of `shape`.

    Args:
        layout: The layout.
        mesh: Where it is to be.
        shape: The global shape.
        source: Where the array is, for axes that are to match.

    Raises:
        LayoutError: If it does not fit, or an `AxisLayout` would give shards that are not equal.
    """
    if not isinstance(layout, AxisLayout):
        made = Layout(mesh, layout)
        made.tiling(shape)
        return made
    known = AxisLayout([UNSHARDED if s == MATCH else s for s in layout.specs], layout.mesh)
    made = Layout(mesh, known)  # refuses another mesh
    known.local_shape_from_global_shape(shape)
    if MATCH not in layout.specs or source is None:
        return Layout(mesh, layout)
    return Layout(mesh, _matched(layout, source))


def _brought(x: DTensor, layout: PlacementLike, mesh: DeviceMesh | None) -> DTensor:
    live = x.mesh if mesh is None else mesh
    return x.redistribute(placed_as(layout, live, x.shape, x.layout), mesh=live)


def _matched(layout: AxisLayout, source: Layout) -> Placement:
    """Return the placement with what `source` has for the axes that are to match.

    Dims are the same if they have one name, also on two meshes. Unlike `AxisLayout.matching`
    it takes sources that only a :class:`Layout` can say, as two dims that split one axis.
    """
    kept = {
        name: spec
        for name, spec in zip(source.mesh.dim_names, source.placement, strict=True)
        if isinstance(spec, Shard) and layout.specs[spec.axis] == MATCH
    }
    for name, spec in kept.items():
        if name in layout.specs or not layout.mesh.contains_dim(name):
            why = "is to split another" if name in layout.specs else "is not in the new mesh"
            raise LayoutError(
                f"{layout.sharding_specs} cannot match {source}: axis {spec.axis} is split by "
                f"{name}, which {why}"
            )
    specs: list[PlacementSpec] = []
    for name in layout.mesh.dim_names:
        if name in layout.specs:
            specs.append(Shard(layout.specs.index(name)))
        else:
            specs.append(kept.get(name, Replicate()))
    return Placement(specs)
