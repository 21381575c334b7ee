"""TVM's functions on split arrays, from ``tvm.relax.distributed``, and its scatter of workers."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from mpimesh.arguments import as_int, check_kind, shape_of, shown
from mpimesh.arrays import Array
from mpimesh.dtensor import DTensor
from mpimesh.dtensor.relayout import tensor_of
from mpimesh.errors import GroupError, LayoutError, ShapeError
from mpimesh.layout import DTensorType, Layout, PlacementLike, Replicate, Shard
from mpimesh.runtime import DeviceMesh, ProcessGroup

__all__ = [
    "annotate_sharding",
    "dtensor_type",
    "redistribute",
    "redistribute_replica_to_shard",
    "scatter_from_worker0",
]


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
        >>> y = mm.compat.tvm.redistribute(x, mesh, "S[0], R")
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
        >>> with mm.DeviceMesh("a=1,b=1") as mesh:
        ...     x = mm.ones((4, 4), mesh, "S[0], R", dtype="float32")
        ...     print(mm.compat.tvm.dtensor_type(x))
        R.DTensor((4, 4), "float32", R.device_mesh((1, 1), R.Range(0, 1)), "S[0], R")
    """
    tensor = tensor_of(x, "dtensor_type")
    return DTensorType(tensor.shape, tensor.dtype, tensor.layout.mesh, tensor.placement)


def scatter_from_worker0(
    x: Array | None,
    num_workers: int,
    axis: int = 0,
    *,
    group: ProcessGroup,
    out: Array | None = None,
) -> Array:
    """Cut the array of worker 0 along `axis`, and return this worker's part, ``length / n`` long.

    Collective, and waits. Whatever the axis, each worker receives its part in one piece.

    Args:
        x: On worker 0, the array. None elsewhere: what another worker gives is not sent, which a
            RuntimeWarning tells.
        num_workers: The number of ranks of `group`.
        axis: The axis to cut; negative counts from the end.
        group: The workers; worker 0 is its first rank.
        out: Array for the part. New if None.

    Raises:
        GroupError: If `group` is none, or has another number of ranks than `num_workers`.
        ShapeError: On every rank, if there is no such axis, or its length is not divisible by
            `num_workers`, or if worker 0 has none. On a worker whose `out` does not fit.

    Example:
        >>> with mm.DeviceMesh("tp=-1") as mesh:
        ...     x = np.arange(6).reshape(2, 3) if mesh.rank == 0 else None
        ...     mm.compat.tvm.scatter_from_worker0(x, mesh.size, 1, group=mesh.group("tp")).shape[0]
        2
    """
    wanted = "a group of ranks, as mesh.group('tp') gives"
    group = check_kind(group, ProcessGroup, "group", GroupError, wanted=wanted)
    if as_int(num_workers, "num_workers", GroupError) != group.size:
        raise GroupError(
            f"num_workers is {num_workers}, but group {group.name!r} has {group.size} ranks; give "
            "group.size, or the group of those workers"
        )
    # An array without axes, if worker 0 has none: it is refused on all workers.
    sent = np.empty(()) if x is None and group.rank == 0 else x
    try:
        part = group.scatter(sent, root=0, axis=axis, out=out).resolve()
    except ShapeError as error:
        error.add_note(
            "scatter_from_worker0 makes equal parts, group.scatter(x, sizes=...) others; None from "
            "worker 0 counts as an array with 0 axes"
        )
        raise
    if x is not None and group.rank != 0:
        # After the exchange: a warning may be an error here, and the others would wait for it.
        shape = shape_of(x)
        warnings.warn(
            f"scatter_from_worker0 sends the array of worker 0; worker {group.rank} of group "
            f"{group.name!r} gave one, too, {shown(x) if shape is None else f'of shape {shape}'}, "
            "which is dropped: give None there",
            RuntimeWarning,
            stacklevel=2,
        )
    return part
