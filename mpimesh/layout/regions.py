"""Exchanges of regions: the boxes that each rank gets of the blocks of others, as a value.

The ranks of a communicator hold blocks. Each lists what it is to *take*, where it
lies, and where it goes; and what it is to *give*, which is what the others take of
its own block. A planner makes the lists, for the ranks as the communicator counts
them and with boxes of the blocks themselves, so they are carried out as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mpimesh.errors import ReduceOpError, ShapeError
from mpimesh.layout.boxes import Box, extent, fits, is_box, local_box

__all__ = ["Give", "Part", "Regions", "Take", "local_regions"]

T = TypeVar("T")

_OPS = ("sum", "prod", "min", "max")


@dataclass(frozen=True, slots=True)
class Part:
    """Place of a piece of a value.

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
                f"a part is a box in a block, 0 <= start <= stop on each axis; got {self.box} in "
                f"the block of shape {self.shape} of rank {self.rank}"
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
                f"what is taken goes into a box, 0 <= start <= stop on each axis, and has at least "
                f"one part; got {self.box} and {len(self.parts)} parts"
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
        """True if there are several parts."""
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
                f"a box has 0 <= start <= stop on each axis; got {self.box} for rank {self.rank}"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Regions:
    """All that one rank takes and gives in an exchange.

    Make it once and pass it again with every exchange of the same kind: what is worked out for
    the first one is cached, by its identity.

    Attributes:
        takes: What this rank gets. Boxes of different takes do not overlap.
        gives: For each rank that takes of this one, all its parts here, in the order of its
            takes and of their parts. What this rank takes of itself may be listed or not.
    """

    takes: tuple[Take, ...] = ()
    gives: tuple[Give, ...] = ()
    _prepared: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "takes", tuple(self.takes))
        object.__setattr__(self, "gives", tuple(self.gives))

    def prepared(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what `make` gives, from the last time if it was asked for by this key."""
        try:
            value: T = self._prepared[key]
        except KeyError:
            value = self._prepared[key] = make()
        return value


def local_regions(
    takes: Iterable[tuple[Box, Box, Sequence[int]]],
    gives: Sequence[tuple[int, Box]],
    rank: int,
    block_of: Callable[[int], Box],
    number_of: Callable[[int], int],
    op: str = "",
) -> Regions:
    """Return what a rank takes and gives of an array, in boxes of the blocks that the ranks hold.

    Args:
        takes: For each box where it goes in this rank's target, where it lies in the array, and
            the ranks that hold it.
        gives: The ranks that take of this one, and which boxes of the array.
        rank: This rank.
        block_of: Gives the box of the array that a rank holds.
        number_of: Gives the number of a rank in the communicator.
        op: The reduction of what several ranks hold.
    """

    def part(holder: int, box: Box) -> Part:
        block = block_of(holder)
        return Part(number_of(holder), extent(block), local_box(box, block))

    own = block_of(rank) if gives else ()
    return Regions(
        tuple(
            [
                Take(into, tuple([part(one, box) for one in ranks]), op if len(ranks) > 1 else "")
                for into, box, ranks in takes
            ]
        ),
        tuple([Give(number_of(other), local_box(box, own)) for other, box in gives]),
    )
