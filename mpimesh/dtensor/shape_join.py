"""Arrays joined along an axis, and cut into several."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import index
from typing import Any

import numpy as np

from mpimesh.dtensor.apply import apply_rule, operand_of
from mpimesh.dtensor.arguments import as_tensor, axis_of, moved_to, refuse_given
from mpimesh.dtensor.picking import pick_along
from mpimesh.dtensor.registry import implements
from mpimesh.dtensor.shape_axes import atleast_1d, atleast_2d, atleast_3d, expand_dims, squeeze
from mpimesh.dtensor.shape_reshape import ravel
from mpimesh.dtensor.tensor import DTensor
from mpimesh.errors import DTypeError, ShapeError
from mpimesh.layout import cheapest
from mpimesh.layout.axis_rules import join_rules, unsplit
from mpimesh.layout.boxes import even_sizes

__all__ = ["concatenate", "stack"]


def _tensors(arrays: Any) -> list[DTensor]:
    rows = list(arrays)
    mesh = next(one.mesh for one in rows if isinstance(one, DTensor))
    return [as_tensor(one, mesh) for one in rows]


@implements(np.concatenate)
def concatenate(
    arrays: Any,
    /,
    axis: Any = 0,
    out: Any = None,
    *,
    dtype: Any = None,
    casting: Any = "same_kind",
) -> DTensor:
    """Join arrays along an axis. Collective, if anything has to move.

    The layout is that of the operand for which the fewest bytes move. If it splits `axis`, the
    result is split evenly along it. See :func:`~mpimesh.layout.axis_rules.join_rules`.
    """
    refuse_given("concatenate", out=out)
    tensors = _tensors(arrays)
    if axis is None:
        tensors, axis = [ravel(one) for one in tensors], 0
    ndim = tensors[0].ndim
    if any(one.ndim != ndim for one in tensors) or ndim == 0:
        raise ShapeError(
            f"arrays to be joined have as many axes, and at least one; got shapes "
            f"{[one.shape for one in tensors]}"
        )
    which = axis_of(axis, ndim)
    rest = {one.shape[:which] + one.shape[which + 1 :] for one in tensors}
    if len(rest) > 1:
        raise ShapeError(
            f"arrays to be joined along axis {which} have one length along every other axis; got "
            f"shapes {[one.shape for one in tensors]}"
        )
    kind = np.result_type(*[one.dtype for one in tensors]) if dtype is None else np.dtype(dtype)
    wrong = [one.dtype for one in tensors if not np.can_cast(one.dtype, kind, casting)]
    if wrong:
        raise DTypeError(f"arrays of {wrong[0]} are not joined as {kind} with casting={casting!r}")
    tensors = [one.astype(kind, copy=False) for one in tensors]
    mesh = tensors[0].layout.mesh
    operands = [operand_of(one) for one in tensors]
    rule = cheapest(mesh, operands, join_rules(mesh, operands, which))
    shape = list(tensors[0].shape)
    shape[which] = sum(one.shape[which] for one in tensors)
    return apply_rule(lambda *blocks: np.concatenate(blocks, which), tensors, rule, shape, kind)


@implements(np.append)
def append(arr: Any, values: Any, axis: Any = None) -> DTensor:
    """Join two arrays; without an axis, all elements of both in a row."""
    return concatenate((arr, values), axis=axis)


@implements(np.stack)
def stack(
    arrays: Any, axis: Any = 0, out: Any = None, *, dtype: Any = None, casting: Any = "same_kind"
) -> DTensor:
    """Join arrays of one shape along a new axis."""
    tensors = _tensors(arrays)
    if len({one.shape for one in tensors}) > 1:
        raise ShapeError(f"arrays to be stacked have one shape; got {[x.shape for x in tensors]}")
    which = axis_of(axis, tensors[0].ndim + 1)
    grown = [expand_dims(one, which) for one in tensors]
    return concatenate(grown, which, out, dtype=dtype, casting=casting)


def _all_at_least(function: Any, arrays: Any) -> list[DTensor]:
    return [function(one) for one in _tensors(arrays)]


@implements(np.vstack)
def vstack(tup: Any, *, dtype: Any = None, casting: Any = "same_kind") -> DTensor:
    """Join arrays as rows."""
    return concatenate(_all_at_least(atleast_2d, tup), 0, dtype=dtype, casting=casting)


@implements(np.hstack)
def hstack(tup: Any, *, dtype: Any = None, casting: Any = "same_kind") -> DTensor:
    """Join arrays as columns."""
    rows = _all_at_least(atleast_1d, tup)
    return concatenate(rows, 0 if rows[0].ndim == 1 else 1, dtype=dtype, casting=casting)


@implements(np.dstack)
def dstack(tup: Any) -> DTensor:
    """Join arrays along the third axis."""
    return concatenate(_all_at_least(atleast_3d, tup), 2)


@implements(np.column_stack)
def column_stack(tup: Any) -> DTensor:
    """Join arrays as columns, arrays of one axis as one column each."""
    rows = [expand_dims(x, 1) if x.ndim == 1 else atleast_2d(x) for x in _tensors(tup)]
    return concatenate(rows, 1)


# -- cutting ---------------------------------------------------------------------------


def _cut(x: DTensor, edges: Sequence[int], axis: int) -> list[DTensor]:
    length = x.shape[axis]
    found = []
    for start, stop in zip([0, *edges], [*edges, length], strict=True):
        begin, end, _ = slice(start, stop).indices(length)
        found.append(pick_along(x, {axis: range(begin, max(begin, end))}, name="split"))
    return found


@implements(np.array_split)
def array_split(ary: Any, indices_or_sections: Any, axis: Any = 0) -> list[DTensor]:
    """Cut an array into parts, which may differ in length. Local: elements stay where they are."""
    which = axis_of(axis, ary.ndim)
    if hasattr(indices_or_sections, "__iter__"):
        return _cut(ary, [index(one) for one in indices_or_sections], which)
    parts = index(indices_or_sections)
    if parts < 1:
        raise ShapeError(f"an array is cut into at least one part, got {parts}")
    return _cut(ary, [*accumulate(even_sizes(ary.shape[which], parts))][:-1], which)


@implements(np.split)
def split(ary: Any, indices_or_sections: Any, axis: Any = 0) -> list[DTensor]:
    """Cut an array into parts of one length, or at some indices. Local.

    Elements stay where they are: a part of a split axis is on the ranks that have it, and
    ``part.redistribute(...)`` spreads it.
    """
    which = axis_of(axis, ary.ndim)
    if not hasattr(indices_or_sections, "__iter__"):
        parts = index(indices_or_sections)
        if parts < 1 or ary.shape[which] % parts:
            raise ShapeError(
                f"axis {which} of shape {ary.shape} cannot be cut into {parts} parts of one "
                "length; np.array_split takes any number"
            )
    return array_split(ary, indices_or_sections, which)


@implements(np.hsplit)
def hsplit(ary: Any, indices_or_sections: Any) -> list[DTensor]:
    """Cut along axis 1, or along the only one."""
    return split(ary, indices_or_sections, 0 if ary.ndim == 1 else 1)


@implements(np.vsplit)
def vsplit(ary: Any, indices_or_sections: Any) -> list[DTensor]:
    """Cut along axis 0 of at least two."""
    if ary.ndim < 2:
        raise ShapeError(f"np.vsplit takes at least 2 axes, got shape {ary.shape}")
    return split(ary, indices_or_sections, 0)


@implements(np.dsplit)
def dsplit(ary: Any, indices_or_sections: Any) -> list[DTensor]:
    """Cut along axis 2."""
    return split(ary, indices_or_sections, 2)


@implements(np.unstack)
def unstack(x: Any, /, *, axis: Any = 0) -> tuple[DTensor, ...]:
    """Cut along an axis into arrays without it. Collective, if it is split."""
    which = axis_of(axis, x.ndim)
    ready = moved_to(x, unsplit(x.placement, {which}))
    parts = _cut(ready, range(1, x.shape[which]), which) if x.shape[which] else []
    return tuple(squeeze(part, which) for part in parts)
