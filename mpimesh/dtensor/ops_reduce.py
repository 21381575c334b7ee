"""Reductions of split arrays. Those of a split axis wait, `Partial`, until they are needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_tuple

from mpimesh.dtensor.ops_ufunc import call, plain
from mpimesh.dtensor.redistribute import identity_of
from mpimesh.dtensor.registry import implements
from mpimesh.dtensor.run import Work, kept_summands, run, shape_of, store
from mpimesh.dtensor.tensor import DTensor
from mpimesh.errors import ShapeError, on_all_ranks
from mpimesh.layout.op_rules import broadcast_shape, reduced_shape, reduction_pattern

__all__ = ["axes_of", "given", "mean", "reduce", "reduce_blocks", "strict_axes_of"]

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


def given(value: Any) -> bool:
    """Tell whether an option was given."""
    return value is not None and value is not np._NoValue


def axes_of(axis: Any, ndim: int) -> tuple[int, ...]:
    """Return the axes to reduce, in order and counted from 0; all for None.

    Raises:
        AxisError: If the array does not have one, or it is named twice.
    """
    if axis is None:
        return tuple(range(ndim))
    if ndim == 0 and axis in (0, -1):
        return ()
    return tuple(sorted(normalize_axis_tuple(axis, ndim)))


def strict_axes_of(axis: Any, ndim: int, where: Any = True) -> tuple[int, ...]:
    """Return the axes, of which an array without axes has none, unlike in sums and the like.

    With `where`, NumPy counts by a sum.
    """
    if where is not True and where is not np._NoValue:
        return axes_of(axis, ndim)
    return axes_of(axis if axis is None else normalize_axis_tuple(axis, ndim), ndim)


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

    return run(function if op else whole, operands, pattern, result, [kind], into=into)[0]


def broadcast_to_first(shape: tuple[int, ...], others: Sequence[tuple[int, ...]]) -> None:
    """Check that what goes with an array does not stretch it.

    Raises:
        ShapeError: If it does.
    """
    for other in others:
        if broadcast_shape([shape, other]) != shape:
            raise on_all_ranks(
                ShapeError(f"an array of shape {other} does not broadcast to {shape}, whose it is")
            )


@implements(np.ufunc.reduce)
def reduce(
    ufunc: np.ufunc,
    a: Any,
    axis: Any = 0,
    dtype: Any = None,
    out: Any = None,
    keepdims: Any = False,
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
    masks = [] if where is True or where is np._NoValue else [plain(where)]
    keep = keepdims is True or bool(given(keepdims) and keepdims)
    shape = shape_of(a)
    axes = axes_of(axis, len(shape))
    options = {} if dtype is None else {"dtype": np.dtype(dtype)}
    begins = initial is not np._NoValue and initial is not None
    # Arrays of one element show what NumPy would make of these dtypes and options, or refuse.
    probe = dict(options, initial=initial) if begins else options
    one = np.ones((1,) * len(shape), a.dtype)
    mask = np.ones((1,) * len(shape), bool) if masks else True
    kind = np.asarray(ufunc.reduce(one, axis=axes, where=mask, **probe)).dtype
    op, kinds = _OPS.get(ufunc, ("", ""))
    if kind.kind not in kinds:
        op = ""
    empty = any(shape[axis] == 0 for axis in axes)
    if empty and not begins and (ufunc.identity is None or initial is None):
        raise on_all_ranks(
            ShapeError(
                f"np.{ufunc.__name__} of no elements, along axes {axes} of shape {shape}, is "
                "nothing; give initial="
            )
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
        ufunc.reduce(here.blocks[0], axis=axes, keepdims=keep, out=here.out[0], **how)

    stays = ufunc in (np.add, np.multiply, np.minimum, np.maximum)
    linear = stays and bool(kept_summands(a, kind, reduction_pattern((), (), op).linear))
    made = reduce_blocks(work, [a, *masks], axes, op, kind, keepdims=keep, linear=linear, into=True)
    if later:
        made = call(ufunc, (made, np.asarray(initial).astype(kind)[()]), dtype=kind)
    return made if not given(out) else store(made, out)


def _reduction(function: Callable[..., Any], ufunc: np.ufunc) -> None:
    @implements(function)
    def do(
        a: DTensor,
        axis: Any = None,
        dtype: Any = None,
        out: Any = None,
        keepdims: Any = False,
        initial: Any = np._NoValue,
        where: Any = True,
    ) -> DTensor:
        return reduce(ufunc, a, axis, dtype, out, keepdims, initial, where)


def _comparison(function: Callable[..., Any], ufunc: np.ufunc) -> None:
    @implements(function)
    def do(
        a: DTensor,
        axis: Any = None,
        out: Any = None,
        keepdims: Any = False,
        initial: Any = np._NoValue,
        where: Any = True,
    ) -> DTensor:
        return reduce(ufunc, a, axis, None, out, keepdims, initial, where)


def _test(function: Callable[..., Any], ufunc: np.ufunc) -> None:
    @implements(function)
    def do(
        a: DTensor, axis: Any = None, out: Any = None, keepdims: Any = False, *, where: Any = True
    ) -> DTensor:
        return reduce(ufunc, a, axis, None, out, keepdims, np._NoValue, where)


_reduction(np.sum, np.add)
_reduction(np.prod, np.multiply)
for _name in (np.min, np.amin):
    _comparison(_name, np.minimum)
for _name in (np.max, np.amax):
    _comparison(_name, np.maximum)
_test(np.all, np.logical_and)
_test(np.any, np.logical_or)


@implements(np.ptp)
def ptp(a: DTensor, axis: Any = None, out: Any = None, keepdims: Any = False) -> DTensor:
    """Return the largest minus the smallest value."""
    most = reduce(np.maximum, a, axis, keepdims=keepdims)
    least = reduce(np.minimum, a, axis, keepdims=keepdims)
    made: DTensor = call(np.subtract, (most, least))
    return store(made, out) if given(out) else made


@implements(np.count_nonzero)
def count_nonzero(a: DTensor, axis: Any = None, *, keepdims: bool = False) -> DTensor:
    """Count what is not zero; a split axis is counted in parts, which wait to be summed."""
    axes = axes_of(axis, a.ndim)

    def work(here: Work) -> None:
        block = here.blocks[0]
        here.out[0][...] = np.count_nonzero(block, axis=axes, keepdims=keepdims)

    return reduce_blocks(work, [a], axes, "sum", np.intp, keepdims=keepdims, into=True)


def count(a: DTensor, axes: tuple[int, ...], keepdims: bool, where: Any) -> Any:
    """Return how many elements each mean is of: a number, or an array where a mask says so."""
    if where is True or where is np._NoValue:
        return prod(a.shape[axis] for axis in axes)

    def work(here: Work) -> None:
        mask = np.broadcast_to(here.blocks[1], here.blocks[0].shape)
        np.add.reduce(mask, axis=axes, keepdims=keepdims, out=here.out[0])

    return reduce_blocks(
        work, [a, plain(where)], axes, "sum", np.intp, keepdims=keepdims, into=True
    )


@implements(np.mean)
def mean(
    a: DTensor,
    axis: Any = None,
    dtype: Any = None,
    out: Any = None,
    keepdims: Any = False,
    *,
    where: Any = True,
) -> DTensor:
    """Return the mean: the sum, divided. Of integers in float64, of float16 by way of float32."""
    keep = bool(given(keepdims) and keepdims)
    axes = strict_axes_of(axis, a.ndim, where)
    short = dtype is None and a.dtype == np.float16
    kind = np.float32 if short else dtype
    if kind is None and a.dtype.kind in "biu":
        kind = np.float64
    total = reduce(np.add, a, axes, kind, None, keep, np._NoValue, where)
    made: DTensor = call(np.divide, (total, count(a, axes, keep, where)))
    if made.dtype != total.dtype or short:
        made = call(
            np.positive, (made,), dtype=np.float16 if short else total.dtype, casting="unsafe"
        )
    return store(made, out) if given(out) else made
