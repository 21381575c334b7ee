"""Values of a tree as JSON can say them: what JSON has not is a dict with one key, ``$tuple``."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from mpimesh.arrays import refuse_objects
from mpimesh.arrays.dtypes import dtype_from_json, dtype_to_json
from mpimesh.errors import DamagedError, MpimeshError, StoreError
from mpimesh.store.parts import Value

__all__ = ["from_json", "to_json"]


def to_json(value: Any, name: str) -> Value:
    """Return a value as JSON can say it, so that :func:`from_json` gives it again."""
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):  # float64 of NumPy, and the value of a loss, are floats
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, np.generic):
        refuse_objects(value.dtype)
        raw = base64.b64encode(np.asarray(value).tobytes()).decode()
        return {"$numpy": [dtype_to_json(value.dtype), raw]}
    if isinstance(value, complex):
        return {"$complex": [value.real, value.imag]}
    if type(value) is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if type(value) is list:
        return [to_json(entry, name) for entry in value]
    if type(value) is tuple:
        return {"$tuple": [to_json(entry, name) for entry in value]}
    if type(value) is dict:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: to_json(entry, name) for key, entry in value.items()}
        return {"$dict": [[to_json(k, name), to_json(v, name)] for k, v in value.items()]}
    raise StoreError(
        f"{name or 'the tree'} is a {type(value).__name__}, which cannot be saved: a checkpoint "
        "holds arrays, models, optimizers, objects with state_dict() and load_state_dict(), and "
        "None, truth values, numbers, texts, bytes, and dicts, lists and tuples of these"
    )


def from_json(value: Value) -> Any:
    """Return what :func:`to_json` was given.

    Raises:
        DamagedError: If it gave no such thing.
    """
    if isinstance(value, list):
        return [from_json(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if not (len(value) == 1 and (kind := next(iter(value))).startswith("$")):
        return {key: from_json(entry) for key, entry in value.items()}
    inner = value[kind]
    try:
        if kind == "$complex":
            return complex(*inner)
        if kind == "$bytes":
            return base64.b64decode(inner, validate=True)
        if kind == "$tuple":
            return tuple(map(from_json, inner))
        if kind == "$dict":
            return {from_json(key): from_json(entry) for key, entry in inner}
        if kind == "$numpy":
            raw, dtype = base64.b64decode(inner[1], validate=True), _dtype(inner[0])
            if not dtype.itemsize:
                return dtype.type(raw)
            (number,) = np.frombuffer(raw, dtype)
            return number
    except (TypeError, ValueError, ArithmeticError, LookupError, MpimeshError) as error:
        raise DamagedError(f"a value of the checkpoint is no {kind[1:]}: {error}") from None
    raise DamagedError(f"a value of the checkpoint is a {kind[1:]}, which is not known here")


def _dtype(text: Any) -> np.dtype[Any]:
    dtype = dtype_from_json(text)
    refuse_objects(dtype)
    return dtype
