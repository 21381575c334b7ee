"""The blocks that a function returned, made arrays."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, SupportsIndex

import numpy as np

from mpimesh.arguments import as_shape
from mpimesh.arrays import HostArray
from mpimesh.dtensor.blocks import agreed_dtype, host_block, writable_block
from mpimesh.dtensor.tensor import DTensor
from mpimesh.errors import ShapeError, on_all_ranks
from mpimesh.layout import Layout, Placement, Shard
from mpimesh.runtime import DeviceMesh

__all__ = ["wrapped_result"]

_ADVICE = 'results of other lengths need out_shapes="agree", or their shapes'


def wrapped_result(
    found: Any,
    placements: Any,
    shapes: Any,
    mesh: DeviceMesh,
    tensors: Sequence[DTensor],
    name: str,
) -> Any:
    """Return what a function returned with arrays in place of their blocks.

    Args:
        found: A block, or a tuple, list or dict of them.
        placements: How they lie: one for all or one for each.
        shapes: Their global shapes: the same.
        mesh: The mesh.
        tensors: The arrays whose blocks the function got.
        name: What the function is called in messages.

    Raises:
        ShapeError: If there is not one for each, or a result is not the block that it should be.
    """
    if isinstance(found, dict):
        to = placements if isinstance(placements, dict) else dict.fromkeys(found, placements)
        of = shapes if isinstance(shapes, dict) else dict.fromkeys(found, shapes)
        _check_keys(mesh, name, found, to, of)
        made = {
            key: _wrapped(found[key], to[key], of[key], mesh, tensors, f"{name}()[{key!r}]")
            for key in sorted(found, key=str)  # ranks agree on shapes in one order
        }
        return {key: made[key] for key in found}
    if isinstance(found, tuple | list):
        count = len(found)
        goals = placements if isinstance(placements, tuple) else (placements,) * count
        wholes = shapes if _is_row(shapes) else (shapes,) * count
        _check_keys(mesh, name, range(count), range(len(goals)), range(len(wholes)))
        row = [
            _wrapped(found[k], goals[k], wholes[k], mesh, tensors, f"{name}()[{k}]")
            for k in range(count)
        ]
        return type(found)(*row) if hasattr(found, "_fields") else type(found)(row)
    return _wrapped(found, placements, shapes, mesh, tensors, f"{name}()")


def _is_row(shapes: Any) -> bool:
    """Tell whether these are several shapes, and not one."""
    return isinstance(shapes, tuple | list) and not all(
        isinstance(one, SupportsIndex) for one in shapes
    )


def _check_keys(mesh: DeviceMesh, name: str, found: Any, placements: Any, shapes: Any) -> None:
    for what, keys in (("out_placements", placements), ("out_shapes", shapes)):
        if set(keys) != set(found):
            raise ShapeError(
                f"rank {mesh.rank}: {name} returned results {list(found)}, but {what} are for "
                f"{list(keys)}"
            )


def _wrapped(
    value: Any,
    placements: Any,
    shape: Any,
    mesh: DeviceMesh,
    tensors: Sequence[DTensor],
    what: str,
) -> Any:
    if placements is None:
        return value
    layout = Layout(mesh, placements)
    if not isinstance(value, np.ndarray | np.generic):
        raise ShapeError(
            f"rank {mesh.rank}: {what} must be a NumPy array, the block of an array as {layout}; "
            f"got {value!r}"
        )
    block = writable_block(host_block(value), mesh)
    axes = 1 + max((s.axis for s in layout.placement if isinstance(s, Shard)), default=-1)
    if block.ndim < axes:
        raise ShapeError(
            f"rank {mesh.rank}: {what} must have at least {axes} axes to lie as {layout}, got "
            f"shape {block.shape}"
        )
    if isinstance(shape, str):
        if shape != "agree":
            raise ShapeError(f'out_shapes are shapes, "agree" or None; got {shape!r}')
        return DTensor.from_local(block, mesh, placements)
    if shape is not None:
        return _checked(block, mesh, layout, as_shape(shape, one=True), what)
    inferred = _inferred(block, layout, tensors)
    if inferred is None:
        return DTensor.from_local(block, mesh, placements)
    shape, layout = inferred
    if mesh.settings.checks:
        made = DTensor.from_local(block, mesh, layout.placement)
        if (made.shape, made.layout) != inferred:
            raise on_all_ranks(
                ShapeError(
                    f"{what} must be the blocks of an array of shape {shape} as {layout}, got "
                    f"those of shape {made.shape} as {made.layout}; {_ADVICE}"
                )
            )
        return made
    return _checked(block, mesh, layout, shape, what)


def _checked(
    block: HostArray, mesh: DeviceMesh, layout: Layout, shape: tuple[int, ...], what: str
) -> DTensor:
    expected = layout.local_shape(shape, mesh.rank) if len(shape) == block.ndim else None
    if block.shape != expected:
        raise ShapeError(
            f"rank {mesh.rank}: {what} must be the block "
            f"{'' if expected is None else f'of shape {expected} '}of an array of shape {shape} as "
            f"{layout}, got shape {block.shape}; {_ADVICE}"
        )
    if any((bounds[1:] == bounds[:-1]).any() for bounds in layout.tiling(shape).bounds):
        # A block without elements may have any dtype; all ranks know that there is one.
        block = block.astype(agreed_dtype(block, mesh, what), copy=False)
    return DTensor(mesh, layout, shape, block.dtype, block)


def _inferred(
    block: HostArray, layout: Layout, tensors: Sequence[DTensor]
) -> tuple[tuple[int, ...], Layout] | None:
    """Return the shape of the whole, and the layout with the sizes of its blocks.

    None if the arguments do not tell, which is the same on all ranks: it asks how many axes there
    are and how the arguments lie, and never how long a block is.
    """
    mesh, specs = layout.mesh, list(layout.placement)
    lengths = list(block.shape)
    for axis in range(block.ndim):
        dims = _split_by(layout, axis)
        if prod(mesh.dims[dim].size for dim in dims) == 1:
            continue
        own = tuple(specs[dim].sizes for dim in dims)  # type: ignore[attr-defined]
        known = {
            (x.shape[a], sizes)
            for x in tensors
            for a in range(x.ndim)
            if x.layout.mesh.dims == mesh.dims and _split_by(x.layout, a) == dims
            for sizes in [tuple(x.placement[dim].sizes for dim in dims)]  # type: ignore[attr-defined]
            if own in (sizes, (None,) * len(dims))
        }
        if len(known) != 1:
            return None
        ((lengths[axis], sizes),) = known
        for dim, one in zip(dims, sizes, strict=True):
            specs[dim] = Shard(axis, sizes=one)
    return tuple(lengths), Layout(mesh, Placement(specs))


def _split_by(layout: Layout, axis: int) -> tuple[int, ...]:
    """Return the numbers of the dims that split an axis."""
    return tuple(
        dim
        for dim, spec in enumerate(layout.placement)
        if isinstance(spec, Shard) and spec.axis == axis
    )
