"""Traces and norms of split arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_tuple

from mpimesh.dtensor.ops_reduce import given, reduce, reduce_blocks
from mpimesh.dtensor.ops_ufunc import call
from mpimesh.dtensor.registry import implements
from mpimesh.dtensor.run import Work, resolved, store
from mpimesh.dtensor.tensor import DTensor
from mpimesh.errors import ShapeError, on_all_ranks


@implements(np.trace)
def trace(
    a: DTensor,
    offset: int = 0,
    axis1: int = 0,
    axis2: int = 1,
    dtype: Any = None,
    out: Any = None,
) -> DTensor:
    """Return the sum along a diagonal: each block's part of it is a diagonal of the block."""
    row, column = normalize_axis_tuple((axis1, axis2), a.ndim)
    kind = np.trace(np.ones((1,) * a.ndim, a.dtype), dtype=dtype).dtype if a.ndim > 1 else a.dtype

    def work(here: Work) -> Any:
        (block,), (box,) = here.blocks, here.boxes
        here_offset = offset + box[row][0] - box[column][0]
        return np.trace(block, here_offset, row, column, dtype=dtype)

    made = reduce_blocks(work, [resolved(a)], tuple(sorted((row, column))), "sum", kind)
    return store(made, out) if given(out) else made


@implements(np.linalg.norm)
def norm(x: DTensor, ord: Any = None, axis: Any = None, keepdims: bool = False) -> DTensor:  # noqa: A002
    """Return the norm of vectors or matrices, as :func:`numpy.linalg.norm`.

    The spectral and the nuclear norm bring the two axes whole.

    Raises:
        ShapeError: If there is no such norm of so many axes.
    """
    axes = tuple(range(x.ndim)) if axis is None else normalize_axis_tuple(axis, x.ndim)
    if axis is not None and len(axes) not in (1, 2):
        raise on_all_ranks(ShapeError(f"a norm is over one axis or two, got {axis}"))
    if x.dtype.kind not in "fc":
        x = call(np.positive, (x,), dtype=np.float64)
    if ord is None or (ord in ("f", "fro") and len(axes) == 2) or (ord == 2 and len(axes) == 1):
        return _root_of_squares(x, axes, keepdims)
    if len(axes) == 1 and not isinstance(ord, str):
        return _vector_norm(x, ord, axes, keepdims)
    if len(axes) == 2 and ord in (1, -1, np.inf, -np.inf):
        summed = axes[0] if abs(ord) == 1 else axes[1]
        kept = axes[1] if abs(ord) == 1 else axes[0]
        sums = reduce(np.add, call(np.absolute, (x,)), summed, keepdims=True)
        best = reduce(np.maximum if ord > 0 else np.minimum, sums, kept, keepdims=True)
        return best if keepdims else reduce(np.add, best, axes)
    if len(axes) == 2 and ord in (2, -2, "nuc"):
        kind = np.linalg.norm(np.ones((1, 1), x.dtype), ord).dtype

        def work(here: Work) -> Any:
            return np.linalg.norm(here.blocks[0], ord, axes, keepdims)

        return reduce_blocks(work, [x], tuple(sorted(axes)), "", kind, keepdims=keepdims)
    raise on_all_ranks(ShapeError(f"there is no norm of order {ord!r} over axes {axes}"))


def _root_of_squares(x: DTensor, axes: tuple[int, ...], keepdims: bool) -> DTensor:
    def work(here: Work) -> None:
        block = here.blocks[0]
        squares = block * block if block.dtype.kind != "c" else block.real**2 + block.imag**2
        np.add.reduce(squares, axis=axes, keepdims=keepdims, out=here.out[0])

    kind = np.zeros((), x.dtype).real.dtype
    total = reduce_blocks(work, [x], tuple(sorted(axes)), "sum", kind, keepdims=keepdims, into=True)
    made: DTensor = call(np.sqrt, (total,))
    return made


def _vector_norm(x: DTensor, order: float, axes: tuple[int, ...], keepdims: bool) -> DTensor:
    if order == 0:
        made = reduce(np.add, call(np.not_equal, (x, 0)), axes, np.float64, keepdims=keepdims)
        kind = np.zeros((), x.dtype).real.dtype
        return (
            made if made.dtype == kind else call(np.positive, (made,), dtype=kind, casting="unsafe")
        )
    size = call(np.absolute, (x,))
    if np.isinf(order):
        return reduce(np.maximum if order > 0 else np.minimum, size, axes, keepdims=keepdims)
    if order == 1:
        return reduce(np.add, size, axes, keepdims=keepdims)
    total = reduce(np.add, call(np.power, (size, order)), axes, keepdims=keepdims)
    root: DTensor = call(np.power, (total, 1.0 / order))
    return root
