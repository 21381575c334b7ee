"""Exchanges of regions on the arrays of one rank: their checks, and the local work in them.

The exchange itself is a value, `mpimesh.layout.Regions`. Ranks that share memory carry it out in
the window of their node, whose form of it is :class:`mpimesh.core.node.Boxes`; the others by
messages (`region_messages.py`). Parts are reduced in their order, halves added up in float32 and
rounded once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from math import prod
from typing import NamedTuple, TypeAlias

import numpy as np

from mpimesh.arrays import ReduceOp, refuse_objects, wire_dtype
from mpimesh.arrays.namespace import DType, HostArray
from mpimesh.core.node import Boxes, can_reduce
from mpimesh.errors import DTypeError, MismatchError, RankError, ShapeError
from mpimesh.layout.boxes import (
    Box,
    Regions,
    Take,
    fits,
    slices,
    volume,
)

__all__ = [
    "FUNCTIONS",
    "Blocks",
    "Kind",
    "check_contiguous",
    "check_dtypes",
    "check_regions",
    "copy_own",
    "described_bytes",
    "descriptor",
    "kind_of",
    "raw_dtype",
]

FUNCTIONS: dict[str, Callable[..., HostArray]] = {
    "sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}

_SIZE_BITS = 12
_DTYPE_BITS = _SIZE_BITS + 7

Kind: TypeAlias = tuple[tuple[int, ...], DType] | None
"""The shape and the dtype of an array; None for no array."""

Blocks: TypeAlias = Mapping[int, Callable[[tuple[int, ...]], HostArray]]
"""For ranks whose memory this one reads: what gives their block by its shape."""

_BoxTake: TypeAlias = tuple[
    Box, tuple[int, ...], int, Sequence[tuple[int, tuple[int, ...], Box]], str
]
"""A take as `core` knows it: the last number is that of the array it goes into."""


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


def descriptor(source: Kind, target: Kind) -> int:
    """Return the size of a rank's source, and the dtype of it and its target, as one number.

    0 if it has neither.
    """
    if source is None and target is None:
        return 0
    _, dtype = source or target or ((), np.dtype(np.uint8))
    nbytes = 0 if source is None else prod(source[0]) * dtype.itemsize
    code = ord(dtype.kind) << _SIZE_BITS | dtype.itemsize % (1 << _SIZE_BITS)
    return nbytes << _DTYPE_BITS | code


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


# -- in memory that ranks share ------------------------------------------------------------


def moves_in_memory(source: Kind, target: Kind) -> bool:
    """Tell whether boxes of a dtype move in memory that ranks share, and not by messages. Local.

    Numbers do that a window adds up: whether an exchange reduces is not known to ranks that only
    give. One without arrays has nothing to send.
    """
    if source is None and target is None:
        return True
    _, dtype = source or target or ((), np.dtype(np.uint8))
    return can_reduce(dtype) or not _is_number(dtype)


@lru_cache
def _is_number(dtype: DType) -> bool:
    try:
        wire_dtype(dtype, ReduceOp("sum"))
    except DTypeError:
        return False
    return True


class NearAndFar(NamedTuple):
    """The plan of one rank's exchange: boxes in memory that it shares, and regions by messages.

    Attributes:
        boxes: What is taken and given in memory.
        beside: The ranks that share memory whose parts are reduced with others that come by
            messages, and the shapes of their blocks: the parts come into arrays like these.
        far: What goes by messages, and what is reduced of both.
    """

    boxes: Boxes
    beside: tuple[tuple[int, tuple[int, ...]], ...]
    far: Regions


def near_and_far(
    regions: Regions,
    rank: int,
    size: int,
    near: Sequence[int],
    source: Kind,
    target: Kind,
) -> NearAndFar:
    """Return what a rank takes and gives, as ranks do of which some share memory. Local.

    Args:
        regions: What it takes and gives.
        rank: The rank.
        size: How many ranks there are.
        near: Those that share memory, in the order of their window.
        source: The shape and dtype of its block; None for none.
        target: Those of what it takes into.

    Raises:
        MpimeshError: If the arrays do not fit.
    """
    key = ("memory", rank, len(near), source, target)
    make = partial(_near_and_far, regions, rank, size, near, source, target)
    return regions.prepared(key, make)


def _near_and_far(
    regions: Regions,
    rank: int,
    size: int,
    near: Sequence[int],
    source: Kind,
    target: Kind,
) -> NearAndFar:
    _check(regions, rank, size, source, target)
    mine = descriptor(source, target)
    _, dtype = source or target or ((), np.dtype(np.uint8))
    into = () if target is None else target[0]
    places = {one: place for place, one in enumerate(near)}
    takes: list[_BoxTake] = []
    beside: dict[int, tuple[int, ...]] = {}
    far_takes: list[Take] = []
    shapes: dict[int, tuple[int, ...]] = {}
    for take in regions.takes:
        if not volume(take.box) * dtype.itemsize:
            continue
        parts = [(places[one.rank], one.shape, one.box) for one in take.parts if one.rank in places]
        if len(parts) < len(take.parts):
            far_takes.append(take)
            parts = [part for part in parts if near[part[0]] != rank]
            for part in parts:
                owner, shape, box = part
                beside.setdefault(near[owner], shape)
                takes.append((box, shape, 1 + [*beside].index(near[owner]), [part], ""))
        else:
            takes.append((take.box, into, 0, parts, take.op))
        shapes.update((owner, shape) for owner, shape, _ in parts)
    gives: list[list[Box]] = [[] for _ in near]
    for give in regions.gives:
        if give.rank != rank and give.rank in places and volume(give.box) * dtype.itemsize:
            gives[places[give.rank]].append(give.box)
    blocks = [0] * len(near)
    for owner, shape in shapes.items():
        blocks[owner] = prod(shape) * dtype.itemsize << _DTYPE_BITS | mine % (1 << _DTYPE_BITS)

    def explain(owner: int, is_block: bool, seen: int) -> Exception:
        other = near[owner]
        if not is_block:
            taken = sum(
                volume(box) for *_, parts, _ in takes for one, _, box in parts if one == owner
            )
            return gives_otherwise(rank, dtype.itemsize * taken, other, seen)
        try:
            check_dtypes({rank: mine, other: seen})
        except MismatchError as error:
            return error
        return MismatchError(
            f"rank {rank} takes of a block of rank {other} with shape {shapes[owner]}, of "
            f"{described_bytes(blocks[owner])} bytes, but that has {described_bytes(seen)}"
        )

    own = None if source is None else source[0]
    boxes = Boxes(len(near), dtype, takes, gives, own, blocks, mine, explain)
    far_gives = [give for give in regions.gives if give.rank not in places]
    return NearAndFar(boxes, tuple(beside.items()), Regions(tuple(far_takes), tuple(far_gives)))


def gives_otherwise(rank: int, taken: int, owner: int, given: int) -> MismatchError:
    """Return the error of a rank that is given something else than it takes."""
    return MismatchError(
        f"rank {rank} takes {taken} bytes of rank {owner}, which gives it {given}; each rank gives "
        "what the others take of it"
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
