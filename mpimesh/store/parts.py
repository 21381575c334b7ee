"""Contents of a checkpoint: a rank's parts of arrays, and values as JSON can say them.

Values that JSON has not are a dict with one key, such as ``$$tuple``.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from mpimesh.arguments import shown
from mpimesh.arrays import Array, DType, refuse_objects
from mpimesh.arrays.dtypes import dtype_from_json, dtype_to_json
from mpimesh.dtensor.consistency import CallNumber
from mpimesh.errors import DamagedError, MpimeshError, ShapeError, StoreError
from mpimesh.layout.boxes import Box, extent, fits, whole

__all__ = ["Parts", "Saved", "Storable", "Value", "from_json", "to_json"]

Value: TypeAlias = Any
"""A JSON value: None, a truth value, a number, a text, and lists and dicts of these."""


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """A rank's part of one array: boxes of it, each with its values.

    Attributes:
        shape: The array's global shape.
        dtype: Its dtype.
        parts: The boxes and their values, which are live arrays: saving reads them and loading
            writes them. They need not be contiguous, and may lie on a device. Boxes of a rank do
            not overlap. A rank may have none; boxes of several ranks may be the same, and then
            have the same values.
        origin: What tells a split array from others like it, with checks on.

    Raises:
        ShapeError: If an array has not the extent of its box, or a box lies outside.
    """

    shape: tuple[int, ...]
    dtype: DType
    parts: tuple[tuple[Box, Array], ...]
    origin: CallNumber | str | None = None

    def __post_init__(self) -> None:
        for box, array in self.parts:
            if not fits(box, self.shape) or extent(box) != array.shape:
                raise ShapeError(
                    f"a part is a box of its array with values of the same extent; got box {box} "
                    f"with values of shape {array.shape} of an array of shape {self.shape}"
                )

    @classmethod
    def all_of(cls, array: Array) -> Parts:
        """Return an array that the rank has whole."""
        return cls(array.shape, array.dtype, ((whole(array.shape), array),))


@dataclass(frozen=True, slots=True)
class Saved:
    """An array of a checkpoint, without its values.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
    """

    shape: tuple[int, ...]
    dtype: DType


class Storable(Protocol):
    """An object that is saved by its parts: a model or an optimizer that ranks have together.

    Each rank tells what it has, by names that all ranks understand; names that several ranks tell
    are of the same array, or of equal values. Both methods are local.
    """

    def _stored_parts(self) -> Mapping[str, Parts | Value]:
        """Return what this rank has, by name: live arrays, and values that JSON can say.

        Each element of each array must be in the parts of some rank. An array that several ranks
        see in one memory is told by the one that writes it, or in boxes that do not overlap.
        """
        ...

    def _restored_parts(
        self, saved: Mapping[str, Saved | Value], *, strict: bool
    ) -> tuple[Mapping[str, Parts], Callable[[], None]]:
        """Return where arrays of a checkpoint are to be read to, and what takes all over then.

        Nothing has changed yet when this returns or raises, and memory that is read into must not
        be used before: if reading fails, the object is to be as before, or half of the new values
        are in place, which the error says.

        Args:
            saved: All that the checkpoint has of the object, on all ranks: arrays and values.
            strict: Whether names that are missing or unknown are refused; else what is missing
                stays as it is.

        Returns:
            The arrays that this rank wants, by name: only names that are arrays in `saved`, with
            its shape. Their dtype may be another float dtype, to which values are rounded. And
            what is called once all of them are read on all ranks; it may be collective.

        Raises:
            MpimeshError: If what is saved does not fit.
        """
        ...


# -- values ---------------------------------------------------------------------------------------


def to_json(value: Any, name: str) -> Value:
    """Return a value as JSON can say it, so that :func:`from_json` gives it again.

    Raises:
        StoreError: If it is none that is saved; `name` is for the message.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if value.bit_length() > 4096:
            bits = value.bit_length()
            raise StoreError(f"{name} has a number of {bits} bits; at most 4096 are saved")
        return int(value)
    if isinstance(value, float):  # float64 of NumPy, and the value of a loss, too
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, str):
        return str(value)
    if isinstance(value, np.generic):
        refuse_objects(value.dtype)
        raw = base64.b64encode(np.asarray(value).tobytes()).decode()
        return {"$$numpy": [dtype_to_json(value.dtype), raw]}
    if isinstance(value, complex):
        return {"$$complex": [to_json(value.real, name), to_json(value.imag, name)]}
    if type(value) is bytes:
        return {"$$bytes": base64.b64encode(value).decode()}
    if type(value) is list:
        return [to_json(entry, name) for entry in value]
    if type(value) is tuple:
        return {"$$tuple": [to_json(entry, name) for entry in value]}
    if isinstance(value, dict):
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: to_json(entry, name) for key, entry in value.items()}
        return {"$$dict": [[to_json(k, name), to_json(v, name)] for k, v in value.items()]}
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
    try:
        return _from_json(value)
    except (TypeError, ValueError, ArithmeticError, LookupError, RecursionError, MpimeshError) as e:
        raise DamagedError(f"no value of a checkpoint is {shown(value)}: {e}") from None


def _from_json(value: Value) -> Any:
    if isinstance(value, list):
        return [_from_json(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    inner: Any
    kind, inner = next(iter(value.items()), ("", None))
    if len(value) != 1 or not kind.startswith("$"):
        return {key: _from_json(entry) for key, entry in value.items()}
    if kind == "$float" and inner in ("nan", "inf", "-inf"):
        return float(inner)
    if kind == "$$complex":
        return complex(*map(_from_json, inner))
    if kind == "$$bytes":
        return base64.b64decode(inner, validate=True)
    if kind == "$$tuple":
        return tuple(map(_from_json, inner))
    if kind == "$$dict":
        return {_from_json(key): _from_json(entry) for key, entry in inner}
    if kind == "$$numpy":
        raw, dtype = base64.b64decode(inner[1], validate=True), dtype_from_json(inner[0])
        refuse_objects(dtype)
        if not dtype.itemsize:
            return dtype.type(raw)
        (number,) = np.frombuffer(raw, dtype)
        return number
    raise ValueError(f"{kind} is not known here")
