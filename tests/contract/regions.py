"""Random exchanges of regions, and what they must give, worked out in one process."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np

from mpimesh.layout import Box, Give, Part, Regions, Take
from mpimesh.layout.boxes import slices, whole

__all__ = ["DTYPES", "Case", "gives_of", "make", "ring", "rows_to_columns"]

RECORD = np.dtype([("key", "i2"), ("value", "f8"), ("name", "S3")])

DTYPES: dict[str, list[str]] = {
    "f8": ["sum", "prod", "min", "max"],
    "f4": ["sum", "min"],
    "f2": ["sum", "prod", "max"],
    "i4": ["sum", "prod", "min", "max"],
    "u1": ["sum", "max"],
    "?": ["min", "max"],
    "D": ["sum"],
    "M8[s]": [],
    "S3": [],
    "record": [],
}
"""Dtypes, and by what they are reduced here; `record` has fields, and bytes between them."""

_FUNCTIONS: dict[str, Any] = {
    "sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}


@dataclass
class Case:
    """An exchange of n ranks.

    Attributes:
        sources: Each rank's block.
        before: Each rank's target as it is before.
        regions: What each takes and gives.
        after: Each rank's target as it must be afterwards.
    """

    sources: list[Any]
    before: list[Any]
    regions: list[Regions]
    after: list[Any]


def make(seed: int, ranks: int, dtype: str = "f8", *, side: int = 6, axes: int = -1) -> Case:
    """Make one by chance, the same on all ranks for a seed.

    Args:
        seed: For the random numbers.
        ranks: How many.
        dtype: A key of `DTYPES`.
        side: The longest axis of a block.
        axes: How many a block has; by chance if -1.
    """
    rng = np.random.default_rng([seed, ranks, side])
    axes = int(rng.integers(0, 4)) if axes < 0 else axes
    kind = RECORD if dtype == "record" else np.dtype(dtype)
    shapes = [_shape(rng, axes, side) for _ in range(ranks)]
    sources = [_values(rng, shape, kind) for shape in shapes]
    takes = []
    before = []
    for _ in range(ranks):
        shape = _shape(rng, axes, side)
        before.append(_values(rng, shape, kind))
        takes.append(_takes(rng, shape, shapes, DTYPES[dtype]))
    gives = gives_of(takes)
    regions = [Regions(tuple(t), tuple(g)) for t, g in zip(takes, gives, strict=True)]
    after = [_after(rows, sources, old) for rows, old in zip(takes, before, strict=True)]
    return Case(sources, before, regions, after)


def gives_of(takes: list[list[Take]]) -> list[list[Give]]:
    """Return what each rank gives, if all take these."""
    gives: list[list[Give]] = [[] for _ in takes]
    for rank, rows in enumerate(takes):
        for take in rows:
            for part in take.parts:
                if part.rank != rank:
                    gives[part.rank].append(Give(rank, part.box))
    return gives


def rows_to_columns(ranks: int, rows: int, columns: int) -> list[Regions]:
    """Return the exchange by which a matrix split in rows becomes split in columns."""
    row, column = _cuts(rows, ranks), _cuts(columns, ranks)
    takes = [
        [
            Take(
                ((row[s], row[s + 1]), (0, column[r + 1] - column[r])),
                (
                    Part(
                        s,
                        (row[s + 1] - row[s], columns),
                        ((0, row[s + 1] - row[s]), (column[r], column[r + 1])),
                    ),
                ),
            )
            for s in range(ranks)
        ]
        for r in range(ranks)
    ]
    gives = gives_of(takes)
    return [Regions(tuple(t), tuple(g)) for t, g in zip(takes, gives, strict=True)]


def ring(ranks: int, rows: int, columns: int) -> list[Regions]:
    """Return the exchange in which each rank's first and last row become copies of its neighbours'.

    An array of `rows` + 2 rows is source and target in one.
    """
    shape = (rows + 2, columns)

    def row(number: int) -> Any:
        return ((number, number + 1), (0, columns))

    takes = [
        [
            Take(row(0), (Part((rank - 1) % ranks, shape, row(rows)),)),
            Take(row(rows + 1), (Part((rank + 1) % ranks, shape, row(1)),)),
        ]
        for rank in range(ranks)
    ]
    gives = gives_of(takes)
    return [Regions(tuple(t), tuple(g)) for t, g in zip(takes, gives, strict=True)]


def _cuts(size: int, parts: int) -> list[int]:
    return [size * part // parts for part in range(parts + 1)]


def _shape(rng: Any, axes: int, side: int) -> tuple[int, ...]:
    return tuple(rng.integers(0 if rng.random() < 0.1 else 1, side + 1, axes).tolist())


def _values(rng: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    if dtype.kind in "fiuc":
        values = rng.standard_normal(shape) * 10.0 ** rng.integers(-2, 3, shape)
        values = values * (10 if dtype.kind in "iu" else 1)
        with np.errstate(all="ignore"):
            return np.asarray(abs(values) if dtype.kind == "u" else values).astype(dtype)
    if dtype.kind == "b":
        return np.asarray(rng.random(shape) < 0.5)
    if dtype.kind == "M":
        return np.asarray(rng.integers(0, 1 << 40, shape)).astype(dtype)
    values = np.zeros(shape, dtype)
    if dtype.kind == "S":
        values[...] = np.asarray(rng.integers(0, 1000, shape)).astype("S3")
        return values
    for name in dtype.names:
        values[name] = np.asarray(rng.integers(0, 1000, shape)).astype(dtype[name])
    return values


def _takes(
    rng: Any, shape: tuple[int, ...], shapes: list[tuple[int, ...]], ops: list[str]
) -> list[Take]:
    """Cut the target into strips along an axis; each is taken if some blocks are large enough."""
    boxes: list[Box] = [whole(shape)]
    if shape:
        axis = int(rng.integers(len(shape)))
        cuts = np.unique(rng.integers(0, shape[axis] + 1, 4)).tolist()
        (rest,) = boxes
        boxes = [(*rest[:axis], edges, *rest[axis + 1 :]) for edges in pairwise(cuts)]
        boxes += [whole([0] * len(shape))] * int(rng.integers(2))
    rng.shuffle(boxes)
    found = []
    for box in boxes:
        box = _narrowed(rng, box)
        size = [stop - start for start, stop in box]
        fitting = [
            rank
            for rank, there in enumerate(shapes)
            if all(a <= b for a, b in zip(size, there, strict=True))
        ]
        if not fitting:
            continue
        count = int(rng.integers(1, 2 * len(shapes) + 1)) if ops and rng.random() < 0.5 else 1
        parts = []
        for rank in rng.choice(fitting, count).tolist():
            starts = [
                int(rng.integers(0, b - a + 1)) for a, b in zip(size, shapes[rank], strict=True)
            ]
            there = tuple((at, at + a) for at, a in zip(starts, size, strict=True))
            parts.append(Part(rank, shapes[rank], there))
        op = ops[int(rng.integers(len(ops)))] if count > 1 else ""
        found.append(Take(box, tuple(parts), op))
    return found


def _narrowed(rng: Any, box: Box) -> Box:
    """Leave something of a box out, now and then."""
    if rng.random() < 0.5:
        return box
    cut = []
    for start, stop in box:
        first, last = sorted(rng.integers(start, stop + 1, 2).tolist())
        cut.append((first, last))
    return tuple(cut)


def _after(takes: list[Take], sources: list[Any], before: Any) -> Any:
    after = before.copy()
    half = after.dtype == np.float16
    for take in takes:
        parts = [sources[part.rank][slices(part.box)] for part in take.parts]
        if len(parts) == 1:
            after[slices(take.box)] = parts[0]
            continue
        if half:
            parts = [part.astype(np.float32) for part in parts]
        with np.errstate(all="ignore"):
            after[slices(take.box)] = reduce(_FUNCTIONS[take.op], parts).astype(after.dtype)
    return after
