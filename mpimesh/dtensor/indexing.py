"""Parts of split arrays by keys, masks and arrays of indices; grids and Kronecker products."""

from __future__ import annotations

from operator import getitem
from typing import Any

import numpy as np

from mpimesh.arrays import HostArray
from mpimesh.core.dispatch import COPY, Entry
from mpimesh.dtensor.dispatch import implements, plans, sure_rule_of
from mpimesh.dtensor.dtensor import DTensor, common_mesh, whole_of
from mpimesh.dtensor.elementwise import blockwise, call
from mpimesh.dtensor.joining import concatenate, pad
from mpimesh.dtensor.methods import reduced, require_member
from mpimesh.dtensor.picking import exchange_counts, keys_here, pick, pick_along, pick_pairs
from mpimesh.dtensor.reshape import (
    broadcast_to,
    expand_dims,
    moveaxis,
    permuted,
    ravel,
    reshape,
    row_along,
    shape_tuple,
    squeeze,
    swapaxes,
)
from mpimesh.dtensor.run import (
    as_tensor,
    as_tensors,
    axes_of,
    implements_anew,
    implements_by_name,
    moved_to,
    plain_values,
    row_of,
    whole_key,
    whole_places,
)
from mpimesh.errors import IndexOutOfRangeError, NoRuleError, ShapeError
from mpimesh.layout import Layout, Placement, Shard
from mpimesh.layout.axis_rules import (
    picked_placement,
    renumbered,
    row_dim,
    rows_placement,
    unsplit,
)
from mpimesh.layout.keys import checked_indices, read_key
from mpimesh.runtime.operands import normal_axis

__all__ = ["masked", "of_rows"]


@implements(getitem)
def get_item(x: DTensor, key: Any) -> DTensor:
    """Return a part of an array, as a new one.

    Elements stay on their ranks if the key is made of slices that go forward: blocks of the result
    may be uneven, and ``redistribute`` evens them out. An axis with one number that is split is
    replicated along its dims. Arrays of indices are alike on all ranks; split ones
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
        whole = all(len(one) == n for one, n in zip(read.picks, x.shape, strict=True))
        part = x if whole and all(one.step > 0 for one in read.picks) else pick(x, read.picks)
        found = _with_arrays(part, read)
    return expand_dims(found, read.new) if read.new else found


@plans(getitem)
def _planned(_: Any, args: tuple[Any, ...], options: dict[str, Any], into: None) -> Entry | None:
    """Decide on a key of numbers and slices, whose elements all stay on their ranks."""
    x, key = args
    read = read_key(key, x.shape)
    picks = read.picks
    placement = picked_placement(x.layout.mesh, x.placement, x.shape, picks)
    if unsplit(placement, set(read.single)) != placement:
        return None  # the only element along an axis is brought to all ranks
    keys = keys_here(x, picks, tuple(map(len, picks)), Layout(x.mesh, placement))
    if keys is None or 0 in read.shape:
        return None
    own: list[Any] = []
    kept: dict[int, int] = {}
    for axis, one in enumerate((*keys, None)):  # at last new axes behind all others
        if axis in read.single:
            own.append(one.start if isinstance(one, slice) else 0)
            continue
        while len(kept) + own.count(None) in read.new:
            own.append(None)
        if one is not None:
            kept[axis] = len(kept) + own.count(None)
            own.append(one)
    layout = Layout(x.mesh, renumbered(placement, kept))
    local = layout.local_shape(read.shape, x.mesh.rank)
    if x.local[(*own, ...)].shape != local:
        return None
    spec = x.mesh._core.dispatch.spec(layout, read.shape, x.dtype)
    return Entry(COPY, getitem, 1, spec, local, ((*own, ...),))


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


@implements_by_name(np.take)
def take(a: Any, indices: Any, axis: Any = None, mode: str = "raise") -> DTensor:
    """Return the elements at some indices along an axis. Collective, if any have to move.

    Split indices are gathered.

    Raises:
        IndexOutOfRangeError: On every rank, if an index is out of bounds.
    """
    x, which = row_along(a, axis)
    length = x.shape[which]
    rows = whole_places(indices)
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
    first, second = (
        normal_axis(axis1, a.ndim, what="axis1"),
        normal_axis(axis2, a.ndim, what="axis2"),
    )
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
    zero = np.zeros((), v.dtype)[()]
    column = pad(v, (down, right), constant_values=zero) if down or right else v
    layout = Layout(v.mesh, column.placement)
    block = None
    if v.is_member:
        values = column.local
        block = v.mesh.shared_empty((len(values), size), v.dtype)
        block[...] = zero
        first = column.global_offset[0]
        rows = np.arange(max(down, first), min(down + v.shape[0], first + len(values)))
        block[rows - first, rows + k] = values[rows - first]
    return DTensor(v.mesh, layout, (size, size), v.dtype, block)


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
    x = reduced(x)
    target = rows_placement(x.placement, x.shape, mask.ndim)
    x = moved_to(x, target)
    mask = moved_to(mask, rows_placement(target, x.shape, mask.ndim, only=True))
    require_member(x)
    found = x.local[mask.local]
    rest = x.shape[mask.ndim :]
    places = {axis: axis - mask.ndim + 1 for axis in range(mask.ndim, x.ndim)}
    return of_rows(x, found, rest, {0: 0, **places})


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
    table = counts.reshape(x.layout.mesh.shape)
    first = tuple(slice(None) if d == dim else 0 for d in range(table.ndim))
    sizes = table[first].tolist()
    specs[dim] = Shard.of_sizes(0, sizes)
    layout = Layout(x.mesh, Placement(specs))
    return DTensor(x.mesh, layout, (sum(sizes), *rest), block.dtype, block)


@implements(np.argwhere)
def argwhere(a: Any) -> DTensor:
    """Return the indices of elements that are not 0, one in each row. Collective."""
    x = reduced(a)
    x = moved_to(x, rows_placement(x.placement, x.shape, x.ndim))
    require_member(x)
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
    flags, x = as_tensors([condition, arr])
    return masked(ravel(x), _truth(ravel(reduced(flags))))


@implements_by_name(np.compress)
def compress(condition: Any, a: Any, axis: Any = None) -> DTensor:
    """Return the slices along an axis for which a condition of one axis holds. Collective."""
    flags, x = as_tensors([condition, a])
    x, which = row_along(x, axis)
    flags = _truth(reduced(flags))
    length = x.shape[which]
    if flags.ndim != 1:
        raise ShapeError(f"a condition has one axis, got shape {flags.shape}")
    if flags.shape[0] > length:
        if 0 in x.shape[:which] + x.shape[which + 1 :]:  # NumPy looks at no element then
            require_member(x)
            none = np.compress(plain_values(flags), np.empty(x.shape, x.dtype), axis=which)
            return as_tensor(none, x.mesh)
        beyond = pick_along(flags, {0: range(length, flags.shape[0])}, name="compress")
        if bool(sure_rule_of(np.any)(beyond)):
            raise IndexOutOfRangeError.everywhere(
                f"a condition of shape {flags.shape} holds beyond axis {which} of shape {x.shape}"
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


@implements(np.meshgrid)
def meshgrid(
    *xi: Any, copy: bool = True, sparse: bool = False, indexing: str = "xy"
) -> tuple[DTensor, ...]:
    """Return the coordinates of a grid. Local: each is split along the axis that it runs along.

    They never share memory with `xi`; without `copy` they cannot be written to.
    """
    if indexing not in ("xy", "ij"):
        raise ShapeError.everywhere(f"indexing is xy or ij, got {indexing!r}")
    rows = [ravel(one.copy()) for one in as_tensors(xi)]
    axes = range(len(rows))
    found = [
        expand_dims(row, tuple(other for other in axes if other != axis))
        for axis, row in zip(axes, rows, strict=True)
    ]
    if indexing == "xy" and len(rows) > 1:
        found = [swapaxes(one, 0, 1) for one in found]
    if not sparse:
        shape = np.broadcast_shapes(*(one.shape for one in found))
        found = [broadcast_to(one, shape) for one in found]
    return tuple(one.copy() for one in found) if copy else tuple(found)


@implements_anew(np.ix_)
def ix_(*args: Any) -> tuple[DTensor, ...]:
    """Return rows as indices along one axis each. Collective for truth values, which are found."""
    found = []
    for axis, row in enumerate(as_tensors(args)):
        if row.ndim != 1:
            raise ShapeError.everywhere(f"np.ix_ takes rows, got shape {row.shape}")
        if row.dtype == bool:
            (row,) = nonzero(row)
        others = tuple(other for other in range(len(args)) if other != axis)
        found.append(expand_dims(row, others) if others else row)
    return tuple(found)


@implements(np.block)
def block(arrays: Any) -> DTensor:
    """Put arrays together as nested lists say: the innermost along the last axis."""
    flat = list(_leaves(arrays))
    mesh = common_mesh(flat)
    depths = set(_depths(arrays, 0))
    if len(depths) != 1:
        raise ShapeError.everywhere(f"np.block takes lists of one depth, got {sorted(depths)}")
    depth = depths.pop()
    ndim = max(depth, *(np.ndim(one) for one in flat))

    def joined(tree: Any, level: int) -> DTensor:
        if not isinstance(tree, list):
            x = as_tensor(tree, mesh)
            return expand_dims(x, tuple(range(ndim - x.ndim))) if x.ndim < ndim else x
        parts = [joined(one, level + 1) for one in tree]
        return concatenate(parts, ndim - depth + level)

    found = joined(arrays, 0)
    return found if isinstance(arrays, list) else found.copy()


def _leaves(tree: Any) -> Any:
    if not isinstance(tree, list):
        yield tree
        return
    for one in tree:
        yield from _leaves(one)


def _depths(tree: Any, depth: int) -> Any:
    if isinstance(tree, tuple):
        raise TypeError("np.block takes lists, not tuples")
    if not isinstance(tree, list):
        yield depth
        return
    if not tree:
        raise ShapeError.everywhere("np.block takes no empty lists")
    for one in tree:
        yield from _depths(one, depth + 1)


@implements(np.kron)
def kron(a: Any, b: Any) -> DTensor:
    """Return the Kronecker product. Local, if one dim at most splits each axis of `a` alone."""
    x, y = as_tensors([a, b])
    ndim = max(x.ndim, y.ndim)
    x, y = (reshape(one, (*(1,) * (ndim - one.ndim), *one.shape)) for one in (x, y))
    outer = tuple(range(1, 2 * ndim, 2))
    inner = tuple(range(0, 2 * ndim, 2))
    found = call(np.multiply, (expand_dims(x, outer), expand_dims(y, inner)))
    return reshape(found, tuple(n * m for n, m in zip(x.shape, y.shape, strict=True)))


@implements(np.diagflat)
def diagflat(v: Any, k: int = 0) -> DTensor:
    """Return the matrix that has all elements on a diagonal."""
    return diag(ravel(v), k)


@implements(np.resize)
def resize(a: Any, new_shape: Any) -> DTensor:
    """Return an array of another size, with the elements repeated as often as needed."""
    shape = shape_tuple(new_shape)
    if any(n < 0 for n in shape):
        raise ShapeError.everywhere(f"np.resize takes no negative lengths, got {shape}")
    row = ravel(a)
    count = int(np.prod(shape, dtype=np.int64))
    if not row.size:
        found: DTensor = sure_rule_of(np.zeros_like)(row, shape=shape)
        return found
    return reshape(pick_along(row, {0: np.arange(count) % row.size}, name="resize"), shape)


@implements(np.trim_zeros)
def trim_zeros(filt: Any, trim: str = "fb", axis: Any = None) -> DTensor:
    """Return the array without zeros at its edges. Collective: all ranks learn where they end."""
    sides = trim.lower()
    if sides not in ("fb", "bf", "f", "b", ""):
        raise ShapeError.everywhere(f"trim is made of f and b, got {trim!r}")
    axes = range(filt.ndim) if axis is None else axes_of(axis, filt.ndim)
    found = blockwise(_are_nonzero, [filt])
    key = [slice(None)] * filt.ndim
    for one in axes:
        others = tuple(other for other in range(filt.ndim) if other != one)
        flags = np.flatnonzero(whole_of(np.any(found, axis=others)))
        start, stop = (int(flags[0]), int(flags[-1]) + 1) if len(flags) else (0, 0)
        if len(flags) or "f" in sides or "b" in sides:
            key[one] = slice(
                start if "f" in sides else 0, stop if "b" in sides or not len(flags) else None
            )
    picked: DTensor = filt[tuple(key)]
    return picked


def _are_nonzero(block: Any) -> HostArray:
    """Tell which elements are not zero: of records, too, which are no truth values."""
    flags = np.zeros(np.shape(block), bool)
    flags.reshape(-1)[np.flatnonzero(block)] = True
    return flags


@implements(np.apply_over_axes)
def apply_over_axes(func: Any, a: Any, axes: Any) -> Any:
    """Call a reduction over one axis after the other, which stay with length 1."""
    found = a if row_of(axes) else a.copy()
    for axis in row_of(axes):
        which = normal_axis(axis, max(a.ndim, 1))
        made = func(found, which)
        if made.ndim not in (a.ndim, a.ndim - 1):
            raise NoRuleError("np.apply_over_axes takes a function that reduces one axis")
        found = made if made.ndim == a.ndim else expand_dims(made, which)
    return found


@implements(np.sort_complex)
def sort_complex(a: Any) -> DTensor:
    """Return the elements of the last axis sorted, as complex numbers."""
    found = sure_rule_of(np.sort)(a)
    kind = np.sort_complex(np.ones(1, a.dtype)).dtype
    sorted_: DTensor = found.astype(kind, copy=False)
    return sorted_
