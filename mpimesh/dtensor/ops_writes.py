"""NumPy's functions that write into their argument, and np.insert, which writes into a new array.

Each rank writes what lies in its block. Split values are gathered.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpimesh.arrays import HostArray
from mpimesh.dtensor.arguments import as_tensor, axis_of, moved_to, whole_key
from mpimesh.dtensor.methods import settled
from mpimesh.dtensor.picking import pick_along
from mpimesh.dtensor.pieces import true_anywhere
from mpimesh.dtensor.registry import implements
from mpimesh.dtensor.setting import elements_for, set_item, split_elements
from mpimesh.dtensor.shape_reshape import broadcast_to, row_along
from mpimesh.dtensor.tensor import DTensor, common_mesh
from mpimesh.errors import (
    DTypeError,
    IndexOutOfRangeError,
    LayoutError,
    NoRuleError,
    ShapeError,
    on_all_ranks,
)
from mpimesh.layout.axis_rules import unsplit

__all__: list[str] = []


def _written(x: Any, name: str) -> DTensor:
    """Return the array to write into, which must be a split one that waits for no sums."""
    if not isinstance(x, DTensor):
        raise on_all_ranks(
            DTypeError(
                f"np.{name} with split operands writes into a DTensor, got {type(x).__name__}"
            )
        )
    if x.layout.partial_op:
        raise on_all_ranks(
            LayoutError(f"np.{name} cannot write into {x!r}: sum it up first with redistribute")
        )
    return x


@implements(np.put)
def put(a: Any, ind: Any, v: Any, mode: str = "raise") -> None:
    """Write values at places that are counted in one row; the last one counts. Local.

    Split places and values are gathered.

    Raises:
        IndexOutOfRangeError: If a place is out of bounds.
    """
    x = _written(a, "put")
    places = np.ravel(whole_key(ind))
    if mode == "wrap" and x.size:
        places = places % x.size
    elif mode == "clip" and x.size:
        places = np.clip(places, 0, x.size - 1)
    elif mode not in ("raise", "wrap", "clip"):
        raise on_all_ranks(NoRuleError(f"np.put has modes raise, wrap and clip, got {mode!r}"))
    if ((places < -x.size) | (places >= x.size)).any():
        raise on_all_ranks(
            IndexOutOfRangeError(f"a place of {places} is out of bounds for {x.size} elements")
        )
    values = np.ravel(elements_for(x, whole_key(v)))
    if not places.size or not values.size:
        return
    written = np.resize(values, places.size)
    if x.ndim:
        set_item(x, np.unravel_index(places % x.size, x.shape), written)
    else:
        set_item(x, (), written[-1])


@implements(np.putmask)
def putmask(a: Any, /, mask: Any, values: Any) -> None:
    """Write values where a mask is true: each its own, or over again if they are fewer.

    Collective, if the mask has to be brought to the layout of `a`.
    """
    x = _written(a, "putmask")
    where = settled(as_tensor(mask, x.mesh))
    if where.shape != x.shape:
        raise on_all_ranks(ShapeError(f"a mask of shape {where.shape} does not fit {x!r}"))
    flags = moved_to(where, x.placement)
    if isinstance(values, DTensor) and values.shape == x.shape:
        chosen = moved_to(split_elements(x, settled(values)), x.placement)
        if x.is_member:
            np.putmask(x.local, flags.local, chosen.local)
        return
    row = np.ravel(elements_for(x, whole_key(values)))
    if x.is_member and row.size:
        if not x.ndim:
            np.putmask(x.local, flags.local, row)
            return
        key = np.nonzero(flags.local)
        whole = [one + start for one, start in zip(key, x.global_offset, strict=True)]
        x.local[key] = row[np.ravel_multi_index(whole, x.shape) % row.size]


@implements(np.fill_diagonal)
def fill_diagonal(a: Any, val: Any, wrap: bool = False) -> None:
    """Write values along the diagonal, over again if they are fewer. Local."""
    x = _written(a, "fill_diagonal")
    if x.ndim < 2 or (x.ndim > 2 and len(set(x.shape)) > 1):
        raise on_all_ranks(
            ShapeError(f"a diagonal is of two axes, or of equal ones, got shape {x.shape}")
        )
    step = x.shape[1] + 1 if x.ndim == 2 else 1 + int(np.cumprod(x.shape[:-1]).sum())
    end = x.shape[1] * x.shape[1] if x.ndim == 2 and not wrap else x.size
    places = np.arange(0, min(end, x.size), step)
    put(x, places, val)


@implements(np.put_along_axis)
def put_along_axis(arr: Any, indices: Any, values: Any, axis: Any) -> None:
    """Write values by indices along an axis, line by line; the last one counts. Collective.

    Indices and values are brought where the lines are; each rank gets whole lines of them.

    Raises:
        IndexOutOfRangeError: On every rank, if an index is out of bounds.
    """
    x = _written(arr, "put_along_axis")
    rows = settled(as_tensor(indices, x.mesh))
    if axis is None:
        if rows.ndim != 1:
            raise on_all_ranks(ShapeError(f"indices without an axis are a row, got {rows.shape}"))
        put(x, rows, broadcast_to(as_tensor(values, x.mesh), rows.shape))
        return
    which = axis_of(axis, x.ndim)
    if rows.ndim != x.ndim or rows.dtype.kind not in "iu":
        raise on_all_ranks(
            ShapeError(
                f"indices must be whole numbers with {x.ndim} axes, got {rows.dtype} of "
                f"{rows.shape}"
            )
        )
    shape = (*x.shape[:which], rows.shape[which], *x.shape[which + 1 :])
    target = unsplit(x.placement, {which})
    rows = moved_to(broadcast_to(rows, shape), target)
    fitting = split_elements(x, settled(as_tensor(values, x.mesh)))
    given = moved_to(broadcast_to(fitting, shape), target)
    length = x.shape[which]
    wrong = x.is_member and bool(((rows.local < -length) | (rows.local >= length)).any())
    if true_anywhere(x.mesh, "put_along_axis", wrong):
        raise on_all_ranks(
            IndexOutOfRangeError(f"an index of {rows!r} is out of bounds for axis {which} of {x!r}")
        )
    if not x.is_member:
        return
    start, stop = x.layout.box(x.shape, x.mesh.rank)[which]
    places = rows.local % max(length, 1)
    key = list(np.nonzero((places >= start) & (places < stop)))
    chosen = given.local[tuple(key)]
    key[which] = places[tuple(key)] - start
    x.local[tuple(key)] = chosen


@implements(np.insert)
def insert(arr: Any, obj: Any, values: Any, axis: Any = None) -> DTensor:
    """Return the array with values put in along an axis. The others stay where they are.

    Split values and places are gathered. Local, unless several dims split the axis.
    """
    mesh = common_mesh([arr, obj, values])
    x = settled(as_tensor(arr, mesh))
    x, which = row_along(x, axis if axis is None else axis_of(axis, x.ndim))
    where, given = whole_key(obj), elements_for(x, whole_key(values))
    length = x.shape[which]
    none = np.empty((*x.shape[:which], 0, *x.shape[which + 1 :]), x.dtype)
    try:
        # Into no elements: the values alone, with the shape that NumPy gives them.
        new = np.insert(none, _zeros_like(where, length), given, which)
        marks = np.insert(np.full(length, -1), where, np.arange(new.shape[which]))
    except IndexError as error:
        raise on_all_ranks(
            IndexOutOfRangeError(f"np.insert, axis {which} of shape {x.shape}: {error}")
        ) from None
    if not length:
        found = as_tensor(new, x.mesh)
        return moved_to(found, x.placement) if found.ndim == x.ndim else found
    kept = np.cumsum(marks < 0) - 1
    found = pick_along(x, {which: np.maximum(kept, 0)}, name="insert")
    if found.is_member:
        box = found.layout.box(found.shape, x.mesh.rank)
        mine = marks[slice(*box[which])]
        places = np.flatnonzero(mine >= 0)
        outside = [slice(*edges) for edges in box]
        outside[which] = slice(None)
        block = np.moveaxis(found.local, which, 0)
        block[places] = np.moveaxis(new[tuple(outside)], which, 0)[mine[places]]
    return found


def _zeros_like(where: Any, length: int) -> Any:
    """Return as many places, in the same form, that are all 0."""
    if isinstance(where, slice):
        return [0] * len(range(*where.indices(length)))
    rows: HostArray = np.asarray(where)
    if rows.dtype == bool:
        return np.zeros(int(rows.sum()), np.intp)
    return np.zeros(rows.shape, np.intp) if rows.ndim else 0
