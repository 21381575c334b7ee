"""Arrays laid out against each other: grids, blocks of blocks, Kronecker products."""

from __future__ import annotations

from operator import index
from typing import Any

import numpy as np

from mpimesh.dtensor.arguments import as_tensor, axes_of, axis_of
from mpimesh.dtensor.indexing import diag
from mpimesh.dtensor.masks import nonzero
from mpimesh.dtensor.ops_ufunc import call
from mpimesh.dtensor.picking import pick_along
from mpimesh.dtensor.registry import implements, sure_rule_of
from mpimesh.dtensor.shape_axes import expand_dims, swapaxes
from mpimesh.dtensor.shape_join import concatenate
from mpimesh.dtensor.shape_reshape import broadcast_to, ravel, reshape, shape_tuple
from mpimesh.dtensor.tensor import DTensor, common_mesh
from mpimesh.errors import NoRuleError, ShapeError, on_all_ranks

__all__: list[str] = []


@implements(np.meshgrid)
def meshgrid(
    *xi: Any, copy: bool = True, sparse: bool = False, indexing: str = "xy"
) -> tuple[DTensor, ...]:
    """Return the coordinates of a grid. Local: each is split along the axis that it runs along."""
    if indexing not in ("xy", "ij"):
        raise on_all_ranks(ShapeError(f"indexing is xy or ij, got {indexing!r}"))
    mesh = common_mesh(xi)
    rows = [ravel(as_tensor(one, mesh)) for one in xi]
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


@implements(np.ix_)
def ix_(*args: Any) -> tuple[DTensor, ...]:
    """Return rows as indices along one axis each. Collective for truth values, which are found."""
    mesh = common_mesh(args)
    found = []
    for axis, one in enumerate(args):
        row = as_tensor(one, mesh)
        if row.ndim != 1:
            raise on_all_ranks(ShapeError(f"np.ix_ takes rows, got shape {row.shape}"))
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
        raise on_all_ranks(ShapeError(f"np.block takes lists of one depth, got {sorted(depths)}"))
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
        raise on_all_ranks(ShapeError("np.block takes no empty lists"))
    for one in tree:
        yield from _depths(one, depth + 1)


@implements(np.kron)
def kron(a: Any, b: Any) -> DTensor:
    """Return the Kronecker product. Local, if one dim at most splits each axis of `a` alone."""
    mesh = common_mesh([a, b])
    x, y = as_tensor(a, mesh), as_tensor(b, mesh)
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
        raise on_all_ranks(ShapeError(f"np.resize takes no negative lengths, got {shape}"))
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
        raise on_all_ranks(ShapeError(f"trim is made of f and b, got {trim!r}"))
    axes = range(filt.ndim) if axis is None else axes_of(axis, filt.ndim)
    found = call(np.not_equal, (filt, 0))
    key = [slice(None)] * filt.ndim
    for one in axes:
        others = tuple(other for other in range(filt.ndim) if other != one)
        flags = np.flatnonzero(np.any(found, axis=others).full())
        start, stop = (int(flags[0]), int(flags[-1]) + 1) if len(flags) else (0, 0)
        if len(flags) or "f" in sides or "b" in sides:
            key[one] = slice(
                start if "f" in sides else 0, stop if "b" in sides or not len(flags) else None
            )
    kept: DTensor = filt[tuple(key)]
    return kept


@implements(np.apply_over_axes)
def apply_over_axes(func: Any, a: Any, axes: Any) -> Any:
    """Call a reduction over one axis after the other, which stay with length 1."""
    rows = axes if hasattr(axes, "__iter__") else (index(axes),)
    found = a
    for axis in rows:
        which = axis_of(axis, max(a.ndim, 1))
        made = func(found, which)
        if made.ndim not in (a.ndim, a.ndim - 1):
            raise NoRuleError("np.apply_over_axes takes a function that reduces one axis")
        found = made if made.ndim == a.ndim else expand_dims(made, which)
    return found


@implements(np.sort_complex)
def sort_complex(a: Any) -> DTensor:
    """Return the elements of the last axis sorted, as complex numbers."""
    found = sure_rule_of(np.sort)(a)
    kind = np.sort_complex(np.zeros(1, a.dtype)).dtype
    sorted_: DTensor = found.astype(kind, copy=False)
    return sorted_
