"""A dtype as text that another rank can read back."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from mpimesh.arguments import shown
from mpimesh.arrays.types import DType
from mpimesh.errors import DTypeError

__all__ = ["as_dtype", "dtype_from_json", "dtype_to_json"]


def as_dtype(dtype: Any) -> DType:
    """Return what is given for `dtype` as one of NumPy's.

    Raises:
        DTypeError: If it is none.
    """
    try:
        kind: DType = np.dtype(dtype)
    except Exception as error:  # of any class: somebody's object may have a `dtype`
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
