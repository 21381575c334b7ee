"""Parts: what one rank has of one array, and what objects that are saved by their parts tell."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from mpimesh.arrays import Array, DType
from mpimesh.errors import ShapeError
from mpimesh.layout.boxes import Box, extent, fits, whole

__all__ = ["Parts", "Saved", "Storable", "Value"]

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

    Raises:
        ShapeError: If an array has not the extent of its box, or a box lies outside.
    """

    shape: tuple[int, ...]
    dtype: DType
    parts: tuple[tuple[Box, Array], ...]

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
