"""The way of the bytes of one operation, and the reason for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Route"]


@dataclass(frozen=True, slots=True)
class Route:
    """A rule by which a communicator moves bytes.

    Attributes:
        operation: The collective, such as ``"all_reduce"``; ``"messages"`` for send and receive;
            ``"*"`` for all that has no route of its own.
        memory: Where the arrays lie: ``"host"``, ``"shared"`` for memory of
            :meth:`DeviceMesh.shared_empty`, or ``"device"``.
        from_bytes: The smallest array that goes this way; the next larger one's route of the same
            operation and memory takes over where it begins.
        transport: Who moves it, such as ``"mpi"`` or ``"node_shared"``.
        reason: Why, for a person.
    """

    operation: str
    memory: str
    from_bytes: int
    transport: str
    reason: str

    def size_text(self, bytes_text: Callable[[int], str]) -> str:
        """Return from which size on it holds, or above which: what reads better."""
        above = self.from_bytes - 1
        if above and above % 1024 == 0:
            return f"above {bytes_text(above)}"
        return f"from {bytes_text(self.from_bytes)}"

    def __str__(self) -> str:
        """Show it in a line."""
        name = "all others" if self.operation == "*" else self.operation
        size = f", {self.size_text('{:,} bytes'.format)}" if self.from_bytes > 1 else ""
        return f"{name}, {self.memory} memory{size}: {self.transport} ({self.reason})"
