"""Functions of whole lines along an axis, which is brought whole if it is split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpimesh.dtensor.arguments import as_tensor, axis_of
from mpimesh.dtensor.registry import implements, sure_rule_of
from mpimesh.dtensor.run import resolved
from mpimesh.dtensor.shape_axes import moveaxis
from mpimesh.dtensor.shape_reshape import row_along
from mpimesh.dtensor.stacks import on_stacks
from mpimesh.dtensor.tensor import DTensor, common_mesh
from mpimesh.errors import ShapeError, on_all_ranks

__all__: list[str] = []


@implements(np.lexsort)
def lexsort(keys: Any, axis: int = -1) -> DTensor:
    """Return the indices that sort lines by several keys, of which the last one counts first."""
    mesh = common_mesh([keys] if isinstance(keys, DTensor) else keys)
    if isinstance(keys, DTensor):
        keys = sure_rule_of(np.unstack)(keys)
    rows = [as_tensor(one, mesh) for one in keys]
    if not rows or rows[0].ndim == 0 or len({one.shape for one in rows}) > 1:
        raise on_all_ranks(
            ShapeError(f"np.lexsort takes keys of one shape, got {[one.shape for one in rows]}")
        )
    which = axis_of(axis, rows[0].ndim)
    turned = [moveaxis(one, which, -1) for one in rows]
    (found,) = on_stacks(lambda *blocks: np.lexsort(blocks, -1), turned, ["n"] * len(rows))
    return moveaxis(found, -1, which)


def _bits(function: Callable[..., Any]) -> None:
    @implements(function)
    def do(a: Any, /, axis: Any = None, **options: Any) -> DTensor:
        x, which = row_along(a, axis)
        turned = moveaxis(x, which, -1)
        (found,) = on_stacks(lambda one: function(one, -1, **options), [turned], ["n"])
        return moveaxis(found, -1, which)


_bits(np.packbits)
_bits(np.unpackbits)


def _nan_argument(function: Callable[..., Any], plainly: Callable[..., Any], worst: float) -> None:
    """Register a search that passes NaN over.

    It raises a `ValueError` on every rank if a line has nothing else.
    """

    @implements(function)
    def do(a: DTensor, axis: Any = None, out: Any = None, *, keepdims: Any = False) -> Any:
        x: Any = resolved(a)
        if x.dtype.kind in "fc":
            gone = np.isnan(x)
            if bool(np.any(np.all(gone, axis=axis))):
                raise on_all_ranks(
                    ShapeError(f"np.{function.__name__} of a line of nothing but NaN")
                )
            x = sure_rule_of(np.where)(gone, x.dtype.type(worst), x)
        return plainly(x, axis, out, keepdims=keepdims)


_nan_argument(np.nanargmin, np.argmin, np.inf)
_nan_argument(np.nanargmax, np.argmax, -np.inf)
