"""A row of pieces, seen through a window that moves along it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

__all__ = ["Fragment", "length", "windows"]


class Fragment(NamedTuple):
    """The part of a piece that lies in a window.

    Attributes:
        piece: Its number.
        part: The elements of it.
        at: Where they lie in the window.
    """

    piece: int
    part: slice
    at: int

    @property
    def place(self) -> slice:
        """Where they lie in the window, from the first to the last."""
        return slice(self.at, self.at + length(self.part))


def length(part: slice) -> int:
    """Return how many elements a part of an array has."""
    return int(part.stop - part.start)


def windows(lengths: Iterable[int], step: int) -> Iterator[list[Fragment]]:
    """Cut a row of pieces into windows of `step` elements, of which the last may be shorter."""
    window: list[Fragment] = []
    filled = 0
    for piece, size in enumerate(lengths):
        start = 0
        while start < size:
            stop = min(start + step - filled, size)
            window.append(Fragment(piece, slice(start, stop), filled))
            filled += stop - start
            start = stop
            if filled == step:
                yield window
                window, filled = [], 0
    if window:
        yield window
