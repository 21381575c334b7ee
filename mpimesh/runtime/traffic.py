"""How much a rank has handed to the transport, by operation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

__all__ = ["Traffic"]


@dataclass(slots=True)
class Traffic:
    """Counters of one rank on one mesh.

    Bytes are those of the arrays this rank put in: what an all-reduce of 1 MiB
    counts is 1 MiB, whatever its algorithm moves.

    Attributes:
        calls: Operations started, by name.
        bytes: Bytes put in, by name.
    """

    calls: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)

    def count(self, name: str, nbytes: int, calls: int = 1) -> None:
        """Add operations of one kind."""
        self.calls[name] = self.calls.get(name, 0) + calls
        self.bytes[name] = self.bytes.get(name, 0) + nbytes

    @property
    def total_calls(self) -> int:
        """Operations of all kinds."""
        return sum(self.calls.values())

    @property
    def total_bytes(self) -> int:
        """Bytes of all operations."""
        return sum(self.bytes.values())

    def __iter__(self) -> Iterator[tuple[str, int, int]]:
        """Yield (name, calls, bytes) in alphabetical order."""
        return ((name, self.calls[name], self.bytes[name]) for name in sorted(self.calls))
