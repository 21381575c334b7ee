"""Exchanges of regions on the arrays of one rank: their checks, and the local work in them.

The exchange itself is a value, `mpimesh.layout.Regions`; `region_messages.py` carries it out by
messages, and `region_shared.py` in memory that the ranks of a node share. Both make what is local
of small pieces of work: copies, and reductions of parts in their order. Halves are added up in
float32 and rounded once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import TypeAlias

import numpy as np

from mpimesh.arrays import ReduceOp, refuse_objects, wire_dtype
from mpimesh.arrays.dtypes import sum_dtype
from mpimesh.arrays.namespace import DType, HostArray
from mpimesh.errors import DTypeError, MismatchError, RankError, ShapeError
from mpimesh.layout.boxes import (
    Box,
    Regions,
    extent,
    fits,
    global_box,
    slices,
    tiles,
    view,
    volume,
    whole,
)

__all__ = [
    "FUNCTIONS",
    "Blocks",
    "Call",
    "Kind",
    "Piece",
    "check_contiguous",
    "check_dtypes",
    "check_regions",
    "copied_boxes",
    "copy_own",
    "copying",
    "described_bytes",
    "descriptor",
    "kind_of",
    "piece_work",
    "pieces_of",
    "raw_dtype",
]

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

_SMALL_BYTES = 64 * 1024
"""Size up to which a copy need not let other threads run meanwhile."""

_PAGE_BYTES = 4096
_OVERTAKEN_BYTES = 16
"""Some processors copy blocks ten times slower to where they begin so little further in a page."""

_WHOLE_FROM = 0.6
"""From this part of a block on it is copied as a whole."""

_MOST_COMPARED = 64
"""Of more boxes, those that lie in another are copied twice."""

_SIZE_BITS = 12
_DTYPE_BITS = _SIZE_BITS + 7

Kind: TypeAlias = tuple[tuple[int, ...], DType] | None
"""The shape and the dtype of an array; None for no array."""

Piece: TypeAlias = tuple[str, Box, tuple[tuple[int, tuple[int, ...], Box], ...]]
"""The reduction if any, where it goes, and for each part its rank, the shape there, and where."""

Blocks: TypeAlias = Mapping[int, Callable[[tuple[int, ...]], HostArray]]
"""For ranks whose memory this one reads: what gives their block by its shape."""

Call: TypeAlias = Callable[[], object]


# -- checks: local -------------------------------------------------------------------------


def kind_of(array: HostArray | None) -> Kind:
    """Return the shape and the dtype of an array."""
    return None if array is None else (array.shape, array.dtype)


def check_regions(
    regions: Regions, rank: int, size: int, source: HostArray | None, target: HostArray | None
) -> None:
    """See whether the arrays of a rank fit what it takes and gives. Local.

    Raises:
        RankError: If a rank is named that there is not.
        ShapeError: If an array is not C-contiguous, or a box lies outside of it.
        DTypeError: If the arrays have different dtypes, hold Python objects, or cannot be
            reduced as asked for.
    """
    check_contiguous(rank, source, target)
    kinds = kind_of(source), kind_of(target)
    regions.prepared(("check", rank, size, kinds), lambda: _check(regions, rank, size, *kinds))


def check_contiguous(rank: int, source: HostArray | None, target: HostArray | None) -> None:
    """See whether the arrays of a rank are in one run of memory each. Local.

    Raises:
        ShapeError: If not.
    """
    for array in (source, target):
        if array is not None and not array.flags.c_contiguous:
            raise ShapeError(
                f"regions are exchanged between C-contiguous arrays, got one of shape "
                f"{array.shape} with strides {array.strides} on rank {rank}"
            )


def _check(regions: Regions, rank: int, size: int, source: Kind, target: Kind) -> None:
    ranks = {give.rank for give in regions.gives}
    ranks |= {part.rank for take in regions.takes for part in take.parts}
    for other in ranks:
        if not 0 <= other < size:
            raise RankError(f"there are ranks 0 to {size - 1}, but rank {rank} names {other}")
    dtypes = {kind[1] for kind in (source, target) if kind is not None}
    if len(dtypes) > 1:
        raise DTypeError(
            f"source and target of an exchange have one dtype, got "
            f"{' and '.join(sorted(map(str, dtypes)))} on rank {rank}"
        )
    for dtype in dtypes:
        refuse_objects(dtype)
        for op in {take.op for take in regions.takes if take.reduces}:
            wire_dtype(dtype, ReduceOp(op))
    _check_boxes("target", rank, target, [take.box for take in regions.takes])
    _check_boxes("source", rank, source, [give.box for give in regions.gives])
    own = {part.shape for take in regions.takes for part in take.parts if part.rank == rank}
    if own and (source is None or own != {source[0]}):
        raise ShapeError(
            f"rank {rank} takes of its own block with shape {sorted(own)}, but its source has "
            f"{'none' if source is None else source[0]}"
        )


def _check_boxes(name: str, rank: int, array: Kind, boxes: Sequence[Box]) -> None:
    for box in boxes:
        if array is None or not fits(box, array[0]):
            raise ShapeError(
                f"box {box} does not lie in the {name} of rank {rank}, which has "
                f"{'none' if array is None else f'shape {array[0]}'}"
            )


# -- checks: over ranks --------------------------------------------------------------------


def descriptor(*arrays: HostArray | None) -> int:
    """Return the size of a rank's source, and the dtype of it and its target, as one number.

    0 if it has neither.
    """
    for number, array in enumerate(arrays):
        if array is not None:
            code = ord(array.dtype.kind) << _SIZE_BITS | array.dtype.itemsize % (1 << _SIZE_BITS)
            return (0 if number else array.nbytes) << _DTYPE_BITS | code
    return 0


def described_bytes(number: int) -> int:
    """Return the size of a rank's source, by its descriptor."""
    return number >> _DTYPE_BITS


def check_dtypes(descriptors: Mapping[int, int]) -> None:
    """See whether the arrays of ranks have one dtype, by their descriptors.

    Raises:
        MismatchError: If not.
    """
    codes = {rank: code % (1 << _DTYPE_BITS) for rank, code in descriptors.items() if code}
    if len({*codes.values()}) > 1:
        each = ", ".join(
            f"rank {rank}: {chr(code >> _SIZE_BITS)}{code % (1 << _SIZE_BITS)}"
            for rank, code in sorted(codes.items())[:16]
        )
        raise MismatchError(
            f"an exchange of regions has one dtype on all ranks; kinds and bytes are: {each}"
        )


# -- dtypes --------------------------------------------------------------------------------


def raw_dtype(dtype: DType) -> DType:
    """Return a dtype of the same size that NumPy copies fastest, all bytes of an element."""
    if dtype.kind in "biufc" and dtype.isnative:
        return dtype
    return _WORDS.get(dtype.itemsize) or np.dtype((np.void, dtype.itemsize))


_WORDS: dict[int, DType] = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


# -- local work ------------------------------------------------------------------------


def copy_own(regions: Regions, source: HostArray, target: HostArray) -> None:
    """Copy what a rank takes, where all of it is its own."""
    for into, part in regions.prepared("own", lambda: _own_indices(regions)):
        target[into] = source[part]


def _own_indices(regions: Regions) -> list[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    return [(slices(take.box), slices(take.parts[0].box)) for take in regions.takes]


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
        for tile in tiles(extent(take.box), max(1, most)):
            if volume(tile):
                parts = [(part.rank, part.shape, global_box(tile, part.box)) for part in take.parts]
                op = take.op if take.reduces else ""
                pieces.append((op, global_box(tile, take.box), tuple(parts)))
    after = [piece for piece in pieces if piece[2][0][0] >= first]
    return after + [piece for piece in pieces if piece[2][0][0] < first]


def piece_work(
    piece: Piece, target: HostArray, blocks: Blocks, scratch: Callable[[int], HostArray]
) -> tuple[Call, ...]:
    """Return the calls that make a piece. Doing them again from the first is harmless.

    Args:
        piece: The piece.
        target: The whole target, in which nobody takes of what is taken into.
        blocks: The blocks of which the piece is made.
        scratch: Gives so many bytes for what is worked out on the way.
    """
    op, box, parts = piece
    sources = [view(blocks[rank](shape), there) for rank, shape, there in parts]
    if op:
        return _reduction(op, view(target, box), sources, scratch)
    raw = raw_dtype(target.dtype)
    return (copying(sources[0].view(raw), view(target.view(raw), box)),)


def copying(source: HostArray, target: HostArray) -> Call:
    """Return what copies `source`, of the same shape and dtype as `target`.

    Doing it again is harmless.
    """
    is_run = source.flags.c_contiguous and target.flags.c_contiguous
    if is_run and target.nbytes > _PAGE_BYTES:  # the addresses themselves take time
        apart = (target.ctypes.data - source.ctypes.data) % _PAGE_BYTES
        if 0 < apart < _OVERTAKEN_BYTES:
            rows = [array.reshape(-1).view(np.uint8) for array in (source, target)]
            return partial(np.positive, rows[0], out=rows[1])
    if is_run and 0 < target.nbytes <= _SMALL_BYTES:
        # A third of what NumPy takes, which looks at shapes and dtypes each time.
        into, block = [
            memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
            for array in (target, source)
        ]
        return partial(into.__setitem__, slice(None), block)
    # A third of what np.copyto takes, which looks for overrides first.
    return partial(target.__setitem__, ..., source)


def _reduction(
    op: str, target: HostArray, sources: Sequence[HostArray], scratch: Callable[[int], HostArray]
) -> tuple[Call, ...]:
    function = FUNCTIONS[op]
    between = sum_dtype(target.dtype)
    if between == target.dtype:
        first = partial(function, sources[0], sources[1], out=target)
        return (first, *[partial(function, target, source, out=target) for source in sources[2:]])
    shape, nbytes = target.shape, target.size * between.itemsize
    both = scratch(2 * nbytes)
    total = both[:nbytes].view(between).reshape(shape)
    term = both[nbytes : 2 * nbytes].view(between).reshape(shape)
    calls: list[Call] = [partial(np.copyto, total, sources[0])]
    for source in sources[1:]:
        calls += [partial(np.copyto, term, source), partial(function, total, term, out=total)]
    return (*calls, partial(np.copyto, target, total, casting="unsafe"))


def copied_boxes(regions: Regions, shape: tuple[int, ...]) -> tuple[Box, ...]:
    """Return what to copy of a block of which others take: that, or all in one run.

    Of large blocks a run is half the traffic, for the processor need not read what it writes over.
    """
    boxes = tuple(dict.fromkeys([give.box for give in regions.gives]))
    if len(boxes) <= _MOST_COMPARED:
        # The corners of a block lie in its edges.
        boxes = tuple([box for box in boxes if not any(_is_part(box, other) for other in boxes)])
    if sum(map(volume, boxes)) > _WHOLE_FROM * prod(shape):
        return (whole(shape),)
    return boxes


def _is_part(box: Box, other: Box) -> bool:
    """Tell whether a box lies in another one."""
    edges = zip(box, other, strict=True)
    return box != other and all(first <= a and b <= last for (a, b), (first, last) in edges)
