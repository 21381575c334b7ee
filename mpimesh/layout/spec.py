"""The way in which one mesh dim treats an array: it splits an axis, holds copies, or summands."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import SupportsIndex

from mpimesh.arguments import as_int, shown
from mpimesh.errors import LayoutError
from mpimesh.layout.cuts import even_sizes

__all__ = ["PARTIAL_OPS", "Partial", "PlacementSpec", "Replicate", "Shard"]

PARTIAL_OPS = ("sum", "mean", "prod", "min", "max")
"""The reductions that a :class:`Partial` may wait for."""

_ALIASES = {"avg": "mean", "average": "mean", "product": "prod"}


class PlacementSpec(ABC):
    """The treatment of an array along one mesh dim: a `Shard`, a `Replicate`, a `Partial`.

    The text of one (``S[0]``, ``R``, ``P``) is read by :meth:`Placement.from_text`.
    """

    __slots__ = ()

    @staticmethod
    def sharding(axis: int) -> Shard:
        """Return ``Shard(axis)``, in TVM's words."""
        return Shard(axis)

    @staticmethod
    def replica() -> Replicate:
        """Return ``Replicate()``, in TVM's words."""
        return Replicate()

    @abstractmethod
    def __str__(self) -> str: ...

    @property
    @abstractmethod
    def short(self) -> str:
        """The text without brackets, as it stands behind a dim's name: ``S0``, ``R``, ``P``."""


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Shard(PlacementSpec):
    """The ranks along the dim hold blocks of an axis, in the order of their coordinates.

    Without `sizes` the first ``length % n`` of n ranks hold one element more than the others, so
    blocks may be uneven, and empty where there are more ranks than elements.

    Args:
        axis: The array axis that is split, counted from 0.
        sizes: How many elements each rank along the dim holds.

    Raises:
        LayoutError: If `axis` or a size is negative or no whole number, or there are no sizes.

    Example:
        >>> print(Shard(0), Shard(1, sizes=(3, 0, 1)))
        S[0] S[1](3,0,1)
    """

    axis: int
    sizes: tuple[int, ...] | None

    def __init__(
        self, axis: SupportsIndex, *, sizes: Sequence[SupportsIndex] | None = None
    ) -> None:
        object.__setattr__(self, "axis", as_int(axis, "the axis of a Shard", LayoutError, least=0))
        if sizes is not None:
            if not _is_row(sizes):
                raise LayoutError(
                    "sizes of a Shard must be a row of whole numbers, one for each rank in order, "
                    f"got {shown(sizes)}"
                )
            sizes = tuple(as_int(size, "a size of a Shard", LayoutError, least=0) for size in sizes)
        object.__setattr__(self, "sizes", sizes)

    @classmethod
    def of_sizes(cls, axis: int, sizes: Sequence[int]) -> Shard:
        """Return the shard with blocks of these sizes, which it does not name if they are even."""
        cut = cls(axis, sizes=sizes)
        if cut.sizes is None:
            raise LayoutError("sizes of a Shard are missing: give one for each rank")
        even = list(cut.sizes) == even_sizes(sum(cut.sizes), len(cut.sizes))
        return cls(axis) if even else cut

    @property
    def short(self) -> str:
        """The text without brackets."""
        return f"S{self.axis}{self._sizes_text()}"

    def __str__(self) -> str:
        return f"S[{self.axis}]{self._sizes_text()}"

    def __repr__(self) -> str:
        sizes = "" if self.sizes is None else f", sizes={self.sizes}"
        return f"Shard({self.axis}{sizes})"

    def _sizes_text(self) -> str:
        return "" if self.sizes is None else f"({','.join(map(str, self.sizes))})"


def _is_row(sizes: object) -> bool:
    """Tell whether these are some values in an order; a set and a mapping have none to rely on."""
    if not hasattr(sizes, "__iter__") or not hasattr(sizes, "__len__"):
        return False
    if isinstance(sizes, str | bytes | Set | Mapping) or getattr(sizes, "ndim", 1) != 1:
        return False
    return len(sizes) > 0


@dataclass(frozen=True, slots=True)
class Replicate(PlacementSpec):
    """All ranks along the dim hold the same."""

    @property
    def short(self) -> str:
        """The text, which has no brackets."""
        return "R"

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Partial(PlacementSpec):
    """The value is the reduction of what the ranks along the dim hold, and not yet worked out.

    Args:
        op: ``"sum"``, ``"mean"``, ``"prod"``, ``"min"`` or ``"max"``.

    Raises:
        LayoutError: If there is no such reduction.
    """

    op: str

    def __init__(self, op: str = "sum") -> None:
        name = _ALIASES.get(str(op), str(op))
        if name not in PARTIAL_OPS:
            raise LayoutError(f"Partial knows {', '.join(PARTIAL_OPS)}, got {shown(op)}")
        object.__setattr__(self, "op", name)

    @property
    def short(self) -> str:
        """The text, which has no brackets."""
        return "P" if self.op == "sum" else f"P({self.op})"

    def __str__(self) -> str:
        return self.short

    def __repr__(self) -> str:
        return "Partial()" if self.op == "sum" else f"Partial({self.op!r})"
