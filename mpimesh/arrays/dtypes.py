"""Dtypes: their text for other ranks, and the types in which each is reduced.

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

Byte-swapped numbers are reduced in native order, and the result is swapped back.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from mpimesh.arguments import ReduceOp, shown
from mpimesh.arrays.namespace import DType
from mpimesh.errors import DTypeError

__all__ = [
    "as_dtype",
    "dtype_from_json",
    "dtype_to_json",
    "is_half",
    "refuse_masked",
    "refuse_objects",
    "sum_dtype",
    "wire_dtype",
]


def as_dtype(dtype: Any) -> DType:
    """Return `dtype` as one of NumPy's.

    Raises:
        DTypeError: If it is none.
    """
    try:
        kind: DType = np.dtype(dtype)
    except Exception as error:  # of any class: an object may have a `dtype`
        raise DTypeError(f"dtype must be one of NumPy, got {shown(dtype)}: {error}") from None
    return kind


def dtype_to_json(dtype: DType) -> Any:
    """Return a JSON value that :func:`dtype_from_json` turns into `dtype` again.

    Raises:
        DTypeError: If NumPy has no text for it, as for fields that overlap.
    """
    if dtype.type.__module__ == "ml_dtypes":
        return {"ml_dtypes": dtype.name}  # NumPy's own text for these is just "V2"
    try:
        # As np.lib.format has it, but that warns of metadata, which the text leaves out.
        return dtype.str if dtype.names is None else _without_metadata(dtype.descr)
    except ValueError as error:
        raise DTypeError(f"dtype {dtype} cannot be described to another rank: {error}") from None


def dtype_from_json(value: Any) -> DType:
    """Return the dtype that `value` describes.

    Raises:
        DTypeError: If it describes none, or one of a package that is missing here.
    """
    if isinstance(value, dict):
        try:
            import ml_dtypes

            small: DType = np.dtype(getattr(ml_dtypes, value["ml_dtypes"]))
        except (ImportError, AttributeError, KeyError):
            raise DTypeError(
                f"an array of dtype {json.dumps(value)} arrived, but ml_dtypes with that type is "
                "not installed on this rank"
            ) from None
        return small
    try:
        dtype: DType = np.lib.format.descr_to_dtype(_tuples(value))
    except (TypeError, ValueError):
        raise DTypeError(f"{value!r} describes no dtype") from None
    return dtype


def _without_metadata(kind: Any) -> Any:
    """Leave out of a row of fields the metadata: where there are some, a type is a pair of both."""
    if isinstance(kind, list):
        return [(name, _without_metadata(of), *shape) for name, of, *shape in kind]
    return kind[0] if isinstance(kind, tuple) else kind


def _tuples(value: Any) -> Any:
    """Undo JSON's turning of tuples into lists: a field is a tuple, a row of fields a list."""
    if not isinstance(value, list):
        return value
    fields = []
    for field in value:
        name, kind, *shape = field
        name = tuple(name) if isinstance(name, list) else name
        fields.append((name, _tuples(kind), *(tuple(s) for s in shape)))
    return fields


def is_half(dtype: DType) -> bool:
    """Tell whether `dtype` is a float of fewer than 32 bits, reduced in float32."""
    if dtype.kind == "f":
        return dtype.itemsize < 4
    # ml_dtypes registers its types as kind "V" with a scalar class of its own.
    return dtype.type.__module__ == "ml_dtypes" and "float" in dtype.name


def sum_dtype(dtype: DType) -> DType:
    """Return the dtype in which elements are added up: float32 for smaller floats."""
    return np.dtype(np.float32) if is_half(dtype) else dtype


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
