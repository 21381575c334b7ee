"""From which size on a collective goes through shared memory rather than through MPI.

The two cross once: below, MPI's own messages win, because a meeting costs some
microseconds of Python; above, reading in place wins by more and more. Where they
cross depends on the machine and its MPI, so it is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["ALWAYS", "NEVER", "NUMBERS", "OPERATIONS", "Choice"]

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")

NEVER = 1 << 62
ALWAYS = 1


@dataclass(frozen=True, slots=True)
class Choice:
    """The sizes from which on shared memory is used, the same on all ranks of a communicator.

    Attributes:
        sizes: Bytes for each of `OPERATIONS`, for arrays in shared memory.
        why: Where the sizes come from.
        staged_from: Bytes from which on ordinary arrays are staged in an all-reduce, up to those
            that fit into the stage as a whole.
        chunks_from: Bytes from which on larger ones go through the stage in chunks in an
            all-reduce, because this MPI's own nonblocking one is slower.
        staged: Whether ordinary arrays of every size and operation are staged, in chunks: it takes
            a meeting for each, which is too slow where ranks share cores.
    """

    sizes: Sequence[int]
    why: str
    staged_from: int = NEVER
    chunks_from: int = NEVER
    staged: bool = False

    def from_bytes(self) -> dict[str, int]:
        """Return the smallest array of each operation that may go through shared memory."""
        sizes = dict(zip(OPERATIONS, self.sizes, strict=True))
        first = min(sizes["all_reduce"], self.staged_from, self.chunks_from)
        return sizes | {"all_reduce": first}

    @property
    def numbers(self) -> list[int]:
        """Numbers that a measured one can be made from again."""
        return [*self.sizes, self.staged_from, self.chunks_from]

    @classmethod
    def of_numbers(cls, numbers: Sequence[int], why: str) -> Choice:
        """Make one from its numbers."""
        *sizes, staged_from, chunks_from = numbers
        return cls(sizes, why, staged_from=staged_from, chunks_from=chunks_from)

    @classmethod
    def everything(cls, why: str) -> Choice:
        """Return the one that takes shared memory for all arrays of all sizes."""
        all_sizes = [ALWAYS] * len(OPERATIONS)
        return cls(all_sizes, why, staged_from=ALWAYS, chunks_from=ALWAYS, staged=True)


NUMBERS = len(OPERATIONS) + 2
"""Length of :attr:`Choice.numbers`."""
