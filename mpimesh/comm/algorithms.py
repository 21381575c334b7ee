"""The table of algorithms: who moves the bytes of an operation, by memory, nodes and size.

For host memory
    ``mpi``: MPI's own collective. ``slots``: every rank puts its array into a slot of shared memory
    and reads those of all. ``in_place``: the ranks of a node read and write each other's arrays
    where they lie. ``chunks``: ordinary arrays go through a stage in shared memory, a chunk at a
    time. ``two_levels``: inside nodes in shared memory, between them by MPI. ``virtual``: threads
    of one process. ``centralized``, ``tree(b)`` and ``ring``: by messages (`reductions.py`), where
    they are asked for.

For device memory
    ``nccl``, ``cuda_ipc``, ``mpi_cuda``, ``staged`` (by way of the host), ``copy``.

The sizes at which they cross are measured (`tuner.py`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from mpimesh.arguments import size_text

__all__ = ["NEVER", "OPERATIONS", "SETTING", "Algorithms", "Row", "Sizes", "Ways"]

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
"""Those that have other ways than MPI."""

SETTING = "MPIMESH_ALGORITHMS"
"""The reason of rows that the user has set."""

NEVER = 1 << 62
_MOST_KEPT = 4096


class Ways(NamedTuple):
    """The algorithms for one operation and size, the same on all ranks.

    Attributes:
        host: For ordinary arrays, or if any rank's is.
        shared: For arrays that lie in shared memory on all ranks.
    """

    host: str
    shared: str


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

    __slots__ = ("_columns", "_rows", "_ways")

    def __init__(self, rows: Sequence[Row]) -> None:
        columns: dict[tuple[str, str], dict[int, Row]] = {}
        for row in rows:
            columns.setdefault((row.operation, row.memory), {})[row.from_bytes] = row
        self._columns = {key: sorted(by_size.items()) for key, by_size in columns.items()}
        self._ways: dict[tuple[str, int], Ways] = {}
        # Rows that change nothing are left out.
        kept: list[Row] = []
        rest = self._columns.get(("*", "host"))
        for key, column in self._columns.items():
            before = rest[0][1].algorithm if rest and key[0] != "*" else ""
            changing: list[Row] = []
            for _, row in column:
                if row.algorithm != before or row.reason == SETTING:
                    changing.append(row)
                before = row.algorithm
            for place, row in enumerate(changing, start=1):
                end = changing[place].from_bytes if place < len(changing) else NEVER
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

    def ways(self, operation: str, nbytes: int) -> Ways:
        """Return the algorithms for an operation of so many bytes, wherever its arrays lie."""
        key = (operation, nbytes)
        found = self._ways.get(key)
        if found is None:
            if len(self._ways) >= _MOST_KEPT:
                self._ways.clear()
            found = Ways(*[self.pick(operation, memory, nbytes) for memory in ("host", "shared")])
            self._ways[key] = found
        return found

    def with_setting(self, operation: str, algorithm: str, most_bytes: int) -> Algorithms:
        """Return this table with what the user has set for an operation on host memory.

        Args:
            operation: The collective.
            algorithm: By which it goes.
            most_bytes: The largest array that can; larger ones go as they do by this table.
        """
        above = most_bytes + 1
        rows = [row for column in self._columns.values() for _, row in column]
        rows = [
            row
            for row in rows
            if (row.operation, row.memory) not in ((operation, "host"), (operation, "shared"))
            or row.from_bytes > above
        ]
        for memory in ("host", "shared"):
            rows.append(Row(operation, memory, 0, algorithm, SETTING))
            if most_bytes < NEVER:
                other = self.pick(operation, memory, above)
                why = f"too large for {algorithm}"
                rows.append(Row(operation, memory, above, other, why))
        return Algorithms(rows)

    @classmethod
    def only(cls, algorithm: str, reason: str) -> Algorithms:
        """Return the table of a communicator that has one way."""
        return cls([Row("*", "host", 0, algorithm, reason)])


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes from which on other ways than MPI are faster, alike on all ranks.

    Attributes:
        others: Bytes for each of `OPERATIONS`, from which on it is done in place on one node, or on
            two levels over several.
        slots_from: Bytes from which on an all-reduce goes through slots.
        slots_to: Bytes up to which it does, if that many fit.
        chunks_from: Bytes from which on larger ones go through the stage in chunks.
        all_in_chunks: Whether ordinary arrays of every size and operation do: it takes a step for
            each chunk, which is too slow where ranks share cores.
        reason: Where the sizes come from.
    """

    others: Sequence[int]
    reason: str
    slots_from: int = NEVER
    slots_to: int = NEVER
    chunks_from: int = NEVER
    all_in_chunks: bool = False

    @property
    def numbers(self) -> list[int]:
        """Numbers that measured ones can be made from again."""
        return [*self.others, self.slots_from, self.slots_to, self.chunks_from]

    @classmethod
    def of_numbers(cls, numbers: Sequence[int], reason: str) -> Sizes:
        """Make them from their numbers."""
        *others, slots_from, slots_to, chunks_from = numbers
        return cls(others, reason, slots_from, slots_to, chunks_from)

    @classmethod
    def everything(cls, reason: str) -> Sizes:
        """Return those that take shared memory for all arrays of all sizes."""
        return cls([1] * len(OPERATIONS), reason, 1, chunks_from=1, all_in_chunks=True)

    @classmethod
    def unmeasured(cls, *, several_nodes: bool = False) -> Sizes:
        """Return sizes that hold on most machines."""
        sizes = [_UNMEASURED_FROM] * len(OPERATIONS)
        if several_nodes:
            sizes[OPERATIONS.index("all_to_all")] = NEVER  # ranks know only their own
        return cls(sizes, "faster on machines seen so far")

    def on_one_node(self, most_slot_bytes: int) -> Algorithms:
        """Return the table of the ranks of one node.

        Args:
            most_slot_bytes: The largest array that fits into a slot.
        """
        rows: list[Row] = []

        def add(operation: str, memory: str, from_bytes: int, algorithm: str, why: str) -> None:
            if from_bytes < NEVER:
                rows.append(Row(operation, memory, from_bytes, algorithm, why, "one"))

        past_slots, why = min(self.slots_to, most_slot_bytes) + 1, self.reason
        slower = "the stage would be slower than messages"
        for operation, placed_from in zip(OPERATIONS, self.others, strict=True):
            for memory in ("host", "shared"):
                add(operation, memory, 0, "mpi", "smaller arrays")
            if operation == "all_reduce":
                for memory in ("host", "shared"):
                    if self.slots_from < past_slots:
                        add(operation, memory, past_slots, "mpi", slower)
                        add(operation, memory, self.slots_from, "slots", why)
                    add(operation, memory, max(self.chunks_from, past_slots), "chunks", why)
                # Up to this size one look at the others less is worth more than a copy.
                copied = most_slot_bytes // _SLOTS_SHARE + 1 if self.slots_from < NEVER else 0
                placed_from = max(placed_from, copied)
                rows = [r for r in rows if r.memory == "host" or r.from_bytes < placed_from]
                add(operation, "shared", placed_from, "in_place", why)
                continue
            if self.all_in_chunks:
                add(operation, "host", placed_from, "chunks", why)
            add(operation, "shared", placed_from, "in_place", why)
        return Algorithms([*rows, Row("*", "host", 0, "mpi", _OWN)])

    def on_several_nodes(self) -> Algorithms:
        """Return the table of ranks on several nodes."""
        why = f"inside nodes in shared memory, between them by MPI; {self.reason}"
        rows = [Row("*", "host", 0, "mpi", _OWN)]
        for operation, from_bytes in zip(OPERATIONS, self.others, strict=True):
            for memory in ("host", "shared"):
                rows.append(Row(operation, memory, 0, "mpi", "smaller arrays", "several"))
                if from_bytes < NEVER:
                    rows.append(Row(operation, memory, from_bytes, "two_levels", why, "several"))
        return Algorithms(rows)


def _sizes_text(first: int, end: int) -> str:
    """Return the sizes from `first` on that are below `end`, in words; "" if they are all."""
    if end == first + 1:
        return f"of {size_text(first)}"
    words = []
    if first > 1:
        words.append(_bound_text(first, "above", "from"))
    if end < NEVER:
        words.append(_bound_text(end, "up to", "below"))
    return " ".join(words)


def _bound_text(nbytes: int, after_round: str, otherwise: str) -> str:
    """Return where a range begins or ends: one byte after a round size names that size."""
    last = nbytes - 1
    if last and last % 1024 == 0:
        return f"{after_round} {size_text(last)}"
    return f"{otherwise} {size_text(nbytes)}"


_OWN = "MPI's own collective"
_UNMEASURED_FROM = 64 * 1024
_SLOTS_SHARE = 16
