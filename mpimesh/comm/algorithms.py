"""The table of algorithms: who moves the bytes of an operation, by memory, nodes and size.

For host memory
    ``node``: in memory that the ranks of one node share, or threads of one process, by
    :mod:`mpimesh.core`. ``mpi``: MPI's own collective. ``two_levels``: inside nodes in shared
    memory, between them by MPI. ``centralized``, ``tree(b)`` and ``ring``: by messages
    (`reductions.py`), where they are asked for.

For device memory
    ``nccl``, ``cuda_ipc``, ``mpi_cuda``, ``staged`` (by way of the host), ``copy``.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from mpimesh.arguments import size_text

__all__ = ["ALGORITHM_NAMES", "AlgorithmName", "Algorithms", "Row", "tree_arity"]

_NEVER = 1 << 62

AlgorithmName = Literal[
    "centralized", "tree(2)", "tree(3)", "tree(4)", "tree(8)", "tree(16)", "ring", "mpi", "node",
    "two_levels",
]  # fmt: skip
"""Ways of moving host memory by name, so that a type checker finds a misspelt one."""
_TREE = re.compile(r"tree\(([1-9]\d{0,5})\)")


def tree_arity(algorithm: str) -> int:
    """Return b of ``tree(b)``, which is 2 or more; 0 for any other text."""
    tree = _TREE.fullmatch(algorithm)
    arity = 0 if tree is None else int(tree[1])
    return arity if arity > 1 else 0


ALGORITHM_NAMES = tuple(name for name in get_args(AlgorithmName) if tree_arity(name) < 3)
"""Of those that move host memory; a tree can have more than 2 branches."""


@dataclass(frozen=True, slots=True)
class Row:
    """A rule by which a communicator moves bytes.

    Attributes:
        operation: The collective, such as ``"all_reduce"``; ``"messages"`` for send and receive;
            ``"*"`` for all that has no row of its own.
        memory: Where the arrays lie: ``"host"``, ``"shared"`` for memory of
            :meth:`DeviceMesh.shared_empty`, or ``"device"``.
        from_bytes: The smallest array that goes this way; the next larger one's row of the same
            operation and memory takes over where it begins.
        algorithm: How, such as ``"mpi"`` or ``"in_place"``.
        reason: Why, for a person.
        nodes: ``"one"`` if it holds for ranks of one node, ``"several"``, or ``"*"`` for both.
        subject: Which operation of which sizes it is for, in words; its table sets it.
    """

    operation: str
    memory: str
    from_bytes: int
    algorithm: str
    reason: str
    nodes: str = "*"
    subject: str = field(default="", compare=False)

    @property
    def is_rest(self) -> bool:
        """True if it is for all of host memory that no other row is for, be it shared or not."""
        return self.operation == "*" and self.memory == "host"

    def __str__(self) -> str:
        """Show it in a line."""
        where = "" if self.is_rest else f", {self.memory} memory"
        return f"{self.subject}{where}: {self.algorithm} ({self.reason})"


class Algorithms(Sequence[Row]):
    """The rows of one communicator. Printed, a row a line.

    Args:
        rows: In any order; the last of those of equal operation, memory and size counts.
    """

    __slots__ = ("_columns", "_rows")

    def __init__(self, rows: Sequence[Row]) -> None:
        columns: dict[tuple[str, str], dict[int, Row]] = {}
        for row in rows:
            columns.setdefault((row.operation, row.memory), {})[row.from_bytes] = row
        self._columns = {key: sorted(by_size.items()) for key, by_size in columns.items()}
        # Rows that change nothing are left out.
        kept: list[Row] = []
        rest = self._columns.get(("*", "host"))
        for key, column in self._columns.items():
            before = rest[0][1].algorithm if rest and key[0] != "*" else ""
            changing: list[Row] = []
            for _, row in column:
                if row.algorithm != before:
                    changing.append(row)
                before = row.algorithm
            for place, row in enumerate(changing, start=1):
                end = changing[place].from_bytes if place < len(changing) else _NEVER
                sizes = _sizes_text(row.from_bytes, end)
                kept.append(replace(row, subject=f"{row.operation} {sizes}".rstrip()))
        kept.sort(key=lambda row: row.operation == "*")
        for place, row in enumerate(kept):
            if row.operation == "*":
                others = "everything"
                if row.is_rest and place:
                    others += " else"
                    if any(other.from_bytes > 1 for other in kept):
                        others += ", smaller arrays included"
                kept[place] = replace(row, subject=others)
        self._rows = kept

    def __getitem__(self, place: Any) -> Any:
        return self._rows[place]

    def __len__(self) -> int:
        return len(self._rows)

    def __eq__(self, other: object) -> bool:
        """Tell whether another table has the same rows."""
        return isinstance(other, Algorithms) and self._rows == other._rows

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        """Show a row a line."""
        return "\n".join(map(str, self._rows))

    def pick(self, operation: str, memory: str, nbytes: int) -> str:
        """Return the algorithm for an operation on arrays of so many bytes in such memory."""
        column = self._columns.get((operation, memory)) or self._columns.get((operation, "host"))
        column = column or self._columns["*", "host"]
        place = bisect_right(column, nbytes, key=lambda item: item[0])
        return column[max(place - 1, 0)][1].algorithm

    def reason(self, algorithm: str) -> str:
        """Return why operations go by an algorithm; empty if no row is for it."""
        return next((row.reason for row in self._rows if row.algorithm == algorithm), "")

    @classmethod
    def only(cls, algorithm: str, reason: str) -> Algorithms:
        """Return the table of a communicator that has one way."""
        return cls([Row("*", "host", 0, algorithm, reason)])


def _sizes_text(first: int, end: int) -> str:
    """Return the sizes from `first` on that are below `end`, in words; "" if they are all."""
    if end == first + 1:
        return f"of {size_text(first)}"
    words = []
    if first > 1:
        words.append(_bound_text(first, "above", "from"))
    if end < _NEVER:
        words.append(_bound_text(end, "up to", "below"))
    return " ".join(words)


def _bound_text(nbytes: int, after_round: str, otherwise: str) -> str:
    """Return where a range begins or ends: one byte after a round size names that size."""
    last = nbytes - 1
    if last and last % 1024 == 0:
        return f"{after_round} {size_text(last)}"
    return f"{otherwise} {size_text(nbytes)}"
