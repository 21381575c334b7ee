"""Elements where a mask is true, and the indices of elements that are not 0."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpimesh.arrays import HostArray
from mpimesh.dtensor.arguments import as_tensor, moved_to, refuse_given
from mpimesh.dtensor.methods import settled
from mpimesh.dtensor.picking import pick_along
from mpimesh.dtensor.pieces import exchange_counts
from mpimesh.dtensor.registry import implements, sure_rule_of
from mpimesh.dtensor.shape_axes import permuted
from mpimesh.dtensor.shape_reshape import ravel, row_along
from mpimesh.dtensor.tensor import DTensor
from mpimesh.errors import IndexOutOfRangeError, LayoutError, ShapeError, on_all_ranks
from mpimesh.layout import Layout, Placement, Shard
from mpimesh.layout.axis_rules import row_dim, rows_placement

__all__ = ["masked", "of_rows"]


def masked(x: DTensor, mask: DTensor) -> DTensor:
    """Return ``x[mask]``, for a mask of the first axes. Collective.

    Elements stay where they are if only the first axis of those that the mask has is split, by
    one dim; else both arrays are first brought to such a layout.

    Raises:
        IndexOutOfRangeError: If the mask does not fit.

    Cost:
        A count from each rank, beside what the layout needs.
    """
    if mask.shape != x.shape[: mask.ndim]:
        raise IndexOutOfRangeError(f"a mask of shape {mask.shape} does not fit shape {x.shape}")
    mask = as_tensor(mask, x.mesh)
    x = settled(x)
    target = rows_placement(x.placement, x.shape, mask.ndim)
    x = moved_to(x, target)
    mask = moved_to(mask, rows_placement(target, x.shape, mask.ndim, only=True))
    found = _member(x).local[mask.local]
    rest = x.shape[mask.ndim :]
    places = {axis: axis - mask.ndim + 1 for axis in range(mask.ndim, x.ndim)}
    return of_rows(x, found, rest, {0: 0, **places})


def _member(x: DTensor) -> DTensor:
    if not x.is_member:
        raise LayoutError(
            f"rank {x.mesh.rank} is not in the mesh, and cannot know how many elements are found"
        )
    return x


def of_rows(x: DTensor, block: HostArray, rest: tuple[int, ...], places: dict[int, int]) -> DTensor:
    """Make the array whose first axis has as many elements as the ranks have found. Collective."""
    dim = row_dim(x.placement)
    specs = [
        Shard(places[s.axis], sizes=s.sizes) if isinstance(s, Shard) else s for s in x.placement
    ]
    if dim is None:
        layout = Layout(x.mesh, Placement(specs))
        return DTensor(x.mesh, layout, (len(block), *rest), block.dtype, block)
    counts = exchange_counts(x.mesh, "count", np.array([len(block)]))[:, 0]
    table = counts.reshape(x.layout.mesh.shape())
    first = tuple(slice(None) if d == dim else 0 for d in range(table.ndim))
    sizes = table[first].tolist()
    specs[dim] = Shard.of_sizes(0, sizes)
    layout = Layout(x.mesh, Placement(specs))
    return DTensor(x.mesh, layout, (sum(sizes), *rest), block.dtype, block)


@implements(np.argwhere)
def argwhere(a: Any) -> DTensor:
    """Return the indices of elements that are not 0, one in each row. Collective."""
    x = settled(a)
    x = _member(moved_to(x, rows_placement(x.placement, x.shape, x.ndim)))
    block = np.argwhere(x.local)
    block += np.array(x.global_offset, block.dtype)
    return of_rows(x, block, (x.ndim,), {0: 0})


@implements(np.nonzero)
def nonzero(a: Any) -> tuple[DTensor, ...]:
    """Return the indices of elements that are not 0, axis by axis. Collective."""
    if a.ndim == 0:
        raise ShapeError("np.nonzero takes at least 1 axis")
    found = argwhere(a)
    return tuple(column(found, axis) for axis in range(a.ndim))


def column(x: DTensor, number: int) -> DTensor:
    """Return one column of an array that is split by rows only. Local."""
    layout = Layout(x.mesh, x.placement)
    return DTensor(x.mesh, layout, x.shape[:1], x.dtype, x.local[:, number].copy())


@implements(np.flatnonzero)
def flatnonzero(a: Any) -> DTensor:
    """Return the places of elements that are not 0, counted in C order. Collective."""
    return nonzero(ravel(a))[0]


@implements(np.extract)
def extract(condition: Any, arr: Any) -> DTensor:
    """Return the elements where a condition holds, in a row. Collective."""
    mesh = next(one.mesh for one in (condition, arr) if isinstance(one, DTensor))
    flags = ravel(settled(as_tensor(condition, mesh)))
    return masked(ravel(as_tensor(arr, mesh)), _truth(flags))


@implements(np.compress)
def compress(condition: Any, a: Any, axis: Any = None, out: Any = None) -> DTensor:
    """Return the slices along an axis for which a condition of one axis holds. Collective."""
    refuse_given("compress", out=out)
    mesh = next(one.mesh for one in (condition, a) if isinstance(one, DTensor))
    x = as_tensor(a, mesh)
    x, which = row_along(x, axis)
    flags = _truth(settled(as_tensor(condition, mesh)))
    length = x.shape[which]
    if flags.ndim != 1:
        raise ShapeError(f"a condition has one axis, got shape {flags.shape}")
    if flags.shape[0] > length:
        beyond = pick_along(flags, {0: range(length, flags.shape[0])}, name="compress")
        if bool(sure_rule_of(np.any)(beyond)):
            raise on_all_ranks(
                IndexOutOfRangeError(
                    f"a condition of shape {flags.shape} holds beyond axis {which} of shape "
                    f"{x.shape}"
                )
            )
        flags = pick_along(flags, {0: range(length)}, name="compress")
    if flags.shape[0] < length:
        x = pick_along(x, {which: range(flags.shape[0])}, name="compress")
    order = [which, *(one for one in range(x.ndim) if one != which)]
    found = masked(permuted(x, order), flags)
    return permuted(found, np.argsort(order).tolist())


def _truth(x: DTensor) -> DTensor:
    block = x.local.astype(bool) if x.is_member else None
    return DTensor(x.mesh, x.layout, x.shape, bool, block)
