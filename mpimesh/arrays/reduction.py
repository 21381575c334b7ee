"""Reductions, and the type in which each dtype is reduced.

The transports add, multiply and compare native number types only. Everything
else is decided here, once, for all of them:

| dtype | sum, prod | min, max | mean |
|---|---|---|---|
| float32, float64, longdouble | as it is | as it is | sum, then divide |
| float16, and bfloat16 and smaller from ml_dtypes | in float32 | in float32 | in float32 |
| complex | as it is | refused: no order | sum, then divide |
| integers | as it is, wraps around as NumPy does | as it is | refused: it would truncate |
| bool | refused: is it a count or an "or"? | "and", "or" | refused |
| dates, text, structures | refused | refused | refused |
| Python objects | refused, and never moved either | | |

Byte-swapped numbers are reduced in native order and given back swapped.
"""

from __future__ import annotations

from enum import StrEnum

import numpy as np

from mpimesh.arrays.types import DType
from mpimesh.errors import DTypeError, ReduceOpError

__all__ = ["ReduceOp", "as_reduce_op", "is_half", "refuse_masked", "refuse_objects", "wire_dtype"]


class ReduceOp(StrEnum):
    """Reduction of the values of all ranks to one."""

    SUM = "sum"
    MEAN = "mean"
    PROD = "prod"
    MIN = "min"
    MAX = "max"


_ALIASES: dict[object, ReduceOp] = {
    **{op: op for op in ReduceOp},
    **{op.value: op for op in ReduceOp},
    # What the systems we follow call the same five.
    "avg": ReduceOp.MEAN,
    "average": ReduceOp.MEAN,
    "product": ReduceOp.PROD,
}


def as_reduce_op(op: ReduceOp | str) -> ReduceOp:
    """Return the reduction called `op`.

    Raises:
        ReduceOpError: If there is none of that name.
    """
    try:
        return _ALIASES[op]
    except (KeyError, TypeError):
        names = ", ".join(ReduceOp)
        raise ReduceOpError(f"no reduction is called {op!r}; there are: {names}") from None


def is_half(dtype: DType) -> bool:
    """Tell whether `dtype` is a float of fewer than 32 bits, reduced in float32."""
    if dtype.kind == "f":
        return dtype.itemsize < 4
    # ml_dtypes registers its types as kind "V" with a scalar class of its own.
    return dtype.type.__module__ == "ml_dtypes" and "float" in dtype.name


def wire_dtype(dtype: DType, op: ReduceOp) -> DType:
    """Return the native number type in which arrays of `dtype` are reduced by `op`.

    Raises:
        DTypeError: If `dtype` cannot be reduced by `op`; the message says why.
    """
    kind = dtype.kind
    if is_half(dtype):
        return np.dtype(np.float32)
    if kind == "f":
        return dtype.newbyteorder("=")
    if kind == "c" and op not in (ReduceOp.MIN, ReduceOp.MAX):
        return dtype.newbyteorder("=")
    if kind in "iu" and op is not ReduceOp.MEAN:
        return dtype.newbyteorder("=")
    if kind == "b" and op in (ReduceOp.MIN, ReduceOp.MAX):
        return np.dtype(np.uint8)
    reasons = {
        "c": "complex numbers have no order",
        "i": "a mean of integers would be cut off; use astype(float) or op='sum'",
        "u": "a mean of integers would be cut off; use astype(float) or op='sum'",
        "b": "say what is meant: astype(int) to count, op='max' for any, op='min' for all",
    }
    reason = reasons.get(kind, "only numbers can be reduced; such data can only be moved")
    raise DTypeError(f"{op} does not work on dtype {dtype}: {reason}")


def refuse_masked(x: object) -> None:
    """Raise if `x` is a masked array, of which other ranks would get the data alone.

    Raises:
        DTypeError: If it is.
    """
    if isinstance(x, np.ma.MaskedArray):
        raise DTypeError(
            "a masked array given, of which the mask would be lost; pass x.filled(value), and "
            "numpy.ma.getmaskarray(x) as an array of its own where the mask is needed"
        )


def refuse_objects(dtype: DType) -> None:
    """Raise if arrays of `dtype` hold pointers, which mean nothing to another process.

    Raises:
        DTypeError: If `dtype` is or contains a Python object type.
    """
    if dtype.hasobject:
        raise DTypeError(
            f"arrays of dtype {dtype} hold Python objects, which cannot be sent to other ranks; "
            "send numbers or bytes"
        )
