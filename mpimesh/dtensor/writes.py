"""Writes into parts of split arrays, in place, and np.insert, which writes into a new array.

Each rank writes the elements of its block. Split values are gathered.
"""

from __future__ import annotations

from contextlib import suppress
from operator import setitem
from typing import TYPE_CHECKING, Any

import numpy as np

from mpimesh.arrays import HostArray, refuse_masked, refuse_objects
from mpimesh.dtensor.dispatch import implements
from mpimesh.dtensor.dtensor import DTensor, common_mesh
from mpimesh.dtensor.methods import reduced
from mpimesh.dtensor.picking import pick_along, regrown, true_anywhere
from mpimesh.dtensor.redistribute import identity_of
from mpimesh.dtensor.reshape import broadcast_to, expand_dims, reshape, row_along, squeeze
from mpimesh.dtensor.run import as_tensor, moved_to, plain_values, whole_key, whole_places
from mpimesh.errors import (
    DTypeError,
    IndexOutOfRangeError,
    LayoutError,
    NoRuleError,
    ShapeError,
)
from mpimesh.layout import Partial, Placement, PlacementSpec, Replicate, Shard
from mpimesh.layout.axis_rules import counts_between, met, unsplit
from mpimesh.layout.keys import Key, read_key
from mpimesh.runtime.operands import normal_axis

if TYPE_CHECKING:
    from mpimesh.layout.axis_rules import Picks

__all__: list[str] = []

_NO_ELEMENT = (TypeError, ValueError, OverflowError)
"""Errors of NumPy for a value that cannot become an element."""


@implements(setitem)
def set_item(x: DTensor, key: Any, value: Any) -> None:
    """Write `value` into a part of `x`, in place: each rank into its block.

    Local with plain values, which are alike on all ranks, and keys of numbers, slices and plain
    arrays. A split value is brought to the blocks that it goes into; with arrays of indices in
    the key it is gathered, and so are split arrays of indices. A split mask of the whole
    array is brought to the layout of `x`, if the value is one number.

    Raises:
        IndexOutOfRangeError: If the key does not fit; before anything moves or changes.
        ShapeError: If the value does not fit.
        DTypeError: If the value has what can be no element of `x`; on all ranks, before anything
            is written.
    """
    is_mask = isinstance(key, DTensor) and key.dtype == bool
    is_whole = is_mask and key.shape == x.shape
    if is_whole and not isinstance(value, DTensor) and np.ndim(value) == 0:
        _fill(x, as_tensor(key, x.mesh), elements_for(x, value))
        return
    if is_mask and key.shape != x.shape[: key.ndim]:
        raise IndexOutOfRangeError(f"a mask of shape {key.shape} does not fit shape {x.shape}")
    read = read_key(whole_key(key), x.shape)
    if read.arrays:
        _scatter(x, read, elements_for(x, plain_values(value)))
    elif isinstance(value, DTensor):
        _put_split(x, read, split_elements(x, as_tensor(value, x.mesh)))
    else:
        _put_plain(x, read, elements_for(x, value))


def _values(x: DTensor, values: HostArray) -> HostArray:
    """Return what this rank writes: of an array that waits for sums, rank 0 along its dims does."""
    coords = x.layout.mesh.coords_of(x.mesh.rank)
    first = not any(
        coord and isinstance(spec, Partial) for coord, spec in zip(coords, x.placement, strict=True)
    )
    op = x.layout.partial_op
    if first or op not in ("sum", "prod"):
        return values
    return np.broadcast_to(np.asarray(identity_of(op, x.dtype), x.dtype), values.shape)


def elements_for(x: DTensor, value: Any) -> HostArray:
    """Return a plain value as an array that can be written into `x`. Local, alike on all ranks.

    Raises:
        DTypeError: If it cannot.
    """
    refuse_masked(value)
    values = np.asarray(value)
    if values.dtype.hasobject and not all(type(one) is int for one in values.flat):
        refuse_objects(values.dtype)  # Python's large integers are objects only for NumPy
    elements = np.empty((1, *values.shape), x.dtype)
    try:
        # From what was given: NumPy refuses Python's numbers that do not fit, and casts arrays.
        elements[0] = value
    except _NO_ELEMENT as error:
        raise _no_element(x, f"{value!r} is none: {error}") from None
    return elements.reshape(values.shape)


def split_elements(x: DTensor, value: DTensor) -> DTensor:
    """Return a split value that can be written into `x`.

    Collective, if that depends on its elements.

    Raises:
        DTypeError: If it cannot; on all ranks of the mesh.
    """
    # Casts between numbers never fail, whatever the values.
    if value.dtype == x.dtype or {value.dtype.kind, x.dtype.kind} <= set("biufc"):
        return value
    value = reduced(value)
    block: HostArray | None = None
    if value.is_member:
        with suppress(*_NO_ELEMENT):  # all others learn of it first
            block = value.local.astype(x.dtype)
        if true_anywhere(x.mesh, "setitem", block is None):
            raise _no_element(x, f"some of {value!r} are none")
    return DTensor(value.mesh, value.layout, value.shape, x.dtype, block)


def _no_element(x: DTensor, what: str) -> DTypeError:
    return DTypeError.everywhere(
        f"elements of {x!r} are of dtype {x.dtype}, and {what}; nothing was written: write "
        f"what can be cast to {x.dtype}"
    )


def _fill(x: DTensor, mask: DTensor, value: HostArray) -> None:
    specs = [Replicate() if isinstance(s, Partial) else s for s in x.placement]
    here = moved_to(mask, Placement(specs))
    if x.is_member:
        x.local[here.local] = _values(x, value)


# -- plain values --------------------------------------------------------------------------


def _put_plain(x: DTensor, read: Key, values: HostArray) -> None:
    whole = _broadcast(values, read)
    # As many axes as x has: without the new ones, and with those of single numbers.
    aligned = np.expand_dims(np.squeeze(whole, read.new), read.single)
    if not x.is_member:
        return
    into, where = [], []
    for (start, stop), pick in zip(x.layout.box(x.shape, x.mesh.rank), read.picks, strict=True):
        at, inside, _ = met(pick, 0, len(pick), start, stop)
        into.append(inside)
        where.append(at)
    x.local[(*into, ...)] = _values(x, aligned[(*where, ...)])


def _broadcast(values: HostArray, read: Key) -> HostArray:
    extra = values.ndim - len(read.shape)
    trimmed = values
    if extra > 0 and values.shape[:extra] == (1,) * extra:
        trimmed = values.reshape(values.shape[extra:])
    try:
        return np.broadcast_to(trimmed, read.shape)
    except ValueError:
        raise ShapeError(
            f"a value of shape {values.shape} does not fit a part of shape {read.shape}"
        ) from None


def _scatter(x: DTensor, read: Key, values: HostArray) -> None:
    """Write where arrays of indices say; the last value counts if an element comes twice."""
    whole = np.squeeze(_broadcast(values, read), read.new)
    if not x.is_member:
        return
    ndim, extra = whole.ndim, len(read.array_shape)
    rest = [axis for axis in range(x.ndim) if axis not in read.arrays]
    free = [at for at in range(ndim) if not read.place <= at < read.place + extra]
    box = x.layout.box(x.shape, x.mesh.rank)
    mine: Any = True
    rows: list[HostArray] = []
    for axis, (start, stop) in enumerate(box):
        if axis in read.arrays:
            index = read.arrays[axis].reshape(read.array_shape + (1,) * (ndim - read.place - extra))
        else:
            pick = np.array(read.picks[axis], np.int64)
            index = pick.reshape(-1, *(1,) * (ndim - 1 - free[rest.index(axis)]))
        rows.append(index)
        if stop - start < x.shape[axis]:
            mine = mine & ((index >= start) & (index < stop))
    mine = np.broadcast_to(mine, whole.shape)
    if ndim == 1:
        mine = np.flatnonzero(mine)  # quicker than the mask
    key = tuple(
        np.broadcast_to(row, whole.shape)[mine] - start
        for row, (start, _) in zip(rows, box, strict=True)
    )
    x.local[key] = _values(x, whole[mine])


# -- split values --------------------------------------------------------------------------


def _put_split(x: DTensor, read: Key, value: DTensor) -> None:
    _broadcast(np.broadcast_to(np.zeros((), bool), value.shape), read)
    ndim = len(read.shape)
    part = value
    if part.ndim > ndim:
        part = reshape(part, part.shape[part.ndim - ndim :])
    elif part.ndim < ndim:
        part = expand_dims(part, tuple(range(ndim - part.ndim)))
    part = expand_dims(squeeze(part, read.new), read.single) if read.new or read.single else part
    picks = list(read.picks)
    turned: dict[int, Picks] = {}
    for axis, pick in enumerate(read.picks):
        if pick.step < 0:  # forward, and the value turned
            picks[axis] = pick[::-1]
            if part.shape[axis] > 1:
                turned[axis] = range(part.shape[axis] - 1, -1, -1)
    if turned:
        part = pick_along(part, turned, name="setitem")
    part = moved_to(part, _beside(x, part, picks))
    if not x.is_member:
        return
    own: list[Any] = [None] * x.ndim
    where: list[Any] = [None] * x.ndim
    values = part.local
    offset = part.global_offset
    for axis, (start, stop) in enumerate(x.layout.box(x.shape, x.mesh.rank)):
        at, inside, count = met(picks[axis], 0, len(picks[axis]), start, stop)
        where[axis] = inside
        first = at.start - offset[axis] if isinstance(at, slice) and count else 0
        own[axis] = slice(0, 1) if part.shape[axis] == 1 else slice(first, first + count)
    x.local[(*where, ...)] = _values(x, values[(*own, ...)])


def _beside(x: DTensor, part: DTensor, picks: list[Any]) -> Placement:
    """Return where the value has to be, so that every rank has what goes into its block."""
    tiling = x.layout.tiling(x.shape)
    specs: list[PlacementSpec] = [Replicate()] * len(x.placement)
    for axis, dims in enumerate(tiling.axis_dims):
        if len(dims) != 1 or part.shape[axis] == 1:
            continue
        every = np.array([0, len(picks[axis])])
        sizes = counts_between(picks[axis], every, tiling.bounds[axis])[0].tolist()
        specs[dims[0]] = Shard(axis, sizes=sizes)
    if part.ndim != x.ndim:
        raise LayoutError(f"{part!r} is not split as {x!r}")
    return Placement(specs)


def _written(x: Any, name: str) -> DTensor:
    """Return the array to write into, which must be a split one that waits for no sums."""
    if not isinstance(x, DTensor):
        raise DTypeError.everywhere(
            f"np.{name} with split operands writes into a DTensor, got {type(x).__name__}"
        )
    if x.layout.partial_op:
        raise LayoutError.everywhere(
            f"np.{name} cannot write into {x!r}: sum it up first with redistribute"
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
    places = np.ravel(whole_places(ind))
    if mode == "wrap" and x.size:
        places = places % x.size
    elif mode == "clip" and x.size:
        places = np.clip(places, 0, x.size - 1)
    elif mode not in ("raise", "wrap", "clip"):
        raise NoRuleError.everywhere(f"np.put has modes raise, wrap and clip, got {mode!r}")
    if places.size and (places.min() < -x.size or places.max() >= x.size):
        raise IndexOutOfRangeError.everywhere(
            f"a place of {places} is out of bounds for {x.size} elements"
        )
    values = np.ravel(elements_for(x, plain_values(v)))
    if not places.size or not values.size:
        return
    written = values if len(values) == 1 else np.resize(values, places.size)
    if x.ndim == 1:
        set_item(x, places, written)
    elif x.ndim:
        set_item(x, np.unravel_index(places % x.size, x.shape), written)
    else:
        set_item(x, (), written[-1])


@implements(np.putmask)
def putmask(a: Any, /, mask: Any, values: Any) -> None:
    """Write values where a mask is true: each its own, or over again if they are fewer.

    Collective, if the mask has to be brought to the layout of `a`.
    """
    x = _written(a, "putmask")
    where = reduced(as_tensor(mask, x.mesh))
    if where.shape != x.shape:
        raise ShapeError.everywhere(f"a mask of shape {where.shape} does not fit {x!r}")
    flags = moved_to(where, x.placement)
    if isinstance(values, DTensor) and values.shape == x.shape:
        chosen = moved_to(split_elements(x, reduced(values)), x.placement)
        if x.is_member:
            np.putmask(x.local, flags.local, chosen.local)
        return
    row = np.ravel(elements_for(x, plain_values(values)))
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
        raise ShapeError.everywhere(
            f"a diagonal is of two axes, or of equal ones, got shape {x.shape}"
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
    rows = reduced(as_tensor(indices, x.mesh))
    if axis is None:
        if rows.ndim != 1:
            raise ShapeError.everywhere(f"indices without an axis are a row, got {rows.shape}")
        put(x, rows, broadcast_to(as_tensor(values, x.mesh), rows.shape))
        return
    which = normal_axis(axis, x.ndim)
    if rows.ndim != x.ndim or rows.dtype.kind not in "iu":
        raise ShapeError.everywhere(
            f"indices must be whole numbers with {x.ndim} axes, got {rows.dtype} of {rows.shape}"
        )
    shape = (*x.shape[:which], rows.shape[which], *x.shape[which + 1 :])
    target = unsplit(x.placement, {which})
    rows = moved_to(broadcast_to(rows, shape), target)
    given = values if isinstance(values, DTensor) else elements_for(x, values)
    fitting = split_elements(x, reduced(as_tensor(given, x.mesh)))
    source = moved_to(broadcast_to(fitting, shape), target)
    length = x.shape[which]
    if not x.is_member:
        return
    wrong = bool(((rows.local < -length) | (rows.local >= length)).any())
    if true_anywhere(x.mesh, "put_along_axis", wrong):
        raise IndexOutOfRangeError.everywhere(
            f"an index of {rows!r} is out of bounds for axis {which} of {x!r}"
        )
    start, stop = x.layout.box(x.shape, x.mesh.rank)[which]
    places = rows.local % max(length, 1)
    key = list(np.nonzero((places >= start) & (places < stop)))
    chosen = source.local[tuple(key)]
    key[which] = places[tuple(key)] - start
    x.local[tuple(key)] = chosen


@implements(np.insert)
def insert(arr: Any, obj: Any, values: Any, axis: Any = None) -> DTensor:
    """Return the array with values put in along an axis. The others stay where they are.

    Split values and places are gathered. Local, unless several dims split the axis.
    """
    mesh = common_mesh([arr, obj, values])
    x = reduced(as_tensor(arr, mesh))
    x, which = row_along(x, axis if axis is None else normal_axis(axis, x.ndim))
    where, new_values = whole_key(obj), elements_for(x, plain_values(values))
    length = x.shape[which]
    none = np.empty((*x.shape[:which], 0, *x.shape[which + 1 :]), x.dtype)
    try:
        # Into no elements: the values alone, with the shape that NumPy gives them.
        new = np.insert(none, _zeros_like(where, length), new_values, which)
        np.insert(np.empty(length, np.int8), where, np.empty(new.shape[which], np.int8))
    except IndexError as error:
        raise IndexOutOfRangeError.everywhere(
            f"np.insert, axis {which} of shape {x.shape}: {error}"
        ) from None
    if not length:
        found = as_tensor(new, x.mesh)
        return moved_to(found, x.placement) if found.ndim == x.ndim else found
    places = np.broadcast_to(_places_of(where, length), new.shape[which])
    outside = [slice(*edges) for edges in x.layout.box(x.shape, x.mesh.rank)] if x.is_member else []

    def mine(start: int, stop: int) -> HostArray:
        """Return which are put behind an element of a block, or before the first of all."""
        after = (places > start) & (places <= stop)
        return after | (places == 0) if start == 0 < stop else after

    def count(start: int, stop: int) -> int:
        return stop - start + int(np.count_nonzero(mine(start, stop)))

    def block_of(block: HostArray, start: int, stop: int) -> HostArray:
        chosen = np.flatnonzero(mine(start, stop))
        outside[which] = slice(None)
        return np.insert(
            block, places[chosen] - start, new[tuple(outside)].take(chosen, which), which
        )

    grown = regrown(x, which, count, block_of)
    return _inserted(x, which, where, new) if grown is None else grown


def _inserted(x: DTensor, which: int, where: Any, new: HostArray) -> DTensor:
    """Return the array with new values put in along an axis that several dims split."""
    marks = np.insert(np.full(x.shape[which], -1), where, np.arange(new.shape[which]))
    positions = np.cumsum(marks < 0) - 1
    found = pick_along(x, {which: np.maximum(positions, 0)}, name="insert")
    if found.is_member:
        box = found.layout.box(found.shape, x.mesh.rank)
        mine = marks[slice(*box[which])]
        places = np.flatnonzero(mine >= 0)
        outside = [slice(*edges) for edges in box]
        outside[which] = slice(None)
        block = np.moveaxis(found.local, which, 0)
        block[places] = np.moveaxis(new[tuple(outside)], which, 0)[mine[places]]
    return found


def _places_of(where: Any, length: int) -> HostArray:
    """Return before which elements values are put in, counted from 0."""
    if isinstance(where, slice):
        return np.arange(*where.indices(length))
    rows: HostArray = np.asarray(where)
    if rows.dtype == bool and rows.ndim:
        return np.flatnonzero(rows)
    rows = np.ravel(rows).astype(np.intp)
    return np.where(rows < 0, rows + length, rows)


def _zeros_like(where: Any, length: int) -> Any:
    """Return as many places, in the same form, that are all 0."""
    if isinstance(where, slice):
        return [0] * len(range(*where.indices(length)))
    rows: HostArray = np.asarray(where)
    if rows.dtype == bool:
        return np.zeros(int(rows.sum()), np.intp)
    return np.zeros(rows.shape, np.intp) if rows.ndim else 0
