"""Reductions of split arrays, and the places of their smallest and largest values.

Sums along a split axis stay `Partial` until they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np

from mpimesh.arrays import DType
from mpimesh.core.dispatch import Entry
from mpimesh.dtensor.dispatch import implements, plans
from mpimesh.dtensor.dtensor import DTensor
from mpimesh.dtensor.elementwise import call, plain, refuses_values
from mpimesh.dtensor.linear import linear_for
from mpimesh.dtensor.methods import reduced
from mpimesh.dtensor.redistribute import identity_of
from mpimesh.dtensor.run import (
    Work,
    axes_of,
    implements_by_name,
    planned,
    reduced_anywhere,
    run,
    shape_of,
)
from mpimesh.errors import ShapeError
from mpimesh.layout import Layout, Partial, PlacementSpec, Shard
from mpimesh.layout.op_rules import broadcast_shape, reduced_shape, reduction_pattern
from mpimesh.runtime.operands import normal_axis

__all__ = ["mean", "reduce", "reduce_blocks", "reduced_axes", "strict_axes"]

_OPS: dict[np.ufunc, tuple[str, str]] = {
    np.add: ("sum", "iufc"),
    np.multiply: ("prod", "iufc"),
    np.minimum: ("min", "biuf"),
    np.maximum: ("max", "biuf"),
    np.logical_and: ("min", "b"),
    np.logical_or: ("max", "b"),
}
"""Ways to join the parts of a split axis, and the kinds of dtypes of each."""

_Work = Callable[[Work], Any]


def reduced_axes(axis: Any, ndim: int) -> tuple[int, ...]:
    """Return the axes to reduce, in order and counted from 0; all for None.

    Raises:
        AxisError: If the array does not have one, or it is named twice.
        AxisTypeError: If it is neither a whole number nor a tuple of some.
    """
    if axis is None:
        return tuple(range(ndim))
    if ndim == 0 and axis in (0, -1):
        return ()
    return tuple(sorted(axes_of(axis, ndim, lists=False)))


def strict_axes(axis: Any, ndim: int, where: Any = True, *, lists: bool = False) -> tuple[int, ...]:
    """Return the axes, of which an array without axes has none, unlike in sums and the like.

    With `where`, NumPy counts by a sum.
    """
    if axis is not None and where is True:
        axis = axes_of(axis, ndim, lists=lists)
    return reduced_axes(axis, ndim)


def reduce_blocks(
    function: _Work,
    operands: Sequence[Any],
    axes: tuple[int, ...],
    op: str,
    kind: Any,
    *,
    keepdims: bool = False,
    linear: bool = False,
    lead: tuple[int, ...] = (),
    into: bool = False,
    refuses: bool = True,
) -> DTensor:
    """Reduce the blocks of the first operand over `axes`.

    Args:
        function: Gives the reduction of a block.
        operands: The array, and what broadcasts to it.
        axes: What goes.
        op: How the parts of a split axis go together; empty if the axes have to be whole.
        kind: The result's dtype.
        keepdims: Whether `axes` stay with length 1.
        linear: Whether summands stay summands.
        lead: The lengths of axes that the result has before all others.
        into: Whether the function writes into ``Work.out``.
        refuses: Whether it may raise for some numbers; see :func:`~mpimesh.dtensor.run.run`.
    """
    shape = shape_of(operands[0])
    others = [shape_of(one) for one in operands[1:]]
    broadcast_to_first(shape, others)
    pattern = reduction_pattern(
        shape, axes, op, keepdims=keepdims, others=others, front=len(lead), linear=linear
    )
    result = (*lead, *reduced_shape(shape, axes, keepdims=keepdims))

    def whole(here: Work) -> Any:
        # NumPy refuses some reductions of no elements, and on other ranks there are some.
        return function(here) if 0 not in here.shape else np.empty(here.shape, kind)

    work = function if op else whole
    return run(work, operands, pattern, result, [kind], into=into, refuses=refuses)[0]


def broadcast_to_first(shape: tuple[int, ...], others: Sequence[tuple[int, ...]]) -> None:
    """Check that what goes with an array does not stretch it.

    Raises:
        ShapeError: If it does.
    """
    for other in others:
        if broadcast_shape([shape, other]) != shape:
            raise ShapeError.everywhere(
                f"an array of shape {other} does not broadcast to {shape}, whose it is"
            )


@implements(np.ufunc.reduce)
def reduce(
    ufunc: np.ufunc,
    a: Any,
    axis: Any = 0,
    dtype: Any = None,
    keepdims: bool = False,
    initial: Any = np._NoValue,
    where: Any = True,
) -> DTensor:
    """Do ``ufunc.reduce``.

    A sum, product, minimum, maximum, "and" or "or" over a split axis is worked out of each block,
    and waits as `Partial` to be put together. For all other ufuncs the axes are brought whole.

    Raises:
        AxisError: If the array has no such axis.
        ShapeError: If it has no elements, and the reduction of none is nothing.
    """
    a = plain(a)
    masks = [] if where is True else [plain(where)]
    shape = shape_of(a)
    axes = reduced_axes(axis, len(shape))
    options = {} if dtype is None else {"dtype": np.dtype(dtype)}
    begins = initial is not np._NoValue and initial is not None
    # Arrays of one element show what NumPy would make of these dtypes and options, or refuse.
    probe = options if initial is np._NoValue else options | {"initial": initial}
    one = np.ones((1,) * len(shape), a.dtype)
    mask = np.ones((1,) * len(shape), bool) if masks else True
    kind = np.asarray(ufunc.reduce(one, axis=axes, where=mask, **probe)).dtype
    op = _op_of(ufunc, kind)
    empty = any(shape[axis] == 0 for axis in axes)
    if empty and not begins and (ufunc.identity is None or initial is None):
        raise ShapeError.everywhere(
            f"np.{ufunc.__name__} of no elements, along axes {axes} of shape {shape}, is "
            "nothing; give initial="
        )
    later = begins and op in ("sum", "prod")
    if begins and not later:
        options["initial"] = initial

    def work(here: Work) -> None:
        how = dict(options)
        if op in ("min", "max") and "initial" not in how and 0 in here.blocks[0].shape:
            how["initial"] = identity_of(op, kind)
        if masks:
            how["where"] = here.blocks[1]
        ufunc.reduce(here.blocks[0], axis=axes, keepdims=keepdims, out=here.out[0], **how)

    linear = bool(op) and bool(linear_for(ufunc, [a], kind, method="reduce"))
    made = reduce_blocks(
        work,
        [a, *masks],
        axes,
        op,
        kind,
        keepdims=keepdims,
        linear=linear,
        into=True,
        refuses=refuses_values(ufunc, [a, a], [kind]),
    )
    if later:
        made = call(ufunc, (made, np.asarray(initial).astype(kind)[()]), dtype=kind)
    return made


def _op_of(ufunc: np.ufunc, kind: DType) -> str:
    """Return how the parts of a split axis go together; empty if it has to be whole."""
    op, kinds = _OPS.get(ufunc, ("", ""))
    return op if kind.kind in kinds else ""


_REDUCTIONS: dict[Callable[..., Any], np.ufunc] = {
    np.sum: np.add,
    np.prod: np.multiply,
    np.min: np.minimum,
    np.amin: np.minimum,
    np.max: np.maximum,
    np.amax: np.maximum,
    np.all: np.logical_and,
    np.any: np.logical_or,
}
for _function, _ufunc in _REDUCTIONS.items():
    implements_by_name(_function)(partial(reduce, _ufunc, axis=None))


@plans(*_REDUCTIONS)
def _planned(
    function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any], _: None
) -> Entry | None:
    """Decide on a reduction without other options than `axis` and `keepdims`."""
    ufunc = _REDUCTIONS[function]
    return _entry(ufunc, ufunc.reduce, args, options, reduced_axes)


def _entry(
    ufunc: np.ufunc,
    kernel: Callable[..., Any],
    args: tuple[Any, ...],
    options: dict[str, Any],
    axes_read: Callable[[Any, int], tuple[int, ...]],
) -> Entry | None:
    """Return what `kernel` is to do, which reduces as `ufunc` does."""
    a = args[0]
    rest = dict(zip(("axis", "dtype", "out", "keepdims"), args[1:], strict=False)) | options
    axes, keep = axes_read(rest.pop("axis", None), a.ndim), rest.pop("keepdims", False)
    if any(one is not None for one in rest.values()) or type(keep) is not bool or 0 in a.shape:
        return None
    kind = np.asarray(ufunc.reduce(np.ones((1,) * a.ndim, a.dtype), axis=axes)).dtype
    op = _op_of(ufunc, kind)
    if not op or 0 in a.local.shape:
        return None
    linear = bool(linear_for(ufunc, [a], kind, method="reduce"))
    pattern = reduction_pattern(a.shape, axes, op, keepdims=keep, linear=linear)
    return planned(
        kernel,
        [a],
        pattern,
        reduced_shape(a.shape, axes, keepdims=keep),
        kind,
        options=(axes, Entry.OUT, keep),
        names=("axis", "out", "keepdims"),
        refuses=refuses_values(ufunc, [a, a], [kind]),
    )


@implements_by_name(np.ptp)
def ptp(a: DTensor, axis: Any = None, keepdims: bool = False) -> DTensor:
    """Return the largest minus the smallest value."""
    most = reduce(np.maximum, a, axis, keepdims=keepdims)
    least = reduce(np.minimum, a, axis, keepdims=keepdims)
    made: DTensor = call(np.subtract, (most, least))
    return made


@implements(np.count_nonzero)
def count_nonzero(a: DTensor, axis: Any = None, *, keepdims: bool = False) -> DTensor:
    """Count what is not zero; a split axis is counted in parts, which wait to be summed."""
    axes = reduced_axes(axis, a.ndim)
    if axis is not None or keepdims:  # refuses what NumPy does
        np.count_nonzero(np.ones((1,) * a.ndim, a.dtype), axis=axes)

    def work(here: Work) -> None:
        block = here.blocks[0]
        if axis is None and not keepdims:  # which takes records, too
            here.out[0][...] = np.count_nonzero(block)
        else:
            here.out[0][...] = np.count_nonzero(block, axis=axes, keepdims=keepdims)

    return reduce_blocks(
        work, [a], axes, "sum", np.intp, keepdims=keepdims, into=True, refuses=False
    )


def count(a: DTensor, axes: tuple[int, ...], keepdims: bool, where: Any) -> Any:
    """Return how many elements each mean is of: a number, or an array where a mask says so."""
    if where is True:
        return prod(a.shape[axis] for axis in axes)

    def work(here: Work) -> None:
        mask = np.broadcast_to(here.blocks[1], here.blocks[0].shape)
        np.add.reduce(mask, axis=axes, keepdims=keepdims, out=here.out[0])

    operands = [a, plain(where)]
    return reduce_blocks(
        work, operands, axes, "sum", np.intp, keepdims=keepdims, into=True, refuses=False
    )


@implements_by_name(np.mean)
def mean(
    a: DTensor, axis: Any = None, dtype: Any = None, keepdims: bool = False, *, where: Any = True
) -> DTensor:
    """Return the mean: the sum, divided. Of integers in float64, of float16 by way of float32."""
    axes = strict_axes(axis, a.ndim, where)
    short = dtype is None and a.dtype == np.float16
    kind = np.float32 if short else dtype
    if kind is None and a.dtype.kind in "biu":
        kind = np.float64
    total = reduce(np.add, a, axes, kind, keepdims, where=where)
    made: DTensor = call(np.divide, (total, count(a, axes, keepdims, where)))
    if made.dtype != total.dtype or short:
        made = call(
            np.positive, (made,), dtype=np.float16 if short else total.dtype, casting="unsafe"
        )
    return made


@plans(np.mean)
def _planned_mean(
    _: Any, args: tuple[Any, ...], options: dict[str, Any], into: None
) -> Entry | None:
    """Decide on a mean of floats that wait for nothing: parts of a sum are divided, too."""
    a = args[0]
    if a.dtype.kind not in "fc" or a.dtype == np.float16 or a.layout.partial_op:
        return None
    shape = a.shape

    def kernel(block: Any, *, axis: tuple[int, ...], out: Any, keepdims: bool) -> None:
        np.add.reduce(block, axis=axis, out=out, keepdims=keepdims)
        np.divide(out, prod(shape[one] for one in axis), out=out)

    return _entry(np.add, kernel, args, options, strict_axes)


_NOWHERE = np.iinfo(np.intp).max


def _argument(function: Callable[..., Any], op: str) -> None:
    """Register a search: each block finds its own best; then the first rank that has the best."""

    @implements_by_name(function)
    def search(a: DTensor, axis: Any = None, *, keepdims: bool = False) -> DTensor:
        place = axis if axis is None else normal_axis(axis, max(a.ndim, 1))
        axes = reduced_axes(place, a.ndim)
        if 0 in (a.shape[one] for one in axes):
            raise ShapeError.everywhere(
                f"np.{function.__name__} of no elements: shape {a.shape}, axis {axis}"
            )
        x = reduced_anywhere(a)
        if x.dtype.kind in "biuf":
            return _first_of_best(x, axes, keepdims, function, op)

        def work(here: Work) -> Any:
            return np.asarray(function(here.blocks[0], axis=axis, keepdims=keepdims))

        # No value is worse than all of these, so the axes are brought whole.
        return reduce_blocks(work, [x], axes, "", np.intp, keepdims=keepdims, refuses=False)


def _first_of_best(
    x: DTensor, axes: tuple[int, ...], keep: bool, function: Callable[..., Any], op: str
) -> DTensor:
    found: list[Any] = []

    def best(here: Work) -> Any:
        """Find the best of this block, and where in the whole array it stands."""
        (block,), (box,) = here.blocks, here.boxes
        lengths = [block.shape[axis] for axis in axes]
        kept = [block.shape[axis] for axis in range(block.ndim) if axis not in axes]
        if 0 in lengths:
            found.append(np.full(kept, _NOWHERE, np.intp))
            return _shaped(np.full(kept, identity_of(op, x.dtype), x.dtype), x, axes, block)
        rows = np.moveaxis(block, axes, range(-len(axes), 0)).reshape(*kept, prod(lengths))
        place = function(rows, axis=-1)
        value = np.take_along_axis(rows, place[..., None], -1)[..., 0]
        within = np.unravel_index(place, lengths) if axes else ()
        spot = np.zeros(kept, np.intp)
        for axis, one in zip(axes, within, strict=True):
            spot = spot * x.shape[axis] + one + box[axis][0]
        found.append(spot)
        return _shaped(value, x, axes, block)

    values = reduce_blocks(best, [x], axes, op, x.dtype, keepdims=True, refuses=False)
    everywhere = reduced(values)

    # The layout of the blocks is fixed: a second search for a layout might find another one.
    specs: list[PlacementSpec] = []
    for spec in values.placement:
        if isinstance(spec, Partial):
            specs.append(Partial("min"))
        elif isinstance(spec, Shard) and not keep:
            gone = sum(axis < spec.axis for axis in axes)
            specs.append(Shard(spec.axis - gone, sizes=spec.sizes))
        else:
            specs.append(spec)
    shape = reduced_shape(x.shape, axes, keepdims=keep)
    layout = Layout(x.mesh, specs)
    if not values.is_member:
        return DTensor(x.mesh, layout, shape, np.intp, None)
    mine, wanted = values.local, everywhere.local
    equal = mine == wanted
    if x.dtype.kind == "f":
        equal |= np.isnan(wanted) & np.isnan(mine)
    spot = np.where(equal, found[0].reshape(mine.shape), _NOWHERE)
    block = x.mesh.shared_empty(layout.local_shape(shape, x.mesh.rank), np.intp)
    block[...] = spot.reshape(block.shape)
    return DTensor(x.mesh, layout, shape, np.intp, block)


def _shaped(values: Any, x: DTensor, axes: tuple[int, ...], block: Any) -> Any:
    """Return `values`, one for each place that is kept, with axes of length 1 for the others."""
    return values.reshape([1 if axis in axes else n for axis, n in enumerate(block.shape)])


_argument(np.argmin, "min")
_argument(np.argmax, "max")
