"""Runs of parameters in a divided bucket, and one rank's part of them and of their state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpimesh.arrays import Array, moved
from mpimesh.errors import ShapeError
from mpimesh.nn import Constant, Parameter
from mpimesh.parallel.gradients.bucket import Bucket
from mpimesh.parallel.gradients.shard import Shard

__all__ = ["Run", "check_shapes", "own_state", "piece_of", "runs_of", "steps_at"]

_NONE = Constant(0.0)  # a piece is never materialised


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbours in a bucket that one optimizer has stepped equally often.

    Attributes:
        optimizer: Its number.
        places: Their places in it.
        starts: Where each begins in the bucket, and where the last ends.
    """

    optimizer: int
    places: tuple[int, ...]
    starts: tuple[int, ...]

    def within(self, part: slice) -> slice:
        """Return which of its elements lie in `part`, counted in the bucket; may be none."""
        start = min(max(self.starts[0], part.start), part.stop)
        return slice(start, max(start, min(self.starts[-1], part.stop)))


def runs_of(
    owners: Sequence[tuple[int, int] | None], sizes: Sequence[int], steps: Sequence[int]
) -> list[Run]:
    """Cut a bucket into runs.

    Args:
        owners: For each parameter the number of its optimizer and its place there; None for one
            that no optimizer has.
        sizes: The elements of each.
        steps: How often each was stepped.
    """
    runs: list[Run] = []
    before: tuple[int, int] | None = None
    at = 0
    for owner, size, count in zip(owners, sizes, steps, strict=True):
        key = None if owner is None else (owner[0], count)
        if owner is not None and key == before:
            last = runs.pop()
            runs.append(Run(owner[0], (*last.places, owner[1]), (*last.starts, at + size)))
        elif owner is not None:
            runs.append(Run(owner[0], (owner[1],), (at, at + size)))
        before = key
        at += size
    return runs


def piece_of(run: Run, bucket: Bucket, shard: Shard) -> Parameter:
    """Return this rank's part of a run as a flat parameter; it may have no elements."""
    inside = run.within(shard.part)
    size = inside.stop - inside.start
    piece = Parameter(f"{run.starts[0]} to {run.starts[-1]} of {bucket.name}", (size,), _NONE)
    piece.data = shard.values[inside]
    start = inside.start - shard.part.start
    piece.grad = shard.memory[start : start + size]
    piece.attach_grad(piece.grad)  # for good: zeros are written into it
    return piece


def own_state(run: Run, shard: Shard, whole: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Cut this rank's part out of the states of a run's parameters."""
    inside = run.within(shard.part)
    first = whole[run.places[0]]
    own: dict[str, Any] = {"steps": int(first["steps"])}
    for name in first:
        # A state that was made without master values has none for any parameter of a dtype.
        if name == "steps" or any(name not in whole[place] for place in run.places):
            continue
        parts: list[Array] = []
        for at, place in enumerate(run.places):
            start, stop = run.starts[at], run.starts[at + 1]
            begin, end = max(start, inside.start), min(stop, inside.stop)
            if begin < end:
                values = moved(whole[place][name], np).reshape(-1)
                parts.append(values[begin - start : end - start])
        own[name] = np.concatenate(parts) if parts else np.empty(0)
    return own


def steps_at(state: Mapping[str, Any], place: int) -> int:
    """Return how often the parameter at `place` was stepped, by the state of its optimizer."""
    return int(state["params"][place]["steps"])


def check_shapes(parameters: Sequence[Parameter], states: Sequence[Mapping[str, Any]]) -> None:
    """Check that the arrays of each state have the shape of its parameter.

    Raises:
        ShapeError: If one has not.
    """
    for place, (parameter, given) in enumerate(zip(parameters, states, strict=True)):
        for name, array in given.items():
            if name != "steps" and tuple(array.shape) != parameter.shape:
                raise ShapeError(
                    f"state {name!r} of parameter {place} ({parameter.name!r}) must have its "
                    f"shape {parameter.shape}, got {tuple(array.shape)}"
                )
