"""What the ranks must agree on in a step, found out while the step already runs.

One all-reduce of a few numbers is started when a step begins, and looked at while
a rank waits and when the step ends. A rank that was given the batch does not wait for it;
one that was not learns from it how many rows there are.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from mpimesh.arrays import Array, HostArray
from mpimesh.errors import MismatchError, ShapeError
from mpimesh.runtime import ProcessGroup
from mpimesh.runtime.digest import digest_bits

__all__ = ["Given", "StepHeader", "checksum", "disagreement", "fingerprint"]

_UNKNOWN = -(1 << 62)


def fingerprint(text: str) -> int:
    """Return 62 bits that are equal on two ranks only if their texts are."""
    return digest_bits(text.encode(), 62)


def checksum(arrays: Iterable[HostArray]) -> str:
    """Return eight hexadecimal digits that tell the values of `arrays` from most others.

    Cost:
        Reads them once, about a second for 2 GB.
    """
    crc = 0
    for x in arrays:
        crc = zlib.crc32(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data, crc)
    return f"{crc:08x}"


@dataclass(frozen=True, slots=True)
class Given:
    """What a rank was given for a step.

    Attributes:
        call: What it calls, in words.
        rows: Rows of its global batch; None if it was given none.
        kind: Shape and dtype of a row of its input, in words; None if it was given none.
        goal: What it trains by, in words; None if it does not hold the last stage.
        x: What tells the values of its input from others; None if it was given none, or if nothing
            is to be checked.
        target: The same of its targets.
    """

    call: str
    rows: int | None = None
    kind: str | None = None
    goal: str | None = None
    x: str | None = None
    target: str | None = None


class StepHeader:
    """The header of one step. Making it is collective over `scope` and does not wait."""

    def __init__(self, scope: ProcessGroup, given: Given) -> None:
        texts = (given.call, given.kind, given.goal, given.x, given.target)
        values = [
            _UNKNOWN if given.rows is None else given.rows,
            *(_UNKNOWN if text is None else fingerprint(text) for text in texts),
        ]
        # After a maximum: the largest of each and minus the smallest, unknown ones left out.
        opposite = [value if value == _UNKNOWN else -value for value in values]
        self._handle = scope.all_reduce(np.array([*values, *opposite]), "max", label="step header")
        self._table: Array | None = None

    def test(self) -> bool:
        """Tell whether :meth:`read` would not wait. Never waits."""
        return self._handle.done()

    def read(self) -> tuple[int, int]:
        """Wait for the header and return the global rows and the kind of the input as a number.

        Raises:
            MismatchError: If the ranks call different things or were given different batches.
                :func:`disagreement` says it in full.
            ShapeError: If no rank was given a batch.
        """
        if self._table is None:
            self._table = self._handle.resolve()
        largest, opposite = self._table.reshape(2, -1).tolist()
        for high, low in zip(largest, opposite, strict=True):
            if high != -low and high != _UNKNOWN:
                raise MismatchError("the ranks were given different things for this step")
        rows, _, kind, *_ = largest
        if rows == _UNKNOWN:
            raise ShapeError("no rank was given a batch: x is needed where the first stage lies")
        return rows, kind


def disagreement(given: Sequence[Given], ranks: Sequence[int]) -> MismatchError | None:
    """Return the error for what `ranks` were given, None if it is not at odds."""
    batch = "must be given the same global batch in"
    values = "each takes its own rows out of it. The CRC-32 of its values is"
    rules = (
        ("call", "must take the same step with the same options"),
        ("rows", f"{batch} x and target, or None; rows are"),
        ("kind", f"{batch} x, or None; its rows are"),
        ("x", f"{batch} x, or None; {values}"),
        ("target", f"{batch} target, or None; {values}"),
        ("goal", "of the last stage must train by the same loss and denominator"),
    )
    for name, rule in rules:
        by_value: dict[object, list[int]] = {}
        for rank, one in zip(ranks, given, strict=True):
            value = getattr(one, name)
            if value is not None:
                by_value.setdefault(value, []).append(rank)
        if len(by_value) > 1:
            rows = "\n".join(f"  ranks {who}: {value}" for value, who in by_value.items())
            return MismatchError(f"all ranks {rule}\n{rows}")
    return None
