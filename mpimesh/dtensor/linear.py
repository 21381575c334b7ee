"""The functions that may work on `Partial` operands as they are, and give a `Partial` result.

A function is linear in an operand for a reduction, if it is the same to reduce before or after it,
whatever the other operands hold, infinities and NaN, too: so a product of floats is linear only in
what goes with a finite number, as of ``7 - 2`` times infinity the parts are not a number together.
It works on the summands in the dtype of its result: that must hold what they add up to.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

import numpy as np

from mpimesh.arrays import DType
from mpimesh.dtensor.dtensor import DTensor
from mpimesh.layout.op_rules import Linearity

__all__ = ["LINEAR", "linear_for"]

_SUMS = ("sum", "mean")
_FIRST = (Linearity((0,), _SUMS),)
_BOTH = (Linearity((0, 1), _SUMS),)

LINEAR: dict[Any, tuple[Linearity, ...]] = {
    np.positive: (Linearity((0,), ("sum", "mean", "prod", "min", "max")),),  # casts and copies
    np.negative: _FIRST,
    np.conjugate: _FIRST,
    np.real: _FIRST,
    np.imag: _FIRST,
    np.add: _BOTH,
    np.subtract: _BOTH,
    np.multiply: (Linearity((0,), _SUMS), Linearity((1,), _SUMS), Linearity((0, 1), ("prod",))),
    np.matmul: (Linearity((0,), _SUMS), Linearity((1,), _SUMS)),  # and all sums of products
    np.divide: _FIRST,
    np.minimum: (Linearity((0, 1), ("min",)),),
    np.maximum: (Linearity((0, 1), ("max",)),),
    np.where: (Linearity((1, 2), _SUMS),),
    np.bincount: (Linearity((1,), _SUMS),),
}
"""For each function the operands that may be `Partial` together, all others being whole."""

_REDUCED: dict[np.ufunc, tuple[Linearity, ...]] = {
    np.add: _FIRST,
    np.multiply: (Linearity((0,), ("prod",)),),
    np.minimum: (Linearity((0,), ("min",)),),
    np.maximum: (Linearity((0,), ("max",)),),
}
"""The same for reductions along axes."""


def linear_for(
    function: Any,
    operands: Sequence[Any],
    kind: DType,
    *,
    method: str = "",
    dtype: Any = None,
    signature: Any = None,
    **options: Any,
) -> tuple[Linearity, ...]:
    """Return which of the operands at hand may be summands of a result of dtype `kind`.

    Args:
        function: A function of NumPy, or one that stands for others in :data:`LINEAR`.
        operands: Its operands, in which nothing but numbers is looked at.
        kind: The dtype of the result.
        method: "reduce" for a reduction along axes.
        dtype: In which dtype a ufunc is to work, if that was said.
        signature: The same in another form.
        options: Others, which change nothing.
    """
    linear = (_REDUCED if method else LINEAR).get(function, ())
    if not linear or signature is not None or (dtype is not None and np.dtype(dtype) != kind):
        return ()
    if not all(_holds(kind, one) for one in operands):
        return ()
    if function is np.divide:
        return linear if _is_number(operands[1], nonzero=True) else ()
    if any(isinstance(x, DTensor) and x.dtype.kind not in "fc" for x in operands):
        # A mean of integers, which would be cut, cannot wait: none of them becomes one.
        linear = tuple(
            Linearity(one.operands, tuple(op for op in one.ops if op != "mean")) for one in linear
        )
    if method or function not in (np.multiply, np.matmul) or kind.kind in "iu":
        return linear
    # In a product of floats only what all others are finite numbers for.
    return tuple(
        one
        for one in linear
        if all(_is_number(x) for at, x in enumerate(operands) if at not in one.operands)
        and len(one.operands) == 1
    )


def _holds(kind: DType, x: Any) -> bool:
    """Tell whether summands of `x` may be worked on in `kind`.

    Integers may have wrapped around, which shows only when they are summed; so they are summed in
    the dtype that they have.
    """
    if not isinstance(x, DTensor) or not x.layout.partial_op or x.dtype == kind:
        return True
    ordered = x.layout.partial_op in ("min", "max")
    fits = kind.kind in "biuf" if ordered else kind.kind in "fc" and x.dtype.kind in "fc"
    return fits and np.can_cast(x.dtype, kind)


def _is_number(x: Any, *, nonzero: bool = False) -> bool:
    """Tell whether `x` is a number by which summands can be multiplied or divided one by one."""
    if getattr(x, "shape", ()) or isinstance(x, DTensor):
        return False
    if np.asarray(x).dtype.kind not in "biufc":
        return False
    value = complex(x)
    return isfinite(value.real) and isfinite(value.imag) and (value != 0 or not nonzero)
