"""Questions about CUDA-aware MPI, and their answers."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MEMORIES", "OPERATIONS", "TRIAL_BYTES", "Answer"]

OPERATIONS = ("messages", "broadcast", "all_gather", "gather", "scatter", "all_to_all")
"""Operations that are tried, in this order: all that moves and nothing that reduces."""

MEMORIES = ("device", "async", "managed")
"""``"device"`` is what CuPy's default pool gives; ``"async"`` is of `cupy.cuda.MemoryAsyncPool`."""

TRIAL_BYTES = (8, 1 << 15, 1 << 22)
"""Sizes that are tried: MPI has another way for each."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Whether MPI may be given device memory for one operation.

    Attributes:
        usable: Whether it may.
        reason: Why, for a person.
        lasting: False if the same trial may end otherwise tomorrow, as after a limit.
    """

    usable: bool
    reason: str
    lasting: bool = True

    def __str__(self) -> str:
        """Say it in one line."""
        return f"{'yes' if self.usable else 'no'}: {self.reason}"
