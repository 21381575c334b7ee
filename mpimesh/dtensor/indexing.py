"""Parts of split arrays by keys, and elements by arrays of indices."""

from __future__ import annotations

from operator import getitem
from typing import Any

import numpy as np

from mpimesh.dtensor.arguments import axis_of, refuse_given, whole_key
from mpimesh.dtensor.masks import masked
from mpimesh.dtensor.picking import pick, pick_along
from mpimesh.dtensor.picking_pairs import pick_pairs
from mpimesh.dtensor.registry import implements
from mpimesh.dtensor.shape_axes import expand_dims, moveaxis, permuted, squeeze
from mpimesh.dtensor.shape_repeat import pad
from mpimesh.dtensor.shape_reshape import reshape, row_along
from mpimesh.dtensor.tensor import DTensor
from mpimesh.errors import NoRuleError, ShapeError
from mpimesh.layout import Layout
from mpimesh.layout.keys import checked_indices, read_key

__all__ = ["diagonal", "get_item", "take"]


@implements(getitem)
def get_item(x: DTensor, key: Any) -> DTensor:
    """Return a part of an array, as a new one.

    Elements stay on their ranks if the key is made of slices that go forward: blocks of the result
    may be uneven, and ``redistribute`` evens them out. An axis with one number that is split is
    given to all ranks along its dims. Arrays of indices are alike on all ranks; split ones
    are gathered, but for a mask of the whole array or of its first axes.

    Collective, unless nothing has to move; all ranks pass the same key.

    Raises:
        IndexOutOfRangeError: If the key does not fit; before anything moves.
    """
    alone = key[0] if isinstance(key, tuple) and len(key) == 1 else key
    if isinstance(alone, DTensor) and alone.dtype == bool and alone.ndim:
        return masked(x, alone)
    read = read_key(whole_key(key), x.shape)
    if not read.arrays:
        found = squeeze(pick(x, read.picks, name="getitem"), read.single)
    else:
        found = _with_arrays(pick(x, read.picks, name="getitem"), read)
    return expand_dims(found, read.new) if read.new else found


def _with_arrays(x: DTensor, read: Any) -> DTensor:
    axes, shape = list(read.arrays), read.array_shape
    rows = [np.ravel(one) for one in read.arrays.values()]
    rest = [axis for axis in range(x.ndim) if axis not in axes]
    if len(axes) == 1:
        found = moveaxis(pick_along(x, {axes[0]: rows[0]}, name="getitem"), axes[0], 0)
    else:
        found = pick_pairs(permuted(x, [*axes, *rest]), rows, name="getitem")
    if len(shape) != 1:
        found = reshape(found, (*shape, *found.shape[1:]))
    return moveaxis(found, range(len(shape)), range(read.place, read.place + len(shape)))


@implements(np.take)
def take(a: Any, indices: Any, axis: Any = None, out: Any = None, mode: str = "raise") -> DTensor:
    """Return the elements at some indices along an axis. Collective, if any have to move.

    Split indices are gathered.

    Raises:
        IndexOutOfRangeError: On every rank, if an index is out of bounds.
    """
    refuse_given("take", out=out)
    x, which = row_along(a, axis)
    length = x.shape[which]
    rows = np.asarray(whole_key(indices))
    if mode not in ("raise", "wrap", "clip"):
        raise NoRuleError(f"np.take has modes raise, wrap and clip, got {mode!r}")
    if mode == "wrap" and length:
        rows = rows % length
    elif mode == "clip" and length:
        rows = np.clip(rows, 0, length - 1)
    picks = checked_indices(rows, length, which)
    found = pick_along(x, {which: picks.reshape(-1)}, name="take")
    if picks.ndim == 1:
        return found
    if picks.ndim == 0:
        return squeeze(found, which)
    return reshape(found, x.shape[:which] + picks.shape + x.shape[which + 1 :])


@implements(np.linalg.diagonal)
def matrix_diagonal(x: Any, /, *, offset: int = 0) -> DTensor:
    """Return the diagonals of the last two axes as the last axis."""
    return diagonal(x, offset, -2, -1)


@implements(np.diagonal)
def diagonal(a: Any, offset: int = 0, axis1: int = 0, axis2: int = 1) -> DTensor:
    """Return diagonals as the last axis. Collective, if both axes are split."""
    first, second = axis_of(axis1, a.ndim, "axis1"), axis_of(axis2, a.ndim, "axis2")
    if first == second:
        raise ShapeError(f"a diagonal runs along two axes, got axis {first} twice")
    down, right = max(0, -offset), max(0, offset)
    count = max(0, min(a.shape[first] - down, a.shape[second] - right))
    rest = [axis for axis in range(a.ndim) if axis not in (first, second)]
    rows = [np.arange(down, down + count), np.arange(right, right + count)]
    found = pick_pairs(permuted(a, [first, second, *rest]), rows, name="diagonal")
    return moveaxis(found, 0, -1)


@implements(np.diag)
def diag(v: Any, k: int = 0) -> DTensor:
    """Return a diagonal, or the array that has one. Collective, if elements have to move."""
    if v.ndim == 2:
        return diagonal(v, k)
    if v.ndim != 1:
        raise ShapeError(f"np.diag takes 1 or 2 axes, got shape {v.shape}")
    size, down, right = v.shape[0] + abs(k), max(0, -k), max(0, k)
    column = pad(v, (down, right))
    layout = Layout(v.mesh, column.placement)
    block = None
    if v.is_member:
        values = column.local
        block = v.mesh.shared_empty((len(values), size), v.dtype)
        block[...] = 0
        first = column.global_offset[0]
        rows = np.arange(max(down, first), min(down + v.shape[0], first + len(values)))
        block[rows - first, rows + k] = values[rows - first]
    return DTensor(v.mesh, layout, (size, size), v.dtype, block)
