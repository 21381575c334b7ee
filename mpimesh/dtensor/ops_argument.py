"""Places of the smallest and largest values of split arrays."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from mpimesh.dtensor.ops_reduce import axes_of, given, reduce_blocks
from mpimesh.dtensor.redistribute import identity_of
from mpimesh.dtensor.registry import implements
from mpimesh.dtensor.run import Work, resolved, store
from mpimesh.dtensor.tensor import DTensor
from mpimesh.errors import ShapeError, on_all_ranks
from mpimesh.layout import Layout, Partial, PlacementSpec, Replicate, Shard
from mpimesh.layout.op_rules import reduced_shape

_NOWHERE = np.iinfo(np.intp).max


def _argument(function: Callable[..., Any], op: str) -> None:
    """Register a search: each block finds its own best; then the first rank that has the best."""

    @implements(function)
    def search(a: DTensor, axis: Any = None, out: Any = None, *, keepdims: Any = False) -> DTensor:
        axes = axes_of(axis, a.ndim)
        if axis is not None and len(axes) != min(a.ndim, 1):
            raise TypeError(f"np.{function.__name__} takes one axis or None, got {axis!r}")
        keep = bool(given(keepdims) and keepdims)
        if 0 in (a.shape[one] for one in axes):
            raise on_all_ranks(
                ShapeError(f"np.{function.__name__} of no elements: shape {a.shape}, axis {axis}")
            )
        x = resolved(a)
        if x.dtype.kind in "biuf":
            made = _first_of_best(x, axes, keep, function, op)
        else:  # No value is worse than all of these, so the axes are brought whole.
            made = reduce_blocks(
                lambda here: np.asarray(function(here.blocks[0], axis=axis, keepdims=keep)),
                [x],
                axes,
                "",
                np.intp,
                keepdims=keep,
            )
        return store(made, out) if given(out) else made


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

    values = reduce_blocks(best, [x], axes, op, x.dtype, keepdims=True)
    everywhere = values.redistribute(
        [Replicate() if isinstance(spec, Partial) else spec for spec in values.placement]
    )

    # Where the blocks lie is settled: a second search for a layout might find another one.
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
