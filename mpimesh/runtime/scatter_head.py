"""Description of the array that the root of a scatter sends along with its blocks."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import NamedTuple

from mpimesh import errors
from mpimesh.arguments import digest_bits
from mpimesh.arrays import Array, DType
from mpimesh.arrays.dtypes import dtype_from_json, dtype_to_json
from mpimesh.core.node import Operation
from mpimesh.errors import DTypeError, MpimeshError, ShapeError, on_all_ranks
from mpimesh.runtime.operands import Blocks, output_array

__all__ = ["ScatterHead", "head", "misfit", "read", "refusal"]

_MOST_BYTES = 1000
_MOST_SIZES = 64


class ScatterHead(NamedTuple):
    """An array and how it is cut.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        of_device: Whether it is a copy of one on a device.
        axis: The axis that is cut.
        sizes: The sizes of the blocks; None if they are equal, or many.
    """

    shape: tuple[int, ...]
    dtype: DType
    of_device: bool
    axis: int
    sizes: tuple[int, ...] | None


@lru_cache(256)
def head(
    shape: tuple[int, ...],
    dtype: DType,
    axis: int,
    sizes: tuple[int, ...] | None,
    of_device: bool,
) -> tuple[bytes, int]:
    """Return what a root tells of an array, and the digest of that.

    Raises:
        DTypeError: If the dtype cannot be described, or the description is too long.
    """
    shown = None if sizes is None or len(sizes) > _MOST_SIZES else sizes
    head = json.dumps([shape, dtype_to_json(dtype), of_device, axis, shown]).encode()
    if len(head) > _MOST_BYTES:
        raise DTypeError(
            f"the description of the dtype takes {len(head)} bytes, more than {_MOST_BYTES}: "
            "shorten its field names"
        )
    return head, digest_bits(head, 32) or 1


def refusal(problem: MpimeshError) -> bytes:
    """Return what a root tells that has no array to scatter."""
    kind = next(one.__name__ for one in type(problem).__mro__ if hasattr(errors, one.__name__))
    text, told = str(problem), b""
    while not told or len(told) > _MOST_BYTES:
        told = json.dumps([kind, text]).encode()
        text = text[: len(text) * 3 // 4]
    return told


def read(told: bytes, root: int) -> ScatterHead:
    """Return what a root has told.

    Raises:
        MpimeshError: On all ranks, if it has none that can be scattered: of its class.
    """
    parts = json.loads(told)
    if len(parts) == 2:
        kind: type[MpimeshError] = getattr(errors, parts[0])
        raise on_all_ranks(kind(f"rank {root}: {parts[1]}"))
    shape, dtype, of_device, axis, sizes = parts
    return ScatterHead(tuple(shape), dtype_from_json(dtype), of_device, axis, sizes)


def misfit(operation: Operation, rank: int, size: int, out: Array) -> MpimeshError:
    """Return what is wrong with an array for a block of a scatter, or with the scatter."""
    try:
        array = read(operation.told or b"", operation.root)
        blocks = Blocks.of_whole(array.shape, array.axis, size, array.sizes)
        output_array(out, blocks.block_shape(rank), array.dtype)
    except MpimeshError as error:
        return error
    return ShapeError(
        f"rank {rank}: out has shape {out.shape} and dtype {out.dtype}, but rank {operation.root} "
        f"scatters an array of shape {array.shape} and dtype {array.dtype}"
    )
