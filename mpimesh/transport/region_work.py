"""Work that puts pieces of blocks together in one process: copied, or reduced in their order.

Halves are added up in float32 and rounded once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np

from mpimesh.arrays.types import DType, HostArray
from mpimesh.transport.boxes import Box, inside, tiles
from mpimesh.transport.regions import Regions, sum_dtype

__all__ = ["FUNCTIONS", "Piece", "piece_work", "pieces_of"]

FUNCTIONS: dict[str, Callable[..., HostArray]] = {
    "sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}

_COPIED_BYTES = 512 * 1024
"""Bytes that are copied at a time, before other operations have a turn."""

_REDUCED_BYTES = 128 * 1024
"""Bytes that are reduced at a time: the sum of two parts stays in cache for the third."""

Piece: TypeAlias = tuple[str, Box, tuple[tuple[int, tuple[int, ...], Box], ...]]
"""The reduction if any, where it goes, and for each part its rank, the shape there, and where."""

Call: TypeAlias = Callable[[], object]


def pieces_of(regions: Regions, takes: Sequence[int], first: int, itemsize: int) -> list[Piece]:
    """Cut takes into pieces that fit into cache.

    Args:
        regions: The whole.
        takes: Which takes of it.
        first: The rank whose parts are to be copied first: not all should read from the same.
        itemsize: Bytes of an element.
    """
    pieces: list[Piece] = []
    for number in takes:
        take = regions.takes[number]
        most = (_REDUCED_BYTES if take.reduces else _COPIED_BYTES) // itemsize
        for tile in tiles([part.stop - part.start for part in take.box], max(1, most)):
            if all(part.start < part.stop for part in tile):
                parts = [(part.rank, part.shape, inside(part.box, tile)) for part in take.parts]
                op = take.op if take.reduces else ""
                pieces.append((op, inside(take.box, tile), tuple(parts)))
    after = [piece for piece in pieces if piece[2][0][0] >= first]
    return after + [piece for piece in pieces if piece[2][0][0] < first]


def piece_work(
    op: str,
    target: HostArray,
    sources: Sequence[HostArray],
    dtype: DType,
    room: Callable[[int], HostArray],
) -> tuple[Call, ...]:
    """Return the calls of NumPy that make a piece. Doing them again from the first is harmless.

    Args:
        op: The reduction; empty if there is one source, which is copied.
        target: Where it goes.
        sources: Its parts.
        dtype: The elements' own dtype.
        room: Gives so many bytes for what is worked out on the way.
    """
    if not op:
        return (partial(np.copyto, target, sources[0]),)
    function = FUNCTIONS[op]
    between = sum_dtype(dtype)
    if between == dtype:
        first = partial(function, sources[0], sources[1], out=target)
        return (first, *[partial(function, target, one, out=target) for one in sources[2:]])
    shape, nbytes = target.shape, target.size * between.itemsize
    both = room(2 * nbytes)
    total = both[:nbytes].view(between).reshape(shape)
    term = both[nbytes : 2 * nbytes].view(between).reshape(shape)
    calls: list[Call] = [partial(np.copyto, total, sources[0])]
    for one in sources[1:]:
        calls += [partial(np.copyto, term, one), partial(function, total, term, out=total)]
    return (*calls, partial(np.copyto, target, total, casting="unsafe"))
