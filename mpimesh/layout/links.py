"""Speeds of bytes from rank to rank, inside a node and between nodes: plans reckon with them."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from mpimesh.errors import LayoutError

__all__ = ["ASSUMED_LINKS", "Link", "Links"]


@dataclass(frozen=True, slots=True)
class Link:
    """A way of bytes.

    Attributes:
        latency_s: What a message costs however short it is.
        bytes_per_s: How many bytes come in a second.
        measured: Whether these numbers are measured; if not, they are assumed.

    Raises:
        LayoutError: If a number is not finite, the latency is negative, or no bytes would come.
    """

    latency_s: float = 2e-6
    bytes_per_s: float = 5e9
    measured: bool = False

    def __post_init__(self) -> None:
        for name in ("latency_s", "bytes_per_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
                raise LayoutError(f"{name} of a link must be a finite number, got {value!r}")
        if self.latency_s < 0 or self.bytes_per_s <= 0:
            raise LayoutError(
                f"a link takes 0 s or more for a message and carries bytes, got {self.latency_s} s "
                f"and {self.bytes_per_s} bytes/s"
            )


@dataclass(frozen=True, slots=True)
class Links:
    """The two kinds of ways that there are.

    All ranks must reckon with the same numbers, for each works out alone what all are to do.

    Attributes:
        near: To one rank from another of its node.
        far: To a node from others. Its ranks share it.

    A link that no pair of ranks can tell stays as it is assumed: `far` on one node, `near` where
    each rank is alone on its own.

    Raises:
        LayoutError: If one is no :class:`Link`.
    """

    near: Link = Link()
    far: Link = Link()

    def __post_init__(self) -> None:
        """See whether these are links."""
        for name in ("near", "far"):
            if not isinstance(getattr(self, name), Link):
                raise LayoutError(f"{name} must be a Link, got {getattr(self, name)!r}")

    @property
    def measured(self) -> bool:
        """True if any of them is measured."""
        return self.near.measured or self.far.measured


ASSUMED_LINKS = Links()
"""Links that plans reckon with where nothing is measured."""
