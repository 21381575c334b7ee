"""Speeds of the links between ranks, by which plans choose their ways."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from mpimesh.errors import LayoutError

__all__ = ["DEFAULT_LINK_COSTS", "LinkCost", "LinkCosts"]


@dataclass(frozen=True, slots=True)
class LinkCost:
    """The latency and the bandwidth of a link.

    Attributes:
        latency_s: Seconds of a message of no bytes.
        bytes_per_s: Bandwidth.
        measured: Whether these numbers are measured, not assumed.

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
class LinkCosts:
    """The costs of links inside a node and between nodes.

    All ranks must estimate with the same numbers, for each plans alone what all do. A link that no
    pair of ranks has stays as assumed: `inter_node` on one node, `intra_node` with one rank a node.

    Attributes:
        intra_node: To a rank from another of its node.
        inter_node: To a node from others. Its ranks share the link.

    Raises:
        LayoutError: If one is no :class:`LinkCost`.
    """

    intra_node: LinkCost = LinkCost()
    inter_node: LinkCost = LinkCost()

    def __post_init__(self) -> None:
        for name in ("intra_node", "inter_node"):
            if not isinstance(getattr(self, name), LinkCost):
                raise LayoutError(f"{name} must be a LinkCost, got {getattr(self, name)!r}")

    @property
    def measured(self) -> bool:
        """True if any of them is measured."""
        return self.intra_node.measured or self.inter_node.measured


DEFAULT_LINK_COSTS = LinkCosts()
"""LinkCosts that plans reckon with where nothing is measured."""
