"""Keys of NumPy's indexing for an array of some shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np

from mpimesh.errors import IndexOutOfRangeError, NoRuleError
from mpimesh.layout.tiling import Integers

__all__ = ["Key", "checked_indices", "read_key"]


@dataclass(frozen=True, slots=True, eq=False)
class Key:
    """A key, read.

    Attributes:
        picks: For each axis the indices of a slice; of one number, ``range(i, i + 1)``; all of
            them for an axis that has an array of indices.
        arrays: The axes that have arrays of indices, with these, of one shape, none negative.
        single: The axes with one number, which go.
        new: Where the result has new axes of length 1.
        place: Which axis of the result, before new ones come, is the first that arrays make.
    """

    picks: tuple[range, ...]
    arrays: dict[int, Integers]
    single: tuple[int, ...]
    new: tuple[int, ...]
    place: int = 0

    @property
    def array_shape(self) -> tuple[int, ...]:
        """The shape that the arrays have; empty if there are none."""
        return next((one.shape for one in self.arrays.values()), ())

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        rows = [
            len(pick)
            for axis, pick in enumerate(self.picks)
            if axis not in self.single and axis not in self.arrays
        ]
        rows[self.place : self.place] = self.array_shape
        for at in self.new:
            rows.insert(at, 1)
        return tuple(rows)


def read_key(key: Any, shape: Sequence[int]) -> Key:
    """Read a key for an array of `shape`.

    Args:
        key: Numbers, slices, None, Ellipsis, arrays of numbers or of bools, or a tuple of these.
        shape: The array's shape.

    Raises:
        IndexOutOfRangeError: If it does not fit.
        NoRuleError: If it is a kind of key that split arrays do not take.
    """
    parts = [_as_part(part) for part in (key if isinstance(key, tuple) else (key,))]
    used = sum(
        0 if part is None or part is Ellipsis else part.ndim if _is_mask(part) else 1
        for part in parts
    )
    if used > len(shape):
        raise IndexOutOfRangeError(f"{used} indices are too many for an array of shape {shape}")
    dots = [place for place, part in enumerate(parts) if part is Ellipsis]
    if len(dots) > 1:
        raise IndexOutOfRangeError(f"a key has one Ellipsis at most, got {len(dots)}")
    filling = [slice(None)] * (len(shape) - used)
    at = dots[0] if dots else len(parts)
    # An Ellipsis separates arrays also where it stands for no axis.
    parts = [*parts[:at], *(["..."] if dots else []), *filling, *parts[at + 1 :]]
    return _walked(parts, tuple(shape))


def _walked(parts: list[Any], shape: tuple[int, ...]) -> Key:
    with_arrays = any(isinstance(part, np.ndarray) for part in parts)
    picks: list[range] = []
    arrays: dict[int, Integers] = {}
    single, new, advanced = [], [], []
    out = place = 0
    for number, part in enumerate(parts):
        axis = len(picks)
        if isinstance(part, str):
            continue
        if part is None:
            new.append((number, out))
            out += 1
        elif isinstance(part, slice):
            picks.append(range(shape[axis])[part])
            out += 1
        elif _is_mask(part):
            if part.shape != shape[axis : axis + part.ndim]:
                raise IndexOutOfRangeError(
                    f"a mask of shape {part.shape} does not fit axes {axis} to "
                    f"{axis + part.ndim - 1} of shape {shape}"
                )
            for one in part.nonzero():
                arrays[len(picks)] = one
                picks.append(range(shape[len(picks)]))
            advanced.append(number)
        elif isinstance(part, np.ndarray):
            arrays[axis] = checked_indices(part, shape[axis], axis)
            picks.append(range(shape[axis]))
            advanced.append(number)
        else:
            if not -shape[axis] <= part < shape[axis]:
                raise IndexOutOfRangeError(
                    f"index {part} is out of bounds for axis {axis} of shape {shape}"
                )
            one = part % shape[axis]
            if with_arrays:
                arrays[axis] = np.array(one)
                picks.append(range(shape[axis]))
                advanced.append(number)
            else:
                single.append(axis)
                picks.append(range(one, one + 1))
        if advanced and advanced[0] == number:
            place = out
    try:
        rows = np.broadcast_arrays(*arrays.values())
    except ValueError:
        shapes = [one.shape for one in arrays.values()]
        raise IndexOutOfRangeError(f"arrays of indices of shapes {shapes} do not fit") from None
    arrays = dict(zip(arrays, rows, strict=True))
    together = not advanced or advanced == list(range(advanced[0], advanced[-1] + 1))
    return _placed(picks, arrays, single, new, advanced, place if together else -1)


def _placed(
    picks: list[range],
    arrays: dict[int, Integers],
    single: list[int],
    new: list[tuple[int, int]],
    advanced: list[int],
    place: int,
) -> Key:
    """Count the axes that arrays make into the places of the new ones."""
    extra = next((one.ndim for one in arrays.values()), 0)
    if not advanced:
        return Key(tuple(picks), {}, tuple(single), tuple(at for _, at in new))
    if place < 0:  # arrays apart from each other: their axes come first
        news = tuple(at + extra for _, at in new)
        return Key(tuple(picks), arrays, tuple(single), news, 0)
    news = tuple(at + (extra if number > advanced[0] else 0) for number, at in new)
    before = sum(number < advanced[0] for number, _ in new)
    return Key(tuple(picks), arrays, tuple(single), news, place - before)


def checked_indices(indices: Any, length: int, axis: int) -> Integers:
    """Return indices counted from 0.

    Raises:
        IndexOutOfRangeError: If one is out of bounds.
    """
    array = np.asarray(indices)
    if array.size == 0:
        return array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise IndexOutOfRangeError(f"indices are whole numbers or bools, got {array.dtype}")
    low, high = int(array.min()), int(array.max())
    if low < -length or high >= length:
        wrong = high if high >= length else low
        raise IndexOutOfRangeError(
            f"index {wrong} is out of bounds for axis {axis}, which has {length} elements"
        )
    rows: Integers = array.astype(np.int64, copy=False)
    return np.where(rows < 0, rows + length, rows) if low < 0 else rows


def _is_mask(part: Any) -> bool:
    return isinstance(part, np.ndarray) and part.dtype == bool


def _as_part(part: Any) -> Any:
    if part is None or part is Ellipsis or isinstance(part, slice):
        return part
    if isinstance(part, bool | np.bool):
        raise NoRuleError(f"split arrays take no single bool in a key, got {part!r}")
    if not isinstance(part, np.ndarray | list | tuple):
        try:
            return index(part)
        except TypeError:
            raise IndexOutOfRangeError(
                f"a key has numbers, slices, None, Ellipsis and arrays, got {part!r}; a "
                "field of a structured array is one of its blocks: mm.local_map(lambda block: "
                "block['field'], placements)(x)"
            ) from None
    array = np.asarray(part)
    if array.dtype == bool:
        if array.ndim == 0:
            raise NoRuleError("split arrays take no single bool in a key")
        return array
    if array.ndim == 0:
        return _as_part(array[()])
    if array.size and array.dtype.kind not in "iu":
        raise IndexOutOfRangeError(f"indices are whole numbers or bools, got {array.dtype}")
    return array
