"""Runs of parameters in a divided bucket, and one rank's part of them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from mpimesh.nn import Constant, Parameter
from mpimesh.parallel.gradients.bucket import Bucket
from mpimesh.parallel.gradients.shard import Shard
from mpimesh.parallel.gradients.spans import Span

__all__ = ["Run", "piece_of", "runs_of"]

_NONE = Constant(0.0)  # a piece is never materialised


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbours in a bucket that one optimizer changes alike, and has stepped equally often.

    Attributes:
        optimizer: Its number.
        places: Their places in it.
        starts: Where each begins in the bucket, and where the last ends.
    """

    optimizer: int
    places: tuple[int, ...]
    starts: tuple[int, ...]

    def span_of(self, at: int) -> Span:
        """Return where its parameter number `at` lies in the bucket."""
        return self.starts[at], self.starts[at + 1]

    def within(self, part: slice) -> slice:
        """Return which of its elements lie in `part`, counted in the bucket; may be none."""
        start = min(max(self.starts[0], part.start), part.stop)
        return slice(start, max(start, min(self.starts[-1], part.stop)))


def runs_of(
    owners: Sequence[tuple[int, int] | None], sizes: Sequence[int], kinds: Sequence[Hashable]
) -> list[Run]:
    """Cut a bucket into runs.

    Args:
        owners: For each parameter the number of its optimizer and its place there; None for one
            that no optimizer has.
        sizes: The elements of each.
        kinds: What only equals may share a run: how often each was stepped, and whether it decays.
    """
    runs: list[Run] = []
    before: tuple[int, Hashable] | None = None
    at = 0
    for owner, size, kind in zip(owners, sizes, kinds, strict=True):
        key = None if owner is None else (owner[0], kind)
        if owner is not None and key == before:
            last = runs.pop()
            runs.append(Run(owner[0], (*last.places, owner[1]), (*last.starts, at + size)))
        elif owner is not None:
            runs.append(Run(owner[0], (owner[1],), (at, at + size)))
        before = key
        at += size
    return runs


class _Piece(Parameter):
    """A flat parameter to whose gradient nothing is added: sums come into its memory by themselves.

    So zeros that were written when somebody looks would wipe sums out that came after them.
    """

    __slots__ = ()

    def zero_grad(self) -> None:
        super().zero_grad()
        self.write_zeros()


def piece_of(run: Run, bucket: Bucket, shard: Shard) -> Parameter:
    """Return this rank's part of a run as a flat parameter; it may have no elements."""
    inside = run.within(shard.part)
    size = inside.stop - inside.start
    piece = _Piece(f"{run.starts[0]} to {run.starts[-1]} of {bucket.name}", (size,), _NONE)
    piece.data = shard.values[inside]
    start = inside.start - shard.part.start
    piece.grad = shard.memory[start : start + size]
    piece.attach_grad(piece.grad)  # for good: zeros are written into it
    return piece
