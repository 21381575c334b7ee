"""TVM's functions on split arrays, from ``tvm.relax.distributed``."""

from __future__ import annotations

from typing import Any

from mpimesh.arguments import as_int
from mpimesh.dtensor.relayout import tensor_of
from mpimesh.dtensor.tensor import DTensor
from mpimesh.errors import LayoutError
from mpimesh.layout import DTensorType, Layout, PlacementLike, Replicate, Shard
from mpimesh.runtime import DeviceMesh

__all__ = ["annotate_sharding", "dtensor_type", "redistribute", "redistribute_replica_to_shard"]


def annotate_sharding(x: DTensor, mesh: DeviceMesh, placement: PlacementLike) -> DTensor:
    """Return `x`, of which is said how it lies; that is checked, and nothing moves. Local.

    Args:
        x: The array.
        mesh: The mesh that it should be on.
        placement: As for :class:`Layout`; TVM's text is ``"S[0], R"``.

    Raises:
        LayoutError: With both layouts, if it lies otherwise, or is no DTensor.
    """
    found, expected = tensor_of(x, "annotate_sharding").layout, Layout(mesh, placement)
    if not found.agrees_with(expected):
        raise LayoutError(
            f"{x!r} is annotated to be {expected}; bring it there with redistribute(x, mesh, "
            "placement)"
        )
    return x


def redistribute(x: DTensor, mesh: DeviceMesh, placement: PlacementLike) -> DTensor:
    """Return the same array on `mesh`, placed so: :meth:`DTensor.redistribute` in TVM's words.

    Collective, and waits. Any placement to any other, on the mesh of `x` or on another.

    Raises:
        LayoutError: If the placement does not fit the array or the mesh, or `x` is no DTensor.

    Example:
        >>> y = mm.dtensor.redistribute(x, mesh, "S[0], R")
    """
    return tensor_of(x, "redistribute").redistribute(placement, mesh=mesh)


def redistribute_replica_to_shard(x: DTensor, num_workers: int, axis: int) -> DTensor:
    """Return the array of which each rank keeps its own slice of `axis`. Local: nothing moves.

    Worker k of n keeps ``[k * length / n, (k + 1) * length / n)``.

    Args:
        x: An array that is replicated on a mesh of one dim.
        num_workers: The number of ranks of the mesh.
        axis: The axis to split, counted from 0.

    Raises:
        LayoutError: If the length of `axis` is not divisible by `num_workers`, or `x` is not such
            an array. It is a `ValueError`.
    """
    layout = tensor_of(x, "redistribute_replica_to_shard").layout
    dims = layout.mesh.dims
    if len(dims) != 1 or list(layout.placement) != [Replicate()]:
        raise LayoutError(
            f"redistribute_replica_to_shard takes an array that is R on a mesh of one dim, got "
            f"{x!r}; redistribute goes from any layout to any other"
        )
    if as_int(num_workers, "num_workers", LayoutError) != dims[0].size:
        raise LayoutError(
            f"num_workers is {num_workers}, but mesh {layout.mesh.dims_text} has "
            f"{dims[0].size} ranks"
        )
    target = Shard(axis)
    layout_there = Layout(layout.mesh, [target])
    layout_there.tiling(x.shape)  # refuses an axis that is not there
    if x.shape[axis] % num_workers:
        raise LayoutError(
            f"axis {axis} of shape {x.shape} is not divisible by num_workers {num_workers}; "
            "redistribute makes uneven slices"
        )
    return x.redistribute([target])


def dtensor_type(x: Any) -> DTensorType:
    """Return all that is known of a split array but its values: TVM's struct info. Local.

    Raises:
        LayoutError: If `x` is no DTensor.

    Example:
        >>> with mm.DeviceMesh("a=2,b=2") as mesh:
        ...     x = mm.ones((4, 4), mesh, "S[0], R", dtype="float32")
        ...     print(mm.dtensor.dtensor_type(x))
        R.DTensor((4, 4), "float32", R.device_mesh((2, 2), R.Range(0, 4)), "S[0], R")
    """
    tensor = tensor_of(x, "dtensor_type")
    return DTensorType(tensor.shape, tensor.dtype, tensor.layout.mesh, tensor.placement)
