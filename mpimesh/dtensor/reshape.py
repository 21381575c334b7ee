"""Shapes of split arrays: axes permuted, added, removed, broadcast and reshaped.

The splits go with their axes, and nothing moves; a reshape for which that cannot be sends elements
to other ranks, in their order in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from mpimesh.arrays import HostArray
from mpimesh.core.dispatch import COPY, MADE, Entry
from mpimesh.dtensor.dispatch import implements, plans
from mpimesh.dtensor.dtensor import DTensor, whole_of
from mpimesh.dtensor.picking import exchange_counts, exchange_pieces, place_in
from mpimesh.dtensor.run import (
    as_tensors,
    axes_of,
    implements_anew,
    implements_by_name,
    moved_to,
)
from mpimesh.errors import AxisError, LayoutError, NoRuleError, ShapeError
from mpimesh.layout import Layout, Tiling
from mpimesh.layout.axis_rules import full_shape, renumbered, reshaped_placement, unsplit
from mpimesh.layout.tiling import places_of
from mpimesh.runtime.operands import MissingAxisError, normal_axis

if TYPE_CHECKING:
    from mpimesh.layout.tiling import Integers

__all__ = [
    "broadcast_to",
    "expand_dims",
    "permuted",
    "ravel",
    "reshape",
    "row_along",
    "shape_tuple",
    "squeeze",
    "view_entry",
]


def permuted(x: DTensor, axes: Sequence[int]) -> DTensor:
    """Return `x` with its axes in another order; its block is a view of that of `x`."""
    places = {axis: place for place, axis in enumerate(axes)}
    layout = Layout(x.mesh, renumbered(x.placement, places))
    block = x.local.transpose(axes) if x.is_member else None
    return DTensor(x.mesh, layout, [x.shape[axis] for axis in axes], x.dtype, block)


@implements(np.transpose)
def transpose(a: Any, axes: Any = None) -> DTensor:
    """Reverse or permute the axes."""
    if axes is None:
        return permuted(a, range(a.ndim)[::-1])
    order = axes_of(axes, a.ndim, "axes")
    if len(order) != a.ndim:
        raise AxisError(f"axes {order} must name each of the {a.ndim} axes once")
    return permuted(a, order)


@plans(np.transpose)
def _planned_transpose(
    _: Any, args: tuple[Any, ...], options: dict[str, Any], into: None
) -> Entry | None:
    """Decide on a transposition: nothing moves."""
    x, axes = args[0], options.get("axes") if len(args) == 1 else args[1]
    order = tuple(range(x.ndim))[::-1] if axes is None else axes_of(axes, x.ndim, "axes")
    if len(order) != x.ndim or len(args) + len(options) > 2:
        return None
    return view_entry(np.ndarray.transpose, x, permuted(x, order), order)


def view_entry(kernel: Any, x: DTensor, made: DTensor, option: Any, way: int = MADE) -> Entry:
    """Return what makes `made` of `x`: `kernel` gives a view of its block, by an option."""
    return Entry(way, kernel, 1, made._spec, made.local.shape, (option,))


@implements(np.matrix_transpose, np.linalg.matrix_transpose)
def matrix_transpose(x: Any, /) -> DTensor:
    """Swap the last two axes."""
    if x.ndim < 2:
        raise ShapeError(f"matrix_transpose takes at least 2 axes, got shape {x.shape}")
    return swapaxes(x, -1, -2)


@implements(np.swapaxes)
def swapaxes(a: Any, axis1: Any, axis2: Any) -> DTensor:
    """Swap two axes."""
    first, second = (
        normal_axis(axis1, a.ndim, what="axis1"),
        normal_axis(axis2, a.ndim, what="axis2"),
    )
    order = list(range(a.ndim))
    order[first], order[second] = second, first
    return permuted(a, order)


@implements(np.moveaxis)
def moveaxis(a: Any, source: Any, destination: Any) -> DTensor:
    """Move axes to other places; the rest keep their order."""
    old = axes_of(source, a.ndim, "source")
    new = axes_of(destination, a.ndim, "destination")
    if len(old) != len(new):
        raise ShapeError(f"source {old} and destination {new} must name as many axes")
    order = [axis for axis in range(a.ndim) if axis not in old]
    for place, axis in sorted(zip(new, old, strict=True)):
        order.insert(place, axis)
    return permuted(a, order)


@implements(np.rollaxis)
def rollaxis(a: Any, axis: Any, start: Any = 0) -> DTensor:
    """Move an axis before the one that is at `start`."""
    which = normal_axis(axis, a.ndim)
    if not -a.ndim <= start <= a.ndim:
        raise MissingAxisError(f"start {start} is out of bounds for an array of {a.ndim} axes")
    place = start + a.ndim if start < 0 else start
    order = [one for one in range(a.ndim) if one != which]
    order.insert(place - (which < place), which)
    return permuted(a, order)


@implements(np.expand_dims)
def expand_dims(a: Any, axis: Any) -> DTensor:
    """Put in axes of length 1."""
    rows = axis if isinstance(axis, tuple | list) else (axis,)
    count = len(rows)
    new = axes_of(rows, a.ndim + count)
    old = [place for place in range(a.ndim + count) if place not in new]
    layout = Layout(a.mesh, renumbered(a.placement, dict(enumerate(old))))
    shape = [1] * (a.ndim + count)
    for axis_, place in enumerate(old):
        shape[place] = a.shape[axis_]
    block = np.expand_dims(a.local, new) if a.is_member else None
    return DTensor(a.mesh, layout, shape, a.dtype, block)


@implements_anew(np.squeeze)
def squeeze(a: Any, axis: Any = None) -> DTensor:
    """Drop axes of length 1; one that is split is first replicated along its dims."""
    if axis is None:
        gone = tuple(one for one, length in enumerate(a.shape) if length == 1)
    else:
        gone = axes_of(axis, a.ndim, lists=False) if a.ndim or axis not in (0, -1) else ()
    long = [one for one in gone if a.shape[one] != 1]
    if long:
        raise ShapeError(
            f"only axes of length 1 can be dropped, but axis {long[0]} of shape {a.shape} has "
            f"{a.shape[long[0]]}"
        )
    x = moved_to(a, unsplit(a.placement, set(gone)))
    old = [one for one in range(x.ndim) if one not in gone]
    places = {axis_: place for place, axis_ in enumerate(old)}
    layout = Layout(x.mesh, renumbered(x.placement, places))
    block = np.squeeze(x.local, gone) if x.is_member else None
    return DTensor(x.mesh, layout, [x.shape[one] for one in old], x.dtype, block)


def _at_least(x: DTensor, count: int) -> DTensor:
    if x.ndim >= count:
        return x
    # As NumPy does: (n,) becomes (1, n) and (1, n, 1); (m, n) becomes (m, n, 1).
    first = 0 if x.ndim == 2 else 1
    new = tuple(range(first)) + tuple(range(first + x.ndim, count))
    return expand_dims(x, new)


def _each_at_least(arrays: tuple[Any, ...], count: int) -> Any:
    found = tuple(_at_least(one, count) for one in as_tensors(arrays))
    return found[0] if len(found) == 1 else found


@implements(np.atleast_1d)
def atleast_1d(*arys: Any) -> Any:
    """Return arrays with at least one axis."""
    return _each_at_least(arys, 1)


@implements(np.atleast_2d)
def atleast_2d(*arys: Any) -> Any:
    """Return arrays with at least two axes."""
    return _each_at_least(arys, 2)


@implements(np.atleast_3d)
def atleast_3d(*arys: Any) -> Any:
    """Return arrays with at least three axes."""
    return _each_at_least(arys, 3)


def reflow(x: DTensor, shape: tuple[int, ...], layout: Layout) -> DTensor:
    """Return `x` in C order with another shape, in `layout`. Collective.

    Args:
        x: The array.
        shape: The new shape.
        layout: That of the result. Dims along which `x` has copies or summands stay so.

    Cost:
        Each rank gets the elements that its new block has and its old one has not, in one
        exchange, after one of counts.
    """
    if not x.is_member:
        return DTensor(x.mesh, layout, shape, x.dtype, None)
    before, after = x.layout.tiling(x.shape), layout.tiling(shape)
    unit = gcd(_unit(before), _unit(after)) or 1
    old, new = _Units.of(before, unit), _Units.of(after, unit)
    me, rank = place_in(x.mesh), x.mesh.rank
    places = places_of(layout.mesh)
    tied = list(before.free_dims)
    near = [
        place
        for place in range(layout.mesh.size)
        if (places.coords[place, tied] == places.coords[me, tied]).all()
    ]
    mine, wanted = old.of_rank(rank), new.of_rank(rank)
    gives = new.by_owner(mine, near)
    takes = old.by_owner(wanted, near)
    counts = exchange_counts(
        x.mesh,
        "reshape",
        np.array([unit * len(gives.get(place, ())) for place in range(layout.mesh.size)]),
    )
    units = x.local.reshape(-1, unit)
    pieces = {place: units[where] for place, where in gives.items() if place != me}
    found = exchange_pieces(x.mesh, "reshape", pieces, counts, x.dtype)
    if me in gives:
        found[me] = units[gives[me]]
    block = x.mesh.shared_empty((len(wanted), unit), x.dtype)
    for place, where in takes.items():
        block[where] = found[place].reshape(-1, unit)
    local = block.reshape(layout.local_shape(shape, rank))
    return DTensor(x.mesh, layout, shape, x.dtype, local)


def _unit(tiling: Tiling) -> int:
    """Return a number of elements that no block's edge cuts through, the larger the better."""
    split = [axis for axis, dims in enumerate(tiling.axis_dims) if dims]
    if not split:
        return prod(tiling.shape)
    inner = prod(tiling.shape[split[-1] + 1 :])
    return inner * gcd(*tiling.bounds[split[-1]].tolist())


@dataclass(frozen=True, slots=True, eq=False)
class _Units:
    """The tiles of an array whose elements are counted in units.

    Attributes:
        tiling: The tiles.
        shape: The lengths of its axes up to the innermost that is split, that one in units.
        bounds: Where the intervals of these axes begin.
    """

    tiling: Tiling
    shape: tuple[int, ...]
    bounds: tuple[Integers, ...]

    @classmethod
    def of(cls, tiling: Tiling, unit: int) -> _Units:
        split = [axis for axis, dims in enumerate(tiling.axis_dims) if dims]
        last = split[-1] if split else 0
        inner = prod(tiling.shape[last + 1 :])
        if not tiling.shape:
            return cls(tiling, (1,), (np.array([0, 1]),))
        edges = tiling.bounds[last] * inner // unit
        shape = (*tiling.shape[:last], tiling.shape[last] * inner // unit)
        return cls(tiling, shape, (*tiling.bounds[:last], edges))

    def of_rank(self, rank: int) -> Integers:
        """Return the units of the tile of `rank`, in order."""
        leaves = self._leaves(rank)
        flat = np.zeros(1, np.int64)
        for length, bounds, leaf in zip(self.shape, self.bounds, leaves, strict=True):
            part = np.arange(bounds[leaf], bounds[leaf + 1])
            flat = (flat[:, None] * length + part).reshape(-1)
        return flat

    def by_owner(self, units: Integers, places: list[int]) -> dict[int, Integers]:
        """Return, for each of some places, which of `units` (as positions) its tile has."""
        home = np.zeros(len(units), np.int64)
        indices = np.unravel_index(units, self.shape)
        for positions, bounds in zip(indices, self.bounds, strict=True):
            leaf = np.searchsorted(bounds, positions, "right") - 1
            home = home * (len(bounds) - 1) + leaf
        order = np.argsort(home, kind="stable")
        ordered = home[order]
        ranks = places_of(self.tiling.mesh).ranks
        found = {}
        for place in places:
            key = 0
            leaves = self._leaves(int(ranks[place]))
            for own, bounds in zip(leaves, self.bounds, strict=True):
                key = key * (len(bounds) - 1) + own
            first, last = np.searchsorted(ordered, [key, key + 1]).tolist()
            if first < last:
                found[place] = order[first:last]
        return found

    def _leaves(self, rank: int) -> list[int]:
        coords = np.array([self.tiling.mesh.coords_of(rank)], np.int64)
        coords = coords.reshape(1, self.tiling.mesh.ndim)
        rows = [int(leaf[0]) for leaf in self.tiling.leaves_of(coords)]
        return rows[: len(self.shape)] if self.tiling.shape else [0]


def shape_tuple(shape: Any) -> tuple[int, ...]:
    """Return a shape, which may be one number.

    Raises:
        ShapeError: If it has other things than whole numbers.
    """
    try:
        return (index(shape),) if not hasattr(shape, "__iter__") else tuple(map(index, shape))
    except TypeError:
        raise ShapeError(f"a shape is made of whole numbers, got {shape!r}") from None


@implements_anew(np.reshape)
def reshape(a: DTensor, /, shape: Any, order: str = "C", *, copy: bool | None = None) -> DTensor:
    """Return the elements in another shape. Collective, if any have to move.

    The splits of :func:`~mpimesh.layout.axis_rules.reshaped_placement` stay, and so do sums
    that are waited for. Users get a copy; here, where nothing moves, the block may be a view of
    that of `a`.
    """
    if copy is False:
        raise LayoutError.everywhere(
            f"np.reshape of split arrays is a copy in every layout, got copy=False for {a!r}; "
            "leave it out"
        )
    if order == "F":
        turned = permuted(a, range(a.ndim)[::-1])
        wanted = shape_tuple(shape)[::-1]
        found = reshape(turned, wanted)
        return permuted(found, range(found.ndim)[::-1])
    if order != "C":
        raise NoRuleError(f"split arrays are reshaped in order 'C' or 'F', got {order!r}")
    return _reshaped(a, full_shape(a.shape, shape_tuple(shape)))


def _reshaped(a: DTensor, new: tuple[int, ...]) -> DTensor:
    """Return the elements of `a` in C order in another shape, which has as many."""
    if new == a.shape:
        return a
    placement, moves = reshaped_placement(a.layout.mesh, a.placement, a.shape, new)
    layout = Layout(a.mesh, placement)
    if moves:
        return reflow(a, new, layout)
    block = None
    if a.is_member:
        block = np.reshape(a.local, layout.local_shape(new, a.mesh.rank))
    return DTensor(a.mesh, layout, new, a.dtype, block)


@plans(np.reshape)
def _planned_reshape(
    _: Any, args: tuple[Any, ...], options: dict[str, Any], into: None
) -> Entry | None:
    """Decide on a new shape in C order, for which nothing moves."""
    x, rest = args[0], dict(zip(("shape", "order", "copy"), args[1:], strict=False)) | options
    if rest.get("order", "C") != "C" or rest.get("copy") is False or "shape" not in rest:
        return None
    new = full_shape(x.shape, shape_tuple(rest["shape"]))
    if new != x.shape and reshaped_placement(x.layout.mesh, x.placement, x.shape, new)[1]:
        return None
    made = _reshaped(x, new)
    return view_entry(np.ndarray.reshape, x, made, made.local.shape, COPY)


@implements_anew(np.ravel)
def ravel(a: Any, order: str = "C") -> DTensor:
    """Return all elements along one axis. Collective, if any have to move.

    A split array has no order in memory: A and K are C.
    """
    return reshape(a, (-1,) if a.size else (0,), "C" if order in "AK" else order)


@implements_by_name(np.broadcast_to)
def _broadcast_anew(array: Any, shape: Any) -> DTensor:
    """Return a copy of the array, repeated as by `broadcast_to`."""
    return broadcast_to(array.copy(), shape)


def broadcast_to(array: Any, shape: Any) -> DTensor:
    """Return the array with axes of length 1 repeated, and with new axes in front.

    Collective only if an axis to be repeated is split, which is then replicated. The
    result cannot be written to. It may be a view of the array's block.
    """
    new = shape_tuple(shape)
    try:
        fits = np.broadcast_shapes(array.shape, new) == new
    except ValueError:
        fits = False
    if not fits:
        raise ShapeError(f"an array of shape {array.shape} cannot be broadcast to {new}")
    before = len(new) - array.ndim
    grown = {axis for axis, n in enumerate(array.shape) if n == 1 and new[before + axis] != 1}
    target = unsplit(array.placement, grown)
    x = array if target == array.placement else array.redistribute(target)
    places = {axis: before + axis for axis in range(x.ndim)}
    layout = Layout(x.mesh, renumbered(x.placement, places))
    block = None
    if x.is_member:
        block = np.broadcast_to(x.local, layout.local_shape(new, x.mesh.rank))
    return DTensor(x.mesh, layout, new, x.dtype, block)


@implements(np.broadcast_arrays)
def broadcast_arrays(*args: Any, subok: bool = False) -> tuple[DTensor, ...]:
    """Return all arrays with the shape that they have together."""
    tensors = as_tensors(args)
    shape = joint_shape([one.shape for one in tensors])
    return tuple(broadcast_to(one.copy(), shape) for one in tensors)


def joint_shape(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape that arrays have when they are broadcast against each other.

    Raises:
        ShapeError: If they do not fit.
    """
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        raise ShapeError(f"shapes {shapes} do not fit each other") from None


def row_along(a: DTensor, axis: Any) -> tuple[DTensor, int]:
    """Return an array and its axis, as NumPy's functions along an axis read them.

    Without an axis it is the row of all elements; an array without axes is a row of one.

    Raises:
        AxisError: If there is no such axis.
    """
    if axis is None:
        return ravel(a), 0
    which = normal_axis(axis, max(a.ndim, 1))
    return (a if a.ndim else ravel(a)), which


@implements(np.shape, fact=True)
def shape(a: Any) -> tuple[int, ...]:
    """Return the global shape."""
    return tuple(a.shape)


@implements(np.ndim, fact=True)
def ndim(a: Any) -> int:
    """Return the number of axes."""
    return int(a.ndim)


@implements(np.size, fact=True)
def size(a: Any, axis: Any = None) -> int:
    """Return the number of elements, of all or along axes."""
    axes = range(a.ndim) if axis is None else axes_of(axis, a.ndim)
    return int(np.prod([a.shape[one] for one in axes], dtype=int))


@implements(np.result_type, fact=True)
def result_type(*arrays_and_dtypes: Any) -> np.dtype[Any]:
    """Return the dtype that operands are brought to."""
    return np.result_type(*[x.dtype if isinstance(x, DTensor) else x for x in arrays_and_dtypes])


@implements(np.can_cast, fact=True)
def can_cast(from_: Any, to: Any, casting: Any = "safe") -> bool:
    """Tell whether a cast is allowed."""
    kinds = [x.dtype if isinstance(x, DTensor) else x for x in (from_, to)]
    return np.can_cast(kinds[0], kinds[1], casting)


@implements(np.iscomplexobj, fact=True)
def iscomplexobj(x: Any) -> bool:
    """Tell whether elements are complex numbers."""
    return bool(x.dtype.kind == "c")


@implements(np.isrealobj, fact=True)
def isrealobj(x: Any) -> bool:
    """Tell whether elements are no complex numbers."""
    return not iscomplexobj(x)


@implements(np.common_type, fact=True)
def common_type(*arrays: Any) -> Any:
    """Return the inexact type that arrays have together."""
    return np.common_type(*[np.empty(0, x.dtype) for x in arrays])


@implements(np.min_scalar_type, fact=True)
def min_scalar_type(a: Any, /) -> np.dtype[Any]:
    """Return the dtype of an array; of one without axes the smallest for its value. Collective."""
    kind: np.dtype[Any] = a.dtype if a.ndim else np.min_scalar_type(whole_of(a)[()])
    return kind


@implements(np.einsum_path, fact=True)
def einsum_path(subscripts: Any, *operands: Any, **options: Any) -> Any:
    """Return the order in which a contraction takes the fewest steps: a matter of shapes."""
    shapes = [np.broadcast_to(np.zeros((), one.dtype), one.shape) for one in operands]
    return np.einsum_path(subscripts, *shapes, **options)


@implements(np.diag_indices_from, fact=True)
def diag_indices_from(arr: Any) -> tuple[HostArray, ...]:
    """Return the indices of the diagonal, as plain arrays, the same on all ranks."""
    if arr.ndim < 2 or len(set(arr.shape)) > 1:
        raise ShapeError.everywhere(f"a diagonal is of equal axes, got shape {arr.shape}")
    return np.diag_indices(arr.shape[0], arr.ndim)


@implements(np.tril_indices_from, fact=True)
def tril_indices_from(arr: Any, k: int = 0) -> tuple[HostArray, ...]:
    """Return the indices of the lower triangle, as plain arrays, the same on all ranks."""
    return np.tril_indices(_matrix(arr)[0], k, _matrix(arr)[1])


@implements(np.triu_indices_from, fact=True)
def triu_indices_from(arr: Any, k: int = 0) -> tuple[HostArray, ...]:
    """Return the indices of the upper triangle, as plain arrays, the same on all ranks."""
    return np.triu_indices(_matrix(arr)[0], k, _matrix(arr)[1])


def _matrix(arr: Any) -> tuple[int, int]:
    if arr.ndim != 2:
        raise ShapeError.everywhere(f"a triangle is of a matrix, got shape {arr.shape}")
    rows, columns = arr.shape
    return rows, columns
