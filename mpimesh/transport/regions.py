"""The parts that each rank gets of the blocks of others, box by box: a value, prepared once.

The ranks of a communicator hold blocks. Each lists what it is to *take*, where it
lies, and where it goes; and what it is to *give*, which is what the others take of
its own block. Nothing here knows where the lists come from.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

import numpy as np

from mpimesh.arrays import ReduceOp, refuse_objects, wire_dtype
from mpimesh.arrays.reduction import is_half
from mpimesh.arrays.types import DType, HostArray
from mpimesh.errors import DTypeError, RankError, ReduceOpError, ShapeError
from mpimesh.transport.boxes import Box, extent, fits, is_box

__all__ = [
    "Give",
    "Part",
    "Regions",
    "Take",
    "check_contiguous",
    "raw_dtype",
    "sum_dtype",
]

T = TypeVar("T")

_OPS = ("sum", "prod", "min", "max")


@dataclass(frozen=True, slots=True)
class Part:
    """Where a piece of a value lies.

    Attributes:
        rank: The rank that holds it, which may be the one that takes it.
        shape: The shape of that rank's block, which is C-contiguous.
        box: The piece in it.

    Raises:
        ShapeError: If the box does not lie in the block.
    """

    rank: int
    shape: tuple[int, ...]
    box: Box

    def __post_init__(self) -> None:
        if not is_box(self.box) or not fits(self.box, self.shape):
            raise ShapeError(
                f"a part is a box in a block, with unit steps; got {self.box} in the block of "
                f"shape {self.shape} of rank {self.rank}"
            )


@dataclass(frozen=True, slots=True)
class Take:
    """One box that this rank is to get.

    Attributes:
        box: Where it goes in this rank's target.
        parts: Where it lies: one part is copied, several are reduced in their order. All have
            the extent of `box`.
        op: ``"sum"``, ``"prod"``, ``"min"`` or ``"max"`` if there are several parts.

    Raises:
        ShapeError: If there are no parts, or one of another extent.
        ReduceOpError: If there are several and no such `op`.
    """

    box: Box
    parts: tuple[Part, ...]
    op: str = ""

    def __post_init__(self) -> None:
        if not is_box(self.box) or not self.parts:
            raise ShapeError(
                f"what is taken goes into a box with unit steps and has at least one part; got "
                f"{self.box} and {len(self.parts)} parts"
            )
        size = extent(self.box)
        for part in self.parts:
            if extent(part.box) != size:
                raise ShapeError(
                    f"all parts have the extent of the box that they go into, {size}; the part "
                    f"of rank {part.rank} has {extent(part.box)}"
                )
        if self.op not in _OPS and (self.op or len(self.parts) > 1):
            raise ReduceOpError(
                f"{len(self.parts)} parts are reduced by one of {', '.join(_OPS)}, got {self.op!r}"
            )

    @property
    def reduces(self) -> bool:
        """Whether there are several parts."""
        return len(self.parts) > 1


@dataclass(frozen=True, slots=True)
class Give:
    """One box of this rank's source that another rank takes.

    Attributes:
        rank: The other.
        box: The box that this one's part has in the other's take.

    Raises:
        ShapeError: If the box is none.
    """

    rank: int
    box: Box

    def __post_init__(self) -> None:
        if not is_box(self.box):
            raise ShapeError(
                f"a box has unit steps, and 0 <= start <= stop on each axis; got {self.box} for "
                f"rank {self.rank}"
            )


@dataclass(frozen=True, slots=True)
class Regions:
    """All that one rank takes and gives in an exchange.

    Make it once and pass it again with every exchange of the same kind: what is worked out for
    the first one is kept.

    Attributes:
        takes: What this rank gets. Boxes of different takes do not overlap.
        gives: For each rank that takes of this one, all its parts here, in the order of its
            takes and of their parts. What this rank takes of itself may be listed or not.
        number: One that no others of this process have.
    """

    takes: tuple[Take, ...] = ()
    gives: tuple[Give, ...] = ()
    number: int = field(default_factory=count().__next__, init=False, repr=False, compare=False)
    _prepared: dict[Hashable, Any] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "takes", tuple(self.takes))
        object.__setattr__(self, "gives", tuple(self.gives))

    def prepared(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what `make` gives, from the last time if it was asked for by this key."""
        try:
            found: T = self._prepared[key]
        except KeyError:
            found = self._prepared[key] = make()
        return found

    def check(
        self, rank: int, size: int, source: HostArray | None, target: HostArray | None
    ) -> None:
        """See whether the arrays of a rank fit. Local.

        Raises:
            RankError: If a rank is named that there is not.
            ShapeError: If an array is not C-contiguous, or a box lies outside of it.
            DTypeError: If the arrays have different dtypes, hold Python objects, or cannot be
                reduced as asked for.
        """
        check_contiguous(rank, source, target)
        given = None if source is None else (source.shape, source.dtype)
        taken = None if target is None else (target.shape, target.dtype)
        key = ("check", rank, size, given, taken)
        if key not in self._prepared:
            self._prepared[key] = self._check(rank, size, given, taken)

    def _check(
        self,
        rank: int,
        size: int,
        source: tuple[tuple[int, ...], DType] | None,
        target: tuple[tuple[int, ...], DType] | None,
    ) -> bool:
        ranks = {give.rank for give in self.gives}
        ranks |= {part.rank for take in self.takes for part in take.parts}
        for one in ranks:
            if not 0 <= one < size:
                raise RankError(f"there are ranks 0 to {size - 1}, but rank {rank} names {one}")
        dtypes = {one[1] for one in (source, target) if one is not None}
        if len(dtypes) > 1:
            raise DTypeError(
                f"source and target of an exchange have one dtype, got "
                f"{' and '.join(sorted(map(str, dtypes)))} on rank {rank}"
            )
        for dtype in dtypes:
            refuse_objects(dtype)
            for op in {take.op for take in self.takes if take.reduces}:
                wire_dtype(dtype, ReduceOp(op))
        self._check_boxes("target", rank, target, [take.box for take in self.takes])
        self._check_boxes("source", rank, source, [give.box for give in self.gives])
        own = {part.shape for take in self.takes for part in take.parts if part.rank == rank}
        if own and (source is None or own != {source[0]}):
            raise ShapeError(
                f"rank {rank} takes of its own block with shape {sorted(own)}, but its source has "
                f"{'none' if source is None else source[0]}"
            )
        return True

    @staticmethod
    def _check_boxes(
        name: str, rank: int, array: tuple[tuple[int, ...], DType] | None, boxes: Sequence[Box]
    ) -> None:
        for box in boxes:
            if array is None or not fits(box, array[0]):
                raise ShapeError(
                    f"box {box} does not lie in the {name} of rank {rank}, which has "
                    f"{'none' if array is None else f'shape {array[0]}'}"
                )


def check_contiguous(rank: int, source: HostArray | None, target: HostArray | None) -> None:
    """See whether the arrays of a rank are in one run of memory each. Local.

    Raises:
        ShapeError: If not.
    """
    for array in (source, target):
        if array is not None and not array.flags.c_contiguous:
            raise ShapeError(
                f"regions are exchanged between C-contiguous arrays, got one of shape "
                f"{array.shape} with strides {array.strides} on rank {rank}"
            )


def raw_dtype(dtype: DType) -> DType:
    """Return a dtype of the same size that NumPy copies fastest, all bytes of an element."""
    if dtype.kind in "biufc" and dtype.isnative:
        return dtype
    return _WORDS.get(dtype.itemsize) or np.dtype((np.void, dtype.itemsize))


_WORDS: dict[int, DType] = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


def sum_dtype(dtype: DType) -> DType:
    """Return the dtype in which elements are reduced: float32 for smaller floats."""
    return np.dtype(np.float32) if is_half(dtype) else dtype
